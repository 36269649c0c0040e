"""One writer at a time: the newest claim wins, and a save that is being written is waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cnr_jax import errors
from cnr_jax.format import names
from cnr_jax.repository import markers
from cnr_jax.repository.store.buckets import BucketStore
from cnr_jax.repository.upkeep.aside import recover
from cnr_jax.repository.upkeep.claim import Aside, Claim, WritingLock, read_writer
from cnr_jax.repository.upkeep.writer import RootWriter

MOVED = names.abandoned("2", 1, "b" * 32)
ASIDE = Aside(uuid="a" * 32, directory="2", item="state", moved=(("2", MOVED),))


@pytest.mark.parametrize("times", [1, 3])
def test_a_claim_that_another_manager_clears_before_it_has_its_name_is_written_again(
    tmp_path: Path, storage: Any, times: int
) -> None:
    cleared: list[str] = []
    claim = Claim(tmp_path)
    with cleared_before_their_name(storage, times, cleared):
        claim.take()
    claim.check()
    assert len(cleared) == times
    assert [path.name for path in tmp_path.iterdir()] == [names.WRITER]


def test_a_claim_that_is_cleared_each_time_is_an_error(
    tmp_path: Path, storage: Any
) -> None:
    with (
        cleared_before_their_name(storage, 1000, []),
        pytest.raises(FileNotFoundError, match=r"cnr_jax\.writer\.json"),
    ):
        Claim(tmp_path).take()


def cleared_before_their_name(storage: Any, times: int, cleared: list[str]) -> Any:
    """Removes claims that are about to get their name, and notes which."""

    def clear(call: Any) -> None:
        if len(cleared) < times:
            os.unlink(call.path)
            cleared.append(call.path)

    return storage.calling(clear, f"{names.WRITER}.", "rename")


def test_the_newest_claim_wins_and_the_older_one_says_whose_it_is(
    tmp_path: Path,
) -> None:
    older, newer = Claim(tmp_path), Claim(tmp_path)
    assert older.take() is None
    older.check()
    before = newer.take()
    assert before is not None and not before.is_dead
    newer.check()
    with pytest.raises(errors.WriterError) as caught:
        older.check()
    newest = read_writer(tmp_path)
    assert newest is not None and str(newest) in str(caught.value)
    assert caught.value.kind == "writer"
    older.give_up()
    older.take()
    older.check()
    with pytest.raises(errors.WriterError):
        newer.check()


def test_a_claim_that_was_tidied_away_is_renewed(tmp_path: Path) -> None:
    claim = Claim(tmp_path)
    claim.take()
    (tmp_path / names.WRITER).unlink()
    claim.check()
    other = Claim(tmp_path)
    assert other.take() is not None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 3}', '{"id": "x", "pid": []}'])
def test_a_claim_that_cannot_be_read_is_somebody_elses(
    tmp_path: Path, text: str
) -> None:
    claim = Claim(tmp_path)
    claim.take()
    (tmp_path / names.WRITER).write_text(text)
    with pytest.raises(errors.WriterError, match="cannot be read"):
        claim.check()
    claim.take()
    claim.check()


def test_clocks_take_no_part(tmp_path: Path) -> None:
    older, newer = Claim(tmp_path), Claim(tmp_path)
    older.take()
    newer.take()
    path = tmp_path / names.WRITER
    document = json.loads(path.read_text())
    document["since"] = "1970-01-01T00:00:00+00:00"
    path.write_text(json.dumps(document))
    newer.check()
    with pytest.raises(errors.WriterError, match="since 1970"):
        older.check()


def test_what_was_moved_aside_is_handed_over_with_the_claim(tmp_path: Path) -> None:
    older, newer = Claim(tmp_path), Claim(tmp_path)
    older.take()
    older.note_aside(ASIDE)
    newer.take()
    assert newer.aside == ASIDE
    newer.note_aside(None)
    writer = read_writer(tmp_path)
    assert writer is not None and writer.aside is None


def test_who_stands_in_takes_what_was_moved_aside_since_it_looked(
    tmp_path: Path,
) -> None:
    manager, other = Claim(tmp_path), Claim(tmp_path)
    manager.take()
    seen = read_writer(tmp_path)
    assert seen is not None
    manager.note_aside(ASIDE)
    assert other.stand_in(seen, alone=False).aside == other.aside == ASIDE
    other.withdraw()
    manager.check()
    assert manager.aside == ASIDE
    manager.take()
    with pytest.raises(errors.WriterError):
        other.stand_in(seen, alone=False)


_HOLD = """
import sys, time
from cnr_jax.repository.upkeep.claim import Claim
from cnr_jax.repository.upkeep.claim import WritingLock
from pathlib import Path
root = Path(sys.argv[1])
Claim(root).take()
lock = WritingLock(root)
assert lock.acquire(0)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """Another process that has claimed the root and is writing."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_save_that_is_being_written_is_waited_for_until_its_process_ends(
    other: Any, tmp_path: Path, tiny_limits: Any
) -> None:
    tiny_limits(hand_over_secs=0.1)
    writer = RootWriter(lambda: True)
    writer.open(tmp_path, "state")
    temporary = tmp_path / f"3{names.TEMPORARY_SUFFIX}"
    temporary.mkdir()
    with pytest.raises(errors.WriterError, match=f"process {other.pid}") as caught:
        writer.claim()
    assert caught.value.kind == "writer_busy"
    assert temporary.exists(), "somebody is writing it"
    other.kill()
    other.wait()
    # The system frees a dead one's lock, at the latest when it has been waited for.
    writer.claim()
    writer.close()
    assert not temporary.exists()


_FORK = """
import os, sys
from pathlib import Path
from cnr_jax import errors
from cnr_jax.repository.upkeep.claim import Claim
claim = Claim(Path(sys.argv[1]))
claim.take()
child = os.fork()
if not child:
    assert not claim.is_taken
    assert not claim.take().is_dead
    claim.check()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
