"""Runs a rank's part of a program: its three lanes, one iteration after the other.

One thread computes, in the order of the compute lane. After each action everything in the link lane that has
become possible is handed over: messages to the fabric, reductions to the stage's engine. Receives are posted
ahead. Messages from device to device are launched where ``scheduler.ir.launches`` says.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise, zip_longest
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from commsched.channels import Pending
from commsched.errors import CommError
from commsched.pipeline.exchange import Exchange, Inputs, tellers
from commsched.pipeline.messages import Fabric, everyones, from_first, in_words
from commsched.pipeline.random_state import drawing_at
from commsched.pipeline.stage import Loss, Micro, Saved, Stage, Version
from commsched.pipeline.update import Update
from scheduler.ir.actions import TRANSFER, Action, Kind, last_gradient, position, stage_of
from scheduler.ir.launches import can_block, launches
from scheduler.ir.layout import Layout
from scheduler.ir.program import COMPUTE_LANE, LINK_LANE, RECV_LANE, Program, delays, reach, version


class Interpreter:
    """One rank of a running program.

    ``ties`` is called with the period before the steps of stages that share parameters, once all their
    gradients are complete; ``clip`` after it, once they are summed over the replicas, and says whether to
    skip the step; ``tell`` with a period whose losses are all there. ``spans``: a list here is filled with
    what is computed.
    """

    def __init__(
        self,
        program: Program,
        fabric: Fabric,
        stages: dict[int, Stage],
        updates: dict[int, Update],
        inputs: Inputs,
        ties: Callable[[int], None] | None,
        clip: Callable[[], bool] | None,
        tell: Callable[[int], None],
    ) -> None:
        assert program.pipeline is not None
        self.layout: Layout = program.pipeline
        self.rank, self.stages, self.updates = fabric.rank, stages, updates
        self.inputs, self.ties, self.clip, self.tell = inputs, ties, clip, tell
        self.lanes = program.kernel[self.rank]
        self.delays = delays(program)
        order = self.lanes[COMPUTE_LANE]
        self.completes = {stage: order[last_gradient(order, stage)] for stage in stages}
        self.split = {action.stage for action in order if action.kind is Kind.W}
        self.exchange = Exchange(self.layout, fabric, stages, program=program if can_block(program) else None)
        self._launches: list[list[Action]] = []
        if self.exchange.direct is not None:
            self._launches = launches(program.kernel, self.layout)[self.rank]
        self._per_period = {stage: len(self.layout.computed_by(self.rank, stage)) for stage in stages}
        self._tells, self._last = inputs.tells, self.layout.stages - 1
        self.link: deque[Action] = deque()
        self.complete: dict[int, int] = dict.fromkeys(stages, -1)  # the last period with all gradients
        self.stepped: dict[int, int] = dict.fromkeys(stages, -1)
        self.forwards: dict[int, int] = dict.fromkeys(stages, 0)
        self._told = -1
        self._overlap = int(reach(program.kernel) != (0, 0))  # whether periods share iterations
        # A period's steps come after its compute where ranks with several stages could wait for each other.
        mirrored = self.layout.mirror and any(update.replicas for update in updates.values())
        self.steps_at_end = ties is not None or clip is not None or (mirrored and not self._overlap)
        self.spans: list[Span] | None = None
        self._waited_reduced = 0.0

    # One iteration

    def run(self, iteration: int, last: int | None, meanwhile: Callable[[], None]) -> None:
        """The kernel's iteration, without the periods before 0 and after ``last``. ``meanwhile`` is called
        once, when others may already compute with what this rank has sent.
        """
        inbox, moves = self.exchange.inbox, self.exchange.moves
        link = [a for a in self._now(LINK_LANE, iteration, last) if moves(a)]
        if self._launches:
            link = [a for a in link if a.kind not in TRANSFER]
        else:
            # After a checkpoint, some may be here already.
            coming = [a for a in self._now(RECV_LANE, iteration, last) if a not in inbox.arrived]
            inbox.expect([a for a in coming if moves(a)])
        # Gathers that wait for steps at the end would keep back what others compute with.
        gathers = not self.steps_at_end
        self.link.extend(a for a in link if gathers or a.kind is not Kind.AG)
        late, first = [], True
        order = self._now(COMPUTE_LANE, iteration, last)
        self._launch(0, iteration)
        for place, (action, following) in enumerate(zip_longest(order, order[1:]), 1):
            if action.kind is Kind.STEP and self.steps_at_end:
                late.append(action)
                self._launch(place, iteration)
                continue
            self._do(action)
            self._launch(place, iteration)
            self._issue()
            # Only now: nobody waits for this rank to post a receive or to tidy up, but for what it computes.
            inbox.pump()
            self.exchange.free_answered()
            if first:
                self._tidy(iteration)
                meanwhile()
                first = False
            # A backward from the loss waits for no message, and others wait for what it computes.
            if following is None or following.kind is not Kind.B or following.stage != self._last:
                self._tell(action, iteration)
        if first:
            meanwhile()
        if self.steps_at_end:
            self._step_together(late)

    def _launch(self, place: int, iteration: int) -> None:
        """Launch the messages from device to device that follow so many computations."""
        for action in self._launches[place] if self._launches else ():
            self.exchange.launch(action.at(iteration))

    def _tidy(self, iteration: int) -> None:
        """Periods that ended with an earlier iteration have been received everywhere, or will be."""
        self.exchange.free_before(iteration - self._overlap)

    def _now(self, lane: str, iteration: int, last: int | None) -> list[Action]:
        lowest, highest = -iteration, None if last is None else last - iteration
        return [
            action.at(iteration + action.shift)
            for action in self.lanes.get(lane, ())
            if action.shift >= lowest and (highest is None or action.shift <= highest)
        ]

    def settle(self) -> None:
        """Ends what is under way between ranks, which all call this after the same iteration: a rank that
        leaves then breaks no sum and no message of another.
        """
        self.exchange.inbox.drain()
        self._issue()
        for update in self.updates.values():
            update.settle()
        self.exchange.outbox.settle()

    def restart(self) -> None:
        """Periods count from 0 again; nothing is in flight."""
        for number, stage in self.stages.items():
            stage.versions.reset(0)
            self.forwards[number], self.complete[number], self.stepped[number] = 0, -1, -1
        for update in self.updates.values():
            update.restart()
        self.exchange.outbox.settle()
        self.exchange.shares.settle()
        self.exchange.shares.clear()
        self._told = -1

    def _tell(self, action: Action, iteration: int) -> None:
        """A period's loss is told in its own iteration, once all its forwards are over."""
        last = self._last
        if action.stage != last or action.kind is Kind.STEP or self._told >= iteration or not self._tells:
            return
        if self.forwards[last] >= (iteration + 1) * self._per_period[last] and iteration >= 0:
            self._told = iteration
            self.exchange.confirm()
            self.tell(iteration)

    def _do(self, action: Action) -> None:
        if action.kind is Kind.F:
            self._forward(action, stage_of(action))
        elif action.kind is Kind.STEP:
            self._collect(action)
            self._update(action)
        else:
            self._gradient(action, stage_of(action))

    # Computation

    def _forward(self, action: Action, number: int) -> None:
        stage, micro = self.stages[number], (action.index, action.shift)
        weights = stage.versions.live[version(action)]
        arguments = self.inputs.arguments(self.exchange, number, micro)
        head = self.inputs.head(self.exchange, number, micro)
        self.updates[number].prepare(weights)
        try:
            start = perf_counter()
            with _forward_of(stage, weights, micro, self.exchange):
                leaves = stage.forward(micro, arguments, weights, head)
            self._note(action, start)
        except CommError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            # Scripts catch this one, and go on with a smaller batch.
            kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else ValueError
            raise kind(
                f"stage {number} on rank {self.rank} failed in the forward of micro-batch {micro[0]} of step"
                f" {micro[1]} ({type(error).__name__}: {error}); it was given {in_words(arguments[0])}"
            ) from error
        self.forwards[number] += 1
        if head is None:
            grads = stage.needs_grad(leaves, stage.saved[micro].leaves)
            self.exchange.put_out(number, micro, leaves, grads)

    def _gradient(self, action: Action, number: int) -> None:
        """B, or W where the program has any."""
        stage, micro = self.stages[number], (action.index, action.shift)
        kernel = self.completes[number]
        completes = (action.kind, action.index) == (kernel.kind, kernel.index)
        start = perf_counter()
        if action.kind is Kind.W:
            stage.weight_gradients(micro)
            self._note(action, start)
        elif completes:
            with self.updates[number].early(action.shift, stage.saved[micro].version):
                self._backward(action, stage, micro)
        else:
            self._backward(action, stage, micro)
        if completes:
            self.complete[number] = action.shift

    def _backward(self, action: Action, stage: Stage, micro: Micro) -> None:
        leaves, number = stage.saved[micro].leaves, stage.number
        grads = self.exchange.output_grads(number, micro) if number + 1 < self.layout.stages else []
        start = perf_counter()
        found = stage.backward(micro, grads, number in self.split)
        self._note(action, start)
        self.exchange.put_back(number, micro, leaves, found)

    def _note(self, action: Action, start: float) -> None:
        if self.spans is not None:
            waited = self._waited_reduced + self.exchange.inbox.waited
            self.spans.append(Span(action, start, perf_counter(), waited))

    # Sends and collectives

    def _issue(self) -> None:
        """Starts what can be started of the link lane, in its order."""
        while self.link and self._start(self.link[0]):
            self.link.popleft()

    def _start(self, action: Action) -> bool:
        stage = stage_of(action)
        complete = self.complete[stage] >= action.shift
        if action.kind is Kind.SENDF:
            return self.exchange.send_forward(action)
        if action.kind is Kind.SENDB:
            if complete and self.layout.placement == "eager":
                # The program has its sums before it on the wire.
                self._wait_reduced(stage)
            return self.exchange.send_backward(action)
        if action.kind is Kind.AG:
            if self.stepped[stage] < action.shift:
                return False
            self.updates[stage].gather(action.index)
            return True
        if complete:
            self.exchange.confirm()  # before the replicas hear that their sums are complete
            self.updates[stage].reduce(action.shift, action.index)
        return complete

    def _step_together(self, actions: list[Action]) -> None:
        """The steps of a period after all its compute."""
        self.exchange.confirm()
        if actions and self.ties is not None:
            self.ties(actions[0].shift)
        # In the same order on all ranks.
        actions = sorted(actions, key=stage_of)
        for action in actions:
            self._collect(action)
        skip = self.clip is not None and self.clip()
        for action in actions:
            self._update(action, skip)
            update = self.updates[stage_of(action)]
            for bucket in update.numbers:
                update.gather(bucket)

    def _collect(self, action: Action) -> None:
        """Waits for the gradients of all replicas, which is no computation."""
        number = stage_of(action)
        self._issue()
        self.exchange.confirm()
        self._wait_reduced(number)
        self.updates[number].collect(action.shift)

    def _update(self, action: Action, skip: bool = False) -> None:
        number, start = stage_of(action), perf_counter()
        self.updates[number].step(action.shift, lambda v: self._needed(number, v), skip)
        self._note(action, start)
        self.stepped[number] = action.shift

    def _wait_reduced(self, number: int) -> None:
        start = perf_counter()
        self.updates[number].wait_reduced()
        self._waited_reduced += perf_counter() - start

    def _needed(self, number: int, v: int) -> bool:
        """Whether a micro-batch in flight or still to come computes with version ``v``."""
        stage = self.stages[number]
        if any(saved.version.number == v for saved in stage.saved.values()):
            return True
        coming = self.forwards[number] // self._per_period[number]
        return v >= max(0, coming - self.delays[number])


