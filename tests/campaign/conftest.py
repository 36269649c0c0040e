"""Keeps pytest from importing the campaign's own modules: they are run, not collected."""

collect_ignore_glob = ["[!t]*.py", "tr*.py"]
