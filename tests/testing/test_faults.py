"""Faults strike exactly where they are armed; every kind of call is counted, no other is."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cnr_jax import errors
from cnr_jax.testing import _compiling, faults
from cnr_jax.testing.faults import Fault

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(not faults.available(), reason=str(faults.why_unavailable())),
]

# Works in the folder that is its working directory; prints the error number, if any.
EVERY_CALL = """
import os, sys
os.mkdir("d")
f = os.open("d/a", os.O_WRONLY | os.O_CREAT)
os.write(f, b"1234"); os.pwrite(f, b"12", 2); os.writev(f, [b"", b"ab", b"c"])
os.pwritev(f, [b"xy"], 1)
os.fsync(f); os.fdatasync(f); os.ftruncate(f, 3); os.posix_fallocate(f, 0, 5)
r = os.open("d/a", os.O_RDONLY)
g = os.open("b", os.O_RDWR | os.O_CREAT)
os.sendfile(g, r, 0, 3); os.copy_file_range(r, g, 2)
os.close(g)
os.rename("b", "d/c"); os.replace("d/c", "e"); os.link("e", "h"); os.symlink("e", "s")
os.truncate("e", 1)
with open("stdio", "w") as text: text.write("x")
folder = os.open(".", os.O_RDONLY); os.fsync(folder)
os.unlink("h"); os.unlink("e", dir_fd=folder); os.remove("s"); os.unlink("d/a")
os.rmdir("d"); os.mkdir("k"); os.rmdir("k", dir_fd=folder); os.unlink("stdio")
os.mkdir("../outside"); os.rmdir("../outside")
"""
EXPECTED = """
mkdir d
open d/a
write d/a
write d/a
write d/a
write d/a
fsync d/a
fsync d/a
truncate d/a
truncate d/a
open b
write b
write b
rename b d/c
rename d/c e
link e h
link s
truncate e
open stdio
write stdio
fsync .
unlink h
unlink e
unlink s
unlink d/a
rmdir d
mkdir k
rmdir k
unlink stdio
""".split("\n")[1:-1]


def run(program: str, root: Path, fault: Fault | None = None, **others: Any) -> Any:
    root.mkdir(exist_ok=True)
    argv = [sys.executable, "-I", "-S", "-c", program]
    return faults.run(argv, below=root, fault=fault, cwd=root, **others)


def test_every_kind_of_call_is_counted_with_its_paths(tmp_path: Path) -> None:
    ran = run(EVERY_CALL, tmp_path / "root")
    assert ran.returncode == 0, ran.stderr
    lines = [
        " ".join(
            [call.call]
            + [os.path.relpath(p, tmp_path / "root") for p in (call.path, call.to) if p]
        )
        for call in ran.calls
    ]
    assert lines == EXPECTED
    assert [call.number for call in ran.calls] == list(range(1, len(EXPECTED) + 1))
    assert not ran.hits and len({call.pid for call in ran.calls}) == 1


@pytest.mark.parametrize("number", range(1, len(EXPECTED) + 1))
def test_a_kill_at_any_call_is_the_last_thing_that_happens(
    number: int, tmp_path: Path
) -> None:
    ran = run(EVERY_CALL, tmp_path / "root", Fault(nth=number))
    assert ran.returncode == -signal.SIGKILL
    assert [call.hit for call in ran.calls] == [False] * (number - 1) + [True]


@pytest.mark.parametrize("kind", faults.CALLS)
def test_an_error_at_each_kind_of_call_reaches_the_program(
    kind: str, tmp_path: Path
) -> None:
    program = f"try:\n{re.sub('(?m)^', '  ', EVERY_CALL)}\n"
    program += "except OSError as error: print(error.errno)"
    ran = run(program, tmp_path / "root", Fault(kind, action="EDQUOT"))
    assert ran.stdout.split() == [str(errno.EDQUOT)]
    assert [call.call for call in ran.hits] == [kind]
    assert ran.hits == ran.calls[-1:]


WRITES = """
import os
f = os.open("a", os.O_WRONLY | os.O_CREAT)
for part in (b"12", b"34", b"56", b"78"):
    try: print(os.write(f, part))
    except OSError as error: print(error.errno)
"""


@pytest.mark.parametrize(
    ("fault", "contents", "printed"),
    [
        (Fault("write", 2, "kill"), b"12", None),
        (Fault("write", 2, "kill_after"), b"1234", None),
        (Fault("write", 2, "kill_midway"), b"123", None),
        (Fault("write", 2, "EIO"), b"125678", "2 5 2 2"),
        (Fault("write", 2, "ENOSPC", times=2), b"1278", "2 28 28 2"),
        (Fault("write", 2, "EIO", times=0), b"12", "2 5 5 5"),
        (Fault("write", 2, "short_write"), b"1235678", "2 1 2 2"),
        (Fault("any", 2, "EIO", match="/a"), b"345678", "5 2 2 2"),
    ],
)
def test_what_a_fault_leaves(
    fault: Fault, contents: bytes, printed: str | None, tmp_path: Path
) -> None:
    ran = run(WRITES, tmp_path / "root", fault)
    assert (tmp_path / "root/a").read_bytes() == contents
    assert (ran.returncode == -signal.SIGKILL) == (printed is None)
    if printed is not None:
        assert ran.stdout.split() == printed.split()


def test_a_delay_comes_before_the_call(tmp_path: Path) -> None:
    program = """
