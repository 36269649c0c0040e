"""Measurements of a run's saves, kept in its root: advice, as steps are whole without them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.goodput.measured import MOST, MeasuredSave, measured_profile
from cnr_jax.goodput.profile import Profile
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.store import AnyPath, read_small, replace_durably
from cnr_jax.texts import logger

_log = logger(__name__)
_VERSION = 2
# The newest saves tell what saves take now, and the newest full one what a full one takes.
_MOST_SAVES, _MOST_READS = 100, 20
# Far more than so many saves take: a larger file is not ours.
_MOST_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of the newest saves and restores of a run.

    Attributes:
        run: id of the run; None: not known.
        processes: processes that saved.
        saves: saves, the oldest first.
        reads: bytes and seconds of restores.
    """

    run: str | None = None
    processes: int = 1
    saves: tuple[MeasuredSave, ...] = ()
    reads: tuple[tuple[float, float], ...] = ()

    def with_save(self, save: MeasuredSave) -> Measurements:
        """The same with one save more."""
        old = self.saves[: max(len(self.saves) + 1 - _MOST_SAVES, 0)]
        recent = (*self.saves[len(old) :], save)
        if old and all(each.kind != "full" for each in recent):
            full = [each for each in old if each.kind == "full"][-1:]
            recent = (*full, *recent[len(full) :])
        return dataclasses.replace(self, saves=recent)

    def with_end(self, over_secs: float) -> Measurements:
        """The same with the end of the newest save, as in `MeasuredSave`."""
        newest = dataclasses.replace(self.saves[-1], over_secs=over_secs)
        return dataclasses.replace(self, saves=(*self.saves[:-1], newest))

    def with_read(self, nbytes: float, secs: float) -> Measurements:
        """The same with one restore more."""
        found = (*self.reads, (nbytes, secs))[-_MOST_READS:]
        return dataclasses.replace(self, reads=found)

    def profile(self, restart_secs: float = 0.0) -> Profile | None:
        """The profile that follows, as `measured_profile` makes it."""
        return measured_profile(
            self.saves,
            self.reads,
            restart_secs=restart_secs,
            processes=self.processes,
        )

    def write(self, root: AnyPath) -> None:
        """Writes them to a root, in the place of those that are there.

        Raises:
            OSError: if that fails.
        """
        document = {"version": _VERSION, **dataclasses.asdict(self)}
        data = json.dumps(document, separators=(",", ":")).encode()
        replace_durably(root / names.MEASUREMENTS, data)


def read_measurements(root: Any) -> Measurements | None:
    """Reads the measurements in a root; None if there are none that can be understood."""
    path = open_root(root) / names.MEASUREMENTS
    try:
        document = json.loads(read_small(path, _MOST_BYTES))
        if document.pop("version") != _VERSION:
            return None
        saves = tuple(map(MeasuredSave.from_json, document["saves"]))
        reads = tuple((size, secs) for size, secs in document["reads"])
        if not all(0 <= each < MOST for read in reads for each in read):
            raise ValueError(f"{reads} are no restores")
        return Measurements(**{**document, "saves": saves, "reads": reads})
    except FileNotFoundError:
        return None
    except (
        AttributeError,
        KeyError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
        errors.CnrError,
    ) as error:
        _log.info("%s tells of no saves: %s", path, error)
        return None