@contextmanager
def _forward_of(stage: Stage, weights: Version, micro: Micro, exchange: Exchange) -> Iterator[None]:
    """With random numbers of its own, which the tiles of a replica share. ``ValueError`` where a forward
    writes to weights that other ranks have, too.
    """
    before = _writes_to(weights)
    replica, _, _ = exchange.place(stage.number, exchange.rank, micro[0])
    place = stage.number, replica, *micro, stage.forwards
    with drawing_at(stage.device, *place) if exchange.own_generator else nullcontext():
        yield
    writes = zip(stage.versions.names, before, _writes_to(weights), strict=True)
    changed = [name for name, then, now in writes if then != now]
    if changed and len(exchange.layout.members(stage.number)) > 1:
        raise ValueError(
            f"the forward writes to {', '.join(changed[:4])} (as nn.Embedding with max_norm= does), and each"
            " replica would do so for its own rows only: write between steps, or give the stage one replica"
        )


def _writes_to(weights: Version) -> list[int]:
    """How often each tensor has been written to; parameters that have not come are not waited for."""
    with torch._C.DisableTorchFunctionSubclass():
        return [leaf._version for leaf in weights.leaves]


# -- batches outside of training: the forwards of the program, with the newest weights -----------------------

EVALUATED = -1
"""The period of a batch that is evaluated."""


