"""Options of a run, whose values are checked when the object is made."""

from __future__ import annotations

import dataclasses
import numbers
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

import numpy as np

from cnr_jax import errors
from cnr_jax.encoding import Encoding
from cnr_jax.format.manifest import Tracking
from cnr_jax.given import NOT_GIVEN, NotGiven, TableOptions, unset_nones
from cnr_jax.integers import integer, take_integers
from cnr_jax.policy import (
    Consecutive,
    Full,
    IncrementLog,
    Intermittent,
    OneShot,
    Policy,
)
from cnr_jax.rows.codecs import Codec
from cnr_jax.telemetry import SaveReport

_NEAR_STEPS = 2
_SLOWDOWN = 0.03
_INTEGERS = (
    "bits",
    "expected_restores",
    "audit_bytes",
    "min_fulls",
    "max_in_flight",
    "max_staging_bytes",
    "max_parent_bytes",
    "timeout_secs",
)
# Policies of ours: they name no codecs, as one of the user's own may.
_POLICIES = (Full, OneShot, Consecutive, IncrementLog, Intermittent)
_TABLES_HINT = '  hint: tables={"user": cnr_jax.TableOptions(bits=8)}'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a run: how it is saved and restored. The defaults suit most runs.

    If you do not give `codec`, `bits`, `expected_restores`, `slot_codec`, `rounding`, `compression`
    or a field of `tables`, a run that goes on after a restore keeps its own value of it, and
    reports list the option as `inherited`. In a new run such an option has the value that its entry
    here names.

    Attributes:
        policy: policy that decides when a save is full, and on which parent a delta rests.
        codec: how rows of tables are stored: `"adaptive"` (range of each row, refined by least
            squares), `"asymmetric"` (range of each row), `"raw"` (exact), `"lattice"` (integer
            multiples of one number for a table; deltas store differences), another name that
            `cnr_jax.rows.codecs.make_codec` lists, or a codec object. All but `"raw"` round, so
            restored rows differ from the saved ones. In a new run it is `"adaptive"`; if you do not
            give `bits` either, a warning then says how far off rows are.
        bits: width of a code: 2, 3, 4 or 8, or `"auto"`; in a new run 4. An error enters training
            only when a checkpoint is restored. So `"auto"` is 2 for up to one expected restore, 3
            for up to three, 4 for up to twenty, and 8 beyond, as in Check-N-Run. After more
            restores than expected all saves take 8, with a warning. `"auto"` takes more bits, or
            all of them, if a sample of rows shows that rows move less from restore to restore than
            the error of their codes; with fixed bits the log warns of that once. Small tables take
            8 bits: the tables with the fewest elements that together have at most 1 % of the
            elements of all tables at `"auto"`. Their rows are looked up most, and cost next to
            nothing. A codec object keeps its own bits. A table with a number, here or in `tables`,
            keeps that number. Bits that no codec takes, not even that of slots or of a single
            table, raise an OptionError, unless a policy of your own may name a codec that does.
        expected_restores: how often the whole run will be restored, for `bits="auto"`: a number,
            such as `cnr_jax.expected_restores` returns; in a new run 20, hence 4 bits. The restores
            behind the saved state count: a run that goes back to an older step takes the count of
            that step, plus one. A restore just to look at a state counts too, unless another
            manager makes it.
        slot_codec: how optimizer slots are stored; in a new run exactly. `"bfloat16"` takes any
            slot. `"log"` (16 bits) and `"log8"` take slots that are never negative. `"auto"`
            chooses by the names of slots in the state, see `cnr_jax.rows.codecs.slots`:
            accumulators as by `"log"`, momenta in 8 bits, others exactly. `"moments"` stores
            integers, and in deltas differences, as `codec="lattice"` does for tables: `mu` and `nu`
            of Adam coarsely, accumulators as closely as `"log"`, others exactly.
        rounding: how an element of a table gets its code, with the codecs whose levels are
            equidistant (`"adaptive"`, `"asymmetric"`, `"symmetric"`, `"greedy"`, `"lattice"`).
            `"nearest"` takes the nearest code. An element that moves by less than half a step
            between two restores is then put back by each of them. `"dithered"` rounds up or down,
            so that the element is right in the mean, by a hash of its place that is new after each
            restore. Until then a row that does not move keeps its codes, so deltas stay as small.
            An error can be a whole step. `"auto"`, as in a new run, takes the nearest code until
            the run is first restored. From then on it dithers, except in tables whose codes are
            known to err by less than rows move from one restore to the next. Slots always take the
            nearest code.
        compression: `"zstd"` compresses the arrays of a save with zstd, level 1, before their
            checksums are taken. Numbers of several bytes are first split into planes of bytes
            (blosc). None, as in a new run, compresses nothing. On deltas of trained tables of dim
            64, with all bytes counted, it saves 4.0 % at 8 bits, 7 % at 4, 9 % at 2, and about 16 %
            of float32 rows. A save takes a second of a core for 0.6 GB of encoded rows, in the
            background, on up to two cores. A restore takes a second for 0.55 GB. Up to four chunks
            of 16 MiB of an array are in memory twice while they are packed. You may change this
            from save to save. Versions of cnr_jax without this option refuse such steps, and their
            `restore(None)` takes an older one that they can read.
        tables: options of single tables, by name. A field that you do not give is as in the run
            that goes on, else as for all tables.
        tracking: how a save finds the rows that changed. `"recorded"` takes those whose ids
            `record` was given, which is exact if the optimizer changes no others. `"fingerprint"`
            takes those whose 64-bit hash differs from the one at the save before. That is exact for
            every optimizer, and `Save` needs no `touched`; it reads the tables once a save, and
            keeps 12 bytes a row. `"audited"` is recorded, and stops a save if other rows changed.
            None is the mode of the run that is restored, else `"recorded"` if the first save has
            `touched`, else `"fingerprint"`.
        audit_bytes: bytes of rows that each save of a recorded run reads on each device, to find
            out whether any row changed without being recorded. If one did, the save raises
            `AuditError` and writes nothing. 0 reads no rows. All tables of a device have the same
            share, at least two rows each. A save reads small tables whole, and of another one a
            part, each time another part: w of its N rows, as many as half the share holds, so that
            N / w saves make a round. If k rows keep moving unrecorded, n saves miss all of them
            with probability (1 - n w / N)^k, and a whole round never does; for rows that move once
            see `cnr_jax.checkpointer.tracking.audit`. So 40,000 of 4 M rows of dim 64 escape one
            save with probability 3 10^-9. 100 rows escape one save with 0.95, but 100 saves with
            0.007. The host's memory keeps up to 4 bytes a row, one byte a row and leaf, and the
            rows that are read. As no save leaves a table out, each table also takes time of its
            own: about 5 microseconds on one device, 5 ms for a thousand tables.
        drop_unchanged: whether to leave out rows that were recorded but have not changed; needs
            `tracking="audited"`.
        preservation_policy: an Orbax preservation policy, such as
            `ocp.checkpoint_managers.LatestN(3)`. The manager keeps the parents of what it keeps
            too. None keeps everything. After a rollback the steps that were left behind count as
            the oldest. The steps that were set aside go as soon as the policy lets go of any step.
        min_fulls: number of full checkpoints of a branch that stay as long as any step of it does.
            Until that many of them restore, each save is full. With 2 no single damaged file takes
            all steps, at the price of one more full checkpoint.
        max_in_flight: number of saves that may be written at the same time. With 1, a save that is
            due while another is being written waits for it. With n, it waits only while n saves are
            being written. That lets more saves complete where storage answers late, but not where
            its bandwidth is the limit. Saves are committed in the order of their steps. One that
            fails takes down those that rest on it, and the next save contains the rows of all. Some
            saves go alone: the first of a run, one that follows a rollback, one without a state,
            and the last before a preemption. A plain manager of Orbax writes one at a time.
        max_staging_bytes: bytes of rows and dense leaves that may wait in memory to be written, of
            all saves in flight together. If they have more, training waits while they are written.
        keep_staging: whether the host memory in which rows have waited is kept for the next save,
            up to `max_staging_bytes`. It can take longer to get fresh memory than to copy the rows:
            seconds a GB on a virtual machine that returns free memory to its host.
        max_parent_bytes: bytes of host memory, on each process, that integers of the step that the
            next save rests on may take between saves, with `codec="lattice"` or
            `slot_codec="moments"`. If they need more, rows are stored without differences: 0 keeps
            none. None: no limit.
        verify_reads: whether a restore compares the checksum of every chunk with the manifest. With
            False it still detects all damage to data, manifests and dense files, except for a whole
            chunk of another array, step or run in the place of the right one.
        staging: where rows are encoded: `"host"` encodes them in the background, `"device"` before
            they are copied to the host, and `"auto"` chooses by platform and size.
        on_save: function that the manager calls with the `SaveReport` of each save once that save
            is durable or dropped, in a thread of its own, in the order of the saves. If the
            function raises, the error is logged. It must not call the manager's `save`, `restore`,
            `delete`, `verify`, `close` or `wait_until_finished`, nor wait for a thread that does.
            Under a plain Orbax manager the next save calls it.
        metrics: whether process 0 adds a line of JSON to `cnr_jax.metrics.jsonl` in the root for
            each save, once it is durable, and for each restore from this root by a manager that
            saves there. `cnr_jax.read_metrics` reads the file. Needs a local root.
        timeout_secs: seconds that a save waits before it fails: for other processes that have not
            done their part, for its directories, and for room in the staging memory. The error
            names the process.
        when_busy: what a save does if it is due while `max_in_flight` saves are being written.
            `"wait"` waits. `"skip"` leaves it out, on all processes alike, and `save` returns
            False. Even so, a save with `force=True` and the last save before a preemption wait.
        new_run: whether a manager that has not restored begins a new run in a root that holds
            checkpoints. Its first save moves them into a folder of the root, which is a root
            itself: `cnr_jax.verify` and `restore(directory=)` read it, and no manager ever deletes
            it. If that save fails, they come back. After a restore the restored run goes on, and
            the option is ignored with a warning. With False such a save raises `UsedRootError`.
        adopt: whether steps of plain Orbax in the root count as checkpoints. The manager then lists
            them, and restores them as Orbax would. The first save is a full one beside them. From
            the second save on, retention counts and deletes them like others. The manager never
            writes to any of them.
        single_writer: whether you promise that no two programs save to the root at a time. Needed
            for a bucket whose service ignores the conditions of puts: by these conditions two
            programs that save to one root are told apart. With False, the first save tries that
            with an object that it removes again, and raises OptionError if the service ignores
            them. With True it does not try: nothing finds out if two programs do save there, and
            steps of both may be lost.
        mirror: another root, on another disk or in a bucket, to which a thread of process 0 copies
            each committed step. No save waits for it. When you open a manager with tables, or
            restore a step by number, the manager brings back from there what the root lacks. It
            mends from there what a restore finds damaged. See docs/guides/mirrors.md.
        mirror_keep: how many of the newest steps stay in the mirror, with the steps that these rest
            on; `min_fulls` holds there too. None keeps all, whatever the root keeps.
        mirror_bytes_per_sec: bytes a second that the manager writes to the mirror at most. None
            sets no limit.
        near: a local path, such as one below /dev/shm, where saves commit. The root of the manager
            is then the mirror of that path. A run of one process that restarts on the same host
            restores from near, or from the root where that has newer steps. If the host is lost,
            saves that are not in the root yet are lost with it; reports say how many. `mirror_keep`
            says what stays in the root.
        near_steps: how many of the newest steps stay near, with the steps that these rest on. A
            step that is not in the root yet stays near too.
        interval: with `"auto"`, call `save` at each step, and it decides itself whether a save is
            due. The manager measures what saves of this run cost, saves as often as `slowdown`
            allows, and adapts when the cost changes; the log and `SaveReport.interval_changed` say
            when and why. All processes decide alike, and exchange nothing at steps that do not
            save. With None, `orbax_options` say when, such as `save_interval_steps`. Needs
            `CheckpointManager`.
        slowdown: share by which saves may make training longer, for `interval="auto"`.
        max_lost_secs: seconds of training that a failure may take at most, for `interval="auto"`.
            Saves are then so frequent that even if one fails, the next is durable in time, whatever
            that costs. None sets no limit. With several processes the manager goes by the measured
            seconds of steps, and not by the clock, so that no step needs a message.
        save_on_sigterm: whether SIGTERM asks for a last save, in a run of one process. With False,
            SIGTERM ends the program. With `jax.distributed.initialize` jax itself listens for it,
            and the option changes nothing. Processes that the run forks do not listen. See
            `CheckpointManager.reached_preemption`.

    Raises:
        OptionError: if a value cannot work.

    Example:
        >>> Options(codec="adaptive", bits=4).codec_for("user", "table", 64, np.float32)
        Asymmetric(bits=4, refits=3, metadata_bits=16)
    """

    policy: Policy = dataclasses.field(default_factory=Intermittent)
    codec: str | Codec | NotGiven | None = NOT_GIVEN
    bits: int | Literal["auto"] | NotGiven | None = NOT_GIVEN
    expected_restores: float | NotGiven | None = NOT_GIVEN
    slot_codec: str | Codec | NotGiven = NOT_GIVEN
    rounding: Literal["auto", "nearest", "dithered"] | NotGiven | None = NOT_GIVEN
    compression: Literal["zstd"] | NotGiven | None = NOT_GIVEN
    tables: Mapping[str, TableOptions] = dataclasses.field(default_factory=dict)
    tracking: Tracking | None = None
    audit_bytes: int = 1 << 20
    drop_unchanged: bool = False
    preservation_policy: Any = None
    min_fulls: int = 1
    max_in_flight: int = 1
    max_staging_bytes: int = 2 << 30
    max_parent_bytes: int | None = None
    keep_staging: bool = True
    verify_reads: bool = True
    staging: Literal["auto", "host", "device"] = "auto"
    on_save: Callable[[SaveReport], None] | None = None
    metrics: bool = False
    timeout_secs: float = 600.0
    when_busy: Literal["wait", "skip"] = "wait"
    interval: Literal["auto"] | None = None
    slowdown: float = _SLOWDOWN
    max_lost_secs: float | None = None
    save_on_sigterm: bool = False
    new_run: bool = False
    adopt: bool = False
    single_writer: bool = False
    mirror: str | os.PathLike[str] | None = None
    mirror_keep: int | None = None
    mirror_bytes_per_sec: int | None = None
    near: str | os.PathLike[str] | None = None
    near_steps: int = _NEAR_STEPS

    def __post_init__(self) -> None:
        unset_nones(self, ("codec", "bits", "expected_restores", "rounding"))
        take_integers(self, *_INTEGERS)
        self._check_policy()
        self._check_kinds()
        self._check_tracking()
        self._check_mirror()
        self._check_interval()
        if self.staging not in ("auto", "host", "device"):
            raise errors.OptionError(
                f"staging {self.staging!r} is not known, expected 'auto', 'host' or 'device'"
            )
        for name, least in (("max_staging_bytes", 1), ("timeout_secs", 0)):
            value = getattr(self, name)
            if not (value > 0 and value >= least):
                raise errors.OptionError(f"{name} must be positive, got {value}")
        limit = self.max_parent_bytes
        if limit is not None and (integer(limit) is None or limit < 0):
            raise errors.OptionError(
                f"max_parent_bytes is {limit!r}, expected None or a number, 0 or more"
            )
        if self.when_busy not in ("wait", "skip"):
            raise errors.OptionError(
                f"when_busy {self.when_busy!r} is not known, expected 'wait' or 'skip'"
            )
        self.encoding.check()

    @property
    def encoding(self) -> Encoding:
        """Encoding of rows, as far as these options say it."""
        return Encoding(
            codec=self.codec,
            bits=self.bits,
            expected_restores=self.expected_restores,
            slot_codec=self.slot_codec,
            rounding=self.rounding,
            compression=self.compression,
            tables=self.tables,
            may_be_named=type(self.policy) not in _POLICIES,
        )

    def _check_policy(self) -> None:
        """Checks that the policy is an object that decides, rather than a name or a class."""
        policy: Any = self.policy
        if not isinstance(policy, type) and callable(getattr(policy, "decide", None)):
            return
        ours = {kind.name: kind for kind in _POLICIES}
        kind = ours.get(policy, Intermittent) if isinstance(policy, str) else policy
        hint = f"cnr_jax.{Intermittent.__name__}()"
        if kind in ours.values():
            hint = f"cnr_jax.{kind.__name__}()"
        elif isinstance(kind, type) and callable(getattr(kind, "decide", None)):
            hint = f"{kind.__name__}()"
        raise errors.OptionError(
            f"policy is {policy!r}, expected an object that decides\n"
            f"  hint: policy={hint}"
        )

    def _check_kinds(self) -> None:
        """Checks that objects and numbers are of the kinds that are used later."""
        keeps: Any = self.preservation_policy
        asks = callable(getattr(keeps, "should_preserve", None))
        if keeps is not None and (isinstance(keeps, type) or not asks):
            raise errors.OptionError(
                f"preservation_policy is {keeps!r}, expected an object of Orbax with"
                " should_preserve\n"
                "  hint: ocp.checkpoint_managers.LatestN(3) keeps the newest three"
            )
        if self.on_save is not None and not callable(self.on_save):
            raise errors.OptionError(
                f"on_save is {self.on_save!r}, expected a function of a SaveReport\n"
                "  hint: on_save=print"
            )
        for name in _FLAGS:
            said = getattr(self, name)
            if not isinstance(said, bool | np.bool_):
                raise errors.OptionError(
                    f"{name} is {said!r}, expected True or False\n  hint: {name}=True"
                )
        given: Any = self.tables
        if not isinstance(given, Mapping):
            raise errors.OptionError(
                f"tables is {type(given).__name__}, expected a mapping of names to"
                f" TableOptions\n{_TABLES_HINT}"
            )
        for name, each in cast("Mapping[Any, Any]", given).items():
            if not isinstance(each, TableOptions):
                raise errors.OptionError(
                    f"options of table {name!r} are {each!r}, expected TableOptions\n"
                    f"{_TABLES_HINT}"
                )
        for name in ("min_fulls", "max_in_flight"):
            least: Any = getattr(self, name)
            if integer(least) is None or least < 1:
                raise errors.OptionError(
                    f"{name} is {least!r}, expected a positive integer"
                )
        secs: Any = self.timeout_secs
        if isinstance(secs, bool) or not isinstance(secs, numbers.Real):
            raise errors.OptionError(f"timeout_secs is {secs!r}, expected a number")
        if integer(self.max_staging_bytes) is None:
            raise errors.OptionError(
                f"max_staging_bytes is {self.max_staging_bytes!r}, expected a number"
                " of bytes, which is an integer"
            )

    def auto_bits(self, restores: int) -> int:
        """Width that `bits="auto"` means in a save, if its run was restored so often before.

        Example:
            >>> options = Options(bits="auto", expected_restores=3)
            >>> options.auto_bits(3), options.auto_bits(4)
            (3, 8)
        """
        return self.encoding.auto_bits(restores)

    def codec_for(
        self,
        table: str,
        leaf: str,
        width: int,
        dtype: Any,
        auto_bits: int | None = None,
    ) -> Codec:
        """Codec for rows of `width` elements of a leaf: `"table"`, or the name of a slot.

        `auto_bits` is the width for a table whose bits are `"auto"`. None stands for the width of
        the expected restores, even for a table that is small among others. The method does not know
        the options that a run inherits when it goes on.
        """
        return self.encoding.codec_for(table, leaf, width, dtype, auto_bits)

    @property
    def kept_staging_bytes(self) -> int:
        """Bytes of staging memory that may lie idle between saves."""
        return self.max_staging_bytes if self.keep_staging else 0

    def _check_mirror(self) -> None:
        for name in ("mirror", "near"):
            where: Any = getattr(self, name)
            if where is not None and not isinstance(where, str | os.PathLike):
                raise errors.OptionError(
                    f"{name} is {where!r}, expected the path of another root"
                )
        for name in ("mirror_keep", "mirror_bytes_per_sec", "near_steps"):
            value: Any = getattr(self, name)
            if value is None and name != "near_steps":
                continue
            if (integer(value) or 0) < 1:
                raise errors.OptionError(
                    f"{name} is {value!r}, expected a positive integer"
                )
            if name != "near_steps" and self.mirror is None and self.near is None:
                raise errors.OptionError(
                    f"{name} is {value!r}, but there is no mirror\n"
                    '  hint: mirror="s3://bucket/run"'
                )
        others = {
            "mirror": self.mirror is not None,
            "new_run": self.new_run,
            "adopt": self.adopt,
            "preservation_policy": self.preservation_policy is not None,
        }
        given = [name for name, is_given in others.items() if is_given]
        if self.near is not None and given:
            raise errors.OptionError(
                f"near and {given[0]} do not go together: the root is the mirror of what is near\n"
                "  hint: mirror_keep=N says which steps stay in the root, near_steps=N which stay"
                " near; a new run begins in a root of its own, and steps of plain Orbax are"
                " adopted by a manager without near"
            )
        if self.near is None and self.near_steps != _NEAR_STEPS:
            raise errors.OptionError(
                f"near_steps is {self.near_steps!r}, but no near root is given\n"
                '  hint: near="/dev/shm/run"'
            )

    def _check_interval(self) -> None:
        if self.interval not in (None, "auto"):
            raise errors.OptionError(
                f"interval is {self.interval!r}, expected 'auto' or None\n"
                "  hint: orbax_options=ocp.CheckpointManagerOptions(save_interval_steps=100)"
            )
        for name, default in (("slowdown", _SLOWDOWN), ("max_lost_secs", None)):
            value: Any = getattr(self, name)
            if value == default:
                continue
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 < float(value) < np.inf:
                raise errors.OptionError(
                    f"{name} is {value!r}, expected a number above 0"
                )
            if name == "slowdown" and float(value) >= 1:
                raise errors.OptionError(
                    f"slowdown is {value!r}, expected a share below 1\n"
                    "  hint: 0.03 is 3 %"
                )
            if self.interval is None:
                raise errors.OptionError(
                    f"{name} is {value!r}, but no interval that goes by it is asked for\n"
                    '  hint: interval="auto"'
                )

    def _check_tracking(self) -> None:
        known = get_args(Tracking)
        if self.tracking not in (None, *known):
            raise errors.OptionError(
                f"tracking {self.tracking!r} is not known, expected one of"
                f" {', '.join(map(repr, known))}"
            )
        given = self.audit_bytes
        if integer(given) is None or given < 0:
            raise errors.OptionError(
                f"audit_bytes is {given!r}, expected 0 or a positive integer"
            )
        if self.drop_unchanged and self.tracking != "audited":
            raise errors.OptionError(
                "drop_unchanged needs to know which recorded rows have changed\n"
                f"  got tracking={self.tracking!r}, expected tracking='audited'\n"
                "  hint: with tracking='fingerprint' such rows are left out anyway"
            )

    def check_tables(self, names: Any) -> None:
        """Checks that options of single tables name tables that exist.

        Raises:
            OptionError: if some do not; the text names them.
        """
        unknown = sorted(set(self.tables) - set(names))
        if unknown:
            raise errors.OptionError(
                f"options for unknown tables: {', '.join(unknown)}\n"
                f"  tables: {', '.join(sorted(names))}"
            )


_FLAGS = [f.name for f in dataclasses.fields(Options) if isinstance(f.default, bool)]


def checked(options: object) -> Options:
    """Returns the options that were given, or the default ones for None.

    Raises:
        OptionError: if they are something else.
    """
    if options is None:
        return Options()
    if isinstance(options, Options):
        return options
    raise errors.OptionError(
        f"options is {type(options).__name__}, expected cnr_jax.Options\n"
        "  hint: Orbax's CheckpointManagerOptions are given as orbax_options="
    )
