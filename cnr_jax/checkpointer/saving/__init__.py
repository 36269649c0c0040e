"""One save: checked, decided, captured, written in the background, committed or failed."""
