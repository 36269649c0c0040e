"""Systems that save torch tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from system import State, System, flat


class _Torch(System):
    """A system of torch: states are flat, by dotted path."""

    needs: ClassVar[tuple[str, ...]] = ("torch",)
    torch = True

    @classmethod
    def prepare(cls, state: State) -> State:
        import numpy as np
        import torch

        return {
            path: torch.from_numpy(np.array(leaf)) for path, leaf in flat(state).items()
        }


class Safetensors(_Torch):
    """`safetensors.torch.save_file`, one file."""

    name = "safetensors"
    needs = ("torch", "safetensors")

    def step_path(self, step: int) -> Path:
        return self.root / f"{step}.safetensors"

    def _save(self, step: int, state: State, touched: Any) -> None:
        from safetensors.torch import save_file

        save_file(state, self.step_path(step))

    def restore(self, step: int, abstract: State) -> State:
        from safetensors.torch import load_file

        # Otherwise tensors are the mapped file, and nothing has been read yet.
        return {k: v.clone() for k, v in load_file(self.step_path(step)).items()}


class DcpAsync(_Torch):
    """PyTorch's distributed checkpoint, `async_save` in a thread, files synced."""

    name = "dcp-async"
    _future: Any = None

    def _save(self, step: int, state: State, touched: Any) -> None:
        import torch.distributed.checkpoint as dcp

        self._wait()
        writer = dcp.FileSystemWriter(self.step_path(step), sync_files=True)
        self._future = dcp.async_save(state, storage_writer=writer, no_dist=True)

    def _wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def done(self) -> bool:
        return self._future is None or self._future.done()

    def restore(self, step: int, abstract: State) -> State:
        import torch
        import torch.distributed.checkpoint as dcp

        metadata = dcp.FileSystemReader(self.step_path(step)).read_metadata()
        into: State = {
            path: torch.empty(entry.size, dtype=entry.properties.dtype)  # type: ignore[union-attr]
            for path, entry in metadata.state_dict_metadata.items()
        }
        reader = dcp.FileSystemReader(self.step_path(step))
        dcp.load(into, storage_reader=reader, no_dist=True)
        return into


class TorchsnapshotAsync(_Torch):
    """`torchsnapshot.Snapshot.async_take`."""

    name = "torchsnapshot-async"
    needs = ("torch", "torchsnapshot")
    _pending: Any = None

    def _save(self, step: int, state: State, touched: Any) -> None:
        import torchsnapshot

        self._wait()
        self._pending = torchsnapshot.Snapshot.async_take(
            str(self.step_path(step)), {"state": torchsnapshot.StateDict(**state)}
        )

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()

    def done(self) -> bool:
        return self._pending is None or self._pending.done()

    def restore(self, step: int, abstract: State) -> State:
        import torch
        import torchsnapshot

        snapshot: Any = torchsnapshot.Snapshot(str(self.step_path(step)))
        shapes = {
            path.partition("state/")[2]: entry
            for path, entry in snapshot.get_manifest().items()
            if hasattr(entry, "shape")
        }
        into = torchsnapshot.StateDict(
            **{
                k: torch.empty(e.shape, dtype=_dtype(e.dtype))
                for k, e in shapes.items()
            }
        )
        snapshot.restore({"state": into})
        return dict(into)


def _dtype(name: str) -> Any:
    import torch

    return getattr(torch, name.removeprefix("torch."))
