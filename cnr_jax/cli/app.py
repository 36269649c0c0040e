"""The verbs of `cnr-jax`."""

from __future__ import annotations

from typing import Annotated

import typer

from cnr_jax.cli.advise import advise
from cnr_jax.cli.bits import bits
from cnr_jax.cli.compact import compact
from cnr_jax.cli.cost import cost
from cnr_jax.cli.diff import diff
from cnr_jax.cli.exit_codes import Verbs, verb
from cnr_jax.cli.explain import explain
from cnr_jax.cli.export import export
from cnr_jax.cli.ls import ls
from cnr_jax.cli.mirror import mirror
from cnr_jax.cli.printing import print_text
from cnr_jax.cli.prune import prune
from cnr_jax.cli.report.verb import report
from cnr_jax.cli.rows import rows
from cnr_jax.cli.show import show
from cnr_jax.cli.simulate import simulate
from cnr_jax.cli.verify import verify

# Plain help, without rich: it comes sooner, and reads alike wherever it is shown.
app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Looks into a root of checkpoints of cnr_jax. Only `compact`, `prune --yes` and"
    " `mirror --repair` change it.",
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print_text(f"cnr-jax {version('cnr-jax')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    pass


for each in (ls, show, verify, explain, diff):
    app.command()(verb(each))
# So that -1 is taken for a row, and not for an option.
app.command(context_settings={"ignore_unknown_options": True})(verb(rows))
for each in (bits, export, report, advise, cost, simulate, compact, prune, mirror):
    app.command()(verb(each))