class Evaluation:
    """Runs the forwards of one period, on a message lane of its own: training messages may be in flight."""

    def __init__(
        self, program: Program, fabric: Fabric, stages: dict[int, Stage], inputs: Inputs, losses: Losses
    ) -> None:
        self.layout, self.rank, self.stages = program.layout, fabric.rank, stages
        self.inputs, self.losses = inputs, losses
        self.exchange = Exchange(self.layout, fabric, stages, "evaluation")
        self._fabric, self._lane = fabric, fabric.lane("counts")
        self._forwards = self._of_one_period(program, COMPUTE_LANE, Kind.F)
        self._receives = self._of_one_period(program, RECV_LANE, Kind.RECVF)

    def _of_one_period(self, program: Program, lane: str, kind: Kind) -> list[Action]:
        order = program.kernel[self.rank].get(lane, ())
        places = [n for n, a in enumerate(order) if a.kind is kind]
        return [
            order[place].at(EVALUATED) for place in sorted(places, key=lambda place: position(order, place))
        ]

    def run(self) -> float:
        """The mean loss of the batch that ``exchange.shares`` has of period ``EVALUATED``."""
        self.losses.begin()
        self._pass_forward(None)
        if self.inputs.tells:
            self.losses.tell(EVALUATED)
        total = self.losses.total()
        self._forget()
        self.losses.settle()
        return total

    def count(self, count: Loss) -> Tensor:
        """The sum over that batch of what ``count`` returns, in the same order of ranks everywhere."""
        found = everyones(self._lane, self.rank, range(self._fabric.size), self._pass_forward(count))
        self._forget()
        return _sum([found[rank] for rank in tellers(self.layout) if found[rank] is not None])

    @torch.no_grad()
    def _pass_forward(self, count: Loss | None) -> Tensor | None:
        """Runs all forwards; the sum of the counts on this rank, if any."""
        exchange = self.exchange
        exchange.inbox.expect([action for action in self._receives if self._comes(action)])
        counted: list[Tensor] = []
        with self._evaluating(), self._first_buffers():
            for action in self._forwards:
                self._forward(action, count, counted)
                exchange.inbox.pump()
        return _sum(counted) if counted else None

    @contextmanager
    def _first_buffers(self) -> Iterator[None]:
        """With the running statistics of each stage's first replica, which the saved model has too. Mirrored
        ones keep their own.
        """
        with ExitStack() as lent:
            for number, stage in () if self.layout.mirror else self.stages.items():
                ranks = self.layout.members(number)
                mine = dict(stage.module.named_buffers(remove_duplicate=False))
                if len(ranks) > 1 and mine:
                    first = from_first(self._lane, self.rank, ranks, mine)
                    if self.rank != ranks[0]:
                        lent.enter_context(stage.with_buffers(first))
            yield

    def _forget(self) -> None:
        exchange = self.exchange
        exchange.outbox.settle()
        exchange.outputs.clear()
        exchange.came.clear()
        exchange.to_come.clear()
        exchange.shares.settle()
        exchange.shares.clear()

    def _comes(self, action: Action) -> bool:
        """Whether an action of the recv lane has rows in this batch."""
        low, high = self.exchange.rows(stage_of(action), self.rank, (action.index, EVALUATED))
        return low < high and self.exchange.moves(action)

    def _forward(self, action: Action, count: Loss | None, counted: list[Tensor]) -> None:
        number, micro, exchange = stage_of(action), (action.index, EVALUATED), self.exchange
        stage, (low, high) = self.stages[number], exchange.rows(number, self.rank, micro)
        if low == high:
            return
        leaves, spec, cuts = self.inputs.arguments(exchange, number, micro)
        head = self.inputs.head(exchange, number, micro, count)
        with _forward_of(stage, stage.versions.newest, micro, exchange):
            outputs = stage.run(Saved(stage.versions.newest, leaves, spec, head, [], micro, cuts))
        if head is not None and count is not None:
            if head.counts:
                counted.append(outputs[0].double().cpu())
            return
        if head is not None:
            stage.add_loss(EVALUATED, outputs[0], head)
            return
        exchange.put_out(number, micro, outputs, [False] * len(outputs))
        for peer in exchange.peers(number, number + 1, micro[0]):
            send = Action(Kind.SENDF, micro[0], number, peer=peer, shift=EVALUATED)
            if peer != self.rank and exchange.moves(send):
                exchange.send_forward(send)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        for stage in self.stages.values():  # else what the caller has set would be undone at the end
            stage.follow()
        modules = [module for stage in self.stages.values() for module in stage.modules]
        modes = [(part, part.training) for module in modules for part in module.modules()]
        for part, _ in modes:
            part.training = False
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training
            for stage in self.stages.values():
                stage.leave()


