"""Replay of a chain of steps to arrays on any mesh: rows are laid over each other, full first."""
