"""The command line: looks into a root, mostly without jax; few verbs change anything in it."""
