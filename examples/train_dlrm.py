"""Trains a DLRM on flight delays, saves every ten steps, and goes on where it stopped.

    python examples/train_dlrm.py --root runs/dlrm
    python examples/train_dlrm.py --root runs/dlrm --steps 300
    python examples/train_dlrm.py --root runs/exact --codec raw
    python examples/train_dlrm.py --root runs/hashed --tracking fingerprint

Stop it as you like, and start it again: it restores the newest checkpoint, onto as many devices
as there are then. `kill_and_resume.py` does just that, and compares.

The model is Flax NNX. Its eight embedding tables are sharded by rows and trained with
`cnr.optim.rowwise_adagrad`, beside `optax.adagrad` for the dense layers: only rows that a
batch looks up are changed. Such training is what makes deltas small. Which rows changed
the optimizer says, and the train step records it; with `--tracking fingerprint` it records
nothing, and each save finds them by hashing all rows; with `audited` it records, and each
save checks that by hashing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from flights import TABLES, Batch, FlightBatches, load_flights
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cnr_jax as cnr

DIM = 16
HIDDEN = 64
ROW_MULTIPLE = 8  # rows are padded to a multiple of it, so 1, 2, 4 or 8 devices divide
SAVE_EVERY = 10
SPARSE_RATE = 0.05
DENSE_RATE = 0.02
# Gradients of a mean over a batch are small: they would be lost in the default of 0.1.
SPARSE_OPTIMIZER = cnr.optim.rowwise_adagrad(
    SPARSE_RATE, initial_accumulator_value=0, eps=1e-16
)
OPTIMIZER = optax.multi_transform(
    {"rows": cnr.optim.as_optax(SPARSE_OPTIMIZER), "dense": optax.adagrad(DENSE_RATE)},
    lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "rows" if is_table(path) else "dense", params
    ),
)

POLICIES = {
    "full": cnr.Full,
    "one-shot": cnr.OneShot,
    "consecutive": cnr.Consecutive,
    "intermittent": cnr.Intermittent,
}

TRACKING = ("recorded", "fingerprint", "audited")

State = dict[str, Any]


class DLRM(nnx.Module):
    """Bottom MLP, dot products of all pairs of vectors, top MLP."""

    def __init__(self, features: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.05)
        self.tables = nnx.Dict(
            {
                name: nnx.Embed(padded_rows(rows), DIM, embedding_init=init, rngs=rngs)
                for name, (_, rows) in TABLES.items()
            }
        )
        vectors = len(TABLES) + 1
        pairs = vectors * (vectors - 1) // 2
        self.bottom = nnx.Linear(features, HIDDEN, rngs=rngs)
        self.project = nnx.Linear(HIDDEN, DIM, rngs=rngs)
        self.top = nnx.Linear(pairs + DIM, HIDDEN, rngs=rngs)
        self.logit = nnx.Linear(HIDDEN, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(
        self, dense: jax.Array, vectors: list[jax.Array], key: jax.Array
    ) -> jax.Array:
        """Logits float32[batch] of looked-up vectors, with dropout drawn from `key`."""
        x = nnx.relu(self.project(nnx.relu(self.bottom(dense))))
        stacked = jnp.stack([x, *vectors], axis=1)
        products = jnp.einsum("bnd,bmd->bnm", stacked, stacked)
        first, second = np.triu_indices(stacked.shape[1], k=1)
        x = jnp.concatenate([x, products[:, first, second]], axis=1)
        x = self.dropout(nnx.relu(self.top(x)), rngs=nnx.Rngs(dropout=key))
        return self.logit(x)[:, 0]


def padded_rows(rows: int) -> int:
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def is_table(path: tuple[Any, ...]) -> bool:
    return "tables" in jax.tree_util.keystr(path, simple=True, separator="/").split("/")


def init_state(features: int, seed: int) -> State:
    """The whole train state: everything that a resumed run needs but the reader."""
    key, sub = jax.random.split(jax.random.key(seed))
    params = nnx.state(DLRM(features, rngs=nnx.Rngs(sub)))
    return {
        "params": params,
        # Slots have the path of their table behind their own: they are found by that.
        "opt_state": OPTIMIZER.init(params),
        "step": jnp.zeros((), jnp.int32),
        "key": key,
    }


def state_shardings(abstract: State, mesh: Mesh) -> State:
    """Tables and their slots are cut by rows; all else is on every device."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P("shard") if is_table(path) and leaf.ndim else P())

    return jax.tree_util.tree_map_with_path(sharding, abstract)


