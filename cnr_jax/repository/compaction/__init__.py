"""Merging a chain of checkpoints into one that stands for it, from stored bytes to stored bytes."""
