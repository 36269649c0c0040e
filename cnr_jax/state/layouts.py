"""Row layouts: the place of a table's logical rows in its stored array.

A layout maps logical row ids to rows of the physical array and back. It is pure integer
arithmetic, so the same methods serve Python ints, numpy arrays and (traced) JAX arrays.
It knows neither tables nor files; a manifest stores a layout as its `name` and
`configuration()`, and `layout_from` rebuilds it.

To remember: a layout is a bijection between the logical ids it covers and the physical
rows, and nobody but a layout does this arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

from cnr_jax.errors import FormatError, TableError
from cnr_jax.integers import integer, take_integers

# An int, a numpy array or a JAX array of any integer dtype; the same kind comes back.
Integers = TypeVar("Integers", bound=Any)


@runtime_checkable
class RowLayout(Protocol):
    """Maps logical row ids to rows of the stored array and back.

    Implementations are frozen and hashable: they are static data under `jax.jit`. Ids
    must already lie within the layout's range; no method clamps or wraps.
    """

    name: ClassVar[str]
    """The layout's name in a manifest."""

    def configuration(self) -> dict[str, int]:
        """Returns the numbers that, with `name`, rebuild this layout."""
        ...

    def to_physical(self, logical: Integers) -> Integers:
        """Returns the stored row of each logical row id."""
        ...

    def to_logical(self, physical: Integers) -> Integers:
        """Returns the logical row id of each stored row."""
        ...


@dataclass(frozen=True, slots=True)
class Identity:
    """Row layout that stores logical row `i` at row `i`.

    Example:
        >>> Identity().to_physical(3)
        3
    """

    name: ClassVar[str] = "identity"

    def configuration(self) -> dict[str, int]:
        """Returns an empty mapping: there is nothing to configure."""
        return {}

    def to_physical(self, logical: Integers) -> Integers:
        """Returns `logical` unchanged."""
        return logical

    def to_logical(self, physical: Integers) -> Integers:
        """Returns `physical` unchanged."""
        return physical


@dataclass(frozen=True, slots=True, kw_only=True)
class ModSharded:
    """Row layout that deals logical rows round robin over shards: row `i` to shard `i % shards`.

    It is a bijection on `[0, shards * rows_per_shard)`. Every value on the way is below that
    product, so ids need only a dtype that holds the physical row numbers.

    Attributes:
        shards: number of shards, at least 1.
        rows_per_shard: number of physical rows per shard, at least 1.

    Example:
        >>> layout = ModSharded(shards=2, rows_per_shard=3)
        >>> [layout.to_physical(i) for i in range(6)]
        [0, 3, 1, 4, 2, 5]
    """

    name: ClassVar[str] = "mod"
    shards: int
    rows_per_shard: int

    def __post_init__(self) -> None:
        """Rejects sizes that describe no array."""
        for field in ("shards", "rows_per_shard"):
            take_integers(self, field)
            value = getattr(self, field)
            if integer(value) is None or value < 1:
                raise TableError(
                    f"layout 'mod' cannot have {field}={value!r}\n"
                    f"  got {value!r}, expected an integer of at least 1"
                )

    def configuration(self) -> dict[str, int]:
        """Returns `shards` and `rows_per_shard`."""
        return {"shards": self.shards, "rows_per_shard": self.rows_per_shard}

    def to_physical(self, logical: Integers) -> Integers:
        """Returns `(logical % shards) * rows_per_shard + logical // shards`."""
        return (logical % self.shards) * self.rows_per_shard + logical // self.shards

    def to_logical(self, physical: Integers) -> Integers:
        """Returns the logical ids that `to_physical` maps to `physical`."""
        shard, row = physical // self.rows_per_shard, physical % self.rows_per_shard
        return row * self.shards + shard


_LAYOUTS = {kind.name: kind for kind in (Identity, ModSharded)}


def layout_from(name: str, configuration: Mapping[str, int]) -> RowLayout:
    """Rebuilds a layout from its name and configuration, as a manifest stores them.

    Args:
        name: "identity" or "mod".
        configuration: what the layout's `configuration()` returned.

    Returns:
        A layout equal to the one described.

    Raises:
        FormatError: if the name is unknown or the configuration does not fit it.

    Example:
        >>> layout_from("mod", {"shards": 2, "rows_per_shard": 3})
        ModSharded(shards=2, rows_per_shard=3)
    """
    known = _LAYOUTS.get(name)
    if known is None:
        raise FormatError(
            f"row layout {name!r} is not known\n  known: {', '.join(sorted(_LAYOUTS))}"
        )
    try:
        return known(**configuration)
    except (TypeError, TableError) as error:
        raise FormatError(
            f"configuration of row layout {name!r} does not fit it\n"
            f"  got {dict(configuration)!r}: {error}"
        ) from error
