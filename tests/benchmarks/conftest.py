"""Keeps pytest from importing the benchmarks: they are run, not collected, but for their tests."""

collect_ignore_glob = ["[!t]*.py", "t[!e]*.py"]
