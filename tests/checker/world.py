"""One rank of one program: the user's model and optimizers, and what the user keeps between actions.

The same actions run on a ``World`` whose optimizers are distributed and on one whose optimizers are plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.checker import models
from tests.checker.allowed import rows_for
from tests.checker.plain import Book, Exchange, PlainMethods, plain_optimizer

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    "decay": lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-2),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-2, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, eps=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-2),
    "lbfgs": lambda params: torch.optim.LBFGS(
        params, lr=0.05, max_iter=2, tolerance_grad=0, tolerance_change=0
    ),
}


class World:
    """``wrap`` makes a base optimizer distributed: of this world, a base and the options."""

    def __init__(self, seed: int, options: dict[str, Any], rank: int, size: int) -> None:
        self.seed, self.options, self.rank, self.size = seed, dict(options), rank, size
        self.model = models.build(options["kind"], options["tied"], seed)
        trained = [p for n, p in self.model.named_parameters() if not n.startswith("late.")]
        parts = [trained[: len(trained) // 2], trained[len(trained) // 2 :]] if options["two"] else [trained]
        self.bases = [OPTIMIZERS[options["optimizer"]](part) for part in parts]
        self.optimizers: list[Any] = []
        self.kept: dict[str, Any] = {}
        self.log: list[Any] = []  # what hooks have seen
        self.captured: list[torch.Tensor] = []
        self.hooks: list[Any] = []
        self.batches = 0
        if options["frozen"] is not None:
            self.model.body[options["frozen"]].requires_grad_(False)
            self.kept["frozen"] = True
        self.wrap()

    # -- what a script does ----------------------------------------------------------------------------------

    def wrap(self) -> None:
        self.optimizers = [self.distributed(base, self.model) for base in self.bases]

    def distributed(self, base: torch.optim.Optimizer, model: Any) -> Any:
        """Return the optimizer of a module, or of what has ``named_parameters``, made distributed."""
        raise NotImplementedError

    @property
    def is_wrapped(self) -> bool:
        return self.optimizers[0] is not self.bases[0]

    def gather(self) -> None:
        """Synchronize, unless the optimizers are closed."""
        if self.is_wrapped:
            self.synchronize()

    def gather_shards(self) -> None:
        """Make gradients readable."""
        if self.options["gather"] == "parameters":
            self.gather()

    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def trained(self) -> list[nn.Parameter]:
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.tail.weight.dtype

    def batch(self, salt: Any) -> torch.Tensor:
        """Return this rank's next batch of the action with this salt."""
        self.batches += 1
        x = models.batch(self.model.kind, self.seed, salt, self.batches, self.rank)
        return x.to(self.dtype) if x.is_floating_point() else x

    def noise(self, shape: Any, *key: Any) -> torch.Tensor:
        """Return a tensor that is the same on all ranks."""
        return models.noise(shape, self.seed, *key).to(self.dtype)

    def forward(self, x: torch.Tensor, spec: dict[str, Any], bomb: int | None = None) -> torch.Tensor:
        branch = spec.get("branch", "left")
        if branch == "by rank":
            branch = "right" if self.rank % 2 else "left"
        self.captured.clear()
        return self.model(x, branch, spec.get("twice", False), spec.get("checkpointed", "no"), bomb)

    def loss_of(self, out: torch.Tensor, spec: dict[str, Any], salt: Any) -> torch.Tensor:
        extra = spec.get("extra")
        loss = (out - self.noise(out.shape, salt, "target")).square().mean()
        if extra == "functional":
            h = self.noise((2, models.WIDTH), salt, "functional")
            loss = loss + 0.3 * F.linear(h, self.model.body[0].linear.weight).square().mean()
        elif extra == "sum of weights":
            loss = loss + 0.01 * sum(p.square().sum() for p in self.model.body.parameters())
        for tensor in self.captured:
            loss = loss + 0.3 * tensor.square().mean()
        other = self.kept.get("second")
        if other is not None:
            loss = loss + 0.3 * other(self.noise((2, models.WIDTH), salt, "second")).square().mean()
        return loss

    def loss(self, spec: dict[str, Any], salt: Any, bomb: int | None = None) -> torch.Tensor:
        return self.loss_of(self.forward(self.batch(salt), spec, bomb), spec, salt)

    def backward(self, loss: torch.Tensor | list[torch.Tensor], **how: Any) -> None:
        if isinstance(loss, list):
            torch.autograd.backward(loss, **how)
        else:
            loss.backward(**how)

    def step(self) -> None:
        nothing = [lambda: torch.zeros(())] if self.options["optimizer"] == "lbfgs" else []
        for optimizer in self.optimizers:
            optimizer.step(*nothing)

    def zero_grad(self, **how: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(**how)

    def synchronize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.synchronize()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def after_closing(self) -> None:
        """Go on with the optimizers that were wrapped."""

    def reading(self) -> None:
        """Announce that the action reads gradients from here on."""

    def changing_grads(self) -> None:
        """Announce that the action has changed gradients."""

    def converting(self) -> None:
        """Announce that the action converts parameters to another type."""

    def events(self, events: Iterable[str]) -> None:
        """Announce what the action does next, for the table of listed errors."""

    def join(self) -> None:
        """Wait until all ranks have no data left."""


class PlainWorld(World):
    """``allowed``: the listed errors that this action may end with."""

    def __init__(self, seed: int, options: dict[str, Any], rank: int, size: int, exchange: Exchange) -> None:
        self.exchange = exchange
        self.allowed: set[str] = set()
        self.diverged = False
        super().__init__(seed, options, rank, size)

    def distributed(self, base: torch.optim.Optimizer, model: Any) -> Any:
        return plain_optimizer(base, self.exchange, self.size, self.event, self.options)

    def begin_action(self) -> None:
        """Begin to collect listed errors: some come with the next use of a parameter, whatever that is."""
        self.allowed = {"second gradient"} if any(book.was_late for book in self.books) else set()

    @property
    def wrapped(self) -> list[PlainMethods]:
        return [o for o in self.optimizers if isinstance(o, PlainMethods)]

    @property
    def books(self) -> list[Book]:
        return [o.book for o in self.wrapped]

    def event(self, event: str, book: Book) -> None:
        self.allowed |= {row.name for row in rows_for(event, book)}

    def troubled_by(self, events: Iterable[str]) -> bool:
        """Whether one of these would be a listed error now."""
        return any(row.sure for event in events for book in self.books for row in rows_for(event, book))

    def backward(self, loss: torch.Tensor | list[torch.Tensor], **how: Any) -> None:
        wrapped = self.wrapped
        if not wrapped:
            self.diverged = True
        self.inside_a_backward()
        if how.get("create_graph") and any(book.sums for book in self.books):
            self.allowed.add("sum changed")
        marks = [optimizer.before_backward() for optimizer in wrapped]
        try:
            super().backward(loss, **how)
        except BaseException:
            for optimizer, mark in zip(wrapped, marks, strict=True):
                optimizer.after_backward(mark, whole=False)
            raise
        for optimizer, mark in zip(wrapped, marks, strict=True):
            optimizer.after_backward(mark)

    def inside_a_backward(self) -> None:
        """Announce a backward, whose hooks may read gradients."""
        if self.hooks:
            self.reading()
            for book in self.books:
                self.event("inside", book)

    def step_with_zeros(self, loss: dict[str, Any], salt: Any, has_data: bool) -> None:
        """Take a step of a job in which some ranks have joined: these contribute zeros."""
        if has_data:
            value = self.loss(loss, salt)
            self.inside_a_backward()
            for optimizer in self.wrapped:
                optimizer.before_backward()
            torch.autograd.backward(value)
        for optimizer in self.wrapped:
            optimizer.book.local = True  # the sums of this batch are to be made
            optimizer.average()
        self.step()
        self.zero_grad()

    def after_closing(self) -> None:
        for base in self.bases:
            base.__dict__.pop("step", None)  # of a scheduler: base and wrapper share all attributes

    def note(self, spec: dict[str, Any]) -> None:
        """Note what a loss of some rank does."""
        if spec.get("checkpointed") == "reentrant":
            for book in self.books:
                book.late = book.sharded or len(self.books) > 1

    def forward(self, x: torch.Tensor, spec: dict[str, Any], bomb: int | None = None) -> torch.Tensor:
        self.note(spec)
        return super().forward(x, spec, bomb)

    def reading(self) -> None:
        self.events(("read",))

    def events(self, events: Iterable[str]) -> None:
        for event in events:
            for book in self.books:
                self.event(event, book)

    def changing_grads(self) -> None:
        for book in self.books:
            book.changed = book.sums

    def converting(self) -> None:
        for book in self.books:
            book.converted = book.sharded

    def look(self) -> None:
        for optimizer in self.wrapped:
            optimizer.look()
