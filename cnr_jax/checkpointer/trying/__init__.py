"""Trials of code widths on the caller's own metric: cnr_jax.try_bits."""
