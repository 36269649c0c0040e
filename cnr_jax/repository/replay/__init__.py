"""From a chain of steps to arrays on any mesh: its rows are laid over each other, full first."""
