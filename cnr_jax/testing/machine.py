"""A hypothesis state machine that plays any run against the model, faults included.

Example:
    >>> import hypothesis, jax
    >>> from cnr_jax.testing import strategies
    >>> class Mine(RunMachine):
    ...     setups = strategies.setups(devices=jax.devices()[:1])  # or a run of your own
    >>> few = hypothesis.settings(max_examples=2, stateful_step_count=5, deadline=None)
    >>> run_state_machine_as_test(Mine, settings=few)
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections import Counter
from typing import Any, ClassVar

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from hypothesis.stateful import run_state_machine_as_test as run_state_machine_as_test

from cnr_jax.repository.store import store_of
from cnr_jax.testing import strategies
from cnr_jax.testing.faults import Fault
from cnr_jax.testing.inprocess import is_url
from cnr_jax.testing.playing import Player
from cnr_jax.testing.setup import Setup

_INDEX = st.integers(0, 5)
_GAP = st.sampled_from([1, 1, 2, 3])
_NTH = st.integers(1, 60)
# A save or a deletion in a bucket makes fewer requests than calls on a disk.
_NTH_REQUEST = st.integers(1, 25)


class RunMachine(RuleBasedStateMachine):
    """Trains, saves, fails, crashes, restores, deletes; every step must restore bit for bit.

    Subclass it and set `setups` to play a run of your own.

    Attributes:
        setups: strategy of the runs to be played.
        folder: folder for the folders of checkpoints, or the URL of a bucket or of a place in one;
            None: the system's for temporary files.
        counts: how often each thing has happened, over all examples.
    """

    setups: ClassVar[st.SearchStrategy[Setup]] = strategies.setups()
    folder: ClassVar[str | None] = None
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Chooses a run and saves once."""
        if self._in_bucket():
            self.place = f"{self.folder}/{secrets.token_hex(8)}"
        else:
            self.place = tempfile.mkdtemp(dir=self.folder, prefix="cnr_jax_machine_")
        setup = data.draw(type(self).setups, label="setup")
        self.player = Player(f"{self.place}/root", setup)
        self.player.save()

    @rule(seed=st.integers(0, 2**16))
    def train(self, seed: int) -> None:
        """One train step."""
        self.player.train(seed)

    @rule(seed=st.integers(0, 2**16), gap=_GAP)
    def train_and_save(self, seed: int, gap: int) -> None:
        """A train step and a save."""
        self.player.train(seed)
        self.player.save(gap)

    @rule(seeds=st.lists(st.integers(0, 2**16), min_size=2, max_size=4))
    def train_and_save_several(self, seeds: list[int]) -> None:
        """Several train steps with a save each; it waits only after the last one."""
        self.player.save_several(seeds)

    @rule(gap=_GAP)
    def save(self, gap: int) -> None:
        """A save, perhaps with nothing changed."""
        self.player.save(gap)

    @rule(seed=st.integers(0, 2**16), fault=strategies.faults_in_process(), gap=_GAP)
    def fail_while_saving(self, seed: int, fault: Fault, gap: int) -> None:
        """A save that fails, after a train step."""
        self.player.train(seed)
        self.player.fail_while_saving(fault, gap)

    @rule(seed=st.integers(0, 2**16), nth=_NTH, after=st.booleans(), gap=_GAP)
    def crash_while_saving(self, seed: int, nth: int, after: bool, gap: int) -> None:
        """A process that dies in a save."""
        self.player.train(seed)
        self.player.crash_while_saving(nth=nth, after=after, gap=gap)

    @rule(index=_INDEX, nth=_NTH, after=st.booleans())
    def crash_while_deleting(self, index: int, nth: int, after: bool) -> None:
        """A process that dies in a deletion."""
        self.player.crash_while_deleting(index, nth=nth, after=after)

    @rule(index=_INDEX)
    def restore(self, index: int) -> None:
        """Goes on from any step: a rollback unless it is the latest."""
        self.player.restore(index)

    @rule()
    def restore_latest(self) -> None:
        """Goes on from the latest step."""
        self.player.restore_latest()

    @rule(index=_INDEX)
    def evaluate(self, index: int) -> None:
        """Looks at a step, and goes on with the state there was."""
        self.player.evaluate(index)

    @rule(anew=st.booleans())
    def reopen(self, anew: bool) -> None:
        """A new process that goes on, or starts the run again in the same folder."""
        self.player.reopen(anew=anew)

    @rule(gap=_GAP)
    def put_folder(self, gap: int) -> None:
        """Somebody else puts a folder with a number for a name into the root."""
        self.player.put_folder(gap)

    @rule(index=_INDEX)
    def delete(self, index: int) -> None:
        """Deletes a step, if none rests on it."""
        self.player.delete(index)

    @rule(index=st.integers(0, 500), do=strategies.damages())
    def damage(self, index: int, do: Any) -> None:
        """Damages a file, and undoes it."""
        self.player.damaged(index, do)

    @invariant()
    def lists_what_there_is(self) -> None:
        """The manager lists what it must."""
        if hasattr(self, "player"):
            self.player.check_listing()

    def teardown(self) -> None:
        """Every step must restore from what is stored alone."""
        if not hasattr(self, "player"):
            return
        try:
            self.player.check_all()
        finally:
            self.player.manager.close()
            if self._in_bucket():
                store_of(self.player.root).remove_tree(self.player.root.parent)
            else:
                shutil.rmtree(self.place)
            for what, count in self.player.counts.items():
                event(what)
                type(self).counts[what] += count

    @classmethod
    def _in_bucket(cls) -> bool:
        return cls.folder is not None and is_url(cls.folder)


class BucketMachine(RunMachine):
    """The same in a bucket, of whose URL `folder` is; catalogues are lost and exchanged too."""

    @rule(index=st.integers(1, 5), seed=st.integers(0, 2**16))
    def go_back_and_save(self, index: int, seed: int) -> None:
        """Goes on from an older step, and saves the number that follows it again."""
        self.player.restore(index)
        self.train_and_save(seed, 1)

    @rule(seed=st.integers(0, 2**16), nth=_NTH_REQUEST, after=st.booleans(), gap=_GAP)
    def crash_while_saving(self, seed: int, nth: int, after: bool, gap: int) -> None:
        """A process that dies in a save."""
        self.player.train(seed)
        self.player.crash_while_saving(nth=nth, after=after, gap=gap)

    @rule(index=_INDEX, nth=_NTH_REQUEST, after=st.booleans())
    def crash_while_deleting(self, index: int, nth: int, after: bool) -> None:
        """A process that dies in a deletion."""
        self.player.crash_while_deleting(index, nth=nth, after=after)

    @rule(
        kind=st.sampled_from(["lost", "old", "foreign"]),
        index=st.integers(0, 50),
        seeds=st.lists(st.integers(0, 2**16), max_size=2),
    )
    def exchange_catalogue(self, kind: str, index: int, seeds: list[int]) -> None:
        """Loses the catalogue, or puts an old one there, or that of another root."""
        data, old = None, self.player.catalogues
        if kind == "foreign":
            data = self.player.catalogue_elsewhere()
        elif kind == "old" and old:
            data = old[index % len(old)]
        self.player.put_catalogue(data, seeds)
