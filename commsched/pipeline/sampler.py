"""A batch sampler for ``DataLoader`` that yields just the rows that this rank passes to a local step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from commsched.pipeline.random_state import set_random_state


class StepSampler(Sampler[list[int]]):
    """Yields, for each step, the indices of this rank's rows; one index on ranks that read no batch.

    ``rows(n)``: this rank's rows of a step of ``n`` rows; ``local``: these are not all of them. The position
    counts the steps that the pipeline has taken, not the batches that a loader has fetched ahead: new
    iterators begin there, and checkpoints hold it. After an epoch's last step the next epoch begins, in
    another order if ``shuffle``.
    """

    def __init__(
        self,
        rows: Callable[[int], list[int]],
        dataset: Sized,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        local: bool,
    ) -> None:
        self._rows, self._size, self._batch_size, self.local = rows, len(dataset), batch_size, local
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._data = {"rows": self._size, "batch_size": batch_size, "shuffle": shuffle, "seed": seed}
        self._data |= {"drop_last": drop_last, "local": local}
        self.epoch, self.position = 0, 0
        self._random: list[Tensor] | None = None
        if batch_size < 1 or not len(self):
            raise ValueError(
                f"batch_size must be at least 1, and with drop_last=True at most the data set's {self._size}"
                f" rows; got {batch_size} and {self._size} rows"
            )
        self._rows(min(batch_size, self._size))
        self._rows(self._step_size(len(self) - 1))

    def _step_size(self, number: int) -> int:
        return min(self._batch_size, self._size - number * self._batch_size)

    def __len__(self) -> int:
        """Steps of an epoch."""
        return (self._size if self._drop_last else self._size + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        if self._random is not None:
            # A loader draws a seed for its workers; in mid-epoch the run that was stopped did not.
            set_random_state(self._random, torch.device("cpu"))
            self._random = None
        order = torch.arange(self._size)
        if self._shuffle:
            order = torch.randperm(
                self._size, generator=torch.Generator().manual_seed(self._seed + self.epoch)
            )
        for number in range(self.position, len(self)):
            step = order[number * self._batch_size :][: self._step_size(number)]
            yield step[self._rows(len(step)) or [0]].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch; within this epoch, stays where the pipeline is."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def advance(self) -> None:
        """The pipeline has taken a step."""
        self.position += 1
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0

    def state(self) -> dict[str, Any]:
        """Data and position, for a checkpoint."""
        return {"data": self._data, "epoch": self.epoch, "position": self.position}

    def resume(self, state: dict[str, Any], random: list[Tensor]) -> None:
        """Goes on at a checkpoint's position, whose random numbers were ``random``."""
        if state["data"] != self._data:
            raise ValueError(
                f"the checkpoint's sampler has {state['data']}, this one {self._data}; make it of the same"
                " data with the same arguments"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._random = random if self.position else None


class Sampling:
    """A pipeline's sampler, if it has one, and a checkpoint's position that waits for one."""

    def __init__(self) -> None:
        self._sampler: StepSampler | None = None
        self._waiting: tuple[dict[str, Any], list[Tensor]] | None = None

    def use(self, sampler: StepSampler) -> StepSampler:
        """Takes it in the place of any earlier one."""
        self._sampler = sampler
        if self._waiting is not None:
            sampler.resume(*self._waiting)
            self._waiting = None
        return sampler

    def check(self, local: bool) -> None:
        """``ValueError`` where a step is not the kind of step that the sampler yields."""
        if self._sampler is not None and local is not self._sampler.local:
            raise ValueError(
                f"this pipeline's sampler was made with local={self._sampler.local}, so call"
                f" step(batch, local={self._sampler.local}); got local={local}"
            )

    def advance(self) -> None:
        if self._sampler is not None:
            self._sampler.advance()

    def state(self) -> dict[str, Any] | None:
        return None if self._sampler is None else self._sampler.state()

    def resume(self, state: dict[str, Any] | None, random: list[Tensor]) -> None:
        self._waiting = None if state is None else (state, random)
        if self._sampler is not None:
            self.use(self._sampler)
