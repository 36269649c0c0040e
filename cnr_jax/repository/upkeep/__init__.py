"""Upkeep of a root: its writer, the claim, steps moved aside or removed, and the check `verify`."""
