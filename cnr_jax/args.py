"""Arguments of `CheckpointManager.save` and `restore` (`args=`), and their checks."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec

import jax
import numpy as np
import orbax.checkpoint as ocp

from cnr_jax import errors
from cnr_jax.plain_args import (
    RESTORE,
    STATES_RESTORED,
    STATES_SAVED,
    name_of,
    not_taken,
    state_of_pytree,
)
from cnr_jax.rows.touched import Touched
from cnr_jax.state.table import Tables

__all__ = ["Restore", "Save"]

P = ParamSpec("P")

# Name of the item of a step that holds one, which the user does not name.
DEFAULT_ITEM = "default"


@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
    """A train state to be saved, for the `args` of `CheckpointManager.save`.

    It does not make a save due: `save(..., force=True)` saves in any case.

    Attributes:
        state: the whole train state, tables and everything else.
        touched: touched rows that went through the same train steps as the state.
        full: whether this save is full, whatever the policy says. Later deltas may rest on it, and
            the policy sees it like other full saves.
        exact: whether this save holds all bits of tables and slots, whatever their codecs: for the
            last step of a run, a promotion, an export. Such a save is full, and raw, unless the
            chain that a delta would rest on holds all bits too. The log says its bytes before it is
            written.

    Raises:
        OptionError: if `full` or `exact` is neither True nor False.

    Example:
        >>> Save({"w": 1.0}, exact=True).exact
        True
    """

    state: Any
    touched: Touched | None = None
    full: bool = dataclasses.field(default=False, kw_only=True)
    exact: bool = dataclasses.field(default=False, kw_only=True)
    # What `CnrHandler.plan` returned, if our manager has planned the save; a plain manager of Orbax
    # does not.
    _planned: Any = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        for name in ("full", "exact"):
            given = getattr(self, name)
            if not isinstance(given, bool | np.bool_):
                raise errors.OptionError(
                    f"{name} is {type(given).__name__}, expected True or False\n"
                    f"  hint: cnr_jax.args.Save(state, touched, {name}=True)"
                )


@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
    """A restore, for the `args` of `CheckpointManager.restore`: the wanted state, and what differs.

    A restore matches tables by name and rows by number, unless `rename` and `ids` say otherwise.
    Slots go with the rows of their table. Unless all tables come back exactly as the checkpoint
    holds them, the next save is full.

    Attributes:
        state: abstract or concrete pytree that gives structure, shapes, dtypes and shardings. With
            None, everything comes back as nested dicts by path, on one device. If jax has only 32
            bits, dense leaves of 64 bits are then numpy arrays, and tables of 64 bits are refused.
        tables: where the tables are in `state`, if not where the manager's are. A manager without
            tables looks for them where they were in the state that was saved.
        partial: whether to restore only what both the checkpoint and `state` have. Leaves, and rows
            of tables, that only `state` has must be concrete, and keep their values.
        cast: whether to restore leaves in the dtypes of `state` even if these cannot hold all
            stored values. The values are converted as by `astype`, with a warning that names the
            leaves. With False a leaf may only have a dtype that holds all values, such as float32
            for bfloat16.
        rename: new names of tables, `{"name in the checkpoint": "name in the state"}`. None as the
            new name leaves the table out.
        ids: by the name of a table in `state`, integer[rows]: for each row of the table, the row of
            the checkpoint that it takes, or -1 to keep the value of `state`. You may take a row
            more than once, or not at all. With several processes pass the same `rename`, `ids`,
            `partial` and `cast` on all of them; else all raise OptionError.

    Raises:
        OptionError: if `rename` or `ids` have another form, or are given without a state.

    Example:
        >>> import tempfile, jax.numpy as jnp, cnr_jax as cnr
        >>> old, root = {"user": jnp.arange(4.0)[:, None]}, tempfile.mkdtemp()
        >>> with cnr.CheckpointManager(root, tables=cnr.find_tables(old, ["user"])) as manager:
        ...     _ = manager.save(0, args=cnr.args.Save(old))
        >>> new = {"user": jnp.full((6, 1), -1.0)}
        >>> tables = cnr.find_tables(new, ["user"])
        >>> with cnr.CheckpointManager(root, tables=tables) as manager:
        ...     grown = manager.restore(0, args=cnr.args.Restore(new, partial=True))
        ...     ids = {"user": [3, 3, -1, 0, 1, 2]}
        ...     moved = manager.restore(0, args=cnr.args.Restore(new, ids=ids))
        >>> grown.state["user"][:, 0].tolist()
        [0.0, 1.0, 2.0, 3.0, -1.0, -1.0]
        >>> moved.state["user"][:, 0].tolist()
        [3.0, 3.0, -1.0, 0.0, 1.0, 2.0]
    """

    state: Any = None
    tables: Tables | None = None
    partial: bool = False
    cast: bool = False
    rename: Mapping[str, str | None] | None = dataclasses.field(
        default=None, kw_only=True
    )
    ids: Mapping[str, Any] | None = dataclasses.field(default=None, kw_only=True)
    # `Attempt` of our manager, which goes on from it once all of the restore has succeeded.
    _attempt: Any = dataclasses.field(
        default=None, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks the forms of the arguments; takes `ids` as int64 on the host."""
        for name in ("partial", "cast"):
            said = getattr(self, name)
            if not isinstance(said, bool | np.bool_):
                raise errors.OptionError(
                    f"{name} is {reprlib.repr(said)}, expected True or False\n"
                    f"  hint: Restore(state, {name}=True)"
                )
        for name in ("rename", "ids"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Mapping):
                raise errors.OptionError(
                    f"{name} is {type(given).__name__}, expected a dict by name of a table\n"
                    f"  hint: Restore(state, {_FORMS[name]})"
                )
            if given and self.state is None:
                raise errors.OptionError(
                    f"{name} is given without a state, whose tables it is about\n"
                    f"  hint: Restore(state, {_FORMS[name]})"
                )
        for old, new in (self.rename or {}).items():
            if not isinstance(old, str) or not isinstance(new, str | None):
                raise errors.OptionError(
                    f"rename is from a name to a name or None, got {old!r} to {new!r}\n"
                    f"  hint: Restore(state, {_FORMS['rename']})"
                )
        if self.ids is not None:
            self.ids = {name: _row_ids(name, given) for name, given in self.ids.items()}


