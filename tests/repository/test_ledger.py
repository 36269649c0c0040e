from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cnr_jax.format import names
from cnr_jax.format.manifest import Manifest, ParentRef, dump
from cnr_jax.repository.index.entries import Entry, entry_of, named, order
from cnr_jax.repository.index.ledger import Ledger
from cnr_jax.repository.index.retention import ChainPreservation, blockers
from cnr_jax.repository.layout import Place
from cnr_jax.repository.upkeep.writer import RootWriter

from .conftest import make_manifest

ITEM = "state"


def put(root: Path, directory: str, manifest: Manifest | bytes) -> None:
    item = root / directory / ITEM
    item.mkdir(parents=True)
    data = manifest if isinstance(manifest, bytes) else dump(manifest)
    (item / names.MANIFEST).write_bytes(data)


def pending(step: int, uuid: str = "f" * 32) -> Entry:
    return Entry(directory=str(step), step=step, uuid=uuid, generation=1, parent=None)


def names_of(entries: list[Entry]) -> list[str]:
    return [entry.directory for entry in entries]


@pytest.fixture
def tree(root: Any) -> Any:
    """0 <- 1 <- 2, 0 <- 3, and 4, which is full."""
    root.zero = root.add(0)
    root.one = root.add(1, root.zero)
    root.two = root.add(2, root.one)
    root.three = root.add(3, root.zero)
    root.four = root.add(4)
    return root


def test_chain_leads_to_the_full_checkpoint(tree: Any) -> None:
    assert names_of(tree.ledger.chain(tree.two)) == ["2", "1", "0"]
    assert names_of(tree.ledger.chain(tree.four)) == ["4"]


def test_dependents_are_direct_and_indirect_newest_first(tree: Any) -> None:
    assert names_of(tree.ledger.dependents("0")) == ["3", "2", "1"]
    assert names_of(tree.ledger.dependents("1")) == ["2"]
    assert names_of(tree.ledger.dependents("4")) == []


def test_closure_holds_all_that_the_given_steps_rest_on(tree: Any) -> None:
    assert tree.ledger.closure(["2"]) == {"2", "1", "0"}
    assert tree.ledger.closure(["3", "4"]) == {"3", "0", "4"}
    assert tree.ledger.closure([]) == set()
    assert tree.ledger.closure(["unknown"]) == {"unknown"}


def test_chain_without_its_full_checkpoint_is_not_whole(tree: Any) -> None:
    assert tree.ledger.is_whole(tree.two)
    tree.ledger.forget("0")
    assert not tree.ledger.is_whole(tree.two)
    assert not tree.ledger.is_whole(tree.three)
    assert tree.ledger.is_whole(tree.four)


def test_parent_of_another_uuid_is_not_the_parent(tree: Any) -> None:
    tree.add(1, tree.zero, uuid="e" * 32)
    assert names_of(tree.ledger.chain(tree.two)) == ["2"]
    assert not tree.ledger.is_whole(tree.two)
    assert names_of(tree.ledger.dependents("1")) == []


def test_chain_that_is_a_circle_ends(root: Any) -> None:
    first = root.add(0)
    second = root.add(1, first, uuid="b" * 32)
    root.add(0, second, uuid=first.uuid)
    assert names_of(root.ledger.chain(second)) == ["1", "0"]
    assert not root.ledger.is_whole(second)


def test_head_is_the_newest_step_of_the_highest_generation(root: Any) -> None:
    assert root.ledger.head() is None
    root.add(90)
    root.add(10, generation=2)
    assert root.add(20, generation=2) == root.ledger.head()
    assert names_of(root.ledger.committed()) == ["90", "10", "20"]


def test_step_in_two_directories_is_that_of_the_highest_generation(root: Any) -> None:
    root.add(7, directory="old_7")
    newer = root.add(7, generation=2, directory="7")
    assert root.ledger.by_step(7) == newer
    assert root.ledger.by_step(8) is None


