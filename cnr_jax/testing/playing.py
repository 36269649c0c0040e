"""Player of a real run beside its model, for a state machine or a test.

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
    ...     player.crash_while_saving(nth=8)
    ...     player.check_all()
    >>> sorted(player.model.steps)
    [0]
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.args import DEFAULT_ITEM
from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.step import read_manifest
from cnr_jax.repository.store import exists, names_in, store_of
from cnr_jax.testing import damage, inprocess
from cnr_jax.testing.comparing import Comparison, WrongError, there_in, values_of
from cnr_jax.testing.faults import Fault, FaultNotHitError
from cnr_jax.testing.model import Model, Saved, Values
from cnr_jax.testing.setup import Setup


class Player(contextlib.AbstractContextManager["Player"]):
    """Plays a run and compares it with its model; raises `WrongError` where they differ.

    Args:
        root: root of the checkpoints: a local path, or the URL of one in a bucket.
        setup: setup of the run.

    Attributes:
        model: model of the run.
        catalogues: what the catalogue of a root in a bucket was after each save, oldest first.
        counts: how often each thing happened, to see that a test tests something.
    """

    def __init__(self, root: str | Path, setup: Setup) -> None:
        # Parents of the saves that were reported, by step.
        self._parents: dict[int, int | None] = {}
        options = dataclasses.replace(setup.options, on_save=self._on_save)
        setup = dataclasses.replace(setup, options=options)
        self._in_bucket = inprocess.is_url(root)
        self.root: Any = open_root(root) if self._in_bucket else Path(root)
        self.setup = setup
        self.model = Model(setup.keeps, setup.options.min_fulls)
        self.counts: dict[str, int] = {}
        self.catalogues: list[bytes] = []
        self._elsewhere: bytes | None = None
        self._next = 0
        self._comparison = Comparison(self.root, setup, self.model)
        self.manager = setup.open(self.root)
        # Steps that new runs have moved into folders of the root, by the name of the folder.
        self._earlier: dict[str, dict[int, Saved]] = {}
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

    def save_several(
        self, seeds: Sequence[int], meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Saves after each of some train steps, and waits once all are made.

        Args:
            seeds: seed of each train step.
            meanwhile: called once all saves have begun.
        """
        made: list[tuple[int, Values]] = []
        for seed in seeds:
            self.train(seed)
            made.append((self._step(1), values_of(self.state)))
            self._begin(made[-1][0])
        meanwhile()
        self.manager.wait_until_finished()
        for number, (step, values) in enumerate(made):
            later = [self._parent(other) for other, _ in made[number + 1 :]]
            needed = [parent for parent in later if parent is not None]
            self._note(step, values, needed)
        self.check_listing()
        self._count("several saves")

    def restore(self, index: int) -> None:
        """Goes on from a step: the one with this index, modulo the number of steps."""
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
        self._comparison.restored(self.manager, step, step)
        if self.setup.options.tracking == "fingerprint":
            # A save compares the state with the step that was just restored, to find its rows. A
            # lower number would be a repetition, which is not saved.
            self.model.restored(step)
            self._next = max(self._next, step + 1)
        else:
            self.model.looked(step, recorded=self.touched is not None)
        self._count("evaluated")

    def reopen(self, *, anew: bool = False) -> None:
        """Opens a new manager, as in a new process: goes on from the latest step, or starts anew.

        A manager that starts anew where there are steps is refused; the next one says that it
        begins a new run.
        """
        self._reopen()
        self.model.reopened()
        if not anew and self.model.steps:
            return self.restore_latest()
        self._start()
        if self.model.steps:
            self._see_refused()

    def put_folder(self, gap: int) -> None:
        """Puts a folder into the root that has a number for a name, and may have been a step.

        In a bucket it also has what commits a step of Orbax: without that it would be a save that
        was never committed, of which nobody takes notice.
        """
        number = max([self._next, *self.model.steps, *self.model.foreign]) + gap
        folder, store = self.root / str(number), store_of(self.root)
        store.make_folder(folder / DEFAULT_ITEM)
        note = folder / DEFAULT_ITEM / "read.me"
        store.write(note, b"not a checkpoint", replaces=False)
        if self._in_bucket:
            store.write(folder / names.ORBAX_COMMITTED, b"", replaces=False)
        self.model.foreign.add(number)
        self.reopen()
        self._count("foreign folder")

    def delete(self, index: int) -> None:
        """Deletes a step, or checks that this is refused because others rest on it."""
        step = self._pick(index)
        if step is None:
            return
        kept_back = self.model.keeps_back(step)
        try:
            self.manager.delete(step)
        except errors.DependentsExistError as error:
            if not kept_back:
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
        """Saves while a call fails, in this process; if there is no such call, just saves.

        In a bucket, where nothing is synced or renamed, a fault of such calls strikes at any.
        """
        if self._in_bucket and fault.call in ("fsync", "rename", "mkdir"):
            fault = dataclasses.replace(fault, call="any")
        step, values = self._step(gap), values_of(self.state)
        before = self._uuid(step)
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
        # What was moved out of the way cannot come back while every call fails. It comes back at
        # the next start.
        gone = fault.times == 0 and bool(self.model.abandoned_by(step))
        if gone:
            self._reopen()
        self._interrupted(step, values, before)
        self._count("failed save" if raised else "failure without consequence")
        if gone:
            self.model.reopened()
            self._go_on()

    def crash_while_saving(
        self, *, nth: int, after: bool = False, gap: int = 1
    ) -> None:
        """Lets a process die before (after) its nth call in a save, then starts a new one.

        A copy of the root that is made at this call is what it leaves; in a bucket, what was put
        there before. If there are fewer calls, it just saves.
        """
        step, values = self._step(gap), values_of(self.state)
        before = self._uuid(step)
        if not self._dies(lambda: self._attempt(step), nth=nth, after=after):
            return self._saved(step, values)
        self._interrupted(step, values, before)
        self._count("crash")
        self.model.reopened()
        self._go_on()

    def crash_while_deleting(
        self, index: int, *, nth: int, after: bool = False
    ) -> None:
        """Lets a process die in the deletion of a step, then starts a new one."""
        step = self._pick(index)
        if step is None or self.model.keeps_back(step):
            return
        if self._dies(lambda: self.manager.delete(step), nth=nth, after=after):
            if step not in there_in(self.root):
                self.model.deleted(step)
            self.check_listing()
            self._count("crash in deletion")
            self.model.reopened()
            self._go_on()
        else:
            self.model.deleted(step)
            self.check_listing()

    def damaged(self, index: int, do: Callable[[Path], damage.Damage]) -> None:
        """Damages a stored file, checks that no wrong value is restored, and undoes the damage.

        Steps that do not rest on it restore as before, `restore(None)` takes the newest that
        can be restored, and `verify` names those that cannot.

        Args:
            index: index of the file, modulo the number of files.
            do: function that damages the file at a path.
        """
        files = damage.files_of(self.root)
        if not files:
            return
        refused = self._comparison.damaged(files[index % len(files)], do)
        self._count("damage detected" if refused else "damage without consequence")

    def put_catalogue(self, data: bytes | None, saves: Sequence[int] = ()) -> None:
        """Puts another catalogue into the root, or takes it away, and checks that all is the same.

        Args:
            data: the catalogue, such as one of `catalogues`, or of another root; None: none.
            saves: seeds of saves that are in flight meanwhile.
        """
        path, store = self.root / names.CATALOGUE, store_of(self.root)

        def put() -> None:
            if data is None:
                store.remove_file(path)
            else:
                store.write(path, data, replaces=True)

        if saves:
            self.save_several(saves, meanwhile=put)
        else:
            put()
        self.check_all()
        self._count("catalogue lost" if data is None else "catalogue exchanged")

    def catalogue_elsewhere(self) -> bytes:
        """The catalogue of another root, whose steps have the same numbers and tables."""
        if self._elsewhere is None:
            root = self.root.with_name(f"{self.root.name}.other")
            with self.setup.open(root) as manager:
                state, touched = self.setup.state, None
                if self.setup.options.tracking != "fingerprint":
                    touched = cnr.init_touched(state, self.setup.tables)
                for step in range(3):
                    state, touched = self.setup.train(state, touched, step)
                    manager.save(step, args=cnr.args.Save(state, touched))
            self._elsewhere = store_of(root).read(root / names.CATALOGUE)
        return self._elsewhere

    # ---- comparisons ----------------------------------------------------------------------

    def check_listing(self) -> None:
        """Checks that the manager lists the steps of the model, and has the same latest step."""
        self._comparison.listing(self.manager)

    def check_all(self) -> None:
        """Checks that each step restores bit for bit, from what is stored alone."""
        self.check_listing()
        self._comparison.stored(self.root, self.model.steps)
        for name, steps in self._earlier.items():
            self._comparison.stored(self.root / name, steps)

    # ---- the rest -------------------------------------------------------------------------

    def _start(self) -> None:
        self.state, self.touched, self._next = self.setup.state, None, 0
        if self.setup.options.tracking != "fingerprint":
            self.touched = cnr.init_touched(self.state, self.setup.tables)
        self.model.started_anew(recorded=self.touched is not None)

    def _see_refused(self) -> None:
        """Checks that a manager that has restored nothing saves nothing; opens one that may."""
        before = self._held()
        try:
            self.manager.save(0, args=cnr.args.Save(self.state, self.touched))
        except errors.UsedRootError:
            self._count("used root refused")
        else:
            raise WrongError("a run began where checkpoints are, and was not refused")
        if self._held() != before:
            raise WrongError("a save that was refused has changed the root")
        self._reopen(new_run=True)

    def _go_on(self) -> None:
        if self.model.steps:
            self.restore_latest()
        else:
            self._start()

    def _step(self, gap: int) -> int:
        step = self._next + gap - 1
        while self.model.refuses(step):
            step += 1
        return step

    def _on_save(self, report: cnr.SaveReport) -> None:
        self._parents[report.step] = report.parent

    def _attempt(self, step: int) -> None:
        self._begin(step)
        self.manager.wait_until_finished()

    def _begin(self, step: int) -> None:
        self._next = step + 1
        self._parents.pop(step, None)
        saved = self.manager.save(step, args=cnr.args.Save(self.state, self.touched))
        if not saved:
            raise WrongError(f"step {step} was not saved")

    def _parent(self, step: int) -> int | None:
        if step not in self._parents:
            raise WrongError(f"there is no report of step {step}")
        return self._parents[step]

    def _saved(self, step: int, values: Values) -> None:
        self._note(step, values)
        self.check_listing()

    def _note(self, step: int, values: Values, needed: Collection[int] = ()) -> None:
        parent = self._parent(step)
        self.model.saved(step, values, parent, needed)
        self._note_earlier()
        self._count("full" if parent is None else "delta")
        if self._in_bucket:
            self._note_catalogue()
            self._note_name(step)

    def _interrupted(self, step: int, values: Values, before: str | None) -> None:
        """Notes what a save has left that failed or was killed.

        Args:
            step: number of the step.
            values: values that it was to hold.
            before: uuid of the step of this number that there was before.
        """
        there = there_in(self.root)
        manifest = self._manifest(step, there)
        # A save that begins a new run may be committed, and be gone again: retention has dropped
        # it. What it has moved aside stays there all the same.
        is_dropped = manifest is None and bool(
            self._earlier_now() - self._earlier.keys()
        )
        committed = is_dropped or (manifest is not None and manifest.uuid != before)
        parent = None
        if committed and manifest is not None and manifest.parent is not None:
            parent = names.step_number(manifest.parent.directory)
        self.model.interrupted(
            step,
            values,
            committed=committed,
            parent=parent,
            there=there,
        )
        self._note_earlier()
        self.check_all()

    def _note_earlier(self) -> None:
        """Notes which folder holds the steps that a new run has moved aside."""
        new = self._earlier_now() - self._earlier.keys()
        if len(new) != len(self.model.earlier) - len(self._earlier):
            raise WrongError(f"steps are moved aside in {new}, and not as expected")
        if new:
            self._earlier[new.pop()] = self.model.earlier[-1]

    def _earlier_now(self) -> set[str]:
        """Folders of the root that hold the steps of earlier runs."""
        return {name for name in self._held() if name.startswith(names.EARLIER_RUN)}

    def _uuid(self, step: int) -> str | None:
        """Uuid of a step; None if it is not there."""
        manifest = self._manifest(step, there_in(self.root))
        return None if manifest is None else manifest.uuid

    def _manifest(self, step: int, there: Collection[int]) -> Manifest | None:
        """Manifest of a step, if it is there."""
        if step not in there:
            return None
        (found,) = (e for e in cnr.describe(self.root).steps if e.step == step)
        return read_manifest(self.root / found.directory / DEFAULT_ITEM)

    def _held(self) -> list[str]:
        """Names in the root; not of folders in which nothing is any more, as buckets list them."""
        found = names_in(self.root)
        if not self._in_bucket:
            return found
        return [name for name in found if exists(self.root / name)]

    def _note_catalogue(self) -> None:
        found = store_of(self.root).read_version(self.root / names.CATALOGUE)
        if found is not None:
            self.catalogues.append(found[0])

    def _note_name(self, step: int) -> None:
        """Counts steps that were saved under names of their own, as their number was taken."""
        there = {names.plain(n) for n in self._held() if names.branch_generation(n)}
        if step in map(names.step_number, there):
            self._count("branched")

    def _dies(self, do: Callable[[], object], *, nth: int, after: bool) -> bool:
        """Whether a process dies that does something; if so, there is a new manager."""
        if not self._in_bucket:
            copy = self.root.with_name(self.root.name + ".crashed")
            with inprocess.copying(self.root, copy, nth=nth, after=after):
                do()
            if copy.exists():
                self.manager.close()
                shutil.rmtree(self.root)
                copy.rename(self.root)
                self._reopen()
                return True
            return False
        with inprocess.dying(self.root, nth=nth, after=after) as failed:
            try:
                do()
            except Exception:
                if not failed:
                    raise
            if not failed:
                return False
            with contextlib.suppress(Exception):
                self.manager.close()
        self._reopen()
        return True

    def _reopen(self, *, new_run: bool = False) -> None:
        self.manager.close()
        self.manager = self.setup.open(self.root, new_run=new_run)
        self.model.leaving = set()

    def _pick(self, index: int) -> int | None:
        listed = there_in(self.root)
        steps = [s.step for s in reversed(self.model.ordered()) if s.step in listed]
        return steps[index % len(steps)] if steps else None

    def _restore(self, wanted: int | None, step: int | None) -> None:
        assert step is not None
        self.state, self.touched = self._comparison.restored(self.manager, wanted, step)
        if self.setup.options.tracking == "fingerprint":
            self.touched = None
        self.model.restored(step)
        self._next = step + 1
        self._count("restored")

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1