_FORMS = {
    "rename": 'rename={"old": "new"}',
    "ids": 'ids={"user": ids}, ids[i]: the row of the checkpoint that row i takes',
}


def _row_ids(table: str, given: Any) -> np.ndarray:
    """Row ids on the host, int64.

    Raises:
        OptionError: if they are not a list of integers, or not on this process.
    """
    got = ""
    if isinstance(given, jax.Array) and not (
        given.is_fully_addressable or given.is_fully_replicated
    ):
        got = "an array that is on several processes"
    else:
        found = np.asarray(given)
        if found.ndim == 1 and found.dtype.kind in "iu":
            if found.dtype == np.uint64:  # else the largest of them would be -1
                found = np.minimum(found, np.uint64(np.iinfo(np.int64).max))
            return found.astype(np.int64, copy=False)
        got = f"{found.dtype}{list(found.shape)}"
    raise errors.OptionError(
        f"ids of table {table!r} are {got}, expected integers[rows]\n"
        f"  hint: Restore(state, {_FORMS['ids']})"
    )


def asked_for(args: Restore) -> dict[str, str]:
    """Arguments of a restore as texts by name, to compare them between processes."""
    renamed = sorted((args.rename or {}).items())
    said = {"partial": args.partial, "cast": args.cast, "rename": dict(renamed)}
    for name, ids in sorted((args.ids or {}).items()):
        digest = hashlib.sha256(np.ascontiguousarray(ids).data).hexdigest()
        said[f"ids of table {name!r}"] = f"{len(ids):,} ids, sha256 {digest[:16]}..."
    return {name: str(value) for name, value in said.items()}


