"""Trial of code widths on a state: the caller's own metric, before and after the rounding.

To remember: the caller's functions run under the caller's settings, on all processes alike, and get
nothing that the state they were given still needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from cnr_jax.checkpointer.trying.given import (
    WIDTHS,
    Better,
    Metrics,
    Width,
    accepted,
    by_metric,
    check_better,
    check_function,
    check_within,
    checked_count,
    checked_metrics,
    checked_widths,
    named,
)
from cnr_jax.checkpointer.trying.restored import RowBytes, restored, row_bytes
from cnr_jax.checkpointer.trying.tried import Loss, TriedBits, TriedWidth, losses_of
from cnr_jax.checkpointer.tuning import of_all
from cnr_jax.encoding import Encoding
from cnr_jax.errors import OptionError, StateMismatchError
from cnr_jax.given import NOT_GIVEN
from cnr_jax.options import Options, checked
from cnr_jax.rows.codecs.dither import Dither
from cnr_jax.rows.tiling import own_settings
from cnr_jax.state.structure import differences, form_of
from cnr_jax.state.table import Tables, check_tables, split
from cnr_jax.texts import logger

_log = logger(__name__)


def try_bits(
    state: Any,
    tables: Tables,
    evaluate: Callable[[Any], float | Mapping[str, float]],
    *,
    better: Better | Mapping[str, Better],
    bits: Sequence[Width] = WIDTHS,
    seeds: int = 3,
    within: float | Mapping[str, float] | None = None,
    options: Options | None = None,
    train: Callable[[Any, int], Any] | None = None,
    restores: int = 1,
) -> TriedBits:
    """Tries widths of codes on a state: your metric before and after a restore.

    It computes the metric for the state as it is, and for the state as each width would restore it,
    and writes nothing. With `train`, it first trains both on, with the same seeds. Mostly the cost
    to training shows only then, and only if restores follow each other soon.

    A width is `"harmless"` if the mean of its losses is at most `within`, and so is half their 95 %
    interval or its upper end. It is `"harmful"` if the mean is above `within` and can be told from
    zero. Else it is `"open"`: on so few seeds its loss may have any size. The narrowest harmless
    width above which none is harmful is recommended.

    In runs of several processes call it on all of them, with the same arguments. The figures of
    process 0 count.

    Args:
        state: train state, concrete. It stays as it is, and alive.
        tables: tables, from `find_tables`.
        evaluate: function from a state to a number, or to several numbers by name. It must not
            donate the state.
        better: `"higher"` or `"lower"`, the better direction of the metric; for several metrics by
            name.
        bits: widths to try, as `Options(bits=...)` takes them; `"raw"` stores tables exactly. A
            table with options of its own keeps them at every width.
        seeds: number of trials of each width, each with a seed of its own, for `train` and for
            dither. If nothing depends on the seed, only one trial is made.
        within: largest loss that you accept, in units of the metric; for several metrics by name.
            None: 0.01 % of the metric of the state as it is.
        options: options of the run; None: the defaults. Their codecs and rounding are used, their
            bits are not. `rounding="auto"` takes nearest codes for the first restore, and dithered
            ones for those after it, as if rows moved little between them.
        train: function from a state and a seed to the state after some steps. It may donate its
            state, and should depend on nothing else. It needs memory for the whole state once more,
            and with several restores for its tables twice. Without it, the trial needs memory for
            the tables once.
        restores: how often the state is restored and trained on in turn, before its metric is
            computed. More than one needs `train`.

    Returns:
        The result for each width, with the bytes of a full save, and a recommendation with its
        confidence. Prints as a table.

    Raises:
        OptionError: if an argument cannot work, or if `evaluate` returns numbers that are not
            finite, or other names than before.
        StateMismatchError: if the state is not the one `tables` was found in, or is abstract; or if
            `train` returns another kind of state.

    Example:
        >>> import jax.numpy as jnp
        >>> from cnr_jax import find_tables
        >>> rows = jax.random.normal(jax.random.key(0), (500, 16))
        >>> state = {"user": rows, "step": 3}
        >>> def distance(state):
        ...     return jnp.abs(state["user"] - rows).mean()
        >>> tables = find_tables(state, ["user"])
        >>> found = try_bits(
        ...     state, tables, distance, better="lower", within=0.1, bits=(2, 4)
        ... )
        >>> found.recommended, [each.verdict for each in found.widths]
        (4, ['harmful', 'harmless'])
    """
    check_function("evaluate", evaluate, "state")
    if train is not None:
        check_function("train", train, "state, seed")
    widths, seeds = checked_widths(bits), checked_count("seeds", seeds)
    restores = checked_count("restores", restores)
    if restores > 1 and train is None:
        raise OptionError(
            f"restores={restores} has no effect without train: nothing moves between two"
            " restores\n  hint: train=, a function of a state and a seed that runs some steps"
        )
    check_better(better)
    check_within(within)
    options = checked(options)
    check_tables(tables)
    options.check_tables(tables)
    encodings: dict[Width, Encoding] = {
        width: encoding_of(options, width, tables) for width in widths
    }
    trial = _Trial(state, tables, evaluate, train, restores)
    # Without training nothing but dither depends on a seed.
    is_random = train is not None or options.encoding.dithered_bits(0) > 0
    numbers = range(seeds if is_random else 1)
    exact = trial.exact(numbers)
    means = _means(exact)
    ways, most = by_metric("better", better, means), accepted(within, means)
    tried: list[TriedWidth] = []
    for width, encoding in encodings.items():
        metrics, rows, varies = trial.rounded(width, encoding, numbers, exact)
        losses = losses_of(exact, metrics, ways, most, random=varies)
        tried.append(_tried(width, losses, _means(metrics), rows))
        lost = ", ".join(f"{name} {loss}" for name, loss in losses.items())
        _log.info("%s tried: a loss of %s", named(width), lost)
    return TriedBits(
        metrics=means,
        widths=tuple(tried),
        seeds=len(numbers),
        restores=restores,
        trained=train is not None,
        random=is_random,
        within=most,
        dense_bytes=trial.state_bytes - trial.row_bytes,
        state_bytes=trial.state_bytes,
    )


def _tried(
    width: Width, losses: Mapping[str, Loss], metrics: Metrics, rows: RowBytes
) -> TriedWidth:
    off = rows.off
    return TriedWidth(
        bits=width,
        losses=losses,
        metrics=metrics,
        table_bytes=rows.tables,
        slot_bytes=rows.slots,
        mean_row_error=off.errors / off.rows if off.rows else None,
        worst_row_error=off.worst if off.rows else None,
    )


def _means(metrics: Sequence[Metrics]) -> dict[str, float]:
    return {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}


def encoding_of(options: Options, width: Width, tables: Tables) -> Encoding:
    """Encoding of rows by options whose bits are replaced by a width.

    Args:
        options: options of the run, whose bits for all tables are replaced.
        width: width of codes.
        tables: tables of the state; the width must change how at least one is stored.

    Raises:
        OptionError: if the options have no use for the width.
    """
    raw = _encoding_of(options.encoding, "raw")
    if width == "raw":
        return raw
    found = _encoding_of(options.encoding, width)
    try:
        found.check()
    except OptionError as error:
        raise OptionError(
            f"bits={width} cannot be tried with these options\n  {error}\n"
            "  hint: leave it out of bits=, or try another codec"
        ) from None
    if not any(
        found.codec_for(name, "table", table.dim, table.dtype)
        != raw.codec_for(name, "table", table.dim, table.dtype)
        for name, table in tables.items()
    ):
        raise OptionError(
            f"bits={width} has no effect: no table would be stored otherwise than with"
            " codec='raw'\n"
            "  hint: the options give every table a codec or bits of its own, or tables hold"
            " integers, double precision, or rows too short to be rounded"
        )
    return found


def _encoding_of(given: Encoding, width: Width) -> Encoding:
    own = dict(given.tables)
    if width == "raw":
        # A table with bits of its own, but no codec, keeps the codec of all tables.
        codec = "adaptive" if given.codec is NOT_GIVEN else given.codec
        for name, table in own.items():
            if table.bits is not NOT_GIVEN and table.codec is NOT_GIVEN:
                own[name] = dataclasses.replace(table, codec=codec)
    is_auto = any(table.bits == "auto" for table in own.values())
    return dataclasses.replace(
        given,
        codec="raw" if width == "raw" else given.codec,
        bits=NOT_GIVEN if width == "raw" else width,
        expected_restores=given.expected_restores if is_auto else NOT_GIVEN,
        tables=own,
    )


class _Trial:
    """Trial of a state with the caller's functions.

    Args:
        state: the state as it is.
        tables: tables of the state.
        evaluate: function that computes its metrics.
        train: function that runs some steps; None: it is not trained.
        restores: how often it is restored, and trained on, in turn.

    Raises:
        StateMismatchError: if the state cannot be rounded.
    """

    def __init__(
        self,
        state: Any,
        tables: Tables,
        evaluate: Callable[[Any], Any],
        train: Callable[[Any, int], Any] | None,
        restores: int,
    ) -> None:
        self._state, self._tables = state, tables
        self._evaluate, self._train, self._restores = evaluate, train, restores
        self._check_alive(state, "the state")

    @property
    def state_bytes(self) -> int:
        """Bytes of all arrays of the state, in memory."""
        return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(self._state))

    @property
    def row_bytes(self) -> int:
        """Bytes of the tables and slots of the state, in memory."""
        return sum(leaf.nbytes for t in self._tables.values() for leaf in t.leaves)

    def exact(self, seeds: Sequence[int]) -> list[Metrics]:
        """Metrics of the state as it is, for each seed after training, if there is any."""
        if self._train is None:
            return [self._measured(self._state, "the state as it is", None)] * len(
                seeds
            )
        found: list[Metrics] = []
        for seed in seeds:
            state = _copied(self._state)
            for _ in range(self._restores):
                state = self._trained(state, seed)
            what, like = "the state trained on as it is", found[0] if found else None
            found.append(self._measured(state, what, like))
            del state
        return found

    def rounded(
        self,
        width: Width,
        encoding: Encoding,
        seeds: Sequence[int],
        exact: Sequence[Metrics],
    ) -> tuple[list[Metrics], RowBytes, bool]:
        """Metrics of the state as a width restores it, one for each seed, and bytes of its rows.

        Also whether the loss may depend on the seed. It does not if all rows are stored exactly,
        and the metrics are those of the state as it is, `exact`.
        """
        found: list[Metrics] = []
        rows: RowBytes | None = None
        what = f"the state as {named(width)} would restore it"
        is_random = is_rounded = False
        for seed in seeds:
            state = self._state
            is_random = is_random or self._train is not None
            for i in range(self._restores):
                # As in a run that does not know how far rows move between restores.
                dither = Dither(f"{seed:016x}{i:016x}", encoding.dithered_bits(i))
                state, leaves = restored(state, self._tables, encoding, dither)
                # Those of the state that was given, as the first seed restores it.
                rows = rows or row_bytes(leaves)
                is_random = is_random or any(each.is_dithered for each in leaves)
                is_rounded = is_rounded or any(each.is_rounded for each in leaves)
                del leaves
                if self._train is not None:
                    state = self._trained(self._apart(state), seed)
            found.append(self._measured(state, what, exact[0]))
            del state
            if not is_random:
                found *= len(seeds)
                break
        assert rows is not None
        return found, rows, is_random and (is_rounded or found != [*exact])

    def _apart(self, state: Any) -> Any:
        """Copies a state for `train`, which may donate it: shares no arrays with the given one."""
        kept = set(map(id, jax.tree.leaves(self._state)))
        return jax.tree.map(lambda x: _copied(x) if id(x) in kept else x, state)

    def _trained(self, state: Any, seed: int) -> Any:
        assert self._train is not None
        trained = self._train(state, seed)
        if jax.tree.structure(trained) != jax.tree.structure(self._state):
            raise StateMismatchError(
                "train returned another kind of state than it was given\n  "
                + _difference(trained, self._state)
            )
        self._check_alive(trained, "what train returned")
        return trained

    def _measured(self, state: Any, what: str, like: Metrics | None) -> Metrics:
        """Calls `evaluate` on a state, and checks the result.

        Raises:
            OptionError: if that is not finite numbers, of the same names as before.
        """
        found = self._evaluate(_lent(state))
        with own_settings():  # numbers may lie on devices
            metrics = checked_metrics(found, what)
        if like is not None and set(metrics) != set(like):
            raise OptionError(
                f"evaluate returned other metrics for {what}\n"
                f"  got {sorted(metrics)}, expected {sorted(like)}"
            )
        self._check_alive(self._state, "after evaluate the state")
        # The figures of process 0 count, so that all processes come to the same.
        values = np.zeros((jax.process_count(), len(metrics)))
        values[jax.process_index()] = list(metrics.values())
        first = dict(zip(metrics, of_all(values)[0].tolist(), strict=True))
        for name, value in first.items():
            if not math.isfinite(value):
                raise OptionError(
                    f"evaluate returned {value} for {name!r} of {what}, expected a finite number"
                )
        return first

    def _check_alive(self, state: Any, what: str) -> None:
        """Checks that all arrays of a state hold something, and those of tables are arrays."""
        arrays, _ = split(state, self._tables)
        for table, leaves in arrays.items():
            for name, array in leaves.items():
                if not isinstance(array, jax.Array):
                    raise StateMismatchError(
                        f"{what} has no rows that could be rounded: {name} of table {table!r}"
                        f" is {type(array).__name__}, expected a jax.Array"
                    )
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            where = f"{what} at {jax.tree_util.keystr(path)}"
            if isinstance(leaf, Tracer):
                raise StateMismatchError(
                    f"{where} is a tracer, which has no value\n"
                    "  hint: call try_bits outside of jax.jit"
                )
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                raise StateMismatchError(
                    f"{where} was donated to a computation\n"
                    "  hint: give try_bits what the train step returned; evaluate must not"
                    " donate its state"
                )


def _difference(got: Any, want: Any) -> str:
    """Describes, in a line, how the structure of a state differs from the expected one."""
    there, here = (
        {(jax.tree_util.keystr(path),): leaf for path, leaf in leaves}
        for leaves in map(jax.tree_util.tree_leaves_with_path, (got, want))
    )
    forms = {path: form_of(leaf) for path, leaf in here.items()}
    problems = differences(forms, there.items()) or [
        f"the same leaves in a {type(got).__name__}, expected in a {type(want).__name__}"
    ]
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return problems[0] + more


def _lent(state: Any) -> Any:
    """Shallow copy of a state for the caller: what can be assigned to is its own."""
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, state)


@own_settings()
def _copied(tree: Any) -> Any:
    """Deep copy of a state, with arrays of its own in the same kind of memory."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        found = leaf.copy()
        is_there = found.sharding == leaf.sharding
        return found if is_there else jax.device_put(found, leaf.sharding)

    return jax.tree.map(copied, _lent(tree))
