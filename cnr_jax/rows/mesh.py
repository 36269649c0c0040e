"""Computing apart from the mesh that a program may have set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np


@contextlib.contextmanager
def outside_mesh() -> Iterator[None]:
    """Leaves the mesh of `jax.set_mesh` for a while; also a decorator.

    Programs of a save or a restore run on one device each, which jax refuses within a mesh of
    several. Arrays keep their own shardings. What is set also decides under what jax keeps a
    program: one that was compiled outside is found again only there, from any thread.
    """
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):
        yield