def check_asked_alike(told: Sequence[Mapping[str, str]]) -> None:
    """Checks that all processes restore the same, by what `asked_for` returned on each.

    Raises:
        OptionError: naming the first argument that differs.
    """
    first, *others = told
    for process, said in enumerate(others, start=1):
        for name in [*first, *(name for name in said if name not in first)]:
            if said.get(name) != first.get(name):
                raise errors.OptionError(
                    f"processes are asked for different restores: {name}\n"
                    f"  got {said.get(name, 'none')} on process {process},"
                    f" {first.get(name, 'none')} on process 0\n"
                    "  hint: pass the same to Restore everywhere"
                )


def only_root_by_position(init: Callable[P, None]) -> Callable[P, None]:
    """Wraps a manager's `__init__`: refuses arguments by position after the root."""

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        if len(args) > 2:
            got = ", ".join(type(each).__name__ for each in args[2:])
            raise errors.OptionError(
                f"a manager takes the root alone by position, got {got} after it\n"
                "  hint: CheckpointManager(root, tables=tables, options=...,"
                " orbax_options=...)"
            )
        init(*args, **kwargs)

    return checked


def check_arguments(args: object, items: Any, kwargs: Any, needed: type) -> None:
    """Checks that a state, or what to restore, is passed as checkpoint arguments.

    Args:
        args: arguments, as the user gave them.
        items: argument of Orbax's older interface, which is refused.
        kwargs: likewise.
        needed: class of the arguments that a state needs, `Save` or `Restore`.

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
    """Finds the arguments of the state among those of a save, and the name of its item.

    Args:
        args: arguments of the save.
        item: name of the item that holds the state, if it is known.

    Raises:
        OptionError: if there are several states, or one for another item or handler.
    """
    items = {DEFAULT_ITEM: args}
    if isinstance(args, ocp.args.Composite):
        items = dict(args.items())
    found = {key: each for key, each in items.items() if isinstance(each, Save)}
    for key, each in items.items():
        # Before the first save it is not known which item is to be the state.
        is_state = key == item if item or found else True
        if is_state and isinstance(each, STATES_SAVED):
            raise errors.OptionError(
                f"this manager does not take {name_of(each)} for the state\n"
                "  hint: cnr.args.Save(state); other items go beside it in a Composite"
            )
    if not found:
        return None, item
    if item is None and len(found) == 1:
        item = next(iter(found))
    if item is None or set(found) != {item}:
        hint = "make another manager with another root for another state"
        if {DEFAULT_ITEM} in ({item}, set(found)) and len(found) == 1:
            # The same state may be meant, with a name or without.
            named = f"args=ocp.args.Composite({item}=cnr.args.Save(state))"
            plain = "args=cnr.args.Save(state)"
            here = plain if item == DEFAULT_ITEM else named
            hint = f"{here}, as in the steps of this manager; or {hint}"
        raise errors.OptionError(
            "a manager saves one state, always as the same item\n"
            f"  got {', '.join(map(repr, found))}, expected {item!r}\n"
            f"  hint: {hint}"
        )
    return found[item], item


def restore_args(
    args: ocp.args.CheckpointArgs | None, item: str | None
) -> ocp.args.CheckpointArgs:
    """Turns the arguments of a restore into this library's own.

    Raises:
        OptionError: if Orbax's own ask for something that a restore of a state cannot do.
    """
    asked = _plainly_asked(args, item)
    if asked is not None:
        state, partial = asked.item, False
        if isinstance(asked, ocp.args.PyTreeRestore):
            state, partial = state_of_pytree(asked)
        # Cast as by Orbax: such a program restores saves of Orbax too.
        return _replaced(args, asked, Restore(state, partial=partial, cast=True))
    if args is not None:
        return args
    if item in (None, DEFAULT_ITEM):
        return Restore()
    return ocp.args.Composite(**{item: Restore()})


def _plainly_asked(
    args: ocp.args.CheckpointArgs | None, item: str | None
) -> ocp.args.StandardRestore | ocp.args.PyTreeRestore | None:
    """Arguments of Orbax (`StandardRestore`, `PyTreeRestore`) that ask for the state, if any."""
    args = _of_state(args, item)
    return args if isinstance(args, STATES_RESTORED) else None


def _of_state(args: Any, item: str | None) -> Any:
    """Arguments of the item that holds the state; None if there are none."""
    if isinstance(args, ocp.args.Composite):
        return args.get(item) if item is not None else None
    return args


def check_restores_state(args: Any, item: str) -> None:
    """Checks that the arguments of the item with the state are a `Restore`.

    Raises:
        OptionError: if they are others.
    """
    asked = _of_state(args, item)
    if asked is not None and not isinstance(asked, Restore):
        raise not_taken(name_of(asked), "", RESTORE)


def asked_item(args: Any, own: str | None, held: str | None) -> str:
    """Name of the state's item in the arguments: that of this root, or of the root that is read."""
    own = own or DEFAULT_ITEM
    is_named = isinstance(args, ocp.args.Composite) and own not in args.keys()
    return (held or own) if is_named else own


