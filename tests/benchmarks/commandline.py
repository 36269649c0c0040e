"""The command line that all benchmarks share: `--quick`, `--json`, and names of folders."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def make_parser(
    doc: str | None,
    *,
    quick: str,
    json: str = "also write the figures here",
    **paths: str,
) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark.

    Args:
        doc: the script's docstring; its first line describes it in the help.
        quick: what `--quick` does.
        json: what the file of `--json` is for.
        paths: further options that each name a file or a folder, and what for.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    for name, what in {**paths, "json": json}.items():
        parser.add_argument(f"--{name}", type=Path, help=what)
    return parser


def write_figures(path: Path | None, figures: Any) -> None:
    """Writes figures as JSON, if `--json` named a file."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