def test_save_in_flight_is_no_checkpoint_yet(tree: Any) -> None:
    tree.ledger.begin(pending(5))
    assert "5" not in names_of(tree.ledger.committed())
    assert not tree.ledger.is_whole(tree.ledger.entries["5"])
    assert tree.ledger.head() == tree.four


def test_save_in_flight_keeps_its_parents(tree: Any) -> None:
    ref = ParentRef(directory="2", uuid=tree.two.uuid, clock=0)
    entry = Entry(directory="5", step=5, uuid="f" * 32, generation=1, parent=ref)
    tree.ledger.begin(entry)
    assert tree.ledger.closure(["5"]) == {"5", "2", "1", "0"}
    assert names_of(tree.ledger.dependents("2")) == ["5"]


def test_load_reads_committed_steps_and_nothing_else(
    tmp_path: Path, manifest_of: Callable[..., Manifest]
) -> None:
    put(tmp_path, "10", manifest_of(10))
    put(tmp_path, "ck_20", manifest_of(20))
    put(tmp_path, f"30{names.TEMPORARY_SUFFIX}", manifest_of(30))
    put(tmp_path, names.abandoned("40", 1, "0" * 32), manifest_of(40))
    put(tmp_path, "logs", manifest_of(50))
    (tmp_path / "60").write_bytes(b"a file")
    ledger = Ledger.load(tmp_path, ITEM)
    assert sorted(ledger.entries) == ["10", "ck_20"]
    assert ledger.entries["ck_20"].step == 20
    assert ledger.folders == {}


def test_load_of_a_root_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert Ledger.load(tmp_path / "none", ITEM).entries == {}


@pytest.mark.parametrize("data", [None, b"", b"{}", b"\xff"])
def test_step_with_a_damaged_manifest_is_unreadable_with_its_reason(
    tmp_path: Path, manifest_of: Callable[..., Manifest], data: bytes | None
) -> None:
    put(tmp_path, "10", manifest_of(10))
    if data is None:
        (tmp_path / "20").mkdir()
    else:
        put(tmp_path, "20", data)
    ledger = Ledger.load(tmp_path, ITEM)
    assert list(ledger.entries) == ["10"]
    assert list(ledger.folders) == ["20"]
    assert "20" in ledger.folders["20"].why
    ledger.forget("20")
    assert ledger.folders == {}


def test_settled_save_has_its_manifest(
    tmp_path: Path, manifest_of: Callable[..., Manifest]
) -> None:
    ledger = Ledger()
    manifest = manifest_of(10)
    ledger.begin(pending(10, manifest.uuid))
    put(tmp_path, "10", manifest)
    entry = ledger.settle(Place(tmp_path, "10", ITEM), manifest.uuid)
    assert entry is not None and entry.manifest == manifest
    assert ledger.head() == entry


@pytest.mark.parametrize("there", [False, True])
def test_failed_save_is_forgotten(
    tmp_path: Path, manifest_of: Callable[..., Manifest], there: bool
) -> None:
    ledger = Ledger()
    ledger.begin(pending(10))
    if there:
        put(tmp_path, f"10{names.TEMPORARY_SUFFIX}", manifest_of(10, uuid="f" * 32))
    assert ledger.settle(Place(tmp_path, "10", ITEM), "f" * 32) is None
    assert ledger.entries == {}


def test_saved_step_that_retention_drops_but_could_not_remove_is_no_error(
    tmp_path: Path, manifest_of: Callable[..., Manifest]
) -> None:
    ledger = Ledger()
    manifest = manifest_of(10)
    ledger.begin(pending(10, manifest.uuid))
    ledger.doom("10")
    put(tmp_path, "10", manifest)
    assert ledger.settle(Place(tmp_path, "10", ITEM), manifest.uuid) is None
    assert ledger.entries == {}


def test_older_step_in_the_place_of_a_failed_save_is_known_as_what_it_is(
    tmp_path: Path, manifest_of: Callable[..., Manifest]
) -> None:
    ledger = Ledger()
    ledger.begin(pending(10))
    put(tmp_path, "10", manifest_of(10, uuid="1" * 32))
    assert ledger.settle(Place(tmp_path, "10", ITEM), "f" * 32) is None
    assert ledger.entries["10"].uuid == "1" * 32


