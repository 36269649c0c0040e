"""Roots and steps that commands are given."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from cnr_jax import errors
from cnr_jax.cli.printing import progress
from cnr_jax.repository.describe import describe
from cnr_jax.repository.description import RootDescription, StepDescription
from cnr_jax.repository.index.folders import Folder
from cnr_jax.repository.layout import check_can_be_read, open_root, step_directories
from cnr_jax.texts import count_of

if TYPE_CHECKING:
    from cnr_jax.repository.step_reader import StepReader


def read_root(root: str, item: str | None) -> RootDescription:
    """Checks that a path is a root, and describes it.

    Raises:
        NoStepError: if there is no such folder.
        OptionError: if it is not a root, but a file, a step, or a folder without a checkpoint.
    """
    with progress("reading steps") as tell:
        found = describe(root, item=item, on_step=tell)
    beside = found.abandoned + found.earlier_runs + found.unfinished + found.removed
    if not found.steps and not beside:
        raise errors.OptionError(
            f"{found.root} is no root: no checkpoint lies in it\n"
            "  hint: pass the folder that the manager was given"
        )
    return found


def check_root(root: str) -> None:
    """Checks that a folder holds anything of this library or of Orbax.

    Raises:
        NoStepError: if there is no such folder.
        OptionError: if it holds no checkpoint, or is a file or a step.
    """
    path = open_root(root)
    check_can_be_read(path)
    found = (Folder.look(path / name) for name in step_directories(path))
    if not any(each.is_checkpoint for each in found):
        # What lies beside steps counts as well.
        read_root(root, None)


def step_of(found: RootDescription, number: int | None) -> StepDescription:
    """Finds a step of a root; if several have that number, the one of the newest branch.

    Args:
        found: description of the root.
        number: number of the step; None: the newest that restores.

    Raises:
        NoStepError: if there is no such step of this library.
    """
    number = found.latest_step if number is None else number
    if number is None:
        whys = [(each.directory, each.problem) for each in reversed(found.steps)]
        raise errors.NoStepError.nothing_restores(found.root, whys)
    steps = [each for each in found.steps if each.step == number]
    own = [each for each in steps if each.kind != "orbax"]
    if own:
        return own[-1]
    if steps:
        text = (
            f"step {number} in {found.root} was saved by plain Orbax\n  hint: a manager with"
            " Options(adopt=True) restores it, cnr_jax.import_orbax converts it"
        )
    else:
        there = sorted({each.step for each in found.steps})
        span = f", which run from {there[0]} to {there[-1]}" if there else ""
        text = f"no step {number} among {count_of(len(there), 'step')} in {found.root}{span}"
    raise errors.NoStepError(text, path=found.root)


def chain_of(found: RootDescription, step: StepDescription) -> list[StepDescription]:
    """Chain of a step, the full one first, as far as its steps are there."""
    by_step = {each.step: each for each in found.steps}
    chain = [step]
    while (parent := chain[-1].parent) in by_step and by_step[parent] not in chain:
        chain.append(by_step[parent])
    return chain[::-1]


def use_cpu() -> None:
    """Keeps jax, if it is not imported yet, away from accelerators: a run may hold them."""
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"


def opened(found: RootDescription, step: StepDescription) -> tuple[StepReader, ...]:
    """Opens the chain of a step for reading.

    Raises:
        IntegrityError, FormatError, ChainError: if it cannot be read.
    """
    use_cpu()
    from cnr_jax.repository.step_reader import open_chain

    path = open_root(found.root)
    return open_chain(path, step.directory, found.item or "default")
