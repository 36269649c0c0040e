"""The command `cnr-jax`, which is also `python -m cnr_jax`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line; says what to install where that is missing."""
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
    app(prog_name="cnr-jax")


if __name__ == "__main__":
    main()
