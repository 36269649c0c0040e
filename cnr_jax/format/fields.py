"""JSON documents with a digest of themselves: their canonical bytes, and their typed fields.

Reading collects all problems instead of raising the first, so one error tells all that is wrong
with a manifest. A problem is one line: the field, what was expected and what was found.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar, cast

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.integers import LARGEST

T = TypeVar("T")
_MISSING = object()
# Made once: `json.dumps` makes an encoder in each call that has other options than the defaults.
json_text = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False
).encode


def is_integer(value: object, minimum: int = 0) -> TypeGuard[int]:
    """Whether a value of JSON is an integer from `minimum` to `LARGEST`."""
    return type(value) is int and minimum <= value <= LARGEST


def is_path(text: str) -> bool:
    """Whether a text is a path that stays below the folder it starts from."""
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

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._value.get(key) is not None

    def keys(self) -> tuple[str, ...]:
        """Keys of the object, in their order."""
        return tuple(self._value)

    def integer(self, key: str, *, minimum: int = 0, most: int = LARGEST) -> int:
        """Reads an integer from `minimum` to `most`; `minimum` itself after a problem."""
        value = self._value.get(key, _MISSING)
        if is_integer(value, minimum) and value <= most:
            return value
        limit = "" if most == LARGEST else f" and at most {most}"
        self._report(key, f"an integer of at least {minimum}{limit}", value)
        return minimum

    def number(self, key: str) -> float:
        """Reads a number that is not negative; 0.0 after a problem."""
        value = self._value.get(key, _MISSING)
        if is_integer(value) or (type(value) is float and 0 <= value < float("inf")):
            return float(value)
        self._report(key, "a number of at least 0", value)
        return 0.0

    def any_number(self, key: str) -> float:
        """Reads a number, which may be negative; 0.0 after a problem."""
        value = self._value.get(key, _MISSING)
        is_whole = is_integer(value, -LARGEST)
        if is_whole or (type(value) is float and math.isfinite(value)):
            return float(value)
        self._report(key, "a number", value)
        return 0.0

    def boolean(self, key: str) -> bool:
        """Reads a truth value; False after a problem."""
        value = self._value.get(key, _MISSING)
        if isinstance(value, bool):
            return value
        self._report(key, "true or false", value)
        return False

    def text(self, key: str, *, choices: tuple[str, ...] = ()) -> str:
        """Reads a string, one of `choices` if given; empty after a problem."""
        value = self._value.get(key, _MISSING)
        if isinstance(value, str) and (not choices or value in choices):
            return value
        expected = f"one of {', '.join(choices)}" if choices else "a string"
        self._report(key, expected, value)
        return ""

    def hexadecimal(self, key: str, digits: int) -> str:
        """Reads a lower-case hexadecimal string of exactly `digits` digits."""
        value = self._value.get(key, _MISSING)
        if isinstance(value, str) and names.is_hex(value, digits):
            return value
        self._report(key, f"{digits} hexadecimal digits", value)
        return "0" * digits

    def name(self, key: str) -> str:
        """Reads a file or directory name: not empty, no separators, no NUL, not `.` or `..`."""
        value = self._value.get(key, _MISSING)
        if isinstance(value, str) and names.is_component(value):
            return value
        self._report(key, "the name of a file or folder", value)
        return "_"

    def path(self, key: str) -> str:
        """Reads a path below the document's folder: names joined by `/`, none of them `..`."""
        value = self._value.get(key, _MISSING)
        if isinstance(value, str) and is_path(value):
            return value
        self._report(key, "a path below this folder", value)
        return "_"

    def any(self, key: str) -> Any:
        """Value under a key, unchecked; None when absent."""
        return self._value.get(key)

    def child(self, key: str) -> Fields:
        """Fields of the object under `key`, which report to the same list."""
        value = self._value.get(key, _MISSING)
        where = f"{self.where}.{key}" if self.where else key
        if value is _MISSING:
            self._report(key, "an object", value)
            return Fields({}, where, [])
        return Fields(value, where, self.problems)

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...]:
        """Reads a list of integers of at least `minimum`."""
        return self._typed_list(
            key,
            lambda v: is_integer(v, minimum),
            f"integers of at least {minimum}",
        )

    def texts(self, key: str) -> tuple[str, ...]:
        """Reads a list of strings."""
        return self._typed_list(key, lambda v: isinstance(v, str), "strings")

    def _typed_list(
        self, key: str, good: Callable[[object], bool], expected: str
    ) -> tuple[Any, ...]:
        value = self._value.get(key, _MISSING)
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
        """Reads a list of objects, each by `read`.

        Args:
            key: key of the list.
            read: reads an object, and reports its problems.
            quick: reads an object without problems, and returns None for any other; saves most
                of the time if there are many.
        """
        value = self._value.get(key, _MISSING)
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
        """Reads an object whose values are objects, each by `read`."""
        child = self.child(key)
        return {
            name: read(Fields(item, f"{child.where}.{name}", self.problems))
            for name, item in child._value.items()
        }


