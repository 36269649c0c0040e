"""Format of checkpoints: what their bytes mean.

It takes the standard library and numpy, but neither jax nor files, so any tool can read the
description of a checkpoint. The invariant to remember: whatever is parsed here may come from a
damaged disk, so a reader either returns what the format allows or raises `errors.FormatError`.
"""
