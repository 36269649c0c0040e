"""The command line: looks into a root, mostly without jax; changes nothing."""
