"""Mirrors of roots: one root is filled from another, and each can mend the other."""
