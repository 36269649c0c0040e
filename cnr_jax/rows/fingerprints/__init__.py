"""Hashes of rows, which tell what changed whatever changed it."""
