"""A real run beside a model of it, and the comparison: what a state machine or a test drives.

Example:
    >>> import tempfile, jax.numpy as jnp
    >>> state = {"user": jnp.zeros((8, 2)), "step": jnp.int32(0)}
    >>> def train(state, touched, seed):
    ...     row = seed % 8
    ...     touched = cnr.record(touched, {"user": jnp.array([row])})
    ...     user = state["user"].at[row].add(1 + seed)
    ...     return {"user": user, "step": state["step"] + 1}, touched
    >>> setup = Setup(
    ...     state=state,
    ...     tables=cnr.find_tables(state, ["user"]),
    ...     train=train,
    ...     options=cnr.Options(codec="raw", policy=cnr.Consecutive()),
    ... )
    >>> with Player(tempfile.mkdtemp(), setup) as player:
    ...     player.train(1)
    ...     player.save()
    ...     player.train(2)
    ...     player.crash_while_saving(nth=20)
    ...     player.check_all()
    >>> sorted(player.model.steps)
    [0]
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax
import numpy as np

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest
from cnr_jax.repository.step import read_manifest
from cnr_jax.testing import damage, inprocess
from cnr_jax.testing.faults import Fault, FaultNotHitError
from cnr_jax.testing.model import (
    Keeps,
    Model,
    Saved,
    Values,
    differences,
    everything,
    same,
)

Train = Callable[[Any, Any, int], tuple[Any, Any]]


class WrongError(errors.CnrError):
    """A run is not what its model says."""

    kind = "model"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Setup:
    """A run to be held against the model.

    Attributes:
        state: to start with; what is restored has its structure and shardings.
        tables: in the state.
        train: makes the next state and touched rows of the ones given, by a seed.
        options: of the manager. Codecs must be exact.
        keeps: what their preservation policy keeps, in plain words; see `model`.
        orbax_options: of the manager; step directories must be named by numbers alone.
    """

    state: Any
    tables: cnr.Tables
    train: Train
    options: cnr.Options
    keeps: Keeps = everything
    orbax_options: Any = None

    def __repr__(self) -> str:
        """Without the numbers of the state."""
        return f"Setup({', '.join(self.tables)}; {self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same where hypothesis prints it."""
        printer.text(repr(self))


