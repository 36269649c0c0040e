"""Questions that are asked once while a root is opened or a step is restored, by one thread.

A listing or a claim that was seen is not asked for again until this thread writes, and files that
are about to be read are fetched side by side. What has changed meanwhile is seen by who asks later.
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
    """Keeps answers meanwhile, those of an outer call too."""
    known = _answers.get()
    token = _answers.set({} if known is None else known)
    try:
        yield
    finally:
        _answers.reset(token)


def is_asking_once() -> bool:
    """Whether answers are kept."""
    return _answers.get() is not None


def once(what: str, path: AnyPath, ask: Callable[[], Any]) -> Any:
    """The answer to a question about a path, which is asked if there is none."""
    answers = _answers.get()
    if answers is None:
        return ask()
    key = what, os.fspath(path)
    if key not in answers:
        answers[key] = ask()
    return answers[key]


def known(what: str, path: AnyPath) -> Any:
    """The answer that is kept; None where none is."""
    return (_answers.get() or {}).get((what, os.fspath(path)))


def keep(what: str, path: AnyPath, answer: Any) -> None:
    """Keeps an answer, if answers are."""
    if (answers := _answers.get()) is not None:
        answers[what, os.fspath(path)] = answer


def forget() -> None:
    """Drops all answers, as this thread changes what they are about."""
    if answers := _answers.get():
        answers.clear()
