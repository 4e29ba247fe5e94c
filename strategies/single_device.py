"""One process on one device."""

from __future__ import annotations

from .base import Strategy


class SingleDeviceStrategy(Strategy):
    """One process, no communication. Every method is the base class's trivial one."""
