"""Questions to storage that a thread asks only once while it opens a root or restores a step.

The thread does not ask again for a listing or a claim until it writes, and it fetches files that it
is about to read side by side. It sees changes by other programs only when it asks later.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Callable, Iterator
from typing import Any

from cnr_jax.repository.store.base import AnyPath

_answers: contextvars.ContextVar[dict[tuple[str, str], Any] | None] = (
    contextvars.ContextVar("answers", default=None)
)


@contextlib.contextmanager
def asking_once() -> Iterator[None]:
    """Context in which answers are kept; an inner one shares the answers of the outer one."""
    known = _answers.get()
    token = _answers.set({} if known is None else known)
    try:
        yield
    finally:
        _answers.reset(token)


def is_asking_once() -> bool:
    """Whether this thread keeps answers."""
    return _answers.get() is not None


def once(what: str, path: AnyPath, ask: Callable[[], Any]) -> Any:
    """Answer to a question about a path: the kept one, or that of `ask`."""
    answers = _answers.get()
    if answers is None:
        return ask()
    key = what, os.fspath(path)
    if key not in answers:
        answers[key] = ask()
    return answers[key]


def known(what: str, path: AnyPath) -> Any:
    """Answer that is kept; None if there is none."""
    return (_answers.get() or {}).get((what, os.fspath(path)))


def keep(what: str, path: AnyPath, answer: Any) -> None:
    """Keeps an answer, within `asking_once`; else does nothing."""
    if (answers := _answers.get()) is not None:
        answers[what, os.fspath(path)] = answer


def forget() -> None:
    """Drops all answers, because this thread changes what they are about."""
    if answers := _answers.get():
        answers.clear()
