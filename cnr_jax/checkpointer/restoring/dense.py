"""The dense leaves of a restored step: read by Orbax, from files that were checked before."""

from __future__ import annotations

import os
from typing import Any

from cnr_jax import errors
from cnr_jax.checkpointer.orbax_compat.dense import DenseStore, abstract_dense
from cnr_jax.checkpointer.restoring.match import Wanted
from cnr_jax.format import names
from cnr_jax.repository.checked import Seal, kind_of, means_damage
from cnr_jax.repository.files import AnyPath
from cnr_jax.state.table import nest


def restore_dense(
    dense: DenseStore,
    directory: AnyPath,
    wanted: Wanted,
    everything: bool,
    seal: Seal | None,
) -> Any:
    """The dense leaves from the files that were checked, if they are still the same.

    None are wanted of files that were not: then `seal` is None.

    Raises:
        IntegrityError: if the files have changed, or Orbax cannot read them though they are
            as they were saved.
    """
    if seal is None:
        return {}
    try:
        if everything:
            found = dense.restore(directory, None)
        else:
            leaves = wanted.dense.items()
            abstract = nest((path, abstract_dense(leaf)) for path, leaf in leaves)
            found = dense.restore(directory, abstract)
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
            kind=kind_of(error, "dense_unreadable"),
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
