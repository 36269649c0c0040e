"""A large dense part against Orbax: seconds of a save's call, until it is durable, of a restore.

    python tests/benchmarks/dense_part.py [--quick] [--json PATH] [--repeats N]

The state is a small table and a dense part of 1 GiB (quick: 64 MiB) of float32: one leaf; 2,000
leaves; one that is split over 8 devices, or replicated on them; an array of numpy; one in memory of
the host. Both save such states in turns in one process, each save over when all of it is synced;
then both restore, the page cache warm, bit for bit. The newest step is kept. A call of `save` is
what training waits for. After each a train step donates the dense part (numpy: changes it in
place), and what that takes is told too: of a donated array that somebody looks at XLA makes another
one. Orbax is its own manager with `StandardSave`, as it comes and without compression.

A full run makes 3 turns in about 10 minutes, a quick one takes 60 s.
"""

from __future__ import annotations

import gc
import hashlib
import statistics
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
import peers
from harness import Case, Figures, PeakMemory, Results, print_mark, print_table
from system import State, System

BYTES, QUICK_BYTES = 1 << 30, 64 << 20
LEAVES, DEVICES = 2000, 8
# Saves of each after the first, and restores after the first.
SAVES, RESTORES = 4, 3
KINDS = ("one leaf", "2,000 leaves", "sharded", "replicated", "numpy", "host memory")
PEERS = ("orbax", "orbax-uncompressed")
SPANS = ("call", "step", "durable", "restore")
# Of each span against Orbax as it comes; None: told, not judged.
MOST = {"call": 1.05, "step": None, "durable": 1.05, "restore": 1.05}


class CnrDense(System):
    """This library, all of whose saves are full and exact."""

    name = "cnr"

    def __init__(self, root: Path, state: State) -> None:
        import orbax.checkpoint as ocp

        import cnr_jax as cnr

        super().__init__(root, state)
        options = cnr.Options(
            policy=cnr.Full(),
            codec="raw",
            tracking="fingerprint",
            preservation_policy=ocp.checkpoint_managers.LatestN(1),
            min_fulls=1,
        )
        tables = cnr.find_tables(state, {"user": "table"})
        self.manager = cnr.CheckpointManager(root, tables=tables, options=options)

    def _save(self, step: int, state: State, touched: Any) -> None:
        import cnr_jax as cnr

        self.manager.save(step, args=cnr.args.Save(state))

    def _wait(self) -> None:
        self.manager.wait_until_finished()

    def restore(self, step: int, abstract: State) -> State:
        import cnr_jax as cnr

        return self.manager.restore(step, args=cnr.args.Restore(abstract)).state

    def close(self) -> None:
        self.manager.close()


def plan(quick: bool) -> list[Case]:
    """The kinds of a dense part."""
    size = QUICK_BYTES if quick else BYTES
    kinds = ("one leaf", "sharded") if quick else KINDS
    return [Case(kind, {"kind": kind, "bytes": size}) for kind in kinds]


def make_state(kind: str, nbytes: int) -> State:
    """A table of 64 rows, and the dense part."""
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    where: Any = {
        "sharded": NamedSharding(mesh, P("x")),
        "replicated": NamedSharding(mesh, P()),
        "host memory": one.with_memory_kind("pinned_host"),
    }.get(kind, one)
    count = LEAVES if kind == "2,000 leaves" else 1
    rng = np.random.default_rng(0)
    rows = nbytes // count // 1024 // DEVICES * DEVICES
    block = rng.normal(size=(rows, 256)).astype(np.float32)
    leaves = [block + i for i in range(count)]
    if kind != "numpy":
        leaves = [jax.device_put(leaf, where) for leaf in leaves]
    table = jax.device_put(np.ones((64, 16), np.float32), one)
    return jax.block_until_ready({"table": table, "dense": leaves})


