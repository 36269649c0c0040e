"""Error of a save whose step is there already, as programs written for Orbax's manager catch it."""

from __future__ import annotations

from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from cnr_jax import errors


class StepExistsError(errors.DependentsExistError, StepAlreadyExistsError):
    """The step of a save is there already; this is an error of Orbax too.

    It is in no public module: catch `cnr_jax.errors.DependentsExistError`, whose `kind` is
    `"step_exists"`, or Orbax's error. Nothing was saved or replaced. With one program it means that
    you save a step twice: go on with a higher number. If another program has saved the step to the
    same root meanwhile, end one of them. `reload()` and `restore(None)` let the other go on from
    the newest step of both.
    """

    kind = "step_exists"


def as_orbax_says(error: errors.DependentsExistError) -> errors.DependentsExistError:
    """Makes an error that a step is there already one of Orbax too; returns others as they are."""
    if error.kind != StepExistsError.kind:
        return error
    return StepExistsError(str(error), path=error.path)