# Objects that nearly all manifests of a run have alike, by key, size and digest of their text.
# Those of few runs are kept: they take several times the bytes of the text.
_alike: dict[tuple[str, int, bytes], tuple[Any, ...]] = {}
_MOST_ALIKE = 64
_MOST_ALIKE_BYTES = 2 << 20


def read_alike(
    fields: Fields,
    key: str,
    read: Callable[[Fields], T],
    varies: Callable[[T], bool] = lambda item: False,
) -> tuple[T, ...]:
    """Reads a list of objects that was probably read before, from another manifest.

    Args:
        fields: fields that hold the list.
        key: key of the list.
        read: reads one of the objects.
        varies: whether an object may well differ in each manifest: such objects are not kept.
    """
    text = json_text(fields.any(key)).encode()
    known = key, len(text), hashlib.sha256(text).digest()
    found = _alike.get(known)
    if found is None:
        problems = len(fields.problems)
        found = fields.objects(key, read)
        if len(fields.problems) > problems or any(map(varies, found)):
            return found
        held = sum(size for _, size, _ in list(_alike))
        if len(_alike) >= _MOST_ALIKE or held + len(text) > _MOST_ALIKE_BYTES:
            _alike.clear()
        if len(text) <= _MOST_ALIKE_BYTES:
            _alike[known] = found
    return found


def dump_document(document: Mapping[str, object]) -> bytes:
    """Canonical bytes of a JSON object without `sha256`, with that key added."""
    texts = {key: json_text(value) for key, value in document.items()}
    digest = hashlib.sha256(_joined(texts)).hexdigest()
    return _joined({**texts, "sha256": json_text(digest)})


def _joined(texts: Mapping[str, str]) -> bytes:
    """Joins values that are text already into the canonical object, so each is made once."""
    pairs = (f"{json_text(key)}:{text}" for key, text in sorted(texts.items()))
    return f"{{{','.join(pairs)}}}\n".encode()


def _is_intact(data: bytes, document: dict[str, object]) -> bool:
    try:
        text = json_text(document)
    # NaN or infinity, which Python reads but no manifest holds; or nested too deeply.
    except (ValueError, RecursionError):
        return False
    if f"{text}\n".encode() != data:
        return False
    # The comma is there, as `format` comes first. No other digest in the document is the same.
    own = f',"sha256":{json_text(document.get("sha256"))}'
    body = text.replace(own, "", 1)
    return document.get("sha256") == hashlib.sha256(f"{body}\n".encode()).hexdigest()


def open_document(data: bytes, where: str, kind: str) -> Fields:
    """Parses JSON and checks format, version, features and digest, in that order.

    Raises:
        ManifestError: if it is not a JSON document of that format, or is damaged.
        UnsupportedVersionError: if it needs a newer reader.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise errors.ManifestError(
            f"{where} is damaged: it is not JSON ({error})"
        ) from error
    fields = Fields(document, "", [])
    if fields.text("format") != kind:
        raise errors.ManifestError(f"{where} is not a {kind} document", fields.problems)
    version = fields.integer("version", minimum=1)
    features = fields.texts("required_features") if kind == names.FORMAT else ()
    unknown = sorted(set(features) - names.KNOWN_FEATURES)
    if version > names.VERSION or unknown:
        raise errors.UnsupportedVersionError(
            f"{where} cannot be read by this version of cnr_jax\n"
            f"  format version: {version}, this reader knows up to {names.VERSION}\n"
            f"  required features unknown here: {', '.join(unknown) or 'none'}\n"
            "  hint: upgrade cnr_jax"
        )
    if not _is_intact(data, document):
        raise errors.ManifestError(f"{where} is damaged: its digest does not match")
    return fields
