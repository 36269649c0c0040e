"""Errors of a failed save, made from whatever was raised while it was written."""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import errno
import sys
import threading
import traceback
from collections.abc import Iterator

import jax

from cnr_jax.checkpointer.orbax_compat.step_errors import as_orbax_says
from cnr_jax.errors import CnrError, DependentsExistError, SaveError
from cnr_jax.repository.causes import causes, errno_of, with_call


def save_error(
    error: BaseException, step: int | None, directory: str | None = None
) -> SaveError:
    """Makes a `SaveError` from an error, or returns it if it is one.

    Args:
        error: error that was raised.
        step: number of the step that was being saved; None: not known.
        directory: directory that the step was to be in; None: not known.
    """
    if isinstance(error, SaveError):
        return error
    where = f" on process {jax.process_index()}" if jax.process_count() > 1 else ""
    what = "a save" if step is None else f"the save of step {step}"
    rest = "what was committed before is untouched, and the next save contains its rows"
    if _has_ended():
        rest = (
            "the program ended before this save was durable; what was committed before is"
            " untouched\n  hint: use `with`, or call close() or wait_until_finished() before"
            " the program ends"
        )
    text = f"{what} failed{where}\n  {with_call(error)}\n"
    if errno_of(error) in (errno.ENOSPC, errno.EDQUOT):
        rest += "\n  hint: make room, or keep fewer steps"
    if directory:
        text += f"  it was to be in {directory}\n"
    kind = "timeout" if isinstance(error, TimeoutError) else None
    return _caused_by(error, f"{text}  {rest}", kind, step)


def after_commit(error: BaseException, step: int | None) -> SaveError:
    """Makes a `SaveError` for a failure after the step was committed."""
    if isinstance(error, SaveError):
        return error
    text = (
        f"step {step} is saved, but what comes after it failed\n  {with_call(error)}\n"
        "  steps that retention does not keep may still be there"
    )
    return _caused_by(error, text, "after_commit", step)


def taken_down(step: int, below: int, error: CnrError | None) -> SaveError:
    """Makes a `SaveError` for a save that rests on a failed one; it has the kind of that error."""
    known = error if isinstance(error, SaveError) else SaveError("")
    return SaveError(
        f"step {step} is not saved: it rests on step {below}, whose save failed\n"
        "  what was committed before is untouched, and the next save contains its rows",
        kind=known.kind,
        path=known.path,
        problem=known.problem,
        step=step,
    )


def _caused_by(
    error: BaseException, text: str, kind: str | None, step: int | None
) -> SaveError:
    here, number = jax.process_index(), errno_of(error)
    found = SaveError(text, kind=kind, step=step, process=here, errno=number)
    found.__cause__ = error
    return found


def _has_ended() -> bool:
    """Whether the program has come to its end, so that no other save follows."""
    return (
        sys.is_finalizing()
        or not threading.main_thread().is_alive()
        # Python ends pools of threads before it says that the main thread ended. No public name.
        or bool(getattr(concurrent.futures.thread, "_shutdown", False))
    )


def without_frames(error: CnrError) -> CnrError:
    """Copies an error to be kept: without frames, hence without the train state."""
    return CnrError.from_json(error.to_json())


@contextlib.contextmanager
def as_save_errors(step: int | None, directory: str) -> Iterator[None]:
    """Raises a `SaveError` for errors of the system; others are raised as they are.

    If the step is there already, the error is one of Orbax too.

    Args:
        step: number of the step that is being saved; None: no save was begun.
        directory: directory that the step is to be in.
    """
    handled = sys.exception()
    try:
        yield
    except DependentsExistError as error:
        raise as_orbax_says(error).with_traceback(error.__traceback__) from None
    except Exception as error:
        if isinstance(error, CnrError) or errno_of(error, handled) is None:
            raise
        raise save_error(error, step, directory) from error


def free_frames(error: BaseException) -> None:
    """Frees the rows that the frames of an error hold, for as long as someone keeps it."""
    for each in causes(error):
        traceback.clear_frames(each.__traceback__)