def move_aside(root: Path, entry: Entry) -> None:
    plan: Any = SimpleNamespace(
        uuid="f" * 32,
        directory=entry.directory,
        abandoned=(entry.directory,),
        earlier="",
        leaves_behind=False,
    )
    writer = RootWriter(lambda: True)
    writer.open(root, ITEM)
    writer.claim()
    writer.move_aside(plan)
    writer.committed()
    writer.close()


def test_step_moved_aside_is_whole_there_and_no_step_any_more(
    tmp_path: Path, manifest_of: Callable[..., Manifest]
) -> None:
    put(tmp_path, "10", manifest_of(10))
    ledger = Ledger.load(tmp_path, ITEM)
    entry = ledger.entries["10"]
    move_aside(tmp_path, entry)
    name = f"10.abandoned-g1-{entry.uuid}"
    assert (tmp_path / name / ITEM / names.MANIFEST).exists()
    assert Ledger.load(tmp_path, ITEM).entries == {}


def test_step_and_generation_can_be_moved_aside_twice(
    tmp_path: Path, manifest_of: Callable[..., Manifest]
) -> None:
    run = "5eed" * 6
    for attempt in ("00000001", "00000002"):
        put(tmp_path, "10", manifest_of(10, uuid=run + attempt))
        move_aside(tmp_path, Ledger.load(tmp_path, ITEM).entries["10"])
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_steps_are_named_oldest_first(tree: Any) -> None:
    assert named([tree.three, tree.one]) == "1, 3"


def test_what_comes_while_another_thread_derives_is_known_right_after(
    tree: Any,
) -> None:
    ledger = tree.ledger

    class Entries(dict[str, Entry]):
        def values(self) -> Any:
            found = super().values()
            listed = [*found]
            if "5" not in self:
                ledger.add(entry_of("5", make_manifest(5)))
            return listed

    ledger._entries = Entries(ledger._entries)
    ledger.drop("4")
    assert names_of(ledger.committed()) == ["0", "1", "2", "3"]
    assert names_of(ledger.committed()) == ["0", "1", "2", "3", "5"]


class Straight:
    """What a ledger should answer, by walking the chain of each entry."""

    def __init__(self, ledger: Ledger) -> None:
        self.entries = dict(ledger.entries)
        self.harm_of = ledger.harm_of

    def chain(self, entry: Entry) -> list[Entry]:
        found = [entry]
        while (parent := found[-1].parent) is not None:
            above = self.entries.get(parent.directory)
            if above is None or above.uuid != parent.uuid or above in found:
                break
            found.append(above)
        return found

    def is_orphan(self, entry: Entry) -> bool:
        return self.chain(entry)[-1].parent is not None

    def is_whole(self, entry: Entry) -> bool:
        chain = self.chain(entry)
        harms = [harm for e in chain if (harm := self.harm_of(e)) is not None]
        sound = all(e.manifest is not None for e in chain)
        sound = sound and all(harm.itself_alone for harm in harms)
        return sound and chain[-1].parent is None

    def committed(self) -> list[Entry]:
        found = [entry for entry in self.entries.values() if entry.manifest]
        return sorted(found, key=order)

    def restorable(self) -> list[Entry]:
        committed = self.committed()
        return [e for e in committed if self.is_whole(e) and not self.harm_of(e)]

    def by_step(self, step: int) -> Entry | None:
        found = [entry for entry in self.entries.values() if entry.step == step]
        found.sort(key=lambda each: self.harm_of(each) is not None)
        return max(found, key=order) if found else None

    def orphans(self) -> list[Entry]:
        found = [entry for entry in self.entries.values() if self.is_orphan(entry)]
        return sorted(found, key=order)

    def dependents(self, directory: str) -> list[Entry]:
        found = [
            entry
            for entry in self.entries.values()
            if entry.directory != directory
            and any(e.directory == directory for e in self.chain(entry))
        ]
        return sorted(found, key=order, reverse=True)

    def closure(self, directories: list[str]) -> set[str]:
        kept = set(directories)
        for directory in kept & self.entries.keys():
            kept = kept | {e.directory for e in self.chain(self.entries[directory])}
        return kept


