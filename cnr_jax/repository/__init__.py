"""Bytes and lineage: arrays on storage, chains of checkpoints, what may be deleted."""