def make_train_step(features: int, shardings: State) -> Callable[..., Any]:
    """The jitted step: (state, touched, batch) -> (state, touched, (loss, logits)).

    It records nothing if `touched` is None.
    """
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: DLRM(features, rngs=nnx.Rngs(0))))
    everywhere = shardings["step"]

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(shardings, None, None))
    def train_step(state: State, touched: cnr.Touched | None, batch: Batch) -> Any:
        # Every device has the ids and the vectors of the whole batch. Were they cut as the
        # batch is, the gradients of whole tables would be summed over the devices.
        columns = jax.lax.with_sharding_constraint(batch["ids"], everywhere).T
        ids = dict(zip(TABLES, columns, strict=True))
        key, dropout_key = jax.random.split(state["key"])

        def loss_fn(params: nnx.State) -> Any:
            model = nnx.merge(graphdef, params)
            vectors = [model.tables[name](ids[name]) for name in TABLES]
            vectors = jax.lax.with_sharding_constraint(vectors, everywhere)
            logits = model(batch["dense"], vectors, dropout_key)
            losses = optax.sigmoid_binary_cross_entropy(logits, batch["label"])
            return losses.mean(), logits

        params = state["params"]
        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = OPTIMIZER.update(
            grads, state["opt_state"], params, ids=ids
        )
        if touched is not None:
            touched = cnr.record(touched, cnr.optim.moved_rows(updates))
        state = {
            "params": optax.apply_updates(params, updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
            "key": key,
        }
        return state, touched, (loss, logits)

    return train_step


class Watch:
    """Told what happens in a run; this one prints it."""

    def restored(self, state: State) -> None:
        print(f"  restored step {int(state['step'])}", flush=True)

    def stepped(self, loss: Any, logits: Any, batch: Batch) -> None:
        """After each train step: a batch is scored before it is learnt from."""

    def saving(self, step: int, state: State) -> None:
        """Before the state of a step is saved."""

    def saved(self, save: cnr.SaveReport) -> None:
        print(f"  {save}", flush=True)


def train(options: argparse.Namespace, watch: Watch) -> None:
    """Trains to the last step, from the newest checkpoint under the root if any."""
    jax.config.update("jax_num_cpu_devices", options.devices)
    devices = jax.devices()[: options.devices]
    if ROW_MULTIPLE % len(devices):
        sys.exit(f"{len(devices)} devices do not divide {ROW_MULTIPLE} rows")
    mesh = Mesh(np.array(devices), ("shard",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("shard"))

    flights = load_flights()
    batches = grain.MapDataset.source(FlightBatches(flights)).repeat()
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    reader = iter(batches.to_iter_dataset(reading))
    features = flights["dense"].shape[1]

    abstract = jax.eval_shape(partial(init_state, features), 0)
    shardings = state_shardings(abstract, mesh)
    abstract = jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        abstract,
        shardings,
    )
    tables = cnr.find_tables(
        abstract,
        {name: cnr.TableSpec(rows=rows) for name, (_, rows) in TABLES.items()},
    )
    train_step = make_train_step(features, shardings)
    recording = options.tracking != "fingerprint"
    manager_options = cnr.Options(
        policy=POLICIES[options.policy](),
        codec=options.codec,
        bits=cnr.NOT_GIVEN if options.codec == "raw" else options.bits,
        tracking=options.tracking,
        on_save=watch.saved,
    )

    with cnr.CheckpointManager(
        options.root, tables=tables, options=manager_options, item="state"
    ) as manager:
        if manager.latest_step() is None:
            init = jax.jit(partial(init_state, features), out_shardings=shardings)
            state = init(options.seed)
            touched = cnr.init_touched(state, tables) if recording else None
        else:
            restored = manager.restore(
                None,
                args=ocp.args.Composite(
                    state=cnr.args.Restore(abstract),
                    data=grain.checkpoint.CheckpointRestore(reader),
                ),
            )
            state, touched = restored["state"]
            touched = touched if recording else None
            watch.restored(state)

        for step in range(int(state["step"]) + 1, options.steps + 1):
            batch = next(reader)
            state, touched, (loss, logits) = train_step(
                state, touched, jax.device_put(batch, by_rows)
            )
            watch.stepped(loss, logits, batch)
            if step % SAVE_EVERY == 0 or step == options.steps:
                watch.saving(step, state)
                # Tables, dense layers and reader go into one step: they are one cut.
                manager.save(
                    step,
                    args=ocp.args.Composite(
                        state=cnr.args.Save(state, touched),
                        data=grain.checkpoint.CheckpointSave(reader),
                    ),
                )
        manager.wait_until_finished()


def make_parser(description: str) -> argparse.ArgumentParser:
    """The options of a run."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--devices", type=int, default=8, help="at most; CPU: faked")
    parser.add_argument("--codec", default="adaptive", help="raw, asymmetric, adaptive")
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    parser.add_argument("--policy", default="intermittent", choices=sorted(POLICIES))
    parser.add_argument("--tracking", default="recorded", choices=TRACKING)
    parser.add_argument("--steps", type=int, default=159, help="159 are one pass")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    arguments = make_parser((__doc__ or "").partition("\n")[0])
    arguments.add_argument(
        "--root", required=True, help="of the checkpoints: a folder, or s3://..."
    )
    train(arguments.parse_args(), Watch())
