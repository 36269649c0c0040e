"""The parts of Orbax that are relied on beyond its documented interface, in one place.

tests/test_orbax_assumptions.py names and tests each of them: the shape of temporary paths, that
a standard handler can be nested below an item, that directories are created while `async_save`
runs and what tells when they are there, which client the processes of a run coordinate through,
what an interrupt leaves behind, where an array lies that is not packed, and that its paths are made
from the one it is given.
"""
