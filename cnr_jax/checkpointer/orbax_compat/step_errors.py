"""The error of a save whose step is there already, as programs on Orbax's manager catch it."""

from __future__ import annotations

from orbax.checkpoint.checkpoint_manager import StepAlreadyExistsError

from cnr_jax import errors


class StepExistsError(errors.DependentsExistError, StepAlreadyExistsError):
    """A save is of a step that is there already: an error of this library and Orbax's own."""

    kind = "step_exists"


def as_orbax_says(error: errors.DependentsExistError) -> errors.DependentsExistError:
    """The error of a save that cannot replace a step, so that Orbax's own catches it too."""
    if error.kind != StepExistsError.kind:
        return error
    return StepExistsError(str(error), path=error.path)