class Player(contextlib.AbstractContextManager["Player"]):
    """Plays a run and holds it against its model. Raises `WrongError` where they differ.

    Args:
        root: of the checkpoints.
        setup: what is run.

    Attributes:
        model: what must be.
        counts: how often what happened, to see that a test tests something.
    """

    def __init__(self, root: str | Path, setup: Setup) -> None:
        self.root, self.setup = Path(root), setup
        self.model = Model(setup.keeps)
        self.counts: dict[str, int] = {}
        self._next = 0
        self.manager = self._open()
        self._start()

    def __exit__(self, *error: Any) -> None:
        self.manager.close()

    # ---- what a run does ------------------------------------------------------------------

    def train(self, seed: int) -> None:
        """One train step."""
        self.state, self.touched = self.setup.train(self.state, self.touched, seed)

    def save(self, gap: int = 1) -> None:
        """Saves, `gap` steps after the last one, and waits."""
        step, values = self._step(gap), values_of(self.state)
        self._attempt(step)
        self._saved(step, values)

    def restore(self, index: int) -> None:
        """Goes on from a step: of all that there are, the one with this index, modulo."""
        step = self._pick(index)
        if step is None:
            return
        self._restore(step, step)

    def restore_latest(self) -> None:
        """Goes on from the latest step."""
        if self.model.steps:
            self._restore(None, self.manager.latest_step())

    def evaluate(self, index: int) -> None:
        """Restores a step with the run's own manager, but goes on with the state there was."""
        step = self._pick(index)
        if step is None:
            return
        self._expect(
            self._restored(self.manager, step), self.model.steps[step].values, step
        )
        if self.setup.options.tracking == "fingerprint":
            # What differs from the step just restored is found by comparing the two.
            # Then a lower number would be a repetition, which is not saved.
            self.model.restored(step)
            self._next = max(self._next, step + 1)
        else:
            self.model.started_anew()
        self._count("evaluated")

    def reopen(self, *, anew: bool = False) -> None:
        """A new manager, as in a new process: goes on from the latest step, or starts anew."""
        self._reopen()
        if anew or not self.model.steps:
            self._start()
        else:
            self.restore_latest()

    def delete(self, index: int) -> None:
        """Deletes a step, or sees that it is refused because others rest on it."""
        step = self._pick(index)
        if step is None:
            return
        dependents = self.model.dependents(step)
        try:
            self.manager.delete(step)
        except errors.DependentsExistError as error:
            if not dependents:
                raise WrongError(
                    f"step {step} could not be deleted: {error}"
                ) from error
            self._count("delete refused")
        else:
            self.model.deleted(step)
            self._count("deleted")
        self.check_listing()

    # ---- what befalls it ------------------------------------------------------------------

    def fail_while_saving(self, fault: Fault, gap: int = 1) -> None:
        """A save of which a call fails, in this process. If there is no such call, a save."""
        step, values = self._step(gap), values_of(self.state)
        raised = None
        try:
            with inprocess.failing(self.root, fault):
                try:
                    self._attempt(step)
                except Exception as error:
                    raised = error
        except FaultNotHitError:
            if raised is not None:
                raise raised from None
            return self._saved(step, values)
        # What was moved out of the way cannot come back while every call fails: it does at
        # the next start.
        gone = fault.times == 0 and bool(self.model.abandoned_by(step))
        if gone:
            self._reopen()
        self._interrupted(step, values)
        self._count("failed save" if raised else "failure without consequence")
        if gone:
            self._go_on()

    def crash_while_saving(
        self, *, nth: int, after: bool = False, gap: int = 1
    ) -> None:
        """A process that dies before (after) its nth call in a save, then a new one.

        What it leaves is a copy of the root made there; if there are fewer calls, a save.
        """
        step, values = self._step(gap), values_of(self.state)
        copy = self._copy
        with inprocess.copying(self.root, copy, nth=nth, after=after):
            self._attempt(step)
        if not copy.exists():
            return self._saved(step, values)
        self._reopen_on(copy)
        self._interrupted(step, values)
        self._count("crash")
        self._go_on()

    def crash_while_deleting(
        self, index: int, *, nth: int, after: bool = False
    ) -> None:
        """A process that dies in the deletion of a step."""
        step = self._pick(index)
        if step is None or self.model.dependents(step):
            return
        copy = self._copy
        with inprocess.copying(self.root, copy, nth=nth, after=after):
            self.manager.delete(step)
        if copy.exists():
            self._reopen_on(copy)
            if step not in self.manager.all_steps():
                self.model.deleted(step)
            self.check_listing()
            self._count("crash in deletion")
            self._go_on()
        else:
            self.model.deleted(step)
            self.check_listing()

    def damaged(self, index: int, do: Callable[[Path], damage.Damage]) -> None:
        """Damages a stored file, sees that no wrong value is restored, and undoes it.

        Steps that do not rest on it restore as before, `restore(None)` takes the newest that
        can be restored, and `verify` names those that cannot.

        Args:
            index: of the file among all there are, modulo.
            do: damages the file whose path it is given.
        """
        files = damage.files_of(self.root)
        if not files:
            return
        file = files[index % len(files)]
        refused = set()
        with do(file.path):
            with self._reader() as reader:
                for step, saved in sorted(self.model.steps.items()):
                    if not self._restores(reader, step, saved, file):
                        refused.add(step)
            with self._reader() as reader:
                self._falls_back(reader, file)
            problems = cnr.verify(self.root)
        found = {int(name) for problem in problems for name in problem.consequence}
        if not refused <= found:
            raise WrongError(
                f"steps {sorted(refused)} could not be restored, verify names"
                f" {sorted(found)}\n  damaged: {file.path}"
            )
        self._count("damage detected" if refused else "damage without consequence")

    # ---- comparisons ----------------------------------------------------------------------

    def check_listing(self) -> None:
        """The manager lists what the model does, the same as latest."""
        listed, latest = set(self.manager.all_steps()), self.manager.latest_step()
        # A manager need not list what its retention has dropped.
        unlisted = set(self.model.steps) - listed - self.model.leaving
        if (
            unlisted
            or not listed <= set(self.model.steps)
            or latest not in self.model.latest()
        ):
            raise WrongError(
                f"got steps {sorted(listed)}, the latest {latest}\n"
                f"  expected {sorted(self.model.steps)}, the latest {self.model.latest()}"
            )

    def check_all(self) -> None:
        """Every step restores bit for bit, with a manager that knows only what is stored."""
        self.check_listing()
        with self._reader() as reader:
            if set(reader.all_steps()) != set(self.model.steps):
                raise WrongError(
                    f"stored are steps {sorted(reader.all_steps())},"
                    f" expected {sorted(self.model.steps)}"
                )
            for step, saved in self.model.steps.items():
                self._expect(self._restored(reader, step), saved.values, step)
        harm = [
            str(problem) for problem in cnr.verify(self.root) if problem.consequence
        ]
        if harm:
            raise WrongError("verify finds what is not there\n  " + "\n  ".join(harm))

    # ---- the rest -------------------------------------------------------------------------

    def _open(self) -> cnr.CheckpointManager:
        return cnr.CheckpointManager(
            self.root,
            tables=self.setup.tables,
            options=self.setup.options,
            orbax_options=self.setup.orbax_options,
        )

    def _reader(self) -> cnr.CheckpointManager:
        options = dataclasses.replace(
            self.setup.options, preservation_policy=None, audit_saves=0
        )
        return cnr.CheckpointManager(
            self.root, tables=self.setup.tables, options=options
        )

    def _start(self) -> None:
        self.state, self.touched, self._next = self.setup.state, None, 0
        if self.setup.options.tracking != "fingerprint":
            self.touched = cnr.init_touched(self.state, self.setup.tables)
        self.model.started_anew()

    def _go_on(self) -> None:
        if self.model.steps:
            self.restore_latest()
        else:
            self._start()

    def _step(self, gap: int) -> int:
        return self._next + gap - 1

    def _attempt(self, step: int) -> None:
        self._next = step + 1
        saved = self.manager.save(step, args=cnr.args.Save(self.state, self.touched))
        if not saved:
            raise WrongError(f"step {step} was not saved")
        self.manager.wait_until_finished()

    def _saved(self, step: int, values: Values) -> None:
        report = self.manager.last_report
        # Retention may drop the newest step at once; then there is no report.
        parent = report.parent if report is not None and report.step == step else None
        self.model.saved(step, values, parent)
        self._count("full" if parent is None else "delta")
        self.check_listing()

    def _interrupted(self, step: int, values: Values) -> None:
        with self._reader() as reader:
            there = reader.all_steps()
        old, manifest = self.model.steps.get(step), self._manifest(step, there)
        committed = manifest is not None and (
            old is None or manifest.generation > old.generation
        )
        parent = None
        if committed and manifest is not None and manifest.parent is not None:
            parent = int(manifest.parent.directory)
        self.model.interrupted(
            step,
            values,
            committed=committed,
            parent=parent,
            there=there,
        )
        self.check_all()

    def _manifest(self, step: int, there: Collection[int]) -> Manifest | None:
        """That of a step, if it is there."""
        if step not in there:
            return None
        (found,) = (self.root / str(step)).glob(f"*/{names.MANIFEST}")
        return read_manifest(found.parent)

    def _restores(
        self, reader: Any, step: int, saved: Saved, file: damage.StoredFile
    ) -> bool:
        """Whether a step can be restored; it must if it does not rest on the file."""
        try:
            restored = self._restored(reader, step)
        except Exception as error:
            if all(above.step != file.step for above in saved.chain()):
                raise WrongError(
                    f"step {step} does not rest on {file.path},"
                    f" but cannot be restored: {error}"
                ) from error
            return False
        self._expect(restored, saved.values, step)
        return True

    def _falls_back(self, reader: Any, file: damage.StoredFile) -> None:
        """`restore(None)` gives the newest step without the damage, or one still newer."""
        ordered = list(reversed(self.model.ordered()))
        whole = [
            all(above.step != file.step for above in saved.chain()) for saved in ordered
        ]
        allowed = ordered[: whole.index(True) + 1] if any(whole) else ordered
        try:
            values = values_of(self._restored(reader, None).state)
        except Exception as error:
            if any(whole):
                raise WrongError(
                    f"restore(None) did not pass over the damage of {file.path}: {error}"
                ) from error
            return
        if not any(same(values, saved.values) for saved in allowed):
            raise WrongError(
                f"restore(None) gave none of steps {[saved.step for saved in allowed]}"
                f"\n  damaged: {file.path}"
            )

    @property
    def _copy(self) -> Path:
        """Where a copy of the root is made, outside of it."""
        return self.root.with_name(self.root.name + ".crashed")

    def _reopen_on(self, copy: Path) -> None:
        self.manager.close()
        shutil.rmtree(self.root)
        copy.rename(self.root)
        self._reopen()

    def _reopen(self) -> None:
        self.manager.close()
        self.manager = self._open()
        self.model.leaving = set()

    def _pick(self, index: int) -> int | None:
        listed = set(self.manager.all_steps())
        steps = [s.step for s in reversed(self.model.ordered()) if s.step in listed]
        return steps[index % len(steps)] if steps else None

    def _restore(self, wanted: int | None, step: int | None) -> None:
        assert step is not None
        restored = self._restored(self.manager, wanted)
        self._expect(restored, self.model.steps[step].values, step)
        self.state, self.touched = restored
        if self.setup.options.tracking == "fingerprint":
            self.touched = None
        self.model.restored(step)
        self._next = step + 1
        self._count("restored")

    def _restored(self, manager: Any, step: int | None) -> Any:
        return manager.restore(step, args=cnr.args.Restore(self.setup.state))

    def _expect(self, restored: Any, expected: Values, step: int) -> None:
        found = differences(values_of(restored.state), expected)
        if found:
            lines = "".join(f"\n  {line}" for line in found)
            raise WrongError(
                f"step {step} restored other values than were saved{lines}"
            )

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


def values_of(state: Any) -> dict[str, np.ndarray]:
    """All leaves of a state by path, copied to the host.

    Example:
        >>> values_of({"a": np.float32(1)})
        {"['a']": array(1., dtype=float32)}
    """
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): _host(leaf) for path, leaf in leaves}


def _host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)
