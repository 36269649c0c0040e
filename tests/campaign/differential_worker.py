"""One process of the differential run, by whichever version of the package is on its path.

It draws every id from one seed, takes the time from one clock, kills itself at named moments, and
prints a line of JSON for each act: what it was told and what came of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

EPOCH_SECS = 1_750_000_000


class Draws:
    """What `secrets` gives, by the seed, the module that asks, and how often it has asked.

    By module, so that one more name drawn in one place changes nothing in the others.
    """

    def __init__(self, seed: str) -> None:
        self._seed, self._asked = seed, Counter[str]()

    def _bytes(self, count: int) -> bytes:
        name = Path(sys._getframe(2).f_code.co_filename).name
        key = f"{name}/{count}"
        self._asked[key] += 1
        text = f"{self._seed}/{key}/{self._asked[key]}"
        return hashlib.sha512(text.encode()).digest()[:count]

    def token_bytes(self, count: int) -> bytes:
        return self._bytes(count)

    def token_hex(self, count: int) -> str:
        return self._bytes(count).hex()

    def randbits(self, bits: int) -> int:
        return int.from_bytes(self._bytes(-(-bits // 8)), "big") % 2**bits


class Clock:
    """The module `time`, of which a day has no length: each act has its own minute."""

    def __init__(self, minute: int) -> None:
        self.minute = minute

    def time(self) -> float:
        return EPOCH_SECS + 60.0 * self.minute

    def perf_counter(self) -> float:
        return 60.0 * self.minute

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Killer:
    """Ends this process by SIGKILL at a moment of a save that Python can see.

    Moments: `begin` (the folder of the step is made), `manifest` (its manifest is opened), `commit`
    (it is renamed), `committed` (the call after that), `removal` (the first file of a removed step
    goes), `aside` (a step is set aside).
    """

    def __init__(self) -> None:
        self._moment, self._step, self._committed = "", -1, ""
        self._removes = False
        sys.addaudithook(self._see)

    def arm(self, moment: str, step: int) -> None:
        self._moment, self._step = moment, step

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if self._moment and self._is_met(event, args):
            self._moment = ""  # a kill is an event too
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_met(self, event: str, args: tuple[Any, ...]) -> bool:
        # An event comes before what it tells of.
        if self._committed and os.path.isdir(self._committed):
            return True
        if self._removes and event in ("os.remove", "os.rmdir", "shutil.rmtree"):
            return True
        names = [os.fsdecode(x) for x in args if isinstance(x, str | bytes)]
        if not names or event not in ("os.mkdir", "os.rename", "open"):
            return False
        path, to = Path(names[0]), Path(names[1] if event == "os.rename" else names[0])
        # The attempt may follow.
        temporary = f"{self._step}.orbax-checkpoint-tmp"
        is_renamed = event == "os.rename"
        match self._moment:
            case "begin":
                return event == "os.mkdir" and path.name.startswith(temporary)
            case "manifest":
                is_manifest = path.name.startswith("manifest.json")
                within = any(part.startswith(temporary) for part in path.parts)
                return event == "open" and is_manifest and within
            case "commit":
                return is_renamed and to.name == str(self._step)
            case "committed" if is_renamed and to.name == str(self._step):
                self._committed = str(to)
            case "aside":
                return is_renamed and ".abandoned-" in to.name
            case "removal" if is_renamed and ".removed-" in to.name:
                self._removes = True
        return False


def main() -> None:
    request = json.loads(sys.stdin.read())
    draws = Draws(request["seed"])
    for name in ("token_hex", "token_bytes", "randbits"):
        setattr(secrets, name, getattr(draws, name))
    import cnr_jax as cnr

    told = Path(request["package"])
    if told not in Path(cnr.__file__).parents:
        sys.exit(f"cnr_jax is {cnr.__file__}, expected one below {told}")
    _warm_up()
    clock = Clock(request["minute"])
    for name, module in list(sys.modules.items()):
        if name.startswith("cnr_jax") and getattr(module, "time", None) is time:
            module.time = clock  # type: ignore[attr-defined]
    if "roots" in request:
        for root in request["roots"]:
            say(root=root, **read_root(Path(root)))
        return
    run = Run(request, clock)
    try:
        for act in request["acts"]:
            clock.minute += 1
            run.do(**act)
    finally:
        run.close()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _warm_up() -> None:
    """Imports what the package imports late, so that all its modules get the clock."""
    import importlib
    import pkgutil

    import cnr_jax

    for found in pkgutil.walk_packages(cnr_jax.__path__, "cnr_jax."):
        if not found.name.startswith(("cnr_jax.cli", "cnr_jax.testing", "cnr_jax.__")):
            importlib.import_module(found.name)


def digests(state: Any) -> dict[str, str]:
    """A digest of the bits of each leaf, by its path; what it is comes first."""
    import jax
    import numpy as np

    found = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(keys)
        kind = type(leaf).__name__
        if hasattr(leaf, "dtype") and jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        bits = hashlib.sha256(array.tobytes()).hexdigest()[:16]
        found[name] = f"{kind} {array.dtype}{list(array.shape)} {bits}"
    return found


def told(error: Exception) -> list[str]:
    """The class of an error, what it is to branch on, and its first line; all of one by a name."""
    kind, text = str(getattr(error, "kind", "")), str(error)
    is_by_name = kind == "unsupported_version"
    return [type(error).__name__, kind, text if is_by_name else text.partition("\n")[0]]


def read_root(root: Path) -> dict[str, Any]:
    """What a manager that only reads gives of each step of a root, whether it lists it or not."""
    import orbax.checkpoint as ocp

    import cnr_jax as cnr

    steps: dict[str, Any] = {}
    options = ocp.CheckpointManagerOptions(read_only=True)
    with cnr.CheckpointManager(root, orbax_options=options) as manager:
        listed, latest = manager.all_steps(), manager.latest_step()
        for step in sorted(int(p.name) for p in root.iterdir() if p.name.isdigit()):
            try:
                state = manager.restore(step, args=cnr.args.Restore()).state
                steps[str(step)] = digests(state)
            except Exception as error:
                steps[str(step)] = told(error)
    problems = sorted([p.directory, p.file, p.kind] for p in cnr.verify(root))
    return {"listed": listed, "latest": latest, "steps": steps, "problems": problems}


class Run:
    """A training run: a manager, the state, and the touched rows."""

    def __init__(self, request: dict[str, Any], clock: Clock) -> None:
        import dataclasses

        import jax
        import orbax.checkpoint as ocp

        import cnr_jax as cnr

        self._root, self._seed = Path(request["root"]), request["seed"]
        self._mesh = jax.make_mesh((2,), ("rows",))
        self.state = self._first_state(int(request["state_seed"]))
        self._tables = cnr.find_tables(self.state, ["user", "item", "tiny"])
        self._killer = Killer()
        given = dict(request["options"])
        policy = given.pop("policy")
        given["policy"] = getattr(cnr, policy)()
        if "tables" in given:
            given["tables"] = {
                name: cnr.TableOptions(**each) for name, each in given["tables"].items()
            }
        if "rounding" in {field.name for field in dataclasses.fields(cnr.Options)}:
            given["rounding"] = "nearest"
        self._records = given.get("tracking") != "fingerprint"
        self.touched = (
            cnr.init_touched(self.state, self._tables) if self._records else None
        )
        orbax = ocp.CheckpointManagerOptions(**request["orbax"])
        self._manager = cnr.CheckpointManager(
            self._root,
            tables=self._tables,
            options=cnr.Options(**given),
            orbax_options=orbax,
        )

    def close(self) -> None:
        self._manager.close()

    def _first_state(self, seed: int) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp
        import numpy as np

        rng = np.random.default_rng(seed)
        rows = jax.NamedSharding(self._mesh, jax.P("rows"))
        shapes = {
            "user": ((600, 16), np.float32),
            "item": ((300, 8), jnp.bfloat16),
            "tiny": ((16, 4), np.float32),
        }
        params = {
            name: jax.device_put(rng.normal(size=shape).astype(dtype), rows)
            for name, (shape, dtype) in shapes.items()
        }
        acc = {
            name: jax.device_put(np.zeros(shape[0], np.float32), rows)
            for name, (shape, _) in shapes.items()
        }
        return {
            "params": params,
            "acc": acc,
            "net": {
                "w": jnp.asarray(rng.normal(size=(33, 5)), jnp.float32),
                "half": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
                "host": rng.integers(0, 9, size=11),
                "none": None,
            },
            "key": jax.random.key(seed),
            "count": 0,
            "rate": 0.5,
            "name": "run",
        }

    def do(self, act: str, **more: Any) -> None:
        """Does one act of the script, and says what came of it."""
        try:
            said = getattr(self, f"_{act}")(**more) or {}
        except Exception as error:
            said = {"error": told(error)}
        manager = self._manager
        listed = {"listed": manager.all_steps(), "latest": manager.latest_step()}
        say(act=act, **more, **said, **listed)

    def _kill(self, moment: str, step: int) -> None:
        self._killer.arm(moment, step)

    def _restore(self, step: int | None) -> dict[str, Any]:
        import cnr_jax as cnr

        restored = self._manager.restore(step, args=cnr.args.Restore(self.state))
        self.state = restored.state
        self.touched = restored.touched if self._records else None
        return {"count": self.state["count"], "state": digests(self.state)}

    def _save(self, step: int, full: bool, rows: int) -> dict[str, Any]:
        import cnr_jax as cnr

        self._train(step, rows)
        args = cnr.args.Save(self.state, self.touched, full=full)
        saved = self._manager.save(step, args=args)
        self._manager.wait_until_finished()
        report = self._manager.last_report
        kind = report.kind if report else ""
        return {"saved": saved, "kind": kind, "reason": report and report.reason}

    def _train(self, step: int, rows: int) -> None:
        import jax
        import numpy as np

        import cnr_jax as cnr

        rng = np.random.default_rng([rows, step])
        state = jax.tree.map(lambda x: x, self.state)
        ids = {}
        for name, table in state["params"].items():
            changed = rng.choice(len(table), min(rows, len(table) // 2), replace=False)
            ids[name] = changed.astype(np.int32)
            move = rng.normal(size=(len(changed), table.shape[1])).astype(table.dtype)
            for kind, more in (("params", move), ("acc", np.float32(1))):
                array = np.array(state[kind][name])
                array[changed] += more
                where = state[kind][name].sharding
                state[kind][name] = jax.device_put(array, where)
        if self.touched is not None:
            self.touched = cnr.record(self.touched, ids)
        state["net"]["w"] = state["net"]["w"] + np.float32(0.25)
        state["key"] = jax.random.fold_in(state["key"], step)
        state["count"] = step
        self.state = state

    def _delete(self, step: int) -> None:
        self._manager.delete(step)

    def _verify(self) -> dict[str, Any]:
        found = self._manager.verify()
        return {"problems": sorted([p.directory, p.file, p.kind] for p in found)}

    def _prune(self, keep: int) -> dict[str, Any]:
        import cnr_jax as cnr

        self._manager.close()
        plan = cnr.prune(self._root, keep=keep, delete=True)
        return {"gone": sorted([fate.name, fate.kind] for fate in plan.going)}


if __name__ == "__main__":
    main()
