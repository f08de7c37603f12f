"""Weight gradients in places of their own, within the same ``backward()``.

When the backward reaches a split module, it runs the module's graph towards the input (B) at once, and
towards the weight (W) where the plan says, with the kernels that an unsplit backward would call.

A module is tried in one iteration before it is split: it is left as it is where a gradient comes out in
other bits, where its weight gets gradients from elsewhere too, or where it is used twice. Everything here
runs in the thread that runs the forward or the backward.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from commsched.optimizer.hooks import Owner
from commsched.optimizer.profiling import Sample
from commsched.optimizer.reducer import Reducer
from commsched.optimizer.split_modules import After, Before, Call, Check, Join, Part, candidates
from commsched.optimizer.waiting_memory import WaitingMemory, default_memory
from scheduler.ir.actions import Action, Kind

_engine: Any = torch.autograd.Variable._execution_engine


def _is_hooked(param: Tensor) -> bool:
    """Whether hooks of others than us, which might be called twice, follow this parameter's gradient."""
    return bool(param._backward_hooks) or len(param._post_accumulate_grad_hooks or ()) > 1


class SplitBackward:
    """The split modules of one optimizer, and their weight gradients that wait.

    ``extra_memory``: bytes that these may hold beyond what an unsplit backward needs; None: a tenth of that.
    """

    def __init__(self, reducer: Reducer, owners: Sequence[Owner], extra_memory: int | None = None) -> None:
        self.reducer, self._asked_memory = reducer, extra_memory
        self.parts = candidates(reducer.params, owners)
        self.extra_memory = 0
        self._trying = self._differentiated = False
        self._handles: list[RemovableHandle] = []
        self._splits: frozenset[Part] = frozenset()
        self._behind: dict[int, int] = {}  # by parameter: the place of the B behind its own; empty: none
        self._waiting: list[tuple[int, int, Call, Tensor]] = []
        self._numbers = itertools.count()
        self._task: int | None = None  # the backward in which they wait
        self._memory = WaitingMemory()
        reducer.compute_waiting = self.drain

    # -- which modules ---------------------------------------------------------------------------------------

    def look(self, args: Sequence[Any]) -> None:
        """Notice, in an iteration before any module is split, a backward that can be differentiated again."""
        for x in args:
            if isinstance(x, Tensor) and x.requires_grad:
                self._handles.append(x.register_hook(self._look_at_gradient))

    def _look_at_gradient(self, _: Tensor) -> None:
        if torch.is_grad_enabled():
            self.differentiated()

    def differentiated(self) -> None:
        """Split nothing from now on: a second derivative would be summed in another order."""
        self._differentiated = True

    def try_modules(self) -> None:
        """Try every candidate in the next iteration."""
        if self._differentiated:
            return self.remove()
        self._trying = True
        self.extra_memory = self._allowed(())
        for part in self.parts:
            part.tried = part.refused = False
        self._follow(self.parts)
        for part in self.parts:
            part.check = Check(part, self.reducer.params[part.weight])
            self._handles.append(part.check.follow())

    def measure(self) -> None:
        """Split all that have passed; each weight gradient stands behind its input gradient."""
        self._trying = False
        passed = [part for part in self.parts if part.passed]
        self.extra_memory = self._allowed(passed)
        for part in passed:
            part.places = 0, 0, 0
        self._behind = {}
        self._follow(passed)

    def install(self, backward: Sequence[Action], layers: Sequence[int]) -> None:
        """Split the modules whose weight gradients this plan puts elsewhere; without actions, none.

        ``layers``: the parameter of each layer.
        """
        if not backward:
            return self.remove()
        weights = {layers[a.index]: n for n, a in enumerate(backward) if a.kind is Kind.W}
        inputs = [n for n, a in enumerate(backward) if a.kind is Kind.B]
        nexts = dict(zip(inputs, [*inputs[1:], len(backward)], strict=True))
        places = {layers[backward[n].index]: n for n in inputs}
        self._behind = {i: nexts[n] for i, n in places.items()}
        apart = []
        for part in self.parts:
            place, own = weights.get(part.weight), places.get(part.weight, 0)
            if part.passed and place is not None and abs(place - own) > 1:
                part.places = place, own, nexts[own]
                apart.append(part)
        self._follow(apart)
        theirs, params = {i for part in apart for i in (part.weight, *part.others)}, self.reducer.params
        for i, place in self._behind.items():
            if apart and 0 <= i < len(params) and i not in theirs and params[i].requires_grad:
                passed = partial(self._passed, place)
                self._handles.append(params[i].register_post_accumulate_grad_hook(passed))

    def remove(self) -> None:
        """Let every module be as it was."""
        self._behind = {}
        self._follow([])

    def names(self) -> list[str]:
        """Return the names of the parameters whose gradients wait."""
        if not self._behind:
            return []
        return [self.reducer.state.names[i] for i in sorted(part.weight for part in self._splits)]

    def kept(self) -> dict[int, int]:
        """Return the bytes that each weight gradient which may wait needs, by parameter."""
        return {part.weight: part.kept for part in self.parts if part.passed}

    def completed(self, times: Sample) -> Sample:
        """Return the times with those of weight gradients that were not computed apart this time.

        They had their share of the module's backward when all were.
        """
        backward, weights = list(times.backward), list(times.weights)
        for part in self.parts:
            own = (part.weight, *part.others)
            total = sum(backward[i] for i in own)
            if weights[part.weight]:
                part.share = weights[part.weight] / total
            elif part.passed and part.share:
                weights[part.weight] = backward[part.weight] = part.share * total
                for i in part.others:
                    backward[i] = (total - backward[part.weight]) / len(part.others)
                if not part.others:
                    backward[part.weight] = total
        return Sample(times.forward, backward, times.outside, weights)

    def _follow(self, parts: Sequence[Part]) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._splits = frozenset(parts)
        apart, params = {part.weight for part in parts}, self.reducer.params
        others = [p.nbytes for i, p in enumerate(params) if i not in apart and p.requires_grad]
        self._memory.others = max(others, default=0)
        for part in parts:
            part.entered = part.last = part.expected = part.check = None
            module = part.module()
            if module is not None:
                self._handles.append(module.register_forward_pre_hook(Before(self, part)))
                self._handles.append(module.register_forward_hook(After(self, part), prepend=True))

    def _allowed(self, parts: Sequence[Part]) -> int:
        asked = self._asked_memory
        return default_memory(self.reducer.params, parts) if asked is None else asked

    # -- the forward -----------------------------------------------------------------------------------------

    def splits(self, part: Part, module: nn.Module, args: Any) -> bool:
        """Return whether this forward can be split."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or part.refused:
            return False
        if self._differentiated:
            return False
        if torch._C._current_graph_task_id() != -1:
            return False  # checkpointing computes this forward again
        if self._task is not None:
            self._forget()  # of a backward that has failed
        weight = self.reducer.params[part.weight]
        if module is not part.module() or module._parameters.get("weight") is not weight:
            return False
        if module._backward_hooks or module._backward_pre_hooks or "forward" in module.__dict__:
            return False
        if any(map(_is_hooked, (self.reducer.params[i] for i in (part.weight, *part.others)))):
            return False
        if len(args) != 1 or type(args[0]) is not Tensor or not weight.requires_grad:
            return False
        return (
            args[0].is_floating_point()
            and args[0].layout is torch.strided
            and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    def joined(self, part: Part, x: Tensor, inside: Tensor, out: Tensor) -> Tensor:
        """Return the module's output, as a node of the model's graph."""
        params = [self.reducer.params[i] for i in (part.weight, *part.others)]
        call = Call(part, inside, out, params)
        self._memory.joined(call)
        before = part.last() if part.last is not None else None
        if before is not None and not before.done:  # a second forward before the backward
            before.whole = call.whole = True
            part.refused = part.refused or self._trying
        part.last = weakref.ref(call)
        result: Tensor = Join.apply(self, call, x, *params)
        return result

    # -- the backward ----------------------------------------------------------------------------------------

    def backward(self, call: Call, grad: Tensor) -> list[Tensor | None]:
        """Return the gradients of the input and of each parameter; None for a weight's that waits."""
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        task = torch._C._current_graph_task_id()
        call.done = True
        if self._trying:
            return self._tried(call, grad, keep)
        memory = self._memory
        # Only a whole backward() accumulates; grad() and backward(inputs=...) want what they have named.
        if call.whole or not _engine.is_checkpoint_valid() or self._task not in (None, task):
            memory.passed(call, keep)
            memory.freed(call, keep)
            return call.gradients(grad, [call.inside, *call.params], keep)
        if self._task is None:
            self._task = task
            memory.begin()
            _engine.queue_callback(self.reducer.end_of_backward)
        place, own, behind = call.part.places
        self._run_before(own, keep)
        memory.at(call, grad)
        while self._waiting and memory.beyond([call, *(w[2] for w in self._waiting)]) > self.extra_memory:
            self._run_first(keep)
        # W never comes first: a sent gradient may update the weight, which B reads.
        inputs, *rest = call.gradients(grad, [call.inside, *call.params[1:]], True)
        heapq.heappush(self._waiting, (place, next(self._numbers), call, grad))
        memory.passed(call, keep)
        memory.waits(grad)
        memory.behind(call)
        watch = self.reducer.arrivals.watch
        if watch is not None:
            watch.grad(call.part.weight)
        self._run_before(behind, keep) if self._behind else self._run_all(keep)
        while self._waiting and memory.beyond(()) > self.extra_memory:
            self._run_first(keep)
        self.reducer.without.add(call.part.weight)
        return [inputs, None, *rest]

    def _passed(self, place: int, _: Tensor) -> None:
        """Run what the plan puts before this place: another module's gradient has been computed."""
        if self._waiting and not self.reducer.splitting:
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            self._run_before(place, keep)

    def drain(self) -> None:
        """Run all that waits, at the end of its backward."""
        if self._task == torch._C._current_graph_task_id():
            self._run_all(torch._C._autograd._get_current_graph_task_keep_graph())
            self._task = None
            self.reducer.without.clear()

    def _run_all(self, keep: bool) -> None:
        while self._waiting:
            self._run_first(keep)

    def _run_before(self, place: int, keep: bool) -> None:
        while self._waiting and self._waiting[0][0] < place:
            self._run_first(keep)

    def _run_first(self, keep: bool) -> None:
        """Compute the weight gradient that is next in the plan; autograd's hooks see it as any other."""
        _, _, call, grad = heapq.heappop(self._waiting)
        watch = self.reducer.arrivals.watch
        start = watch.now() if watch is not None else None
        self._memory.computed(call, grad, keep)
        self.reducer.splitting = True
        try:
            torch.autograd.backward([call.edge], [grad], retain_graph=keep, inputs=[call.params[0]])
        finally:
            self.reducer.splitting = False
        if watch is not None:
            watch.weight(call.part.weight, start)

    def _tried(self, call: Call, grad: Tensor, keep: bool) -> list[Tensor | None]:
        part = call.part
        whole, same = call.tried(grad, self.extra_memory, keep)
        part.tried, part.refused = True, part.refused or not same
        part.kept = max(part.kept, call.inside.nbytes, grad.nbytes)
        part.expected = whole[1]
        return whole

    def _forget(self) -> None:
        self._waiting.clear()
        self.reducer.without.clear()
        self._task = None
