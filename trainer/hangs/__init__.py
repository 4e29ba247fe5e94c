"""Who waits for whom: a watcher on each rank, what it sees, and what is said about it."""

from .watch import HangWatch

__all__ = ["HangWatch"]
