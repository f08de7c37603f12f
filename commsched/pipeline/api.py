"""``Pipeline``: a model trained in stages, by any schedule; ``Hybrid``: the first stages on tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, nullcontext
from functools import partial, reduce
from inspect import signature
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from commsched.collectives.compression import Compression
from commsched.errors import CommError
from commsched.pipeline import build, checkpoint
from commsched.pipeline.build import UpdateMaker, make_stages
from commsched.pipeline.chain import Chain
from commsched.pipeline.checkpoint import FullState
from commsched.pipeline.exchange import Inputs, checked_pair
from commsched.pipeline.factory import Make, WeightSource, keep_freed_memory
from commsched.pipeline.interpreter import EVALUATED, Evaluation, Interpreter, Losses
from commsched.pipeline.messages import Fabric, ProcessFabric
from commsched.pipeline.reduction import checked_ties, sum_ties
from commsched.pipeline.shares import Count, Sampling, StepSampler, Terms, rows_to_pass
from commsched.pipeline.stage import GradientTypes, Loss
from commsched.pipeline.update import Clipping, Factory, OnStep, added_to, scale
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.layout import Placement
from scheduler.ir.program import Program, delays, reach
from scheduler.pipelines.build import orders_of, stage_count


class Pipeline:
    """One rank's part of a pipeline; every rank of the job makes the same one.

        pipeline = Pipeline(model, schedule="1f1b", num_microbatches=8, mesh=(4, 2), loss=F.cross_entropy,
                            optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        for batch in batches:
            loss = pipeline.step(batch)
        pipeline.drain()

    ``schedule``: a name (``scheduler.pipelines.names()``) or a program. ``mesh``: how many ranks one replica
    spans, and how many replicas (a list: of each position); ``ranks`` instead lists them. ``plan``: a file of
    ``commsched partition``, which decides all that. ``cuts``: each stage's first layer, by number from 0
    on or, from the second stage on, by a module's name.

    ``loss(outputs, targets)`` is the mean over the rows. With ``count(targets)``, the number of terms that
    some targets have (tokens that are not ignored), it is the sum over the terms; the pipeline divides by the
    terms of the whole step.

    ``optimizer`` makes an optimizer of a list of a stage's parameters; if its first argument is called
    ``named_parameters``, of pairs of name and parameter. None: the gradients of a synchronous schedule are
    added to ``.grad`` of ``parameters()``, the same on all ranks of a stage. ``on_step(optimizer, number)``
    is called before each of its steps. ``max_norm``: clips each step's gradients by their norm (of
    ``norm_type``) over all stages; ``skip_nonfinite``: no stage steps where a gradient is infinite or not a
    number; both need a synchronous schedule. ``master_weights``: steps float32 copies of half-precision
    parameters. ``compression``: how gradients travel between replicas, as for `DistributedOptimizer`
    (``Compression.int8`` keeps what rounding has lost for the next step).

    ``hosts``: groups of ranks, for bundles. ``inside``: classes of modules that may be cut; ``example``:
    inputs of a batch, which tell in which order a model runs its layers that torch.fx cannot trace. Further
    options go to the schedule (``virtual=2``, ``hop=2``).

    ``model`` may be a function that makes the model, so that no rank ever holds all of it; then a rank makes
    the parameters of its own stages, as in one process. ``weights`` are read instead, by name and only those
    of its stages: a mapping, a file (safetensors, ``torch.save``), or a folder as Hugging Face writes it.
    With them, ``model`` may be on the meta device. ``device``: where such parameters go.

    ``placements`` puts each stage on tiles (``Tiles((2, 2))``) or on ranks that share samples
    (``Samples(2)``), as often as ``mesh`` has replicas. ``mirrored`` adds to each replica one on the same
    ranks in opposite order, with ``num_microbatches`` of its own. ``tile_options``: ``overlap`` of
    ``spatial.shard``.

    ``delays`` says how many steps old the gradient is that each stage applies.
    """

    checkpoint_classes = checkpoint.CLASSES

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module] | Make | Chain,
        schedule: str | Program = "1f1b",
        num_microbatches: int = 1,
        mesh: tuple[int, int | Sequence[int]] | None = None,
        *,
        loss: Loss,
        count: Count | None = None,
        optimizer: Factory | None,
        plan: PipelinePlan | str | Path | None = None,
        ranks: Sequence[Sequence[int]] | None = None,
        cuts: Sequence[int | str] | None = None,
        inside: Iterable[type[nn.Module]] = (),
        example: Any = None,
        weights: WeightSource | None = None,
        device: torch.device | str | None = None,
        placement: str = "bubble",
        bucket_bytes: float = 4 << 20,
        recompute: bool | Sequence[bool] = False,
        on_step: OnStep | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
        placements: Sequence[Placement] | None = None,
        mirrored: bool = False,
        tile_options: Mapping[str, Any] | None = None,
        master_weights: bool = False,
        compression: Any = Compression.none,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        skip_nonfinite: bool = False,
        fabric: Fabric | None = None,
        **options: Any,
    ) -> None:
        build.check_functions(loss, optimizer, count)
        self.fabric = ProcessFabric() if fabric is None else fabric
        self.rank = self.fabric.rank
        self._health = Health(self.fabric.abort)
        with self._health.guarded():  # arguments, a model or an optimizer may fail on this rank alone
            if isinstance(model, Chain) and (inside or example is not None or weights is not None):
                raise ValueError(
                    "inside=, example= and weights= belong to the Chain that you passed: make it with them"
                )
            if optimizer is None and (on_step is not None or master_weights):
                raise ValueError(
                    "on_step= and master_weights= are for steps of the pipeline: pass optimizer=, too"
                )
            build.check_decided(Pipeline, locals())
            chain = model if isinstance(model, Chain) else Chain(model, inside, example, weights=weights)
            checkpoint.allow_state_dict(chain.model)
            mesh = mesh or (len(placements or ranks or range(self.fabric.size)), 1)
            layout = {"ranks": ranks, "placements": placements, "mirrored": mirrored, "placement": placement}
            mine = list(signature(Pipeline).parameters)
            self.program, chain = build.choose(
                chain, plan, schedule, num_microbatches, mesh, cuts, options, mine, recompute=recompute,
                bucket_bytes=bucket_bytes, **layout,
            )  # fmt: skip
            clips = max_norm is not None or skip_nonfinite
            self.layout = build.check(self.program, chain, self.fabric, optimizer is None, clips)
            self.delays = delays(self.program)
            self._lane = self.fabric.lane("whole")
            types = GradientTypes(master_weights and optimizer is not None, build.checked_wire(compression))
            same = f"{master_weights=}, compression={types.wire}, {max_norm=}, {norm_type=}"
            same += f", {skip_nonfinite=}, count={count is not None}"
            build.fill(chain, self.program, self.fabric, self._lane, device, same)
            self._clipping = Clipping(self.fabric, max_norm, norm_type, skip_nonfinite)
            keep_freed_memory()
            self._make_parts(chain, loss, count, optimizer, on_step, hosts, tile_options or {}, types, clips)
            self._weights = FullState(self.layout, self.fabric, self._lane, chain, self.stages, self._newest)
        _, self._ahead = reach(self.program.kernel)
        self._leaves_gradients, self._sampling = optimizer is None, Sampling()
        self._periods = 0  # given so far, since the pipeline was empty
        self._done = -self._ahead  # the next iteration
        self._health.close = self.close

    def _make_parts(
        self,
        chain: Chain,
        loss: Loss,
        count: Count | None,
        optimizer: Factory | None,
        on_step: OnStep | None,
        hosts: Any,
        tile_options: Mapping[str, Any],
        types: GradientTypes,
        clips: bool,
    ) -> None:
        tied, self._names = chain.tied(self.layout.cuts).values(), chain.first_names()
        shared, own = chain.shared(self.layout.cuts).values(), optimizer is None
        self.stages = make_stages(
            chain, self.program, self.fabric, loss, tied, shared, own, tile_options, types
        )
        ties, lane = checked_ties(tied, self.program, self.stages), self.fabric.lane("ties")
        build.share_weights(chain, self.layout, self.fabric, self._lane, self.stages, shared)
        maker = UpdateMaker(chain, self.program, self.fabric, optimizer, on_step, hosts, self._names)
        self._updates = maker.make(self.stages, ties)
        self._health.close = self._close_updates
        self._losses = Losses(self.layout, self.fabric, self.stages)
        terms = None if count is None else Terms(count, self.layout, self.fabric)
        self._inputs = Inputs(self.layout, self.rank, self.stages, chain.arguments, terms)
        self._evaluation = Evaluation(self.program, self.fabric, self.stages, self._inputs, self._losses)
        self._interpreter = Interpreter(
            self.program,
            self.fabric,
            self.stages,
            self._updates,
            self._inputs,
            partial(sum_ties, ties, self.stages, lane, self.rank) if tied else None,
            partial(self._clipping, self._updates.values()) if clips else None,
            self._losses.tell,
        )

    def step(self, batch: Any, *, local: bool = False) -> float | None:
        """One optimizer step's batch, ``(inputs, targets)``: the whole one, the same on every rank. With
        ``local`` the rows that ``rows`` names: ranks of the first stage pass their inputs, those of the last
        stage the targets; nothing else is read. Returns the mean loss of the step that is finished by now,
        the same on every rank; None while an asynchronous pipeline fills.
        """
        self._health.check()
        batch = checked_pair(batch)
        self._sampling.check(local)
        self._inputs.take(self._interpreter.exchange, self._periods, batch, local)
        # Later steps read the batch again, and the caller may have overwritten it by then.
        self._inputs.add(self._periods, batch, copy=self._ahead > 0)
        self._periods += 1
        self._sampling.advance()
        if not self._leaves_gradients:
            return self._iterate(None)
        with added_to(self.parameters()):
            loss = self._iterate(None)
            self._finish()
        return loss

    def _finish(self) -> None:
        """Takes in what comes from other replicas. After a failure, weights that are complete can be read."""
        with nullcontext() if self._health.failed else self._health.guarded():
            for update in self._updates.values():
                update.finish()

    def drain(self) -> list[float]:
        """Finishes what is in flight; returns the mean losses that ``step`` has not. Training may go on: the
        pipeline fills again.
        """
        self._health.check()
        losses = []
        while self.in_flight:
            loss = self._iterate(self._periods - 1)
            if loss is not None:
                losses.append(loss)
        self._finish()
        with self._health.guarded():
            self._interpreter.restart()
            self._losses.settle()
        self._inputs.given.clear()
        self._periods, self._done = 0, -self._ahead
        return losses

    @property
    def in_flight(self) -> bool:
        """Whether steps have begun that are not finished: ``drain()`` does that."""
        back, _ = reach(self.program.kernel)
        return self._periods > 0 and self._done < self._periods + back

    def _iterate(self, last: int | None) -> float | None:
        self._weights.callers_model.old = True
        iteration = self._done
        finishes = 0 <= iteration < self._periods
        with self._health.guarded():
            for stage in self.stages.values():
                stage.follow()
            self._interpreter.run(iteration, last, self._losses.begin if finishes else lambda: None)
            for stage in self.stages.values():
                stage.leave()
            self._done += 1
            if finishes:
                self._inputs.forget(iteration)
            return self._losses.total() if finishes else None

    def rows(self, count: int) -> list[int]:
        """Of a step of ``count`` rows, those that this rank passes to ``step(local=True)``; none if it holds
        neither the first stage nor the last.
        """
        return rows_to_pass(self.layout, self.rank, count)

    def sampler(
        self,
        dataset: Sized,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        *,
        drop_last: bool = False,
        local: bool = True,
        trains: bool | None = None,
    ) -> StepSampler:
        """For ``DataLoader(dataset, batch_sampler=...)`` and ``step(local=True)``: steps of ``batch_size``
        rows over all replicas. ``local=False``: whole steps on every rank. Steps advance one sampler, whose
        position checkpoints hold: the first, or the last with ``trains=True``. Others need ``trains=False``.
        """
        rows = self.rows if local else lambda count: list(range(count))
        sampler = StepSampler(rows, dataset, batch_size, shuffle, seed, drop_last, local)
        if trains is False:
            return sampler
        self._sampling.check_other(sampler, trains)
        return self._sampling.use(sampler)

    @overload
    def evaluate(self, batch: Any, count: None = None, *, local: bool = False) -> float: ...
    @overload
    def evaluate(self, batch: Any, count: Loss, *, local: bool = False) -> Tensor: ...

    def evaluate(self, batch: Any, count: Loss | None = None, *, local: bool = False) -> float | Tensor:
        """The mean loss of a batch with every stage's newest weights, in evaluation mode, on every rank. Or
        the sum over the batch of ``count(outputs, targets)``, which returns a tensor of counts of its rows.
        """
        self._health.check()
        batch = checked_pair(batch)
        self._inputs.take(self._evaluation.exchange, EVALUATED, batch, local, count is None)
        self._newest()
        # Outside of the caller's inference mode, whose tensors have no versions.
        off = torch.inference_mode(False), torch.no_grad()
        with off[0], off[1], self._inputs.kept(EVALUATED, batch), self._health.guarded():
            return self._evaluation.run() if count is None else self._evaluation.count(count)

    def state_dict(self) -> dict[str, Tensor]:
        """The plain whole model's, on every rank: each stage's newest weights, buffers of its first
        replica.
        """
        with self._health.guarded():
            return self._weights.state_dict()

    def save(self, folder: str | Path) -> None:
        """Writes the whole model's newest weights as Hugging Face does: a file of safetensors for each stage,
        and their index. No rank holds more than its stages; ``weights=folder`` reads them.
        """
        with self._health.guarded():
            self._weights.save(folder)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """A whole model's; only while nothing is in flight. Optimizers keep their state."""
        if self.in_flight:
            raise ValueError("micro-batches are in flight with the present weights; call drain() first")
        self._weights.load_state_dict(state)

    def _newest(self) -> None:
        """Puts each stage's newest weights into its module."""
        self._finish()
        for stage in self.stages.values():
            stage.versions.use_newest()

    def checkpoint(self) -> dict[str, Any]:
        """Everything this rank needs to go on exactly here, for ``commsched.save``; every rank must call.
        Nothing is drained: micro-batches in flight are part of it.
        """
        with self._health.guarded():
            return checkpoint.taken(self)

    def resume(self, state: dict[str, Any]) -> None:
        """Goes on where ``checkpoint`` was taken, in a new pipeline made with the same arguments."""
        if self._periods:
            raise ValueError(
                f"resume() is for a new pipeline, and this one has taken {self._periods} steps: make another"
                " one with the same arguments"
            )
        self._weights.callers_model.old = True
        with self._health.guarded():
            checkpoint.resumed(self, state)

    def training_state(self) -> dict[str, Any]:
        """What a pipeline of the same model needs to go on, whatever its ranks and stages: the whole model's
        weights and buffers, the optimizers' state and options by parameter, the number of steps, and the
        sampler's position. Copies in host memory, on every rank. All ranks must call, with nothing in flight.
        """
        self._check_can_be_moved()
        with self._health.guarded():
            return checkpoint.whole_training(self)

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Goes on where ``training_state`` was taken, but for random numbers. Every rank must call."""
        self._check_can_be_moved()
        with self._health.guarded():
            checkpoint.put_training(self, state)

    def _check_can_be_moved(self) -> None:
        if self._leaves_gradients:
            raise ValueError(
                "with optimizer=None the caller takes the steps, and the state of his optimizer is not here:"
                " pass optimizer= to Pipeline"
            )
        if self.in_flight:
            raise ValueError(
                f"schedule {self.program.policy!r} has micro-batches in flight, which belong to the present"
                " stages: call drain() first; it returns the losses of those steps"
            )

    def parameters(self) -> Iterator[nn.Parameter]:
        """The newest weights of the stages that this rank holds, once all of them are here. They may be
        changed between two steps, on all ranks of a stage alike; call this again after each step.
        """
        self._newest()
        for stage in self.stages.values():
            if any(saved.version is stage.versions.newest for saved in stage.saved.values()):
                stage.versions.part()
        leaves = [leaf for stage in self.stages.values() for leaf in stage.versions.newest.leaves]
        yield from dict.fromkeys(leaves)  # two stages may share one

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """This rank's, stage by stage."""
        self._finish()
        return [u.optimizer for u in self._updates.values() if u.optimizer is not None]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips the gradients that a pipeline with ``optimizer=None`` has left, as
        ``torch.nn.utils.clip_grad_norm_`` does in one process; returns their norm over all stages, the same
        on every rank. All ranks must call.
        """
        if not self._leaves_gradients:
            raise ValueError(
                "this pipeline takes the steps itself and leaves no gradients to clip: pass max_norm= to"
                " Pipeline, which clips before each step"
            )
        parameters = list(self.parameters())
        with self._health.guarded():
            counted = [
                grad
                for number, stage in self.stages.items()
                for place in self._updates[number].counted
                if (grad := stage.versions.newest.leaves[place].grad) is not None
            ]
            total = self._clipping.norm(counted, norm_type)
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the total norm of the gradients is {total.item()}, so they cannot be clipped"
            )
        scale([p.grad for p in parameters if p.grad is not None], max_norm, total)
        return total.to(reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32))

    def close(self) -> None:
        """Ends the engines, and messages over NCCL."""
        self._close_updates()
        self._interpreter.exchange.close(self._health.failed)

    def _close_updates(self) -> None:
        for update in self._updates.values():
            update.close()


# -- ``Hybrid``: the first stages on tiles, the rest on whole images, with replicas and micro-batches --------

#     trainer = spatial.Hybrid(stages, [spatial.Tiles((2, 2)), spatial.Samples()], loss=F.cross_entropy)
#     optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
#     loss = trainer.step(images, target)       # gradients are whole, the same on all ranks of a stage
#     optimizer.step()
#
# ``mirrored=True`` adds a second replica on the same ranks in opposite order (GEMS), so that a rank with
# little to do in one replica has much to do in the other.


class Hybrid:
    """Trains ``stages`` (modules that take and return a tensor or a tuple of them) where ``placements`` say.

    A `Pipeline` whose layers are the stages and whose optimizer is the caller's. Every rank makes the same
    one. ``replicas`` share the samples of a batch on ranks of their own; a step takes ``microbatches``
    micro-batches (twice as many with ``mirrored``), which all replicas of one direction share. Samples need
    not divide evenly: each counts alike. ``schedule`` is a synchronous one of ``scheduler.pipelines`` and
    ``options`` are its own; ``virtual=2`` of ``interleaved`` puts stage ``s + len(placements)`` where stage
    ``s`` is. ``loss(output, target)`` is a mean over samples, or with ``count`` a sum over terms.
    ``stages`` may be a function that makes them, and ``weights`` may be read: see `Pipeline`. Needs
    ``commsched.init()``, or a ``fabric``.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module] | Make,
        placements: Sequence[Placement],
        *,
        loss: Loss,
        count: Count | None = None,
        microbatches: int = 1,
        replicas: int = 1,
        mirrored: bool = False,
        schedule: str = "1f1b",
        overlap: str = "auto",
        weights: WeightSource | None = None,
        timeout: float = 60.0,
        fabric: Fabric | None = None,
        **options: Any,
    ) -> None:
        needed = stage_count(orders_of(schedule, len(placements), microbatches, options)) if placements else 0
        chain = Chain(stages, elements=True, weights=weights)
        self.stages = [stage for stage in chain.model._modules.values() if stage is not None]
        if len(self.stages) != needed or not needed:
            raise ValueError(
                f"every stage needs a placement: schedule {schedule!r} runs {needed} stages on"
                f" {len(placements)} placements, got {len(self.stages)} stages, {len(placements)} placements;"
                " pass one placement for each stage (interleaved: for each of the first stages)"
            )
        self.pipeline = Pipeline(
            chain,
            schedule,
            microbatches,
            (len(placements), replicas),
            loss=loss,
            count=count,
            optimizer=None,
            cuts=range(needed),
            placements=placements,
            mirrored=mirrored,
            tile_options={"overlap": overlap},
            fabric=ProcessFabric(timeout) if fabric is None else fabric,
            **options,
        )

    @property
    def program(self) -> Program:
        """Every rank's actions in their order: what the simulator times and the validator checks."""
        return self.pipeline.program

    @property
    def held(self) -> list[int]:
        """The stages that this rank computes."""
        return sorted(self.pipeline.stages)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of the stages that this rank holds."""
        yield from dict.fromkeys(p for number in self.held for p in self.stages[number].parameters())

    def train(self, mode: bool = True) -> None:
        for stage in self.pipeline.stages.values():
            for module in stage.modules:
                module.train(mode)

    def step(self, images: Tensor, target: Tensor) -> float:
        """Forward and backward of a batch that every rank has; the mean loss. Gradients are added to
        ``.grad`` as the sum over tiles, samples and replicas, the same on all ranks that hold a stage.
        """
        loss = self.pipeline.step((images, target))
        assert loss is not None  # synchronous schedules end each step in its own iteration
        return loss

    def evaluate(self, images: Tensor, target: Tensor) -> float:
        """The mean loss in eval mode, without gradients."""
        return self.pipeline.evaluate((images, target))

    def close(self) -> None:
        """Ends the connections that sum gradients."""
        self.pipeline.close()


# -- whether a pipeline can go on: after a failure its ranks no longer agree on where they are ---------------


class Health:
    """At the first failure ``close`` is called, then ``abort`` with its reason."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort, self._failure = abort, ""
        self.close: Callable[[], None] = lambda: None

    @property
    def failed(self) -> bool:
        return bool(self._failure)

    def check(self) -> None:
        """``CommError`` after a failure."""
        if self._failure:
            raise CommError(f"this pipeline has failed before and cannot go on ({self._failure})")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A failure within ``with`` ends the pipeline."""
        self.check()
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            self.close()
            self._abort(self._failure)
            raise
