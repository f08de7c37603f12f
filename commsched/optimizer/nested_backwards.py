"""Whether a backward runs inside another one.

Autograd calls a queued callback at the end of the backward it was queued in. Reentrant checkpointing, and any
``autograd.Function`` whose backward calls ``backward``, runs one within another, and the step's gradients are
complete only at the end of the outermost one. Autograd does not tell which is which, but the backward of a
Python function is on the stack.
"""

from __future__ import annotations

import sys

from torch.autograd.function import BackwardCFunction

_APPLY = BackwardCFunction.apply.__code__


def inside_a_backward() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
