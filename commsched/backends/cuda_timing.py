"""The times of one iteration, as the device saw it: the host is ahead of it and knows nothing."""

from __future__ import annotations

from functools import cached_property

from commsched.backends.cuda_device import Device, Event
from commsched.optimizer.layer_timing import Watch


class DeviceWatch(Watch):
    """As ``Watch``; every moment is a mark on the stream, and reading one waits for it. Its own waits
    cannot be told from its work.
    """

    sees_waits = False

    def __init__(self, device: Device) -> None:
        self._device = device
        self._forwards: list[tuple[int, Event]] = []
        self._grads: list[tuple[int, Event]] = []
        self._marks: dict[str, Event] = {}
        self.waits = []

    def _now(self) -> Event:
        return self._device.record(self._device.current())

    def forward(self, module: int) -> None:
        self._forwards.append((module, self._now()))

    def grad(self, param: int) -> None:
        self._grads.append((param, self._now()))

    def mark(self, name: str) -> None:
        self._marks[name] = self._now()

    def backward_end(self) -> None:
        self.mark("backward_end")

    def worked(self) -> Watch:
        return self

    # Read once the iteration is over, and then often.

    @cached_property
    def forwards(self) -> list[tuple[int, float]]:  # type: ignore[override]
        return [(module, self._device.moment(event)) for module, event in self._forwards]

    @cached_property
    def grads(self) -> list[tuple[int, float]]:  # type: ignore[override]
        return [(param, self._device.moment(event)) for param, event in self._grads]

    @cached_property
    def marks(self) -> dict[str, float]:  # type: ignore[override]
        return {name: self._device.moment(event) for name, event in self._marks.items()}
