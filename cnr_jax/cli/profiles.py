"""Profiles that commands are given: a file, or the root of a run that has noted what it took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cnr_jax.goodput import Profile


def read_profile(
    path: str, item: str | None = None, *, measures: bool = False
) -> Profile | None:
    """Reads a profile.

    Args:
        path: path of a file of JSON, or a root.
        item: item to look at, where steps of the root hold several.
        measures: whether to measure the storage of the root, see `cnr_jax.measure_store`.

    Returns:
        The profile; None: the run has not saved often enough.

    Raises:
        OptionError: if it is neither, or a file whose storage is to be measured.
    """
    from cnr_jax.cli.roots import read_root, use_cpu
    from cnr_jax.errors import OptionError
    from cnr_jax.goodput import Profile
    from cnr_jax.goodput.records import profile_at

    if not Path(path).is_dir() and "://" not in path:
        profile = Profile.read(path)
        if measures:
            raise OptionError(
                f"{path} is a profile, and has no storage to be measured\n"
                "  hint: leave out --measure, or give the root of a run"
            )
        return profile
    found = read_root(path, item)
    if measures:
        use_cpu()
        from cnr_jax import measuring

        return measuring.measure_store(path, secs=measuring.SECS, item=item)
    return profile_at(found)
