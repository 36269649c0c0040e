"""Plain Orbax in a bucket of Google Cloud Storage, before this library saves there and beside it.

Plain Orbax writes to `gs://`, through `gcsfs` and TensorStore, which speak Google's JSON: the
service is `fake-gcs-server`, where `CNR_GS_SERVER` names it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from etils.epath import backend
from orbax.checkpoint import v1

import cnr_jax as cnr
from cnr_jax.format import names
from cnr_jax.repository.store import exists, names_in, store_of

from .bucket_proxy import UploadProxy
from .conftest import case_of, free_port
from .test_adopt import KINDS, STEPS, adopting, in_item, out_of, same, state_at
from .test_bucket_rollbacks import rolled_back, shown

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.environ.get("CNR_GS_SERVER") != "fake-gcs-server",
        reason="CNR_GS_SERVER does not name the one service that plain Orbax knows",
    ),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One for all tests here, as clients go on with the one that they have met first."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        # Else gcsfs, once imported, looks for credentials of another service at each look.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        for name in ("obstore", "gcsfs"):
            pytest.importorskip(name)
        patch.syspath_prepend(Path(__file__).parent / "benchmarks")
        stores = importlib.import_module("object_stores")
        proxy = stack.enter_context(
            contextlib.closing(UploadProxy(f"http://127.0.0.1:{port}"))
        )
        url = stack.enter_context(stores.fake_gcs(port, proxy.url))
        for name in ("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"):
            patch.setenv(name, proxy.url)
        patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        patch.setenv("NO_GCE_CHECK", "true")
        yield url


@pytest.fixture
def root(service: str) -> epath.Path:
    name = f"bucket-{secrets.token_hex(8)}"
    importlib.import_module("object_stores").make_google_bucket(service, name)
    return epath.Path(f"gs://{name}/runs/42")


def see_anew(root: epath.Path) -> None:
    """As in a new program: gcsfs, of which Orbax asks what is there, keeps what it has listed."""
    backend.fsspec_backend.fs(str(root)).invalidate_cache()


def plain_steps(root: epath.Path) -> list[int]:
    """What both of Orbax's managers list, which agree."""
    see_anew(root)
    with ocp.CheckpointManager(root) as plain:
        found = plain.all_steps()
        assert plain.latest_step() == max(found, default=None)
    see_anew(root)
    with v1.training.Checkpointer(str(root)) as checkpointer:
        assert sorted(each.step for each in checkpointer.checkpoints) == sorted(found)
    return sorted(found)


def objects(root: epath.Path) -> dict[str, bytes]:
    """All that lies below a folder of a bucket."""
    store, found = store_of(root), dict[str, bytes]()
    for name in names_in(root):
        below = objects(root / name)
        found |= {f"{name}/{path}": data for path, data in below.items()}
        if not below and exists(root / name):
            found[name] = store.read(root / name)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_in_a_root_that_orbax_has_saved_there(
    root: epath.Path, kind: str
) -> None:
    save, _, ours = KINDS[kind]
    save(root)  # type: ignore[arg-type]
    before = objects(root)
    assert f"3/{names.ORBAX_COMMITTED}" in before
    state = state_at(0)
    tables = cnr.find_tables(state, ["user"])
    asked = in_item(ours, cnr.args.Restore(state))
    keep = ocp.checkpoint_managers.LatestN(2)
    with adopting(root, tables, preservation_policy=keep) as manager:  # type: ignore[arg-type]
        assert manager.all_steps() == [*STEPS]
        same(out_of(ours, manager.restore(2, args=asked)).state, state_at(2))
        state, touched = out_of(ours, manager.restore(None, args=asked))
        same(state, state_at(3))
        assert objects(root) == before, "who restores writes nothing"
        truth: dict[int, Any] = {}
        for step in (4, 5, 6):
            touched = cnr.record(touched, {"user": jnp.array([step])})
            state = {**state, "user": state["user"].at[step].add(1.0)}
            assert manager.save(step, args=in_item(ours, cnr.args.Save(state, touched)))
            manager.wait_until_finished()
            truth[step] = np.asarray(state["user"])
            report = manager.last_report
            assert report and report.kind == ("full" if step == 4 else "delta")
            if step == 4:
                assert manager.all_steps() == [1, 2, 3, 4]
                after = objects(root)
                assert {k: after.get(k) for k in before} == before
        assert manager.all_steps() == [4, 5, 6]
    assert not {"1", "2", "3"} & {path.partition("/")[0] for path in objects(root)}
    with adopting(root, tables) as manager:  # type: ignore[arg-type]
        for step, want in truth.items():
            got = out_of(ours, manager.restore(step, args=asked)).state
            np.testing.assert_array_equal(got["user"], want)
    assert cnr.verify(root) == ()
    assert plain_steps(root) == [4, 5, 6]


def test_plain_orbax_lists_no_wrong_step_after_a_rollback(
    tiny_run: Any, root: epath.Path
) -> None:
    run, store = tiny_run(), store_of(root)
    with run.open(str(root)) as manager:
        run.run(manager, range(4))
        assert plain_steps(root) == [0, 1, 2, 3]
        rolled_back(run, manager, 1, [2])
        assert plain_steps(root) == [0, 1], "neither the one left behind nor the new"
        run.run(manager, [3, 4])
        assert plain_steps(root) == [0, 1, 4]
        assert manager.all_steps() == [0, 1, 2, 3, 4]
    assert shown(root) == ["0", "1", "2.g2.branch", "3.g2.branch", "4"]
    # As if killed between the commit of a step and the marker that plain Orbax looks for.
    store.remove_file(root / "4" / names.ORBAX_COMMITTED)
    assert plain_steps(root) == [0, 1]
    with run.open(str(root)) as manager:
        assert manager.all_steps() == [0, 1, 2, 3, 4]
        run.restore(manager, None)
        run.same(run.state, run.truth[4])
        run.run(manager, [5])
        for step in range(6):
            run.check(manager, step)
    assert plain_steps(root) == [0, 1, 4, 5]


def test_plain_orbax_restores_our_steps_there(tiny_run: Any, root: epath.Path) -> None:
    """It finds the handler of a step by what is saved in it."""
    run = tiny_run()
    with run.open(str(root)) as manager:
        run.run(manager, range(3))
    see_anew(root)
    for args in (None, cnr.args.Restore(run.state)):
        with case_of(args), ocp.CheckpointManager(root) as plain:
            got = plain.restore(2, args=args)
            run.same(jax.tree.map(jnp.asarray, got.state), run.truth[2])
