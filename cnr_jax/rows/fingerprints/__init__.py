"""Hashes of rows, which tell which rows changed, whatever changed them."""