import os, time
start = time.monotonic()
f = os.open("a", os.O_WRONLY | os.O_CREAT)
waited = time.monotonic() - start
assert waited >= 0.05, waited
"""
    ran = run(program, tmp_path / "root", Fault("open", action="delay", secs=0.05))
    assert ran.returncode == 0, ran.stderr
    assert len(ran.hits) == 1 and (tmp_path / "root/a").exists()


def test_a_match_counts_only_paths_with_it_old_or_new(tmp_path: Path) -> None:
    program = "import os\nfor n in 'abc': open(n, 'w').close()\nos.rename('a', 'z')"
    ran = run(program, tmp_path / "root", Fault(nth=1, match="/z"))
    assert [(c.call, Path(c.to).name) for c in ran.hits] == [("rename", "z")]


def test_nothing_counts_before_the_file_that_starts_it(tmp_path: Path) -> None:
    program = f"""
open("a", "w").close()
open({str(tmp_path / "go")!r}, "w").close()
open("b", "w").close()
"""
    fault = Fault("open", 1, "kill_after")
    ran = run(program, tmp_path / "root", fault, after=tmp_path / "go")
    assert [Path(call.path).name for call in ran.calls] == ["b"]
    assert (tmp_path / "root/b").exists()


def test_a_folder_behind_a_link_is_met_by_either_name(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    program = f"""
import os
for folder in {[str(link), str(real), str(real) + "/.//../real/"]!r}:
    with open(folder + "/a", "w") as file: file.write("1")
"""
    ran = faults.run([sys.executable, "-I", "-c", program], below=link)
    assert {call.path for call in ran.calls} == {str(real.resolve() / "a")}
    assert [call.call for call in ran.calls] == ["open", "write"] * 3


def test_a_folder_with_a_longer_name_is_not_below(tmp_path: Path) -> None:
    program = "open('../root2', 'w').close(); open('a', 'w').close()"
    ran = run(program, tmp_path / "root")
    assert [Path(call.path).name for call in ran.calls] == ["a"]


FORKING = """
import os, subprocess, sys
child = 'open(sys.argv[1], "w").close()'
for i in range(2):
    program = [sys.executable, "-I", "-S", "-c", "import sys;" + child, str(i)]
    code = subprocess.call(program, env={**os.environ, "RANK": str(i)})
    print(code)
if os.fork() == 0:
    open("forked", "w").close()
    os._exit(0)
os.wait()
"""


def test_children_count_for_themselves_and_one_can_be_chosen(tmp_path: Path) -> None:
    fault = Fault("open", 1, process="RANK=1")
    ran = run(FORKING, tmp_path / "root", fault)
    assert ran.stdout.split() == ["0", str(-signal.SIGKILL)]
    assert [(call.number, Path(call.path).name, call.hit) for call in ran.calls] == [
        (1, "0", False),
        (1, "1", True),
        (1, "forked", False),
    ]
    assert len({call.pid for call in ran.calls}) == 3


def test_threads_share_one_count_and_one_hit(tmp_path: Path) -> None:
    program = """
import os, threading
def work(k):
    for i in range(50):
        try: os.mkdir(f"{k}.{i}")
        except OSError as error: print(error.errno)
threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
for t in threads: t.start()
for t in threads: t.join()
"""
    ran = run(program, tmp_path / "root", Fault("mkdir", 77, "EIO", times=3))
    assert sorted(call.number for call in ran.calls) == list(range(1, 401))
    assert sorted(call.number for call in ran.hits) == [77, 78, 79]
    assert ran.stdout.split() == ["5"] * 3
    assert len(list((tmp_path / "root").iterdir())) == 397


def test_calls_are_logged_when_the_process_has_no_descriptor_left(
    tmp_path: Path,
) -> None:
    program = """
import os, resource
os.mkdir("first")
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
held = []
try:
    while True: held.append(os.dup(0))
