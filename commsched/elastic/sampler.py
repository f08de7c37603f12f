"""A sampler whose remaining samples are divided among the ranks that there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from commsched.collectives.job import rank, size


def share_of(rank: int, ranks: int, virtual_ranks: int) -> range:
    """Return the virtual ranks of a rank: neighbours, and one more on the first ranks if need be."""
    least, more = divmod(virtual_ranks, ranks)
    return range(rank * least + min(rank, more), (rank + 1) * least + min(rank + 1, more))


class ElasticSampler(torch.utils.data.Sampler):
    """Gives each rank its part of the samples that no rank has processed in this epoch of the data.

    Pass it to ``TorchState``, call ``record_batch()`` after each batch, and ``set_epoch()`` at the end of
    each epoch of the data. ``seed`` must be the same on all ranks. The order is Horovod's: all samples,
    shuffled by seed and epoch, without as many at the front as are processed, dealt out to the ranks in turn.
    The first samples are dealt out again where the ranks cannot divide them equally.

    With ``exact`` no sample is dealt out twice: the ranks' shares differ by up to one sample, and their
    numbers of batches by up to one. Every rank must then call ``record_batch()`` in every step, also in one
    without a batch, with the loader's batch size: a smaller last batch would note less than other ranks do.

    In a function of ``run(virtual_ranks=)`` it deals samples out to virtual ranks: see ``batch()``.
    """

    virtual_ranks = 0  # of the function

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, *, exact: bool = False) -> None:
        self.dataset, self.shuffle, self.seed, self.exact = dataset, shuffle, seed, exact
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch of the data: no sample is processed. Call it at the end of the one before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each (virtual) rank has processed a batch of this size. ``batch_idx`` is not used."""
        self.processed_num += batch_size * self.num_replicas
        if self.exact:  # the ranks' last batches may be smaller
            self.processed_num = min(self.processed_num, len(self.dataset))

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the samples that are left among the ranks of the job as it is now."""
        self.rank, self.num_replicas = rank(), self.virtual_ranks or size()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self._order = order
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        if self.exact:
            self.total_size = len(self.remaining_indices)
            self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))

    def batch(self, virtual: int, batch_size: int, processed: int | None = None) -> list[int]:
        """Return the samples of a virtual rank's batch in the coming step; none after the last.

        Call ``record_batch()`` once a step, with this size. Where the virtual ranks cannot divide the last
        samples equally, some of them begin the order once more; with ``exact`` they have one sample fewer.
        """
        if not self.virtual_ranks:
            raise ValueError(
                "ElasticSampler.batch() is for a function of elastic.run(virtual_ranks=...); pass the sampler"
                " to its TorchState"
            )
        count, ranks = len(self._order), self.virtual_ranks
        processed = self.processed_num if processed is None else processed
        rounds = min(batch_size, max(0, -(-(count - processed) // ranks)))
        places = range(processed + virtual, processed + virtual + rounds * ranks, ranks)
        return [self._order[place % count] for place in places if place < count or not self.exact]

    def batches(self, batch_size: int) -> Iterator[list[int]]:
        """Yield what ``batch()`` returns for this rank's virtual ranks in turn, step after step, to the end
        of the data: a ``batch_sampler`` for a ``DataLoader``. Batches without samples are left out.
        """
        mine = share_of(rank(), size(), self.virtual_ranks)
        for processed in range(self.processed_num, len(self._order), batch_size * self.virtual_ranks):
            yield from filter(None, (self.batch(v, batch_size, processed) for v in mine))

    def __iter__(self) -> Iterator[int]:
        if self.virtual_ranks:
            raise ValueError("with virtual ranks, a rank has no samples; use batch(v, batch_size)")
        dealt = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        self.indices = list(itertools.islice(dealt, self.rank, None, self.num_replicas))
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
