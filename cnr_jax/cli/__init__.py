"""The command line: looks into a root, mostly without jax; only `prune` changes anything."""