def _sum(values: list[Tensor]) -> Tensor:
    """The sum in this order."""
    return sum(values[1:], start=values[0])


# -- the mean loss of each step, told by ranks of the last stage to every rank -------------------------------


class Losses:
    """Sums the replicas' parts in their order, so that every rank has the same number.

    A period's parts travel within the iteration of its backward: sent when complete, received ahead.
    """

    def __init__(self, layout: Layout, fabric: Fabric, stages: dict[int, Stage]) -> None:
        self.ranks, self.fabric = tellers(layout), fabric
        self.stage = stages.get(layout.stages - 1)
        self.lane = fabric.lane("losses")
        self._coming: list[tuple[Tensor, Pending | None]] = []
        self._sent: list[Any] = []
        self._before: list[Any] = []  # of the iteration before

    def begin(self) -> None:
        """An iteration that a loss belongs to."""
        for pending in self._before:
            pending.wait()
        self._before, self._sent = self._sent, []
        for rank in self.ranks:
            value = torch.empty(1, dtype=torch.float64)
            mine = rank == self.fabric.rank
            self._coming.append((value, None if mine else self.lane.receive(rank, [value])))

    def tell(self, period: int) -> None:
        """This replica's part is complete."""
        assert self.stage is not None
        value = torch.tensor([float(self.stage.losses.pop(period, 0.0))], dtype=torch.float64)
        for mine, pending in self._coming:
            if pending is None:
                mine.copy_(value)
        for peer in range(self.fabric.size):
            if peer != self.fabric.rank:
                self._sent.append(self.lane.send(peer, [value]))

    def total(self) -> float:
        """At the end of the iteration."""
        found = 0.0
        for value, pending in self._coming:
            if pending is not None:
                pending.wait()
            found += float(value)
        self._coming = []
        return found

    def settle(self) -> None:
        for pending in (*self._before, *self._sent):
            pending.wait()
        self._before, self._sent = [], []


# -- when a rank computed, and what it needed between one action and the next --------------------------------


class Span(NamedTuple):
    """One computation and its time (seconds of ``time.perf_counter``). ``waited``: the seconds that this
    rank had waited for messages and sums until then, since it began.
    """

    action: Action
    start: float
    end: float
    waited: float


def handling(spans: Sequence[Span]) -> float:
    """Seconds between one action and the next in which nothing is waited for: the rank hands on what it has
    computed and takes up what is next.
    """
    gaps = [(b.start - a.end) - (b.waited - a.waited) for a, b in pairwise(spans)]
    return statistics.median(gaps) if gaps else 0.0
