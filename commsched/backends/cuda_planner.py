"""Plans for a device: the link is timed on it."""

from __future__ import annotations

from commsched.backends.cuda import DeviceWire
from commsched.optimizer.planning import Planner


class DevicePlanner(Planner):
    wire: DeviceWire

    def _time(self, size: int) -> float:
        return self.wire.exchange_seconds(size)
