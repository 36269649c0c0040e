"""A step of a root, written in a form that needs no `cnr_jax` to be read."""
