"""The parts of Orbax that are relied on beyond its documented interface, in one place.

tests/test_orbax_assumptions.py names and tests each of them: the shape of temporary paths, that
a standard handler can be nested below an item, that directories are created while `async_save`
runs and what tells when they are there, which client the processes of a run coordinate through,
what an interrupt leaves behind, and that its paths are made from the one it is given.
"""

from cnr_jax.checkpointer.orbax_compat.dense import DenseStore as DenseStore
from cnr_jax.checkpointer.orbax_compat.dense import abstract_dense as abstract_dense
from cnr_jax.checkpointer.orbax_compat.dense import digest_of_local as digest_of_local
from cnr_jax.checkpointer.orbax_compat.dense import is_host_local as is_host_local
from cnr_jax.checkpointer.orbax_compat.dense import replicated as replicated
from cnr_jax.checkpointer.orbax_compat.directories import Directories as Directories
from cnr_jax.checkpointer.orbax_compat.exact import ExactPath as ExactPath
from cnr_jax.checkpointer.orbax_compat.logs import shorten_logs as shorten_logs
from cnr_jax.checkpointer.orbax_compat.logs import told_elsewhere as told_elsewhere
from cnr_jax.checkpointer.orbax_compat.places import (
    checkpoint_infos as checkpoint_infos,
)
from cnr_jax.checkpointer.orbax_compat.places import place_of as place_of
from cnr_jax.checkpointer.orbax_compat.places import refuse_pipes as refuse_pipes
from cnr_jax.checkpointer.orbax_compat.places import step_names as step_names
from cnr_jax.checkpointer.orbax_compat.processes import (
    COMMIT_BARRIERS as COMMIT_BARRIERS,
)
from cnr_jax.checkpointer.orbax_compat.processes import (
    distributed_client as distributed_client,
)
from cnr_jax.checkpointer.orbax_compat.processes import is_distributed as is_distributed
from cnr_jax.checkpointer.orbax_compat.seams import OrbaxSeams as OrbaxSeams
from cnr_jax.checkpointer.orbax_compat.tasks import (
    end_interrupted_tasks as end_interrupted_tasks,
)
