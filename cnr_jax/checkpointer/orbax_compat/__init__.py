"""The parts of Orbax that are relied on beyond its documented interface, in one place.

tests/test_orbax_assumptions.py tests each assumption. Some of them: the form of temporary paths;
that directories are made while `async_save` runs, and what signals that they are there; through
which client processes coordinate; what an interrupt leaves behind; where an array lies that is not
packed; and that a manager makes its paths from the one it is given.
"""
