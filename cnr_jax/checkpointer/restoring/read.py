"""A restore from the step directory to the train state that was asked for.

Nothing here changes a handler: what a restore means for the saves after it is the handler's.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
from jax.sharding import Sharding

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.dense import DenseStore, abstract_dense
from cnr_jax.checkpointer.orbax_compat.places import place_of
from cnr_jax.checkpointer.restoring import match
from cnr_jax.format import names
from cnr_jax.repository.checked import Seal, means_damage
from cnr_jax.repository.files import AnyPath
from cnr_jax.repository.step_reader import StepReader, open_chain
from cnr_jax.rows.touched import Touched, seeded
from cnr_jax.state.table import Tables, check_tables


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """What a restore returns.

    Attributes:
        state: in the structure that was asked for; nested dicts by path if none was.
        touched: goes on with the state: pass both to the next train step.
    """

    state: Any
    touched: Touched

    def __iter__(self) -> Any:
        """Unpacks as `state, touched`."""
        return iter((self.state, self.touched))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """All that this process reads of a restored step: only computation is left to do.

    Attributes:
        chain: the full checkpoint first, the restored one last.
        state: gives the structure of the restored state.
        tables: where the tables are in the restored state.
        wanted: what was asked for and is there.
        arrays: tables and slots, by table and leaf.
        dense: everything else, as nested dicts.
        stamps: shardings and values of the stamps of the touched rows.
    """

    chain: tuple[StepReader, ...]
    state: Any
    tables: Tables
    wanted: match.Wanted
    arrays: dict[str, dict[str, jax.Array]]
    dense: Any
    stamps: tuple[dict[str, Sharding], dict[str, Any]]

    def put_together(self) -> Restored:
        """The state that was asked for, and touched rows in a fresh lineage.

        With several processes each must make this call: they draw the lineage together.
        """
        touched = seeded(self.tables, *self.stamps, len(self.chain) - 1)
        whole = match.assemble(
            self.state, self.wanted, self.tables, self.arrays, self.dense
        )
        return Restored(whole, touched)


def read_back(
    directory: AnyPath,
    state: Any,
    tables: Tables | None,
    dense: DenseStore,
    *,
    partial: bool,
    cast: bool,
    verify: bool,
) -> ReadBack:
    """Reads a step and all it rests on; nothing is communicated between processes.

    Args:
        directory: of the item.
        state: what is asked for; None for everything, by path, on one device.
        tables: where the tables are in `state`.
        dense: reads what is not a table.
        partial: restore what both the checkpoint and `state` have.
        cast: convert tables also to dtypes that cannot hold all values.
        verify: compare every chunk with the manifest.

    Raises:
        ChainError, IntegrityError, FormatError: if the step is damaged.
        StateMismatchError: if the state asked for does not match.
    """
    place = place_of(directory)
    chain = open_chain(place.root, place.directory, place.item, verify=verify)
    seal = chain[-1].check_dense()
    manifest = chain[-1].manifest
    everything = state is None
    if everything:
        tables = match.tables_of(manifest)
        state = match.abstract_state(manifest, tables)
    if tables is None:
        raise errors.OptionError(
            "restoring into a state needs to know its tables\n"
            "  hint: Restore(state, tables=cnr_jax.find_tables(state, ...))"
        )
    check_tables(tables)
    wanted = match.match(
        manifest, state, tables, partial=partial, cast=cast, step=place.directory
    )
    return ReadBack(
        chain=chain,
        state=state,
        tables=tables,
        wanted=wanted,
        arrays=match.rebuild(chain, wanted),
        dense=_restore_dense(dense, directory, wanted, everything, seal),
        stamps=match.read_stamps(chain, wanted, tables),
    )


def _restore_dense(
    dense: DenseStore,
    directory: AnyPath,
    wanted: match.Wanted,
    everything: bool,
    seal: Seal,
) -> Any:
    """The dense leaves from the files that were checked, if they are still the same.

    Raises:
        IntegrityError: if the files have changed, or Orbax cannot read them though they are
            as they were saved.
    """
    try:
        if everything:
            found = dense.restore(directory, None)
        else:
            abstract = {p: abstract_dense(leaf) for p, leaf in wanted.dense.items()}
            found = dense.restore(directory, match.nest(abstract))
    except Exception as error:
        seal.check()  # if it raises, it says why
        if not means_damage(error) or (
            not everything and _can_be_read(dense, directory)
        ):
            raise
        where = os.fspath(directory / names.DENSE)
        raise errors.IntegrityError(
            f"{where} cannot be read, though its files are those that were saved\n"
            f"  {type(error).__name__}: {error}",
            kind="dense_unreadable",
            path=where,
        ) from error
    seal.check()
    return found


def _can_be_read(dense: DenseStore, directory: AnyPath) -> bool:
    """Whether what Orbax cannot do is due to what was asked for, such as a sharding."""
    try:
        dense.restore(directory, None)
    except Exception:
        return False
    return True
