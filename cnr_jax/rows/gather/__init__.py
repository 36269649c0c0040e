"""Selecting touched rows, gathering them into chunks, and encoding these."""
