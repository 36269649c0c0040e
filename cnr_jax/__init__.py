"""Check-N-Run for JAX: incremental, quantized checkpoints of embedding tables, in Orbax.

`find_tables` finds the tables in a train state. `record`, called in the train step, notes which
rows of them change. `CheckpointManager` saves those rows. README.md shows the first lines of code,
and cnr_jax/format/SPEC.md describes the files on disk.
"""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

# Type checkers and editors see where each name is from. When a program runs, a name is imported
# when it is first asked for. So a root can be looked into without jax, Orbax and TensorStore, which
# take seconds to import. Nearly everything else needs them.
if TYPE_CHECKING:
    from cnr_jax import args as args
    from cnr_jax import errors as errors
    from cnr_jax import goodput as goodput
    from cnr_jax import optim as optim
    from cnr_jax.checkpointer.restoring.restore import Restored as Restored
    from cnr_jax.checkpointer.trying.trial import try_bits as try_bits
    from cnr_jax.checkpointer.trying.tried import Loss as Loss
    from cnr_jax.checkpointer.trying.tried import TriedBits as TriedBits
    from cnr_jax.checkpointer.trying.tried import TriedWidth as TriedWidth
    from cnr_jax.checkpointer.tuning import tune as tune
    from cnr_jax.exporting.export import Exported as Exported
    from cnr_jax.exporting.export import export as export
    from cnr_jax.given import NOT_GIVEN as NOT_GIVEN
    from cnr_jax.given import TableOptions as TableOptions
    from cnr_jax.goodput.advice import advise as advise
    from cnr_jax.handler import handler_registry as handler_registry
    from cnr_jax.importing import import_orbax as import_orbax
    from cnr_jax.manager import CheckpointManager as CheckpointManager
    from cnr_jax.measuring import measure_store as measure_store
    from cnr_jax.options import Options as Options
    from cnr_jax.policy import Consecutive as Consecutive
    from cnr_jax.policy import Decision as Decision
    from cnr_jax.policy import Full as Full
    from cnr_jax.policy import IncrementLog as IncrementLog
    from cnr_jax.policy import Intermittent as Intermittent
    from cnr_jax.policy import OneShot as OneShot
    from cnr_jax.policy import SaveRecord as SaveRecord
    from cnr_jax.policy import expected_restores as expected_restores
    from cnr_jax.repository.compaction.compact import CompactionPlan as CompactionPlan
    from cnr_jax.repository.compaction.compact import compact as compact
    from cnr_jax.repository.compaction.compact import plan_compaction as plan_compaction
    from cnr_jax.repository.describe import describe as describe
    from cnr_jax.repository.description import LeafDescription as LeafDescription
    from cnr_jax.repository.description import RootDescription as RootDescription
    from cnr_jax.repository.description import StepDescription as StepDescription
    from cnr_jax.repository.description import TableDescription as TableDescription
    from cnr_jax.repository.metrics import read_metrics as read_metrics
    from cnr_jax.repository.mirroring.once import mirror as mirror
    from cnr_jax.repository.mirroring.report import MirrorReport as MirrorReport
    from cnr_jax.repository.reading import changed_rows as changed_rows
    from cnr_jax.repository.reading import read_rows as read_rows
    from cnr_jax.repository.upkeep.prune import Fate as Fate
    from cnr_jax.repository.upkeep.prune import PrunePlan as PrunePlan
    from cnr_jax.repository.upkeep.prune import prune as prune
    from cnr_jax.repository.upkeep.verify import Problem as Problem
    from cnr_jax.repository.upkeep.verify import verify as verify
    from cnr_jax.rows.lookups import Lookup as Lookup
    from cnr_jax.rows.touched import Touched as Touched
    from cnr_jax.rows.touched import init_touched as init_touched
    from cnr_jax.rows.touched import record as record
    from cnr_jax.rows.touched import reset_touched as reset_touched
    from cnr_jax.simulation import ByteModel as ByteModel
    from cnr_jax.simulation import Schedule as Schedule
    from cnr_jax.simulation import Simulation as Simulation
    from cnr_jax.simulation import simulate as simulate
    from cnr_jax.state.find import find_tables as find_tables
    from cnr_jax.state.layouts import Identity as Identity
    from cnr_jax.state.layouts import ModSharded as ModSharded
    from cnr_jax.state.table import Tables as Tables
    from cnr_jax.state.table import TableSpec as TableSpec
    from cnr_jax.telemetry import RestoredTable as RestoredTable
    from cnr_jax.telemetry import RestoreReport as RestoreReport
    from cnr_jax.telemetry import SaveReport as SaveReport

    __version__: str

# Public names by the module they are from; those that are not here are modules themselves.
_HOMES = {
    "checkpointer.tuning": "tune",
    "checkpointer.restoring.restore": "Restored",
    "checkpointer.trying.trial": "try_bits",
    "checkpointer.trying.tried": "Loss TriedBits TriedWidth",
    "manager": "CheckpointManager",
    "given": "NOT_GIVEN TableOptions",
    "exporting.export": "Exported export",
    "goodput.advice": "advise",
    "importing": "import_orbax",
    "measuring": "measure_store",
    "options": "Options",
    "policy": "Consecutive Decision Full IncrementLog Intermittent OneShot SaveRecord"
    " expected_restores",
    "handler": "handler_registry",
    "repository.compaction.compact": "CompactionPlan compact plan_compaction",
    "repository.describe": "describe",
    "repository.description": "LeafDescription RootDescription StepDescription TableDescription",
    "repository.metrics": "read_metrics",
    "repository.mirroring.once": "mirror",
    "repository.mirroring.report": "MirrorReport",
    "repository.reading": "changed_rows read_rows",
    "repository.upkeep.prune": "Fate PrunePlan prune",
    "repository.upkeep.verify": "Problem verify",
    "rows.lookups": "Lookup",
    "rows.touched": "Touched init_touched record reset_touched",
    "simulation": "ByteModel Schedule Simulation simulate",
    "state.find": "find_tables",
    "state.layouts": "Identity ModSharded",
    "state.table": "TableSpec Tables",
    "telemetry": "RestoredTable RestoreReport SaveReport",
}

# Not for type checkers: to them every name would be there.
if not TYPE_CHECKING:
    __all__ = sorted(f"args errors goodput optim {' '.join(_HOMES.values())}".split())

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version("cnr-jax")  # as pyproject.toml has it, the one place
        home = next((home for home in _HOMES if name in _HOMES[home].split()), None)
        if home is None:
            module = f"{__name__}.{name}"
            if name.startswith("_") or importlib.util.find_spec(module) is None:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            if name == "args":
                # It tells Orbax which handler takes these arguments.
                importlib.import_module(f"{__name__}.handler")
            return importlib.import_module(module)
        found = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = found
        return found

    if "orbax.checkpoint" in sys.modules:
        # A plain manager of Orbax that meets our steps looks for their handler.
        importlib.import_module(f"{__name__}.handler")

    def __dir__() -> list[str]:
        # As in numpy and scipy: what this module imports for its own use is not offered.
        return sorted([*__all__, "__version__"])
