"""What plain PyTorch does with averaged gradients: one plain model and optimizer on each rank.

A whole backward that ends without an exception, outside of ``no_sync`` (and the k-th with
``backward_passes_per_step=k``), replaces each gradient by its mean over the ranks. ``step()`` and
``synchronize()`` do that first with whatever has been accumulated since. With op=Sum only that is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

Exchange = Callable[[Any], "list[Any]"]
"""Gives every rank's value to every rank, in rank order."""


@dataclass
class Book:
    """What is known of one optimizer's gradients.

    ``local``: some were accumulated on this rank alone. ``fresh``: averaged since a step. ``backwards``:
    since the last step() or zero_grad(). ``uneven``: not every rank had a backward, so that all must call
    step() or synchronize(). ``vague``: which backward is the k-th depends on how gradients were cleared.
    ``changed``: with op=Sum, the user has changed the sums. ``raised``: a backward has raised. ``samples``:
    of weighted losses, since the last sum.

    With ``gather="parameters"``, ``ungathered``: they have been reduced, and no rank holds them whole;
    ``zeros_sent``: that is so although all are zeros; ``gathered``: synchronize() has gathered them;
    ``consumed``: a step has used them up; ``late``: one may have had two in one backward, and ``was_late``:
    before the last step; ``converted``: parameters have another type than when they were divided.
    """

    sharded: bool = False
    early: bool = False
    sums: bool = False
    passes: int = 1
    done: int = 0
    samples: int = 0
    local: bool = False
    ungathered: bool = False
    zeros_sent: bool = False
    gathered: bool = False
    consumed: bool = False
    changed: bool = False
    fresh: bool = False
    uneven: bool = False
    late: bool = False
    was_late: bool = False
    converted: bool = False
    vague: bool = False
    backwards: int = 0
    closed: bool = False
    paused: bool = False
    raised: bool = False
    groups: list[dict[str, Any]] = field(default_factory=list)
    common: dict[nn.Parameter, torch.Tensor | None] = field(default_factory=dict)


