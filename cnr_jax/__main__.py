"""The command `cnr-jax`, which is also `python -m cnr_jax`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Runs the command line; if a package is missing, says what to install."""
    _open_closed_streams()
    try:
        from cnr_jax.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich"):
            raise
        text = (
            f"cnr-jax: {error.name} is not installed; hint: pip install 'cnr-jax[cli]'"
        )
        print(text, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    app(prog_name="cnr-jax")


def _open_closed_streams() -> None:
    """Points standard streams that the caller has closed at nowhere.

    Otherwise the next file that is opened takes the number of such a stream, and the text that any
    library writes to stderr would go into that file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the lowest free number, which is that of the stream.
            nowhere = os.open(os.devnull, os.O_RDWR)
            stream = open(nowhere, mode, encoding="utf-8", closefd=False)
            setattr(sys, name, stream)


if __name__ == "__main__":
    main()