try:
    claim.check()
except errors.WriterError as error:
    print(f"process {child}" in str(error))
"""


def test_a_forked_child_does_not_save_in_the_name_of_its_parent(tmp_path: Path) -> None:
    program = [sys.executable, "-c", _FORK, str(tmp_path)]
    ran = subprocess.run(program, capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


def test_a_lock_is_free_again_when_released(tmp_path: Path) -> None:
    one, two = WritingLock(tmp_path), WritingLock(tmp_path)
    assert one.acquire(0) and one.acquire(0)
    assert not two.acquire(0)
    one.release()
    one.release()
    assert two.acquire(0)
    two.release()


def test_an_unfinished_rollback_is_undone_at_a_start_unless_somebody_writes(
    other: Any, tmp_path: Path
) -> None:
    claim = Claim(tmp_path)
    claim.take()
    claim.note_aside(ASIDE)
    (tmp_path / MOVED).mkdir()
    recover(tmp_path)
    assert not (tmp_path / "2").exists(), "a save may be under way"
    other.kill()
    other.wait()
    recover(tmp_path)
    assert (tmp_path / "2").exists() and not (tmp_path / MOVED).exists()
    recover(tmp_path)
    claim.check()


def test_the_writer_of_a_root_that_is_not_there_makes_it(tmp_path: Path) -> None:
    writer = RootWriter(lambda: True)
    writer.open(tmp_path / "a" / "b", "state")
    writer.claim()
    assert (tmp_path / "a" / "b" / names.WRITER).exists()
    writer.close()


def test_what_another_save_could_not_show_meanwhile_is_tidied_up_by_the_next_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "cnr_jax.repository.upkeep.writer"
    monkeypatch.setattr(f"{module}.can", lambda _: BucketStore.can)
    writer, tidied, threads = RootWriter(lambda: True), list[str | None](), []
    writer.bind(tmp_path)
    writer.open(tmp_path, "state")

    def tidy_up(self: RootWriter, own: str | None) -> None:
        tidied.append(own)
        if len(tidied) == 1:
            threads.append(threading.Thread(target=writer.show, args=("1",)))
            threads[0].start()
            threads[0].join(1)

    def show_alone(*_: Any) -> None:
        raise OSError(28, "no space left")

    monkeypatch.setattr(markers, "show_alone", show_alone)
    monkeypatch.setattr(RootWriter, "_tidy_up", tidy_up)
    writer.claim("a")
    threads[0].join()
    writer.claim("b")
    writer.claim("c")
    writer.close()
    assert tidied == ["a", "b"]


def test_only_the_first_process_touches_the_root(tmp_path: Path) -> None:
    nobody, other = RootWriter(lambda: True), RootWriter(lambda: False)
    other.open(tmp_path / "a", "state")
    (tmp_path / "a" / f"3{names.TEMPORARY_SUFFIX}").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for writer in (nobody, other):
        writer.check_claim()
        writer.committed()
        writer.discard("3")
        writer.undo()
        writer.end_writing()
        writer.take_over()
        writer.close()
        assert not writer.writes and not writer.changed
    assert sorted(tmp_path.rglob("*")) == before
