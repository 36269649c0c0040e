"""Systems that save jax arrays: this library, Orbax, and numpy as the floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from system import State, System, flat


class _Managed(System):
    """A system with an Orbax manager."""

    manager: Any

    def _wait(self) -> None:
        self.manager.wait_until_finished()

    def done(self) -> bool:
        return self._last is None or self.step_path(self._last).exists()

    def close(self) -> None:
        self.manager.close()


class Cnr(_Managed):
    """This library. The first save is full, and so is each without `touched` that must be.

    Args:
        policy: `OneShot` by default: the later saves are deltas against the first one.
        bits: 2, 3, 4 or 8; None: the codec has none.
        codec: its name.
        options: more of `cnr.Options`.
    """

    codec: ClassVar[str] = "adaptive"
    bits: ClassVar[int | None] = 4
    compression: ClassVar[str | None] = None

    def __init__(self, root: Path, state: State, **options: Any) -> None:
        from workload import tables_of

        import cnr_jax as cnr

        super().__init__(root, state)
        given = {
            "codec": self.codec,
            "bits": self.bits,
            "compression": self.compression,
            "policy": cnr.OneShot(),
            "tracking": "recorded",
            **options,
        }
        self.tables = tables_of(state)
        self.manager = cnr.CheckpointManager(
            root, tables=self.tables, options=cnr.Options(**given)
        )

    def _save(self, step: int, state: State, touched: Any) -> None:
        import cnr_jax as cnr

        self.manager.save(step, args=cnr.args.Save(state, touched))

    def restore(self, step: int, abstract: State) -> State:
        import cnr_jax as cnr

        return self.manager.restore(step, args=cnr.args.Restore(abstract)).state


class Cnr4(Cnr):
    """4 bits, the default."""

    name = "cnr-4bit"


class Cnr4Zstd(Cnr4):
    """Arrays compressed by zstd."""

    name = "cnr-4bit-zstd"
    compression = "zstd"


class CnrLattice(Cnr4):
    """On a lattice, at the error of 4 bits."""

    name = "cnr-lattice"
    codec = "lattice"


class Cnr2(Cnr):
    """2 bits."""

    name = "cnr-2bit"
    bits = 2


class Cnr8(Cnr):
    """8 bits."""

    name = "cnr-8bit"
    bits = 8


class CnrRaw(Cnr):
    """Exact."""

    name = "cnr-raw"
    codec = "raw"
    bits = None


class Orbax(_Managed):
    """Orbax as it comes: OCDBT and zstd. `options` are those of its manager."""

    name = "orbax"

    def __init__(self, root: Path, state: State, **options: Any) -> None:
        import orbax.checkpoint as ocp

        super().__init__(root, state)
        self.manager = ocp.CheckpointManager(
            root, options=ocp.CheckpointManagerOptions(**options), **self._handler()
        )

    def _handler(self) -> dict[str, Any]:
        return {}

    def _save(self, step: int, state: State, touched: Any) -> None:
        import orbax.checkpoint as ocp

        self.manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, abstract: State) -> State:
        import orbax.checkpoint as ocp

        return self.manager.restore(step, args=ocp.args.StandardRestore(abstract))


class OrbaxUncompressed(Orbax):
    """Orbax without compression: more bytes, less time."""

    name = "orbax-uncompressed"

    def _handler(self) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        # What StandardSave and StandardRestore use, which do not hand the option on.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        registry = ocp.DefaultCheckpointHandlerRegistry()
        registry.add("default", ocp.args.PyTreeSave, handler)
        registry.add("default", ocp.args.PyTreeRestore, handler)
        return {"handler_registry": registry}

    def _save(self, step: int, state: State, touched: Any) -> None:
        import orbax.checkpoint as ocp

        self.manager.save(step, args=ocp.args.PyTreeSave(state))

    def restore(self, step: int, abstract: State) -> State:
        import orbax.checkpoint as ocp

        args = ocp.checkpoint_utils.construct_restore_args(abstract)
        return self.manager.restore(
            step, args=ocp.args.PyTreeRestore(abstract, restore_args=args)
        )


class Numpy(System):
    """`numpy.save` of every array: the floor."""

    name = "numpy"

    def _save(self, step: int, state: State, touched: Any) -> None:
        import numpy as np

        folder = self.step_path(step)
        folder.mkdir()
        for path, leaf in flat(state).items():
            np.save(folder / f"{path}.npy", np.asarray(leaf))

    def restore(self, step: int, abstract: State) -> State:
        import jax
        import numpy as np

        def load(path: Any, leaf: Any) -> Any:
            name = f"{jax.tree_util.keystr(path, simple=True, separator='.')}.npy"
            return jax.device_put(
                np.load(self.step_path(step) / name), getattr(leaf, "sharding", None)
            )

        return jax.tree_util.tree_map_with_path(load, abstract)
