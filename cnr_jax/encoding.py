"""Encoding of the rows of a run: the codec of each leaf, its bits, and compression.

Some of it is given by options, some is inherited from the run that goes on, and the rest has
defaults; the three come together here. To remember: what is given always wins, field by field. A
width that no codec takes is refused only if it was given.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from cnr_jax import errors
from cnr_jax.format.encodings import (
    EncodingEntry,
    NamedConfiguration,
    TableEncodingEntry,
)
from cnr_jax.format.tiles import COMPRESSIONS
from cnr_jax.given import NOT_GIVEN, NotGiven, TableOptions
from cnr_jax.policy.bits import (
    ASSUMED_RESTORES,
    FALLBACK_BITS,
    RAW_BITS,
    bits_after,
    dithered_bits,
)
from cnr_jax.rows.codecs import (
    Codec,
    Raw,
    at_dim,
    bytes_of,
    check_readable,
    codec_from,
    configuration_of,
    has_choice,
    is_codec,
    make_codec,
    reads_bits,
)
from cnr_jax.rows.codecs.base import WIDEST
from cnr_jax.rows.codecs.residual import is_on_step
from cnr_jax.rows.codecs.slots import moments_codec, slot_codec

# Defaults, if nothing is given and no run goes on.
_CODEC, _BITS, _SLOT_CODEC = "adaptive", 4, "raw"
_LEAVES = ("table", "slot")
# Values of `slot_codec` that choose a codec by the name of each slot.
_BY_NAME = ("auto", "moments")
_OF_TABLES = tuple(field.name for field in dataclasses.fields(TableOptions))
_NOTHING = TableOptions()
_PACKS = "compression"
_ROUNDS = "rounding"
_EXACT = "  hint: codec='raw' stores all bits, and takes no bits="
_OF_ALL = (*_OF_TABLES, "expected_restores", _ROUNDS, _PACKS)
ROUNDINGS = ("auto", "nearest", "dithered")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """Options of how rows are stored, given or inherited; see `cnr_jax.Options`.

    Attributes:
        tables: options of single tables, by name.
        may_be_named: whether a policy may name the codec of a save, and that may take bits.
        inherited: names of the options that come from the run that goes on; those of a table are
            written `tables.user.bits`.
    """

    codec: str | Codec | NotGiven | None = NOT_GIVEN
    bits: int | Literal["auto"] | NotGiven | None = NOT_GIVEN
    expected_restores: float | NotGiven | None = NOT_GIVEN
    slot_codec: str | Codec | NotGiven = NOT_GIVEN
    rounding: Literal["auto", "nearest", "dithered"] | NotGiven | None = NOT_GIVEN
    compression: Literal["zstd"] | NotGiven | None = NOT_GIVEN
    tables: Mapping[str, TableOptions] = dataclasses.field(default_factory=dict)
    may_be_named: bool = False
    inherited: tuple[str, ...] = ()

    # What is given.

    def check(self) -> None:
        """Checks all fields as options that were all given.

        Raises:
            OptionError: if a value cannot work.
        """
        if self.packing not in (None, *COMPRESSIONS):
            raise errors.OptionError(
                f"compression {self.compression!r} is not known, expected"
                f" {' or '.join(map(repr, COMPRESSIONS))} or None"
            )
        if self.rounding is not NOT_GIVEN and self.rounding not in ROUNDINGS:
            raise errors.OptionError(
                f"rounding {self.rounding!r} is not known, expected"
                f" {', '.join(map(repr, ROUNDINGS[:-1]))} or {ROUNDINGS[-1]!r}"
            )
        bits_after(0, self.assumed_restores)
        for name in ("", *self.tables):
            bits = self._value(name, "bits")
            is_number = isinstance(bits, int) and not isinstance(bits, bool)
            if bits not in (NOT_GIVEN, "auto") and not is_number:
                raise errors.OptionError(
                    f"{_where(name)}: bits is {bits!r}, expected 2, 3, 4, 8 or 'auto'"
                    f"\n{_EXACT}"
                )
            slots = self._value(name, "slot_codec")
            if slots == "lattice" or is_on_step(slots):
                raise errors.OptionError(
                    f"{_where(name)}: slot_codec={slots!r} is for tables: on one step a table"
                    " small squares of gradients read as zero\n"
                    "  hint: slot_codec='moments' stores slots by differences"
                )
        self.check_bits_of(self)
        if _given(self.expected_restores) and not self._is_auto_anywhere():
            got = f"bits={self.bits!r}" if _given(self.bits) else "no bits"
            raise errors.OptionError(
                f"expected_restores={self.expected_restores!r} has no effect: got {got},"
                " expected bits='auto' here or for a table\n"
                f"  hint: bits='auto', expected_restores={self.expected_restores!r}; both, in a"
                " run that goes on too"
            )
        self._check_codecs()

    def check_bits_of(self, given: Encoding) -> None:
        """Checks that the bits that options give have something to choose.

        Args:
            given: the encoding by options alone; the rest of `self` is inherited.

        Raises:
            OptionError: naming the bits, and the codec that has none.
        """
        for name in ("", *given.tables):
            bits = given._value(name, "bits")
            if not _given(bits) or self._has_use(name, bits):
                continue
            codec = self._codec_named(name, "table")
            own = isinstance(getattr(codec, "bits", None), int)
            idle = "nothing to choose" if bits == "auto" else "no effect"
            has = (
                f"{codec!r} has bits of its own"
                if own
                else f"codec {codec!r} has no bits"
            )
            raise errors.OptionError(
                f"{_where(name)}: bits={bits!r} has {idle}: {has}\n"
                "  expected bits left out, or the name of a codec that has some\n"
                "  hint: codec='adaptive' is one"
            )

    def _check_codecs(self) -> None:
        for name in ("", *self.tables):
            for leaf in _LEAVES:
                for bits in {self.auto_bits(0), FALLBACK_BITS}:
                    check_readable(self._codec(name, leaf, bits, "squares"))

    def _has_use(self, name: str, bits: Any = None) -> bool:
        """Whether bits of a table, or of all tables, reach a codec that takes or has them."""
        heirs = [name]
        if not name:
            heirs += [t for t in self.tables if not _given(self._value(t, "bits"))]
        # A policy names the codec of all tables but those with one of their own.
        if self.may_be_named and (not name or not _given(self._value(name, "codec"))):
            return True
        # Codecs by the names of slots have bits of their own.
        return any(
            (codec := self._codec_named(heir, leaf)) not in _BY_NAME
            and reads_bits(codec, bits)
            for heir in heirs
            for leaf in _LEAVES
        )

    def _is_auto_anywhere(self) -> bool:
        return any(self._value(n, "bits") == "auto" for n in ("", *self.tables))

    def says_rounding(self, table: str) -> bool:
        """Whether a codec or bits are given for a table or for all: then the user knows of it."""
        names = ("codec", "bits")
        return any(_given(self._value(t, n)) for t in ("", table) for n in names)

    # What comes of it.

    @property
    def packing(self) -> Literal["zstd"] | None:
        """Compression of the arrays of a save; None: not compressed."""
        found = self.compression
        return None if isinstance(found, NotGiven) else found

    def dithered_bits(self, restores: int, even_bits: float | None = None) -> int:
        """The widest codes that are dithered in a save; 0: none are.

        Args:
            restores: number of restores of its run.
            even_bits: motion of its rows, as in `cnr_jax.policy.bits.dithered_bits`.
        """
        if self.rounding in ("auto", NOT_GIVEN):
            return dithered_bits(restores, even_bits)
        return FALLBACK_BITS if self.rounding == "dithered" else 0

    @property
    def expects(self) -> bool:
        """Whether `expected_restores` is given."""
        return _given(self.expected_restores)

    @property
    def assumed_restores(self) -> float:
        """Number of restores of the run for which `bits="auto"` chooses a width."""
        expected = self.expected_restores
        if expected is None or isinstance(expected, NotGiven):
            return ASSUMED_RESTORES
        return expected

    def auto_bits(self, restores: int, even_bits: float | None = None) -> int:
        """The width that `bits="auto"` means in a save, see `bits_after`."""
        return bits_after(restores, self.assumed_restores, even_bits)

    def follows_restores(self) -> bool:
        """Whether the codec of anything depends on the number of restores."""
        return any(
            has_choice(functools.partial(self._codec, name, leaf))
            for name in ("", *self.tables)
            for leaf in _LEAVES
        )

    def is_auto(self, table: str, leaf: str, width: int, dtype: Any) -> bool:
        """Whether the codec that `codec_for` gives depends on the number of restores."""
        return has_choice(functools.partial(self.codec_for, table, leaf, width, dtype))

    def codec_for(
        self,
        table: str,
        leaf: str,
        width: int,
        dtype: Any,
        auto_bits: int | None = None,
        moment: Literal["mean", "squares"] | None = None,
    ) -> Codec:
        """The codec for rows of `width` elements of a leaf (`"table"` or a slot's name).

        `auto_bits` is the width for bits "auto". None stands for the width of the expected
        restores, even for a table that is small among others. `moment` says which of a pair of
        moments a slot is.

        Some rows are stored raw: those that a quantizer would not make smaller or cannot encode
        (integers, double precision), and those so wide that one range for all their elements
        would be a poor one.
        """
        if auto_bits is None:
            auto_bits = self.auto_bits(0)
        codec = self._codec(table, leaf, auto_bits, moment)
        dtype = np.dtype(dtype)
        if dtype.name not in ("float32", "bfloat16", "float16"):
            return Raw()
        if width > WIDEST:
            return Raw()
        if bytes_of(codec.parts(width, dtype)) >= width * dtype.itemsize:
            return Raw()
        return at_dim(codec, width)

    def exact(self) -> Encoding:
        """An encoding that stores all bits of all rows, compressed as this one."""
        return Encoding(codec="raw", slot_codec="raw", compression=self.compression)

    def with_codec(self, codec: str | None) -> Encoding:
        """This encoding with the codec that a policy names; None: unchanged."""
        return self if codec is None else dataclasses.replace(self, codec=codec)

    def _value(self, table: str, name: str) -> Any:
        """Value of an option for one table alone, or for all if the name is empty."""
        said = self.tables.get(table, _NOTHING) if table else self
        return getattr(said, name)

    def _codec_named(self, table: str, leaf: str) -> str | Codec:
        name = "codec" if leaf == "table" else "slot_codec"
        for found in (self._value(table, name), getattr(self, name)):
            if _given(found):
                return found
        return _CODEC if leaf == "table" else _SLOT_CODEC

    def _codec(
        self,
        table: str,
        leaf: str,
        auto_bits: int,
        moment: Literal["mean", "squares"] | None = None,
    ) -> Codec:
        # Bits of the table itself come before those of all tables.
        said = [b for t in (table, "") if _given(b := self._value(t, "bits"))]
        given = said[0] if said else _BITS
        bits = auto_bits if given == "auto" else given
        codec = self._codec_named(table, leaf)
        if not isinstance(codec, str):
            return codec
        if given == "auto" and bits == RAW_BITS and reads_bits(codec):
            return Raw()
        if codec == "auto" and leaf != "table":
            return slot_codec(leaf)
        if codec == "moments" and leaf != "table":
            return moments_codec(leaf, moment)
        try:
            return make_codec(codec, bits)
        except ValueError as error:
            why = f"{_where(table)}: {error}"
            if leaf != "table" and not is_codec(codec):
                why = f"{_where(table)}: slot_{error}, or 'auto' or 'moments'"
            if given != "auto" and is_codec(codec):
                auto = " or 'auto'" if is_codec(codec, FALLBACK_BITS) else ""
                why += f"{auto}\n{_EXACT}"
            if given == "auto" and is_codec(codec):
                why += (
                    "\n  bits='auto' comes to 8 for small tables, and after more restores than"
                    f" expected\n  hint: give codec {codec!r} a number of bits, such as"
                    " bits=4, or take codec='adaptive'"
                )
            raise errors.OptionError(why) from error

    # What the run that goes on tells.

    def entry(self) -> EncodingEntry:
        """Entry for manifests. It spells defaults out, so that these may change."""
        bits = self.bits
        if isinstance(bits, NotGiven):
            bits = _BITS if self._has_use("") else None
        return EncodingEntry(
            codec=_stored(self._codec_named("", "table")),
            bits=bits,
            expected_restores=float(self.assumed_restores) if self.expects else None,
            slot_codec=_stored(self._codec_named("", "slot")),
            compression=self.packing,
            rounding=_stored(self.rounding),
            tables={
                name: TableEncodingEntry(
                    **{n: _stored(getattr(own, n)) for n in _OF_TABLES}
                )
                for name, own in self.tables.items()
                if own != _NOTHING
            },
        )

    def inheriting(self, stored: EncodingEntry, tables: Collection[str]) -> Encoding:
        """This encoding; options that are not given are taken from a run that goes on.

        Args:
            stored: entry of the run's manifest.
            tables: names of the tables that there are now; the run's options of others are left
                out.

        Raises:
            OptionError: if bits are given, but no inherited codec takes any; or if a codec or the
                compression of the run is not known here.
        """
        found: dict[str, Any] = {}
        for name in _OF_ALL:
            said = getattr(stored, name)
            if not _given(getattr(self, name)) and (said is not None or name == _PACKS):
                found[name] = _taken(said, name)
        of_tables = {
            table: {
                name: _taken(said, name, table)
                for name in _OF_TABLES
                if not _given(self._value(table, name))
                and (said := getattr(own, name)) is not None
            }
            for table, own in stored.tables.items()
            if table in tables
        }
        # First with all inherited options: only then it shows which bits reach a codec.
        whole = self._with(found, of_tables)
        # Widths that no codec takes any more, because another one is given.
        for table, own in (("", found), *of_tables.items()):
            if "bits" in own and not whole._has_use(table):
                del own["bits"]
        whole = self._with(found, of_tables)
        if "expected_restores" in found and not whole._is_auto_anywhere():
            del found["expected_restores"]
            whole = self._with(found, of_tables)
        try:
            whole.check_bits_of(self)
            whole._check_codecs()
        except errors.OptionError as error:
            told = ", ".join(whole.told(whole.inherited))
            raise errors.OptionError(
                f"{error}\n  inherited from the run: {told}"
            ) from None
        return whole

    def _with(
        self, found: Mapping[str, Any], of_tables: Mapping[str, Mapping[str, Any]]
    ) -> Encoding:
        own = {
            table: dataclasses.replace(self.tables.get(table, _NOTHING), **values)
            for table, values in of_tables.items()
            if values
        }
        named = [f"tables.{t}.{n}" for t, values in of_tables.items() for n in values]
        return dataclasses.replace(
            self,
            **found,
            tables={**self.tables, **own},
            inherited=(*found, *named),
        )

    def told(self, names: Collection[str]) -> Iterator[str]:
        """Yields options as text, such as `codec='raw'`, by their names as in `inherited`."""
        for name in names:
            # Tables may have dots in their names.
            table, _, own = name.removeprefix("tables.").rpartition(".")
            yield f"{name}={self._value(table, own)!r}"

    def differing(self, stored: EncodingEntry) -> Iterator[str]:
        """Yields given options that differ from those of a run that goes on: `bits=8 (was 4)`."""
        places = [("", name) for name in _OF_ALL]
        places += [(table, name) for table in self.tables for name in _OF_TABLES]
        for table, name in places:
            said = f"tables.{table}.{name}" if table else name
            value = self._value(table, name)
            # A table without a value of its own has that of all tables.
            was = getattr(stored.tables.get(table), name, None)
            was = getattr(stored, name) if was is None else was
            is_own = _given(value) and said not in self.inherited
            if is_own and was != _stored(value):
                yield f"{said}={value!r} (was {_shown(was)})"


def _given(value: Any) -> bool:
    return value is not NOT_GIVEN


def _stored(value: Any) -> Any:
    """A value of an option as manifests hold it; None: it is not given."""
    if isinstance(value, NotGiven) or value is None:
        return None
    if isinstance(value, str | int | float):
        return value
    name, configuration = configuration_of(value)
    return NamedConfiguration(name=name, configuration=configuration)


def _shown(value: Any) -> str:
    if isinstance(value, NamedConfiguration):
        return f"{value.name} {dict(value.configuration)}"
    return repr(value)


def _taken(value: Any, name: str, table: str = "") -> Any:
    """A value of an option that a manifest holds.

    Raises:
        OptionError: if it is a codec, bits, a rounding or a compression that is not known here.
    """
    if name == "expected_restores" or isinstance(value, int):
        return value
    kind = "codec" if name.endswith("codec") else name
    known = {
        _PACKS: lambda: value in (None, *COMPRESSIONS),
        _ROUNDS: lambda: value in ROUNDINGS,
        "bits": lambda: value == "auto",
    }
    try:
        if isinstance(value, NamedConfiguration):
            return codec_from(value.name, value.configuration, whole=False)
        if known.get(name, lambda: is_codec(value))():
            return value
        if name == "slot_codec" and value in _BY_NAME:
            return value
        why = f"{kind} {reprlib.repr(value)} is not known"
    except errors.FormatError as error:
        why = _cut(str(error).partition("\n")[0])
    given = f"{name}="
    if table:
        given = f"tables={{{table!r}: cnr_jax.TableOptions({name}=...)}}"
    raise errors.OptionError(
        f"{_where(table)}: the {name} of the run that goes on cannot be inherited: {why}\n"
        f"  hint: give {given}, or save with the version of cnr_jax that knows it"
    )


def _cut(text: str) -> str:
    """Shortens a long text of a crafted manifest."""
    return text if len(text) <= 200 else f"{text[:197]}..."


def _where(table: str) -> str:
    return f"table {table!r}" if table else "options"
