"""The contract: what the bytes of a checkpoint mean.

Standard library and numpy only: no jax, no file access, so that any tool can read a
checkpoint's description. The invariant to remember: everything that is parsed here may
come from a damaged disk, so a reader either returns what the format allows or raises
`errors.FormatError`.
"""