def check_as_straight(ledger: Ledger, strangers: list[Entry]) -> None:
    straight = Straight(ledger)
    assert ledger.committed() == straight.committed()
    assert ledger.restorable() == straight.restorable()
    assert ledger.orphans() == straight.orphans()
    assert ledger.head() == (straight.committed() or [None])[-1]
    for entry in (*ledger.entries.values(), *strangers):
        assert ledger.chain(entry) == straight.chain(entry)
        is_known = ledger.entries.get(entry.directory) is entry
        assert ledger.is_whole(entry) == (is_known and straight.is_whole(entry))
    for step in range(8):
        assert ledger.by_step(step) == straight.by_step(step)
    for name in DIRECTORIES:
        assert ledger.dependents(name) == straight.dependents(name)
        assert ledger.closure([name, "0"]) == straight.closure([name, "0"])
        if name in ledger.entries and not straight.is_orphan(ledger.entries[name]):
            assert ledger.depth(name) == len(straight.chain(ledger.entries[name]))


DIRECTORIES = [*map(str, range(6)), "old_1", "old_3"]
UUIDS = [f"{i:032x}" for i in range(3)]
PARENTS = st.none() | st.builds(
    ParentRef,
    directory=st.sampled_from(DIRECTORIES),
    uuid=st.sampled_from(UUIDS),
    clock=st.just(0),
)


@st.composite
def made_entries(draw: st.DrawFn) -> Entry:
    directory = draw(st.sampled_from(DIRECTORIES))
    manifest = make_manifest(
        names.step_number(directory),
        uuid=draw(st.sampled_from(UUIDS)),
        generation=draw(st.integers(1, 3)),
    )
    entry = entry_of(directory, manifest)
    return dataclasses.replace(entry, parent=draw(PARENTS))


CHANGES = st.one_of(
    st.tuples(st.just("add"), made_entries()),
    st.tuples(st.just("begin"), made_entries()),
    st.tuples(st.just("forget"), st.sampled_from(DIRECTORIES)),
    st.tuples(st.just("doom"), st.sampled_from(DIRECTORIES)),
    st.tuples(st.just("rows"), st.sampled_from(DIRECTORIES)),
    st.tuples(st.just("dense"), st.sampled_from(DIRECTORIES)),
    st.tuples(st.just("become"), st.lists(made_entries(), max_size=6)),
)


def change(ledger: Ledger, what: str, how: Any) -> None:
    if what == "begin":
        for entry in [e for e in ledger.entries.values() if e.manifest is None]:
            ledger.forget(entry.directory)
        ledger.begin(dataclasses.replace(how, manifest=None))
    elif what in ("rows", "dense"):
        ledger.note_damage(f"{how}/{ITEM}/{what}/c/0", "a bit is wrong")
    elif what == "become":
        fresh = Ledger()
        for entry in how:
            fresh.add(entry)
        ledger.become(fresh)
    else:
        getattr(ledger, what)(how)


@settings(max_examples=300)
@given(
    st.lists(made_entries(), max_size=8),
    st.lists(CHANGES, max_size=6),
    st.lists(made_entries(), max_size=2),
)
def test_any_ledger_answers_as_walks_of_all_chains_do(
    entries: list[Entry], changes: list[tuple[str, Any]], strangers: list[Entry]
) -> None:
    ledger = Ledger()
    for entry in entries:
        ledger.add(entry)
    check_as_straight(ledger, strangers)
    for what, how in changes:
        change(ledger, what, how)
        check_as_straight(ledger, strangers)


class CountedParent:
    """A reference to a parent that counts how often it is followed."""

    followed = 0

    def __init__(self, parent: Entry) -> None:
        self._directory, self.uuid, self.clock = parent.directory, parent.uuid, 0

    @property
    def directory(self) -> str:
        CountedParent.followed += 1
        return self._directory