def as_asked(args: Any, found: Any, item: str | None, state: Any) -> Any:
    """Result of a restore in the form asked for: the bare state for Orbax's own arguments.

    Args:
        args: arguments, as the user gave them.
        found: result of the restore, by item.
        item: name of the item that holds the state.
        state: the restored state alone.
    """
    if _plainly_asked(args, item) is None:
        return found
    if not isinstance(found, ocp.args.Composite):
        return state
    return ocp.args.Composite(**{**dict(found.items()), str(item): state})


def reads_state(args: ocp.args.CheckpointArgs, item: str | None) -> bool:
    """Whether a restore reads the item that this library saves."""
    if isinstance(args, ocp.args.Composite):
        return isinstance(args.get(item or DEFAULT_ITEM), Restore)
    return isinstance(args, Restore)


def in_item(args: ocp.args.CheckpointArgs, item: str, held: str) -> ocp.args.Composite:
    """Arguments of a restore for a step in which the item of the state has another name.

    Args:
        args: arguments, as they were given.
        item: name of the state's item in other steps.
        held: its name in this step.
    """
    if not isinstance(args, ocp.args.Composite):
        return ocp.args.Composite(**{held: args})
    given = {held if key == item else key: each for key, each in args.items()}
    return ocp.args.Composite(**given)


def out_of_item(
    found: ocp.args.Composite, args: ocp.args.CheckpointArgs, item: str, held: str
) -> Any:
    """Result of a restore by `in_item`, under the names that were asked for."""
    if not isinstance(args, ocp.args.Composite):
        return found[held]
    return ocp.args.Composite(
        **{key: found[held if key == item else key] for key in args.keys()}
    )


def planned_args(
    args: ocp.args.CheckpointArgs | None,
    state: Save | None,
    planned: Any,
) -> ocp.args.CheckpointArgs | None:
    """Arguments of a save in which the state carries its plan to the handler."""
    if state is None:
        return args
    own = dataclasses.replace(state)
    own._planned = planned
    return _replaced(args, state, own)


def attempted_args(args: ocp.args.CheckpointArgs, attempt: Any) -> Any:
    """Arguments of a restore in which items of ours carry the attempt to the handler."""
    composite = isinstance(args, ocp.args.Composite)
    for each in args.values() if composite else (args,):
        if isinstance(each, Restore):
            own = dataclasses.replace(each)
            own._attempt = attempt
            args = _replaced(args, each, own)
    return args


def _replaced(args: Any, old: Any, new: Any) -> Any:
    """Copy of arguments in which one of them is replaced; the user's own stay as they are."""
    if args is old:
        return new
    given = {key: new if each is old else each for key, each in args.items()}
    return ocp.args.Composite(**given)
