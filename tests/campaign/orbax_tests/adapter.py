"""This library's manager under the name of Orbax's, for the tests of Orbax's own manager.

`run.py` lays this beside those tests as their `conftest.py`. What a program would change that
goes over to this library is changed here, and nothing else: the state is saved by `Save`, a new
manager of a root that is used restores before it saves, and a restored state comes without its
touched rows. Arguments of a manager that this library does not take skip a test.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import orbax.checkpoint as ocp
import orbax.checkpoint._src.testing as helpers
import pytest
from absl import flags
from orbax.checkpoint import checkpoint_manager

import cnr_jax as cnr

with socket.socket() as bound:
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
flags.FLAGS(["tests"])
# What the tests are made with is not in the package that is installed.
helpers.__path__.append(str(Path(__file__).parent / "helpers"))

SAVED = ocp.args.StandardSave, ocp.args.PyTreeSave
# Tests in which a manager restored before its first save, as `UsedRootError` asks.
RESTORED_FIRST = set[str]()


class Ours(cnr.CheckpointManager):
    """A manager of a state without tables, called as Orbax's."""

    def __init__(
        self,
        directory: Any,
        checkpointers: Any = None,
        options: ocp.CheckpointManagerOptions | None = None,
        metadata: Any = None,
        item_names: Any = None,
        **others: Any,
    ) -> None:
        others["checkpointers"] = checkpointers
        if used := sorted(k for k, v in others.items() if v is not None):
            pytest.skip(f"not taken: {', '.join(used)}")
        named = [item_names] if isinstance(item_names, str) else item_names
        super().__init__(
            directory,
            tables=cnr.Tables({}),
            options=cnr.Options(policy=cnr.Full()),
            orbax_options=options,
            item="params" if "params" in (named or ()) else None,
            metadata=metadata,
        )

    def save(self, step: int, *items: Any, args: Any = None, **others: Any) -> bool:
        if items or others.get("items") is not None:
            pytest.skip("not taken: items without args")
        own = self._own(args)
        try:
            return super().save(step, args=own, **others)
        except cnr.errors.UsedRootError:
            RESTORED_FIRST.add(os.environ["PYTEST_CURRENT_TEST"])
            super().restore(None)
            return super().save(step, args=own, **others)

    def _own(self, args: Any) -> Any:
        """The arguments of a save with the state, which is one item, in this library's."""
        if isinstance(args, SAVED):
            return cnr.args.Save(args.item)
        if not isinstance(args, ocp.args.Composite):
            return args
        states = [name for name, each in args.items() if isinstance(each, SAVED)]
        known = self._listing.item
        state = known if known in states else next(iter(states), None)
        given = {k: self._own(v) if k == state else v for k, v in args.items()}
        return ocp.args.Composite(**given)

    def restore(self, step: int | None, *items: Any, args: Any = None, **o: Any) -> Any:
        if items or o.get("items") is not None:
            pytest.skip("not taken: items without args")
        found = super().restore(step, args=args, **o)
        if isinstance(found, ocp.args.Composite):
            return ocp.args.Composite(**{k: _state(v) for k, v in found.items()})
        return _state(found)


def _state(found: Any) -> Any:
    return found.state if isinstance(found, cnr.Restored) else found


if os.environ["MANAGER"] == "ours":
    checkpoint_manager.CheckpointManager = Ours


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = yield
    name = f"{item.nodeid} (call)"
    if name in RESTORED_FIRST:
        report.user_properties.append(("restored first", "yes"))
    return report
