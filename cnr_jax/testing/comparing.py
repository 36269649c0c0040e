"""Comparison of what a run has stored with its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import cnr_jax as cnr
from cnr_jax import errors
from cnr_jax.format.names import step_number
from cnr_jax.repository.store import AnyPath
from cnr_jax.testing import damage
from cnr_jax.testing.model import Model, Saved, Values, differences, same
from cnr_jax.testing.setup import Setup


class WrongError(errors.CnrError):
    """A run is not what its model says."""

    kind = "model"


def there_in(root: AnyPath) -> set[int]:
    """Returns the steps of a root that can be restored, of all its branches."""
    return {each.step for each in cnr.describe(root).steps if each.restorable}


class Comparison:
    """Compares a root, and managers of it, with a model; raises `WrongError` where they differ.

    It leaves the root as it was. A manager that restores goes on from there.

    Args:
        root: root of the checkpoints.
        setup: setup of the run.
        model: model of the run.
    """

    def __init__(self, root: AnyPath, setup: Setup, model: Model) -> None:
        self._root, self._setup, self._model = root, setup, model

    def listing(self, manager: cnr.CheckpointManager) -> None:
        """Checks that a manager lists the steps of the model, and has the same latest step."""
        listed, latest = set(manager.all_steps()), manager.latest_step()
        expected = self._model.branch(latest if latest in self._model.steps else None)
        # A manager need not list what its retention has dropped.
        unlisted = expected - listed - self._model.leaving
        if unlisted or not listed <= expected or latest not in self._model.latest():
            raise WrongError(
                f"got steps {sorted(listed)}, the latest {latest}\n"
                f"  expected {sorted(expected)} of {sorted(self._model.steps)},"
                f" the latest {self._model.latest()}"
            )

    def stored(self, root: AnyPath, steps: Mapping[int, Saved]) -> None:
        """Checks that each step restores bit for bit, by a manager that knows only what is stored.

        Args:
            root: root that holds these steps, and no others.
            steps: saves by the number of their step.
        """
        with self._setup.reader(root) as reader:
            if there_in(root) != set(steps):
                raise WrongError(
                    f"stored in {root} are steps {sorted(there_in(root))},"
                    f" expected {sorted(steps)}"
                )
            for step, saved in steps.items():
                self._expect(self._restored(reader, step), saved.values, step)
        harm = [
            str(problem)
            for problem in cnr.verify(root)
            if problem.consequence
            and step_number(problem.directory) not in self._model.foreign
        ]
        if harm:
            raise WrongError("verify finds what is not there\n  " + "\n  ".join(harm))

    def restored(
        self, manager: cnr.CheckpointManager, wanted: int | None, step: int
    ) -> Any:
        """Lets a manager restore `wanted`, and checks that it is what was saved as `step`."""
        restored = self._restored(manager, wanted)
        self._expect(restored, self._model.steps[step].values, step)
        return restored

    def damaged(
        self, file: damage.StoredFile, do: Callable[[Path], damage.Damage]
    ) -> bool:
        """Damages a stored file, checks that no wrong value is restored, and undoes the damage.

        Returns:
            Whether a step could not be restored.
        """
        refused = set()
        with damage.of_stored(file.path, do):
            with self._setup.reader(self._root) as reader:
                for step, saved in sorted(self._model.steps.items()):
                    if not self._restores(reader, step, saved, file):
                        refused.add(step)
            with self._setup.reader(self._root) as reader:
                self._falls_back(reader, file)
            problems = cnr.verify(self._root)
        found = {step_number(n) for problem in problems for n in problem.consequence}
        if not refused <= found:
            raise WrongError(
                f"steps {sorted(refused)} could not be restored, verify names"
                f" {sorted(found)}\n  damaged: {file.path}"
            )
        return bool(refused)

    def _restores(
        self,
        reader: cnr.CheckpointManager,
        step: int,
        saved: Saved,
        file: damage.StoredFile,
    ) -> bool:
        """Whether a step can be restored; it must be, unless it rests on the file."""
        try:
            restored = self._restored(reader, step)
        except Exception as error:
            if all(above.step != file.step for above in saved.chain()):
                raise WrongError(
                    f"step {step} does not rest on {file.path},"
                    f" but cannot be restored: {error}"
                ) from error
            return False
        self._expect(restored, saved.values, step)
        return True

    def _falls_back(
        self, reader: cnr.CheckpointManager, file: damage.StoredFile
    ) -> None:
        """Checks that `restore(None)` gives the newest step without the damage, or a newer one."""
        ordered = list(reversed(self._model.ordered()))
        whole = [
            all(above.step != file.step for above in saved.chain()) for saved in ordered
        ]
        allowed = ordered[: whole.index(True) + 1] if any(whole) else ordered
        try:
            values = values_of(self._restored(reader, None).state)
        except Exception as error:
            if any(whole):
                raise WrongError(
                    f"restore(None) did not pass over the damage of {file.path}: {error}"
                ) from error
            return
        if not any(same(values, saved.values) for saved in allowed):
            raise WrongError(
                f"restore(None) gave none of steps {[saved.step for saved in allowed]}"
                f"\n  damaged: {file.path}"
            )

    def _restored(self, manager: cnr.CheckpointManager, step: int | None) -> Any:
        return manager.restore(step, args=cnr.args.Restore(self._setup.state))

    def _expect(self, restored: Any, expected: Values, step: int) -> None:
        found = differences(values_of(restored.state), expected)
        if found:
            lines = "".join(f"\n  {line}" for line in found)
            raise WrongError(
                f"step {step} restored other values than were saved{lines}"
            )


def values_of(state: Any) -> dict[str, np.ndarray]:
    """Copies all leaves of a state to the host, by path.

    Example:
        >>> values_of({"a": np.float32(1)})
        {"['a']": array(1., dtype=float32)}
    """
    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): _host(leaf) for path, leaf in leaves}


def _host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf)
