"""Keeps pytest from importing the benchmarks: they are run, not collected."""

collect_ignore_glob = ["*.py"]
