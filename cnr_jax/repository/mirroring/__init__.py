"""Copies of a run in two roots: one is filled from the other, and each mends the other."""
