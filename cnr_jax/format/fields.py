"""Reading typed fields out of parsed JSON, collecting every problem instead of the first.

The manifests are read through this, so that a damaged one is reported whole: each problem is
one line that names the field, what was expected and what was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar, cast

from cnr_jax.format import names

T = TypeVar("T")
_MISSING = object()
# Of every count, size and offset. Python reads integers of any size, and would add them up, but
# arrays cannot be indexed by them nor texts made of them.
LARGEST = 2**63 - 1


def is_integer(value: object, minimum: int = 0) -> TypeGuard[int]:
    """Whether a value of JSON is an integer from `minimum` to `LARGEST`."""
    return type(value) is int and minimum <= value <= LARGEST


def is_path(text: str) -> bool:
    """Whether a text is a path that leads to nothing but what is below a folder."""
    return all(map(names.is_component, text.split("/")))


class Fields:
    """One JSON object being read; `problems` is shared with its children.

    Example:
        >>> fields = Fields({"rows": -1}, "tables.user", [])
        >>> fields.integer("rows", minimum=0)
        0
        >>> fields.problems
        ['tables.user.rows: expected an integer of at least 0, got -1']
    """

    def __init__(self, value: object, where: str, problems: list[str]) -> None:
        self.where = where
        self.problems = problems
        self._value: dict[str, object] = {}
        if isinstance(value, dict):
            self._value = cast("dict[str, object]", value)
        else:
            self._report("", "an object", value)

    def _report(self, key: str, expected: str, got: object) -> None:
        place = ".".join(part for part in (self.where, key) if part) or "manifest"
        if got is _MISSING:
            self.problems.append(f"{place}: required key is absent")
        else:
            try:
                text = json.dumps(got)
            except RecursionError:
                text = "what is nested too deeply"
            text = text if len(text) <= 60 else text[:57] + "..."
            self.problems.append(f"{place}: expected {expected}, got {text}")

    def _get(self, key: str) -> object:
        return self._value.get(key, _MISSING)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._value.get(key) is not None

    def integer(self, key: str, *, minimum: int = 0) -> int:
        """An integer from `minimum` to `LARGEST`; `minimum` itself after a problem."""
        value = self._get(key)
        if is_integer(value, minimum):
            return value
        self._report(key, f"an integer of at least {minimum}", value)
        return minimum

    def number(self, key: str) -> float:
        """A number that is not negative; 0.0 after a problem."""
        value = self._get(key)
        if is_integer(value) or (type(value) is float and 0 <= value < float("inf")):
            return float(value)
        self._report(key, "a number of at least 0", value)
        return 0.0

    def text(self, key: str, *, choices: tuple[str, ...] = ()) -> str:
        """A string, one of `choices` where given; empty after a problem."""
        value = self._get(key)
        if isinstance(value, str) and (not choices or value in choices):
            return value
        expected = f"one of {', '.join(choices)}" if choices else "a string"
        self._report(key, expected, value)
        return ""

    def hexadecimal(self, key: str, digits: int) -> str:
        """A lower-case hexadecimal string of exactly `digits` digits."""
        value = self._get(key)
        if isinstance(value, str) and names.is_hex(value, digits):
            return value
        self._report(key, f"{digits} hexadecimal digits", value)
        return "0" * digits

    def name(self, key: str) -> str:
        """A file or directory name: not empty, no separators, no NUL, not `.` or `..`."""
        value = self._get(key)
        if isinstance(value, str) and names.is_component(value):
            return value
        self._report(key, "the name of a file or folder", value)
        return "_"

    def path(self, key: str) -> str:
        """A path below the folder of the document: names joined by `/`, none of them `..`."""
        value = self._get(key)
        if isinstance(value, str) and is_path(value):
            return value
        self._report(key, "a path below this folder", value)
        return "_"

    def any(self, key: str) -> Any:
        """The value as it is; None when absent."""
        return self._value.get(key)

    def child(self, key: str) -> Fields:
        """The object under `key`."""
        value = self._get(key)
        where = f"{self.where}.{key}" if self.where else key
        if value is _MISSING:
            self._report(key, "an object", value)
            return Fields({}, where, [])
        return Fields(value, where, self.problems)

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...]:
        """A list of integers of at least `minimum`."""
        return self._typed_list(
            key,
            lambda v: is_integer(v, minimum),
            f"integers of at least {minimum}",
        )

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        return self._typed_list(key, lambda v: isinstance(v, str), "strings")

    def _typed_list(
        self, key: str, good: Callable[[object], bool], expected: str
    ) -> tuple[Any, ...]:
        value = self._get(key)
        if isinstance(value, list):
            items = cast("list[object]", value)
            value = items
            if all(good(item) for item in items):
                return tuple(items)
        self._report(key, f"a list of {expected}", value)
        return ()

    def objects(
        self,
        key: str,
        read: Callable[[Fields], T],
        quick: Callable[[Any], T | None] | None = None,
    ) -> tuple[T, ...]:
        """A list of objects, each read by `read`.

        Args:
            key: of the list.
            read: reads an object, and reports its problems.
            quick: reads an object that has none, and gives None for any other; saves most of
                the time where there are many.
        """
        value = self._get(key)
        if not isinstance(value, list):
            self._report(key, "a list of objects", value)
            return ()
        where = f"{self.where}.{key}" if self.where else key
        found: list[T] = []
        for i, item in enumerate(cast("list[object]", value)):
            good = quick(item) if quick is not None else None
            if good is None:
                good = read(Fields(item, f"{where}[{i}]", self.problems))
            found.append(good)
        return tuple(found)

    def mapping(self, key: str, read: Callable[[Fields], T]) -> dict[str, T]:
        """An object whose values are objects, each read by `read`."""
        child = self.child(key)
        return {
            name: read(Fields(item, f"{child.where}.{name}", self.problems))
            for name, item in child._value.items()
        }
