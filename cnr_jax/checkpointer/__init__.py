"""One save and one restore, on all processes of a run."""
