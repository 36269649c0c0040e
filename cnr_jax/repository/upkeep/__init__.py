"""The writer of a root: its claim, what it moves aside and removes; and the check of a root."""
