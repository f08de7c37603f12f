"""The window of layer m: the compute during which the bytes of layers 0 to m must cross the link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.ir.link import Link
from scheduler.ir.profile import Profile


@dataclass(frozen=True)
class Window:
    """Per layer m: bytes of layers 0 to m, and compute of the layers below m."""

    upto: np.ndarray
    forward_below: np.ndarray
    backward_below: np.ndarray

    @classmethod
    def of(cls, profile: Profile) -> Window:
        forward = np.array([layer.forward for layer in profile.layers])
        backward = np.array([layer.backward for layer in profile.layers])
        return cls(
            np.cumsum(np.array(profile.sizes, float)), *(np.cumsum(t) - t for t in (forward, backward))
        )

    @property
    def below(self) -> np.ndarray:
        return self.forward_below + self.backward_below

    def late(self, link: Link) -> float:
        """Exposed time if every AG comes after the last RS: exposed part of the RS plus that of the AG."""
        some = self.upto > 0  # without bytes at or below a layer, it does not wait
        if not some.any():
            return 0.0
        wire = link.alpha + link.beta * self.upto[some]
        reduces = max(0.0, float((wire - self.backward_below[some]).max()))
        return reduces + float((wire - self.forward_below[some]).max())


def compute_seconds(profile: Profile, gather: str) -> float:
    """Seconds of compute on each rank; with gathered gradients every rank also updates everything."""
    return profile.compute + (profile.update_per_byte * profile.total_bytes if gather == "gradients" else 0.0)