class PlainMethods(Optimizer):
    """Mixed in before a torch optimizer's class, as ``DistributedOptimizer`` does it."""

    _base: type[Optimizer]
    book: Book
    _exchange: Exchange
    _factor: float
    _prescale: float
    _wire: torch.dtype | None  # the type in which gradients travel
    _event: Callable[[str, Book], None]

    # -- what all ranks do together --------------------------------------------------------------------------

    def every_param(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def before_backward(self) -> list[Any]:
        """Remember the sums that are not to be summed again; return marks of all gradients."""
        self._event("backward", self.book)
        self.book.groups = [dict(group) for group in self.param_groups]
        if self.book.backwards:
            self._event("backward again", self.book)
        params = self.every_param()
        if self.book.sums:
            for p in params:
                if p.grad is None or not self.book.local:
                    self.book.common[p] = None if p.grad is None else p.grad.detach().clone()
        return [(id(p.grad), None if p.grad is None else p.grad._version) for p in params]

    def after_backward(self, marks: Sequence[Any], whole: bool = True) -> None:
        """Average if this backward was one that does; ``whole``: it has not raised."""
        params, book = self.every_param(), self.book
        now = [(id(p.grad), None if p.grad is None else p.grad._version) for p in params]
        touched = now != list(marks)
        book.local = book.local or touched
        if touched:
            book.gathered = book.zeros_sent = False
        if not whole and touched and not (book.closed or book.paused) and book.done + 1 >= book.passes:
            book.raised = True
        if book.closed or book.paused or not whole:
            return
        everyone = self._exchange(touched)
        book.done += any(everyone)
        book.backwards += 1
        if not all(everyone):
            book.uneven = book.uneven or any(everyone)
        elif book.done >= book.passes:
            self.average()
            book.ungathered = book.sharded and any(p.grad is not None for p in params)

    @torch.no_grad()
    def average(self) -> None:
        """Replace every gradient by its mean (or sum) over the ranks."""
        book = self.book
        if book.closed:
            return
        params = self.every_param()
        common = [book.common.get(p) if book.local else p.grad for p in params]
        mine = [
            g if g is None or c is None or not book.sums else g - c
            for g, c in zip([p.grad for p in params], common, strict=True)
        ]
        sent = [None if g is None else self._sent(g.detach() * self._prescale) for g in mine]
        everyone = self._exchange((book.local, sent, book.samples))
        samples = sum(counted for _, _, counted in everyone)
        factor = self._factor * len(everyone) / samples if samples else self._factor
        # On the wire gradients are rounded: those that were averaged since the last step are not sent again.
        if self._wire is None or not book.fresh or any(local for local, _, _ in everyone):
            for p, c, grads in zip(params, common, zip(*(sent for _, sent, _ in everyone))):
                total = added(grads)
                if total is not None:
                    total = total * factor
                    if not book.sharded:
                        total = self._sent(total)
                    p.grad = total if c is None or not book.sums else total + c
        book.local, book.uneven, book.fresh, book.samples = False, False, True, 0

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy as it arrives, rounded to the type of the wire."""
        return tensor.clone() if self._wire is None else tensor.to(self._wire).to(tensor.dtype)

    # -- the methods that DistributedOptimizer has -----------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        book = self.book
        if book.backwards and book.groups != [dict(group) for group in self.param_groups]:
            self._event("step with other settings", book)
        if book.closed:
            self._event("step", book)
            return self._base.step(self, closure) if closure is not None else self._base.step(self)

        def whole() -> Any:
            assert closure is not None
            with torch.enable_grad():
                loss = closure()
            self._event("step", book)
            self.average()
            return loss

        if self._base is LBFGS:
            result = self._base.step(self, whole)
        else:
            result = whole() if closure is not None else None
            self._event("step", book)
            self.average()
            self._base.step(self)
        book.consumed = (
            book.sharded and not book.gathered and any(p.grad is not None for p in self.every_param())
        )
        book.done = book.backwards = 0
        book.was_late = book.late
        book.ungathered = book.zeros_sent = book.gathered = False
        book.vague = book.fresh = book.late = book.converted = False
        return result

    def synchronize(self) -> None:
        self._event("synchronize", self.book)
        self.average()
        self.book.ungathered = self.book.zeros_sent = False
        self.book.gathered = any(p.grad is not None for p in self.every_param())  # else the round is over

    def counts(self, samples: int) -> bool:
        """Count the samples of a loss, none of one that is not weighted; return False where it is refused."""
        book = self.book
        there = any(p.grad is not None and bool(p.grad.any()) for p in self.every_param())
        if there and bool(samples) != bool(book.samples):
            return False
        book.samples = samples + book.samples * there
        return True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.book.paused = self.book.paused, True
        try:
            yield
        finally:
            self.book.paused = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.book.passes = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.book.consumed = self.book.zeros_sent = False
        self._base.zero_grad(self, set_to_none)
        self.book.changed = self.book.late = self.book.fresh = False
        self.book.done, self.book.backwards, self.book.vague, self.book.raised = 0, 0, False, False
        self.book.samples = 0
        self.look()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        book = self.book
        self._event("synchronize", book)
        self.average()
        if book.sharded and not book.gathered:
            grads = [p.grad for p in self.every_param() if p.grad is not None]
            book.ungathered = bool(grads)
            book.zeros_sent = bool(grads) and not any(grad.any() for grad in grads)
        return nn.utils.clip_grad_norm_(self.every_param(), max_norm, norm_type)

    def close(self, wait: bool = True) -> None:
        if self.book.early and self.book.backwards:
            self.param_groups, now = self.book.groups, self.param_groups
            self.step()  # which each backward is, with the settings that it began with
            self.param_groups = now
        self.book.closed = True

    def look(self) -> None:
        """Notice that the user has cleared all gradients, in whichever way."""
        book = self.book
        used_up = book.consumed
        grads = [p.grad for p in self.every_param()]
        if all(g is None or not (g.to_dense() if g.is_sparse else g).any() for g in grads):
            if book.done and book.passes > 1:
                book.vague = True
            book.raised = book.local = book.gathered = book.consumed = False
            book.samples = 0
            book.ungathered = book.zeros_sent and any(g is not None for g in grads)
            book.fresh = book.fresh and any(g is not None for g in grads)
            book.changed = book.changed and any(g is not None for g in grads)
            # Zeros that a step has used up are gone like other gradients.
            book.consumed = used_up and any(g is not None for g in grads)
            book.common.clear()

    def state_dict(self) -> Any:
        self._event("state", self.book)
        return self._base.state_dict(self)

    def __reduce__(self) -> Any:
        self._event("state", self.book)
        return _restored, (self._base, self.__getstate__())


def _restored(base: type[Optimizer], state: Any) -> Optimizer:
    optimizer = base.__new__(base)
    optimizer.__setstate__(state)
    return optimizer


def added(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum in rank order; None where no rank has a gradient."""
    present = [g for g in grads if g is not None]
    if not present:
        return None
    if any(g.is_sparse for g in present) and not all(g.is_sparse for g in present):
        present = [g.to_dense() if g.is_sparse else g for g in present]
    total = present[0]
    for other in present[1:]:
        total = total + other
    return total.coalesce() if total.is_sparse else total


def plain_optimizer(
    base: Optimizer,
    exchange: Exchange,
    ranks: int,
    event: Callable[[str, Book], None],
    options: dict[str, Any],
) -> Any:
    """Return ``base`` with the methods of a distributed optimizer; both share all state."""
    kind = type(base)
    cls = type(kind.__name__, (PlainMethods, kind), {"_base": kind})
    plain: Any = object.__new__(cls)
    plain.__dict__ = base.__dict__
    plain.__dict__.pop("step", None)  # that a scheduler of an earlier wrapper has put there
    sums = options["op"] == "sum"
    sharded = options["gather"] == "parameters"
    early = sharded and options["early_step"]
    plain.book = Book(sharded, early, sums, options["passes"])
    plain._exchange, plain._event = exchange, event
    plain._prescale = 1.0 / options["predivide"]
    plain._factor = 1.0 if sums else options["predivide"] / ranks
    plain._wire = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}[options["compression"]]
    return plain