except OSError: pass
os.mkdir("last")
"""
    ran = run(program, tmp_path / "root")
    assert [Path(call.path).name for call in ran.calls] == ["first", "last"]


def test_a_fault_that_is_not_hit_fails(tmp_path: Path) -> None:
    program = "import sys; open('a', 'w').close(); print('so it is', file=sys.stderr)"
    with pytest.raises(faults.FaultNotHitError) as caught:
        run(program, tmp_path / "root", Fault("open", 2, "EIO"))
    assert "1 such calls, 1 of any kind" in str(caught.value)
    assert "so it is" in caught.value.__notes__[0]
    faults.check_hit((), None)


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    program = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        # Two programs start in this time.
        run(program, tmp_path / "root", timeout_secs=10.0)
    deadline = time.monotonic() + 60
    # A killed child is init's to collect, which a container's may not do.
    while (state := _state(int(caught.value.output))) not in ("", "Z"):
        assert time.monotonic() < deadline, f"the child is still there: {state}"
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it goes while it is read
        return ""


@pytest.mark.parametrize(
    "wrong",
    [
        {"call": "read"},
        {"action": "EWHAT"},
        {"nth": 0},
        {"times": -1},
        {"secs": -1.0},
        {"call": "fsync", "action": "short_write"},
        {"action": "kill_midway"},
        {"process": "RANK"},
    ],
)
def test_a_fault_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.OptionError, match=r"got|not known"):
        Fault(**wrong)


def test_without_a_compiler_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(errors.OptionError, match="'no-such-compiler'") as caught:
        _compiling.compiled.__wrapped__()
    assert caught.value.kind == "faults_unavailable"
    monkeypatch.setenv("CC", "false")
    with pytest.raises(errors.OptionError, match="could not be built"):
        _compiling.compiled.__wrapped__()
    monkeypatch.delenv("CC")
    built = _compiling.compiled.__wrapped__()
    assert built.parent == tmp_path / "cache/cnr_jax" and built.exists()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert _compiling.compiled.__wrapped__() == built
    # A library that others could have put there is not loaded.
    built.parent.chmod(0o777)
    with pytest.raises(errors.OptionError, match="'no-such-compiler'"):
        _compiling.compiled.__wrapped__()


SAVING = """
import sys
import jax.numpy as jnp, cnr_jax as cnr
state = {"item": jnp.zeros((16, 4)), "w": jnp.ones(3)}
with cnr.CheckpointManager(sys.argv[1], tables=cnr.find_tables(state, ["item"])) as manager:
    manager.save(0, args=cnr.args.Save(state))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_calls_of_a_save_are_those_that_strace_sees(tmp_path: Path) -> None:
    program = [sys.executable, "-c", SAVING]
    env = {"JAX_PLATFORMS": "cpu"}
    ran = faults.run([*program, str(tmp_path / "a")], below=tmp_path / "a", env=env)
    assert ran.returncode == 0, ran.stderr
    subprocess.run(
        ["strace", "-f", "-yy", "-o", tmp_path / "trace", *program, tmp_path / "b"],
        env={**os.environ, **env},
        check=True,
    )
    seen = Counter(
        kind
        for line in (tmp_path / "trace").read_text(errors="replace").splitlines()
        if (kind := _kind(line, str(tmp_path / "b")))
    )
    assert Counter(call.call for call in ran.calls) == seen


def _kind(line: str, root: str) -> str:
    found = re.match(r"\d+ +(\w+)\((.*)", line)
    if found is None or root not in found[2]:
        return ""
    name, arguments = found.groups()
    if name in ("openat", "open"):
        return "open" if re.search("O_WRONLY|O_RDWR|O_CREAT", arguments) else ""
    if name == "unlinkat" and "AT_REMOVEDIR" in arguments:
        return "rmdir"
    names = {"pwrite64": "write", "writev": "write", "fdatasync": "fsync"}
    name = names.get(name, name).removesuffix("at2").removesuffix("at")
    return name if name in faults.CALLS else ""


EVERY_LOOK = """
import os
folder = os.open("d", os.O_RDONLY)
os.stat("d"); os.lstat("d/a"); os.stat("a", dir_fd=folder); os.fstat(folder)
os.listdir("d"); os.listdir(folder)
open("d/a").close()
os.stat("../root/d/none") if os.path.exists("d/none") else os.stat("..")
"""
LOOKED = """
open_read d
stat d
stat d/a
stat d/a
scandir d
scandir d
open_read d/a
stat d/none
""".split("\n")[1:-1]


def looked(ran: faults.Ran, root: Path) -> list[str]:
    calls = [call for call in ran.calls if call.path != str(root.resolve())]
    return [f"{call.call} {os.path.relpath(call.path, root)}" for call in calls]


def test_every_look_is_counted_where_it_is_asked_for(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "d" / "a").touch()
    ran = run(EVERY_LOOK, root, looks=True)
    assert ran.returncode == 0, ran.stderr
    assert looked(ran, root) == LOOKED
    assert run(EVERY_LOOK, root).calls == ()


@pytest.mark.parametrize("kind", faults.LOOKS)
def test_any_look_of_any_program_can_fail(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    (root / "d" / "a").touch()
    fault = Fault(kind, nth=2, action="ESTALE", match="/d")
    ran = run(EVERY_LOOK, root, fault)
    assert ran.returncode == 1
    assert os.strerror(errno.ESTALE) in ran.stderr
    assert [call.call for call in ran.hits] == [kind]
    assert looked(ran, root)[-1] == [x for x in LOOKED if x.startswith(kind)][1]


def test_programs_that_are_no_python_are_seen_to_look(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    ran = faults.run(["ls", "-l", str(root / "d")], below=root, looks=True)
    assert {call.call for call in ran.calls} == {"stat", "scandir"}
    fault = Fault("scandir", action="EACCES")
    ran = faults.run(["ls", str(root / "d")], below=root, fault=fault)
    assert ran.returncode != 0
    assert os.strerror(errno.EACCES) in ran.stderr
