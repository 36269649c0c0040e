"""What lies in a root: which directories may be steps, and which item holds checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable

from cnr_jax.format import names
from cnr_jax.repository.files import AnyPath, is_local


def step_directories(
    root: AnyPath, is_step: Callable[[str], bool] | None = None
) -> list[str]:
    """Names of the directories below a root that may be committed steps, sorted."""
    wanted = is_step or may_be_step
    if not is_local(root):
        found = [path.name for path in root.iterdir() if _is_step(path)]
    else:
        with os.scandir(os.fspath(root)) as entries:
            found = [e.name for e in entries if may_be_step(e.name) and e.is_dir()]
    return sorted(name for name in found if wanted(name))


def find_item(root: AnyPath) -> str | None:
    """The item of a root's steps that holds a checkpoint of this library, if any does.

    Rather one that holds a manifest than one of which only other files are left.
    """
    if not root.exists():
        return None
    items = [
        item
        for step in sorted(root.iterdir(), key=lambda path: path.name, reverse=True)
        if _is_step(step)
        for item in sorted(step.iterdir(), key=lambda path: path.name)
        if item.is_dir()
    ]
    for item in items:
        if (item / names.MANIFEST).exists():
            return item.name
    for item in items:
        if any(names.is_own(path.name) for path in item.iterdir()):
            return item.name
    return None


def _is_step(path: AnyPath) -> bool:
    """Whether a path may be a committed step: a folder that ends in a number."""
    return may_be_step(path.name) and path.is_dir()


def may_be_step(name: str) -> bool:
    """Whether a name may be that of a committed step: it ends in a digit."""
    return name[-1:] in set("0123456789") and not names.is_set_aside(name)


def is_foreign(step: AnyPath) -> bool:
    """Whether a step directory holds something, but nothing that this library writes."""
    try:
        held = [path for path in step.iterdir() if path.is_dir()]
        found = [path.name for item in held for path in item.iterdir()]
    except OSError:
        return True  # it is not known, and so left alone
    return bool(found) and not any(map(names.is_own, found))