def child(params: dict[str, Any], root: Path) -> Figures:
    """Saves and restores of all in turns: medians, and their ratios."""
    harness.devices(DEVICES)
    import jax

    state = make_state(params["kind"], params["bytes"])
    systems = [CnrDense(root / "cnr", state)]
    systems += [peers.make(name, root / name, state, max_to_keep=1) for name in PEERS]
    spans: dict[str, list[list[float]]] = {n: [[] for _ in systems] for n in SPANS}
    extra: list[list[int]] = [[] for _ in systems]
    saved: list[list[str]] = [[] for _ in systems]
    for step in range(1 + SAVES):
        for i, system in enumerate(systems):
            if step == SAVES:
                saved[i] = digests(state)
            with PeakMemory() as memory:
                start = time.perf_counter()
                system.save(step, state)
                called = time.perf_counter()
                state = train_step(state)
                stepped = time.perf_counter()
                system.wait()
                durable = time.perf_counter()
            spans["call"][i].append(called - start)
            spans["step"][i].append(stepped - called)
            spans["durable"][i].append(durable - start)
            extra[i].append(memory.extra_bytes)
    abstract = jax.tree.map(abstract_of, state)
    del state
    for _ in range(1 + RESTORES):
        for i, system in enumerate(systems):
            gc.collect()
            start = time.perf_counter()
            found = jax.block_until_ready(system.restore(SAVES, abstract))
            spans["restore"][i].append(time.perf_counter() - start)
            assert digests(found) == saved[i], system.name
            del found
    for system in systems:
        system.close()
    figures: Figures = {}
    for name, of_systems in spans.items():
        medians = [statistics.median(found[1:]) for found in of_systems]
        for system, secs in zip(systems, medians, strict=True):
            figures[f"{system.name}_{name}_secs"] = secs
        for system, secs in zip(systems[1:], medians[1:], strict=True):
            figures[f"{name}_to_{system.name}"] = medians[0] / secs
    for system, found in zip(systems, extra, strict=True):
        figures[f"{system.name}_extra_bytes"] = statistics.median(found[1:])
    return figures


def train_step(state: State) -> State:
    """The next dense part, in the memory of this one; waits for it."""
    import jax

    leaves = []
    for leaf in state["dense"]:
        if isinstance(leaf, np.ndarray):
            leaf += 1
            leaves.append(leaf)
        else:
            leaves.append(_plus_one(leaf.sharding)(leaf))
    return jax.block_until_ready({**state, "dense": leaves})


def _plus_one(sharding: Any) -> Any:
    import jax

    if sharding not in _programs:
        _programs[sharding] = jax.jit(
            lambda x: jax.device_put(
                jax.device_put(x, sharding.with_memory_kind("device")) + 1, sharding
            ),
            donate_argnums=0,
        )
    return _programs[sharding]


_programs: dict[Any, Any] = {}


def abstract_of(leaf: Any) -> Any:
    """What a leaf is restored into."""
    import jax

    if isinstance(leaf, np.ndarray):
        return np.empty_like(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def digests(state: State) -> list[str]:
    """Digests of the dense leaves."""
    return [
        hashlib.sha256(np.ascontiguousarray(leaf)).hexdigest()
        for leaf in state["dense"]
    ]


def present(results: Results) -> None:
    """Tables and marks."""
    names = (CnrDense.name, *PEERS)
    header = ("dense part", "s of", *names, *(f"to {peer}" for peer in PEERS))
    lines = []
    for case in results:
        for span in SPANS:
            cells = [case.text(f"{name}_{span}_secs", "{:.3f}") for name in names]
            cells += [case.text(f"{span}_to_{peer}", "{:.2f}") for peer in PEERS]
            lines.append([case.label, span, *cells])
        cells = [case.text(f"{name}_extra_bytes", "{:.0f}", 1e-6) for name in names]
        lines.append([case.label, "(extra MB of a save)", *cells, "", ""])
    print_table("Saves and restores in turns: medians (ranges)", header, lines)
    for case in results:
        for span, most in MOST.items():
            if most is not None:
                ratio = case.median(f"{span}_to_{PEERS[0]}")
                print_mark(f"{case.label}: {span} against Orbax", ratio, most)


if __name__ == "__main__":
    harness.main(__doc__, plan, child, present, repeats=(3, 1))