class Latest:
    def should_preserve(self, infos: Any, *, context: Any) -> list[bool]:
        return [info is infos[-1] for info in infos]


@pytest.mark.parametrize("kept", [[], [50, 90]])
def test_what_a_save_asks_follows_each_parent_a_few_times(
    root: Any, kept: list[int]
) -> None:
    steps, parent = 300, None
    for step in range(steps):
        entry = root.add(step)
        if step and step not in kept:
            entry = dataclasses.replace(entry, parent=CountedParent(parent))
        root.ledger.add(entry)
        parent = entry
    root.ledger.run = ""
    CountedParent.followed = 0
    assert len(root.ledger.restorable()) == steps
    policy = ChainPreservation(Latest(), lambda: root.ledger)
    keeps = policy.should_preserve(root.ledger.committed())
    assert keeps == [step >= max(kept, default=0) for step in range(steps)]
    assert root.ledger.orphans() == []
    assert root.ledger.restorable()[-1].step == steps - 1
    assert len(blockers(root.ledger, str(steps - 3))) == 2
    assert CountedParent.followed < 20 * steps


def test_entries_change_through_the_ledger_alone(tree: Any) -> None:
    with pytest.raises(TypeError):
        tree.ledger.entries["5"] = tree.four
    with pytest.raises(TypeError):
        tree.ledger.folders["5"] = None
    assert len(tree.ledger.restorable()) == 5


def test_a_child_of_other_tables_than_its_parent_cannot_be_restored() -> None:
    parent = entry_of("1", make_manifest(1, uuid="1" * 32))
    made = make_manifest(2, uuid="2" * 32)
    other = dataclasses.replace(made, tables=(*made.tables, *made.tables, None))
    child = dataclasses.replace(
        entry_of("2", other), parent=ParentRef(directory="1", uuid="1" * 32, clock=0)
    )
    ledger = Ledger()
    for entry in (parent, child):
        ledger.add(entry)
    assert ledger.restorable() == [parent] and ledger.newest() is parent
    assert ledger.obstacle(child) == "its tables are not those of its parent 1"
    flaw = ledger.flaw(child)
    assert flaw is not None and flaw.kind == "tables_differ"


def test_of_two_copies_the_damaged_one_alone_cannot_be_restored(root: Any) -> None:
    root.add(0)
    one = root.add(1, root.ledger.entries["0"])
    copy = root.add(1, root.ledger.entries["0"], directory="backup_1")
    assert copy.uuid == one.uuid
    root.ledger.note_damage(f"backup_1/{ITEM}/rows.p00000/codes/c/0", "it is cut")
    assert names_of(root.ledger.restorable()) == ["0", "1"]
    assert root.ledger.obstacle(one) == "" and root.ledger.obstacle(copy) == "it is cut"


def test_what_is_worse_is_what_is_known_of_a_step(root: Any) -> None:
    root.add(0)
    one = root.add(1, root.ledger.entries["0"])
    dense, rows = f"0/{ITEM}/{names.DENSE}/a", f"0/{ITEM}/rows.p00000/codes/c/0"
    root.ledger.note_damage(dense, "dense is cut")
    assert names_of(root.ledger.restorable()) == ["1"]
    root.ledger.note_damage(rows, "rows are cut")
    root.ledger.note_damage(dense, "dense is cut")
    assert root.ledger.restorable() == []
    assert root.ledger.obstacle(one) == "it rests on 0, which is damaged: rows are cut"


def test_damage_that_storage_may_not_show_again_is_taken_back_alone(root: Any) -> None:
    root.add(0)
    root.add(1)
    assert not root.ledger.take_back_unread()
    root.ledger.note_damage("0/state/rows.p00000", "storage failed", unread=True)
    root.ledger.note_damage("1/state/rows.p00000", "it is cut")
    assert root.ledger.newest() is None
    assert root.ledger.take_back_unread()
    assert names_of(root.ledger.restorable()) == ["0"]
