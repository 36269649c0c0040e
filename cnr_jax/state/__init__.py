"""Pytrees: which leaves of a train state are tables, slots and dense, and where they are."""
