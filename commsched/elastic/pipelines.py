"""A state for pipelines: each rank's commit holds the whole training, so that any ranks can go on with it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commsched.collectives.job import rank, size
from commsched.collectives.operations import allgather_object, broadcast_object
from commsched.elastic.state import ObjectState
from commsched.errors import HostsUpdatedInterrupt

if TYPE_CHECKING:
    from commsched.pipeline import Pipeline


@dataclass(frozen=True)
class _Commit:
    """``key``: the number, and a text that tells commits apart that have one number: a rank that was cut off
    may come back with a commit that the others do not have, and have made again since.
    """

    key: tuple[int, str]
    values: dict[str, Any]
    training: dict[str, Any] | None  # None: of no pipeline yet


class PipelineState(ObjectState):
    """A state of a pipeline and of plain values, which are its attributes.

        state = hvd.elastic.PipelineState(lambda ranks: Pipeline(..., mesh=(ranks, 1)), step=0)

    ``make(ranks)`` makes the ``Pipeline`` of as many ranks, with ``optimizer=``, and a new model each time.
    ``elastic.run`` calls it before its function, and again after each change of ranks. ``pipeline`` is the
    present one.

    [Note: commits are whole]

        rank 0   step 8   gather   told   keeps 8
        rank 1   step 8   gather   told   keeps 8
        rank 2   step 8   gather   told   (keeps 4: told of the death of rank 3 instead)
        rank 3   step 8   gather   told   dies

    A commit holds a copy of the whole training (``Pipeline.training_state``) in the memory of every rank. A
    rank keeps it once all ranks have told that they have all of it. The others may die while they tell that,
    so some ranks may keep it and some not. In the next epoch, ``sync()`` gives all ranks the newest commit
    that one of them has: never parts of two.
    """

    def __init__(self, make: Callable[[int], Pipeline], **values: Any) -> None:
        for name, value in values.items():
            if hasattr(value, "state_dict") or name in ("make", "pipeline"):
                raise ValueError(
                    f"PipelineState keeps plain values and a pipeline, {name} is a {type(value).__name__}:"
                    " make what belongs to the pipeline (samplers, schedulers) in elastic.run's function, of"
                    " state.pipeline"
                )
        self._make = make
        self._pipeline: Pipeline | None = None
        super().__init__(broadcast_object, rank, **values)
        self._commit = _Commit((0, ""), self._saved_state, None)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the ranks that there are."""
        if self._pipeline is None:
            raise ValueError(
                "there is no pipeline before the function of elastic.run, and after a lost rank; use"
                " state.pipeline inside of the function, or state.model_state_dict()"
            )
        return self._pipeline

    def model_state_dict(self) -> dict[str, Any]:
        """Return the whole model's state at the last commit, also after a lost rank. No communication."""
        if self._commit.training is None:
            raise ValueError("nothing was committed: elastic.run's function has not begun")
        return deepcopy(self._commit.training["model"])

    def commit(self) -> None:
        """Call ``check_host_updates()``, and save the state. Every rank must call, after the same step."""
        try:
            self.check_host_updates()
        except HostsUpdatedInterrupt:
            self._commits += 1  # it is saved
            raise
        self.save()
        self._commits += 1

    def check_host_updates(self) -> None:
        """Raise ``HostsUpdatedInterrupt`` on all ranks if hosts have changed; saves before. Collective."""
        self.pipeline._check_can_be_moved()
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self.save()  # commit() does it once more
            raise HostsUpdatedInterrupt(False) from None  # with fewer hosts, too, there are other stages

    def save(self) -> None:
        """Copy the whole training to every rank, or to none. Collective."""
        values: dict[str, Any] = {}
        failure: Exception | None = None
        training = self.pipeline.training_state()
        try:
            values = deepcopy(self._current())
        except Exception as error:  # told to the other ranks, which would keep this commit
            failure = error
        mine = (f"{type(failure).__name__}: {failure}" if failure else "", secrets.token_hex(4))
        told = allgather_object(mine, "commsched.elastic.commit")
        if failure is not None:
            raise failure
        if reasons := [f"rank {other}: {each[0]}" for other, each in enumerate(told) if each[0]]:
            raise ValueError(
                f"nothing is committed, because values could not be copied: {'; '.join(reasons)}"
            )
        self._commit = _Commit((self._commit.key[0] + 1, told[0][1]), values, training)
        self._saved_state = values

    def restore(self) -> None:
        """Go back to the values of the last commit. The pipeline ends: ``sync()`` makes the next one."""
        self.reset()
        super().restore()

    def reset(self) -> None:
        """End the pipeline of the ranks that there were."""
        before, self._pipeline = self._pipeline, None
        if before is not None:
            before.close()
            before.fabric.abort("the job goes on with another pipeline")

    def sync(self) -> None:
        """Make the pipeline of the present ranks, at the newest commit that one of them has. Collective."""
        self.reset()
        keys = allgather_object(self._commit.key, "commsched.elastic.commits")
        newest = max(keys)
        if any(key != newest for key in keys):
            self._commit = broadcast_object(self._commit, keys.index(newest), "commsched.elastic.newest")
        self._saved_state = self._commit.values
        made = self._make(size())
        if not hasattr(made, "training_state"):
            raise ValueError(f"make(ranks) must return a Pipeline, but returned a {type(made).__name__}")
        self._pipeline = made
        if self._commit.training is None:
            self._set_attrs(self._bcast_object(self._current()))
            self.save()
        else:
            made.load_training_state(self._commit.training)
            super().restore()
