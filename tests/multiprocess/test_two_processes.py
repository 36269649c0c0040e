"""Two processes save together; one is killed in the middle of a save; the run goes on.

Every child has a deadline and is killed when it has passed: hanging is how several processes
usually fail.
"""

from __future__ import annotations

import collections
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from cnr_jax.format.tiles import ProcessManifest, load_process
from cnr_jax.repository.step import read_manifest, read_processes

sys.path.insert(0, str(Path(__file__).parent))
from forks import Child, server_of

WORKER = Path(__file__).parent / "worker.py"
# Long enough for a machine that does much else; a hang is told by it, nothing else.
DEADLINE_SECS = 400.0
STEPS = 10


class Processes:
    """The processes of one run. Leaving the context kills what still runs."""

    def __init__(
        self,
        count: int,
        root: Path,
        out: Path,
        *options: object,
        worker: Path = WORKER,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        common = ["--processes", count, "--port", port, "--root", root, "--out", out]
        self.out, self.logs = out, [Path(f"{out}.{i}.log") for i in range(count)]
        self.children: list[Child] = []
        for i, log in enumerate(self.logs):
            given = [str(each) for each in ("--process", i, *common, *options)]
            self.children.append(server_of(i).start(worker, given, log))
        self._deadline = time.monotonic() + DEADLINE_SECS

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exc: object) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.wait()

    def allow(self, secs: float) -> None:
        """Sets another deadline, counted from now."""
        self._deadline = time.monotonic() + secs

    def left_secs(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            pytest.fail(f"the processes take too long\n{self.tail()}")
        return left

    def tail(self) -> str:
        texts = [log.read_text(errors="replace")[-3000:] for log in self.logs]
        return "\n----\n".join(texts)

    def finish(self) -> list[list[str]]:
        """Waits for all; returns what each of them noted."""
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(self.left_secs())
            self.left_secs()
            assert child.returncode == 0, self.tail()
        return [
            Path(f"{self.out}.{i}.txt").read_text().splitlines()
            for i in range(len(self.children))
        ]

    def wait_for_save(self, root: Path, step: int) -> None:
        """Until a save is being written: until its temporary directory holds files."""
        pattern = f"{step}.orbax-checkpoint-tmp-*/default/*"
        while not any(root.glob(pattern)):
            self.left_secs()
            assert all(child.poll() is None for child in self.children), self.tail()
            time.sleep(0.02)


def values(out: Path, process: int) -> dict[str, np.ndarray]:
    with np.load(f"{out}.{process}.npz") as found:
        return dict(found)


def assert_same(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for path, value in want.items():
        np.testing.assert_array_equal(got[path], value, err_msg=path)


def run(count: int, root: Path, out: Path, *options: object) -> list[list[str]]:
    with Processes(count, root, out, *options) as processes:
        return processes.finish()


def killed(
    root: Path,
    out: Path,
    step: int,
    *,
    victim: int,
    where: str,
    options: Sequence[object],
) -> None:
    """A run of two processes of which one dies by SIGKILL while `step` is being written."""
    hold = ("--hold-step", step, "--hold-where", where, "--hold-process", victim)
    with Processes(2, root, out, "--stop", STEPS, *hold, *options) as processes:
        processes.wait_for_save(root, step)
        # What the victim has not done, the others must not commit.
        time.sleep(0.5)
        processes.children[victim].send_signal(signal.SIGKILL)
        assert processes.children[victim].wait() == -signal.SIGKILL
        time.sleep(0.5)
        assert not (root / str(step)).exists()
    (left,) = root.glob("*.orbax-checkpoint-tmp*")
    assert left.name.startswith(f"{step}.orbax-checkpoint-tmp-")


@pytest.fixture(scope="module")
def twin(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, list[list[str]]]]:
    """The run that nothing interrupts; at its end it also tries saves that must fail."""
    out = tmp_path_factory.mktemp("twin")
    also = ("--bad-saves", "--tune")
    lines = run(2, out / "root", out / "twin", "--stop", STEPS - 1, *also)
    yield out, lines


def test_two_processes_write_deltas_together(
    twin: tuple[Path, list[list[str]]],
) -> None:
    out, _ = twin
    for step in range(STEPS):
        item = out / "root" / str(step) / "default"
        manifest = read_manifest(item)
        assert manifest.kind == ("delta" if step else "full")
        assert manifest.parent is None or manifest.parent.directory == str(step - 1)
        assert [digest.path for digest in manifest.processes] == [
            "manifest.p00000.json",
            "manifest.p00001.json",
        ]
        # Both wrote rows: tables span the processes.
        assert (item / "rows.p00000").is_dir()
        assert (item / "rows.p00001").is_dir()
        assert manifest.totals.rows == (2 * 17 if step else 512 + 128)
        # Of what both have, one writes each element; what is split, each in part.
        wrote: list[set[str]] = []
        nbytes = collections.Counter[str]()
        for process in read_processes(item, manifest):
            assert process.dense is not None
            tiles = process.dense.tiles
            names = [manifest.dense_leaves[tile.leaf].path[0] for tile in tiles]
            wrote.append(set(names))
            for name, tile in zip(names, tiles, strict=True):
                nbytes[name] += tile.bytes
        assert wrote[1] == {"w"} and wrote[0] >= {"w", "everywhere", "counter", "step"}
        assert (nbytes["w"], nbytes["everywhere"], nbytes["keys"]) == (96, 20, 32)
    assert_same(values(out / "twin", 1), values(out / "twin", 0))


def test_two_processes_try_bits_together(twin: tuple[Path, list[list[str]]]) -> None:
    out, _ = twin
    first, second = ((out / f"twin.{i}.tried").read_text() for i in range(2))
    assert first == second
    two, raw = first.splitlines()
    # Of 512 and 128 rows of 8 elements: codes, and a scale and an offset of two bytes each.
    assert two.startswith(f"2: {640 * (2 + 4)} ") and "'0'" not in two
    assert raw.startswith(f"raw: {640 * 32} ") and raw.endswith(f" 0 {['0'] * 4}")


@pytest.mark.slow
def test_two_processes_tune_and_try_bits_as_one_does(
    twin: tuple[Path, list[list[str]]], tmp_path: Path
) -> None:
    out, _ = twin
    run(1, tmp_path / "root", tmp_path / "one", "--stop", 0, "--tune")
    want = (tmp_path / "one.0.tuned").read_text()
    assert "'user': Asymmetric(bits=2, refits=" in want
    assert "on 512 of 512 rows; errors as shares of it: refits 0: 1." in want
    for process in range(2):
        assert (out / f"twin.{process}.tuned").read_text() == want
        tried = (tmp_path / "one.0.tried").read_text()
        assert (out / f"twin.{process}.tried").read_text() == tried


def test_states_that_differ_between_processes_are_refused_alike_on_all(
    twin: tuple[Path, list[list[str]]],
) -> None:
    _, (first, second) = twin
    assert first == second, "every process raises the same error"
    refusals = first[1:-1]
    paths = ["counter", "key", "step", "name", "scale", "extra"]
    for path, line in zip(paths, refusals, strict=False):
        assert line.startswith("StateMismatchError state_mismatch"), line
        if path == "extra":  # of one process alone, whose state all are told of
            assert "does not have the structure in which the tables" in line
        else:
            assert f"differ between process 0 and process 1 |   {path} |" in line
    assert refusals[6].startswith("AuditError audit table 'user': 1 row "), refusals[6]
    assert "first rows: 500 |" in refusals[6]
    assert "steps that may lack rows: none that is known;" in refusals[6]
    assert refusals[7].startswith("StateMismatchError state_mismatch"), refusals[7]
    assert "item" in refusals[7]
    assert refusals[8].startswith("TouchedError touched"), refusals[8]
    for name, line in zip(("full", "exact"), refusals[9:], strict=True):
        assert line.startswith("OptionError option processes are asked for"), line
        assert f"{name}=False" in line and f"{name}=True" in line
    # And the save after them worked, on both.
    assert first[-1] == f"latest {STEPS - 1}"


# Step, process and where. Process 1 dies while it writes its rows; of the step nothing may ever
# be listed. Process 0 dies when it is about to write the manifest.
IN_ROWS, IN_MANIFEST = (4, 1, "rows"), (7, 0, "manifest")
RESUMED = ("consecutive", "fingerprint", "zstd")


@pytest.mark.parametrize(
    ("policy", "tracking", "compression", "kills"),
    [
        pytest.param("one_shot", "recorded", None, [IN_ROWS], marks=pytest.mark.slow),
        pytest.param(*RESUMED, [IN_MANIFEST], marks=pytest.mark.slow),
        pytest.param(*RESUMED, [IN_ROWS, IN_MANIFEST], marks=pytest.mark.slow),
    ],
    ids=["in rows", "in the manifest", "twice"],
)
def test_a_run_killed_in_the_middle_of_saves_goes_on_bit_for_bit(
    twin: tuple[Path, list[list[str]]],
    tmp_path: Path,
    policy: str,
    tracking: str,
    compression: str | None,
    kills: list[tuple[int, int, str]],
) -> None:
    out, _ = twin
    want = values(out / "twin", 0)
    root = tmp_path / "root"
    with_policy = ["--policy", policy, "--tracking", tracking]
    with_policy += ["--compression", compression] if compression else []
    for step, victim, where in kills:
        also = {"victim": victim, "where": where, "options": with_policy}
        killed(root, tmp_path / where, step, **also)
    newest = kills[-1][0] - 1
    shutil.copytree(root, tmp_path / "copy")

    options = ("--stop", STEPS, *with_policy)
    two = run(2, root, tmp_path / "two", *options)
    assert (
        two
        == [[f"restored {newest}, starts at {newest + 1}", f"latest {STEPS - 1}"]] * 2
    )
    assert_same(values(tmp_path / "two", 0), want)
    assert_same(values(tmp_path / "two", 1), want)
    manifest = read_manifest(root / str(STEPS - 1) / "default")
    assert (manifest.kind, manifest.tracking) == ("delta", tracking)
    assert len(manifest.processes) == 2
    first = read_manifest(root / "0" / "default")
    packed = ("blosc",) if compression else ()  # exact rows, and a slot
    assert first.required_features == (*packed, "dense_tiles")
    features = [process.features for process in _processes(root, 0)]
    assert features == [set(first.required_features)] * 2

    if kills == [IN_ROWS]:
        return
    one = run(1, tmp_path / "copy", tmp_path / "one", *options)
    assert one == [
        [f"restored {newest}, starts at {newest + 1}", f"latest {STEPS - 1}"]
    ]
    assert_same(values(tmp_path / "one", 0), want)
    # Deltas of one process rest on those of two.
    manifest = read_manifest(tmp_path / "copy" / str(STEPS - 1) / "default")
    assert manifest.kind == "delta"
    assert len(manifest.processes) == 1


def _processes(root: Path, step: int) -> list[ProcessManifest]:
    """What each process says it has written."""
    paths = sorted((root / str(step) / "default").glob("manifest.p*.json"))
    return [load_process(path.read_bytes(), str(path)) for path in paths]


def _bits(root: Path, step: int) -> list[set[int]]:
    """Widths of the codes that each process has written."""
    return [
        {c.configuration["bits"] for c in found.codecs if c.name == "cnr.asymmetric"}
        for found in _processes(root, step)
    ]


def test_damage_to_what_either_process_wrote_is_passed_over_by_both(
    twin: tuple[Path, list[list[str]]], tmp_path: Path
) -> None:
    out, _ = twin
    root = tmp_path / "root"
    shutil.copytree(out / "root", root)
    last = STEPS - 1
    for step, process in ((last, 1), (last - 1, 0)):
        rows = root / str(step) / "default" / f"rows.p{process:05d}"
        chunk = rows / "raw.rows.float32" / "c" / "0"
        data = bytearray(chunk.read_bytes())
        data[len(data) // 2] ^= 1
        chunk.write_bytes(data)
    few = tmp_path / "few"
    options = ("--stop", STEPS, "--bad-restore", "--few-bits", few)
    found = run(2, root, tmp_path / "a", *options)
    # What one process alone got wrong both raise, and no other step is taken instead.
    refused = [lines.pop(0) for lines in found]
    assert refused[0].startswith("StateMismatchError state_mismatch on process 1: ")
    assert refused[0].endswith(
        refused[1].removeprefix("StateMismatchError state_mismatch ")
    )
    lines = [f"restored {last}, starts at {last - 1}", f"latest {last}"]
    # Process 0 chooses the bits, whatever process 1 was told to expect.
    few_lines = [[lines.pop(1) for _ in range(4)] for lines in found]
    assert few_lines[0] == few_lines[1], "restored alike"
    assert [line.split(" of ")[0] for line in few_lines[0][:2]] == [
        "full 0 2",
        "delta 1 8",
    ]
    # What no process gives is inherited alike, of a manifest or of what process 0 has found.
    inherited = (
        "bits slot_codec expected_restores compression",
        "bits slot_codec compression",
    )
    assert few_lines[0][2:] == [
        f"full {bits} of codec {names}"
        for bits, names in zip((8, None), inherited, strict=True)
    ]
    # Process 0 writes the small table, which has 8 bits from the start.
    wide = [{8}, {8}]
    assert [_bits(few, step) for step in range(4)] == [[{2, 8}, {2}], wide, wide, wide]
    assert found == [lines, lines]
    assert_same(values(tmp_path / "a", 0), values(out / "twin", 0))
    assert_same(values(tmp_path / "a", 1), values(out / "twin", 0))
    assert read_manifest(root / str(last) / "default").generation == 2
    assert len(list(root.glob("*.abandoned-g1-*"))) == 2
