"""Computation on devices: touched rows, selecting and gathering them, codecs.

Everything here is JAX arithmetic on arrays, most of it under `jax.jit`: no files, no
clocks of the machine, no Orbax. Import the modules themselves; this package is empty.
"""
