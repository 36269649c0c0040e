"""Which of the items that a user names is the state, and what is asked for it."""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
from jax.core import Tracer

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat import DEFAULT_ITEM
from cnr_jax.checkpointer.saving.save_in_flight import NOT_IN_JIT
from cnr_jax.handler import Restore, Save


def check_step(step: object) -> None:
    """Checks that a step is one.

    Raises:
        OptionError: if it is no integer, or negative.
    """
    if isinstance(step, Tracer):
        raise errors.OptionError(f"a step is an integer, got a tracer\n{NOT_IN_JIT}")
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise errors.OptionError(f"a step is an integer, got {step!r}")
    if step.__index__() < 0:  # type: ignore[attr-defined]
        raise errors.OptionError(f"a step is at least 0, got {step}")


def check_restored_step(step: object) -> None:
    """Checks that what to restore is a step, or None.

    Raises:
        OptionError: if it is neither.
    """
    if step is None:
        return
    try:
        check_step(step)
    except errors.OptionError as error:
        raise errors.OptionError(
            f"{error}\n  hint: restore(None) takes the newest step that is whole"
        ) from None


def check_arguments(args: object, items: Any, kwargs: Any, needed: type) -> None:
    """Checks that a state, or what to restore, is given as arguments.

    Args:
        args: as the user gave them.
        items: what Orbax took in its older interface, and no more.
        kwargs: the same.
        needed: what a state has to be in.

    Raises:
        OptionError: if it is given in another way.
    """
    example = f"args=cnr_jax.args.{needed.__name__}(state)"
    if items is not None or kwargs is not None:
        got = items if items is not None else kwargs
        raise errors.OptionError(
            f"a manager takes no items: got {type(got).__name__} beside the step\n"
            f"  hint: name the arguments, {example}"
        )
    if args is None and needed is Save:
        raise errors.OptionError(f"nothing is given to be saved\n  hint: {example}")
    if args is not None and not isinstance(args, ocp.args.CheckpointArgs):
        raise errors.OptionError(
            f"args is {type(args).__name__}, expected checkpoint arguments\n"
            f"  hint: {example}"
        )
    other = Restore if needed is Save else Save
    composite = isinstance(args, ocp.args.Composite)
    for each in args.values() if composite else (args,):
        if isinstance(each, other):
            raise errors.OptionError(
                f"args is {other.__name__}, expected {needed.__name__}\n"
                f"  hint: {example}"
            )


def state_to_save(
    args: ocp.args.CheckpointArgs | None, item: str | None
) -> tuple[Save | None, str | None]:
    """The arguments of the state among those of a save, and the item that it is.

    Args:
        args: of the save.
        item: that holds the state, if it is known.

    Raises:
        OptionError: if there are several, or one for another item or handler.
    """
    items = {DEFAULT_ITEM: args}
    if isinstance(args, ocp.args.Composite):
        items = dict(args.items())
    elif isinstance(args, ocp.args.StandardSave | ocp.args.PyTreeSave):
        raise errors.OptionError(
            f"this manager does not take {type(args).__name__} for the state\n"
            "  hint: cnr.args.Save(state); other items go beside it in a Composite"
        )
    found = {key: each for key, each in items.items() if isinstance(each, Save)}
    if not found:
        return None, item
    if item is None and len(found) == 1:
        item = next(iter(found))
    if item is None or set(found) != {item}:
        raise errors.OptionError(
            "a manager saves one state, always as the same item\n"
            f"  got {', '.join(map(repr, found))}, expected {item!r}\n"
            "  hint: make another manager with another root for another state"
        )
    return found[item], item


def restore_args(
    args: ocp.args.CheckpointArgs | None, item: str | None
) -> ocp.args.CheckpointArgs:
    """What to restore, of this library's own arguments."""
    if isinstance(args, ocp.args.StandardRestore):
        # As Orbax does, whose own saves such a program restores too.
        return Restore(args.item, cast=True)
    if args is not None:
        return args
    if item in (None, DEFAULT_ITEM):
        return Restore()
    return ocp.args.Composite(**{item: Restore()})


def reads_state(args: ocp.args.CheckpointArgs, item: str | None) -> bool:
    """Whether the item that this library saves is among those that are restored."""
    if isinstance(args, ocp.args.Composite):
        return isinstance(args.get(item or DEFAULT_ITEM), Restore)
    return isinstance(args, Restore)
