"""Profiles that commands are given: a file, or the root of a run that has noted what it took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cnr_jax.goodput import Profile


def read_profile(path: str, item: str | None = None) -> Profile | None:
    """Reads a profile.

    Args:
        path: path of a file of JSON, or a root.
        item: item to look at, where steps of the root hold several.

    Returns:
        The profile; None: the run has not saved often enough.

    Raises:
        OptionError: if it is neither.
    """
    from cnr_jax.cli.roots import read_root
    from cnr_jax.goodput import Profile
    from cnr_jax.goodput.records import profile_at

    if not Path(path).is_dir() and "://" not in path:
        return Profile.read(path)
    return profile_at(read_root(path, item))
