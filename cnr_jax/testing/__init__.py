"""Tools with which the tests of `cnr_jax` break checkpoints, for your own set-up too.

* `faults`: runs a program whose k-th write, fsync, rename, ... fails, stalls or is its last.
* `damage`: flips bits of stored files, truncates, removes and exchanges them, and undoes it.
* `model`: says what every saved step must restore to, and which steps stay, in plain numpy.
* `strategies`: hypothesis strategies for tables, placements, options and operations.
* `machine`: a hypothesis state machine that plays a run against the model.
* `interrupts`: interrupts a call at any moment, as Ctrl-C would.

Nothing of the package itself knows of these: they wrap it from outside. `strategies` and
`machine` need hypothesis, which `pip install cnr-jax[test]` brings.
"""
