"""What a system under comparison does; see `peers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from measures import sync_tree

State = dict[str, Any]


class System:
    """Saves states under a root.

    Attributes:
        name: as in `peers.NAMES`.
        needs: packages it is made of, beside jax and Orbax.
        torch: whether states are of torch tensors.

    Args:
        root: an empty folder.
        state: from `prepare`; shows shapes and shardings.
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()
    torch: ClassVar[bool] = False

    def __init__(self, root: Path, state: State, **options: Any) -> None:
        if options:
            raise TypeError(f"{self.name} has no options, got {sorted(options)}")
        self.root = root
        self._last: int | None = None

    @classmethod
    def prepare(cls, state: State) -> State:
        """A state of `workload.table_state` as this system has it; for torch, a copy."""
        return state

    def save(self, step: int, state: State, touched: Any = None) -> None:
        """Saves; what the call takes is what training waits for, but see `stall.py`."""
        self._last = step
        self._save(step, state, touched)

    def wait(self) -> None:
        """Waits until the last save is complete and all of it is synced."""
        self._wait()
        if self._last is not None:
            sync_tree(self.step_path(self._last))

    def done(self) -> bool:
        """Whether the last save is complete; does not wait, and syncs nothing."""
        return True

    def restore(self, step: int, abstract: State) -> State:
        """What was saved, as it was placed.

        Args:
            step: that was saved.
            abstract: from `workload.abstract_of`; not used by systems of torch.
        """
        raise NotImplementedError

    def step_path(self, step: int) -> Path:
        """Where a step lies: a folder, or a file."""
        return self.root / str(step)

    def close(self) -> None:
        """Frees what is held."""

    def _save(self, step: int, state: State, touched: Any) -> None:
        raise NotImplementedError

    def _wait(self) -> None:
        pass


def flat(state: State, prefix: str = "") -> State:
    """Leaves by dotted path."""
    found: State = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
