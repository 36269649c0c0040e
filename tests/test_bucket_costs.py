"""What saves in a bucket cost: requests and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from etils import epath

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.repository.layout import open_root
from cnr_jax.repository.store import is_directory, names_in, read_all

from .bucket_proxy import Proxy

record = jax.jit(cnr.record)


@pytest.mark.parametrize(("tables", "most"), [(1, 24), (100, 28)])
def test_requests_of_a_delta_hardly_grow_with_the_tables(
    bucket: epath.Path, proxy: Proxy, tables: int, most: int
) -> None:
    state: Any = {f"t{i:03d}": jnp.ones((64, 4)) for i in range(tables)}
    found, ids = cnr.find_tables(state, [*state]), jnp.arange(8)
    touched = cnr.init_touched(state, found)
    options = cnr.Options(codec="raw", policy=cnr.Consecutive())
    with cnr.CheckpointManager(
        f"{bucket}/run", tables=found, options=options
    ) as manager:
        for step in range(4):
            touched = record(touched, dict.fromkeys(state, ids))
            with proxy.counting() as counts:
                manager.save(step, args=cnr.args.Save(state, touched))
                manager.wait_until_finished()
        assert manager.last_report is not None
        assert manager.last_report.kind == "delta"
    assert sum(counts.values()) <= most, counts


def files_below(folder: Any) -> dict[str, int]:
    """Sizes of all files below a folder, by their paths."""
    found: dict[str, int] = {}
    for name in names_in(folder):
        path = folder / name
        if is_directory(path):
            found |= {f"{name}/{k}": size for k, size in files_below(path).items()}
        else:
            found[name] = len(read_all(path))
    return found


def test_a_step_takes_the_bytes_that_it_takes_on_a_disk(
    tiny_run: Any, bucket: epath.Path, tmp_path: Path
) -> None:
    """But for the names that commit it, and for numbers in manifests, such as seconds."""
    steps = []
    for root in (f"{bucket}/run", tmp_path / "run"):
        run = tiny_run()
        with run.open(root) as manager:
            run.run(manager, range(3))
        steps.append(files_below(open_root(root) / "2"))
    in_bucket, on_disk = steps
    marks = {names.ATTEMPT, names.ORBAX_COMMITTED}
    assert in_bucket.keys() - on_disk.keys() <= marks
    assert on_disk.keys() <= in_bucket.keys()
    for name in on_disk.keys() - marks:
        rough = 64 if name.endswith((".json", "METADATA")) else 0
        assert abs(on_disk[name] - in_bucket[name]) <= rough, name
