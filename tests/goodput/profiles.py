"""Profiles that several tests play jobs of."""

from __future__ import annotations

from cnr_jax.goodput import Profile, Seconds

# As of a model of 40 GB on a store of 0.4 GB/s.
LARGE = Profile(
    step=Seconds(fixed=0.2),
    blocking=Seconds(fixed=0.05, per_byte=1e-10),
    write=Seconds(fixed=0.5, per_byte=2.5e-9),
    restore=Seconds(fixed=5, per_byte=1e-9),
    restart_secs=90,
    contention=0.05,
    full_bytes=6e9,
    plain_bytes=40e9,
    dense_bytes=5e7,
    changed_bytes=1e7,
    exponent=0.7,
)
