"""What widths of codes cost the caller's own metric: cnr_jax.try_bits."""
