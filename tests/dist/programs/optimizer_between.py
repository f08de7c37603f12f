"""Between ``step()`` and the next forward nobody sees a stale value, and what one changes stays changed."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.support.cases import Me, case, main
from tests.support.oracle import assert_same_bits, batch, release, values
from tests.support.reference_run import Twin, comparing
from tests.support.small_models import loss_of, mlp, mlp64


def as_tensors(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, nn.Module):
        return list(thing.state_dict().values())
    if isinstance(thing, dict):
        return [t for key in sorted(thing, key=str) for t in as_tensors(thing[key])]
    if isinstance(thing, (list, tuple)):
        return [t for value in thing for t in as_tensors(value)]
    return []


def watch(me: Me, look: Callable[[nn.Module], Any], steps: int = 6, **options: Any) -> None:
    """After every step both models are looked at in the same way and must show the same."""
    with comparing(every=0):  # the first step returns early, too
        for zero in (False, True):
            twin = Twin(me, mlp, **options)
            for step in range(steps):
                twin.step(loss_of(step), zero_before=zero)
                mine, plain = twin.both(look)
                if isinstance(mine, (str, bytes)):
                    assert mine == plain, f"step {step}: {mine!r} {plain!r}"
                else:
                    assert_same_bits(as_tensors(mine), as_tensors(plain), f"what was seen in step {step}")
            twin.end()


@case()
def state_dict_is_up_to_date(me: Me) -> None:
    watch(me, lambda model: values(model.state_dict().values()))


@case()
def deepcopy_and_pickle_are_up_to_date(me: Me) -> None:
    watch(me, copy.deepcopy)
    watch(me, lambda model: copy.deepcopy(list(model.parameters())[2]))
    watch(me, lambda model: pickle.loads(pickle.dumps(model)))

    def saved(model: nn.Module) -> Any:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    watch(me, saved)


@case()
def copies_are_ordinary_parameters(me: Me) -> None:
    twin = Twin(me, mlp)
    for step in range(4):
        twin.step(loss_of(step))
        for p in copy.deepcopy(twin.model).parameters():
            assert type(p) is nn.Parameter, type(p)
    twin.end()


@case()
def printing_is_up_to_date(me: Me) -> None:
    watch(me, lambda model: repr(list(model.parameters())))
    watch(me, lambda model: f"{model[4].bias}")


@case()
def evaluation_is_up_to_date(me: Me) -> None:
    def evaluated(model: nn.Module) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            result = model(batch(99, 0))
        model.train()
        return result

    def inferred(model: nn.Module) -> torch.Tensor:
        with torch.inference_mode():
            return model(batch(99, 0)).clone()

    watch(me, evaluated)
    watch(me, inferred)


@case()
def reading_any_way_is_up_to_date(me: Me) -> None:
    looks: list[Callable[[nn.Module], Any]] = [
        lambda m: m[2].weight.detach().clone(),
        lambda m: m[2].weight.data.clone(),
        lambda m: m[2].weight + 1,
        lambda m: torch.from_numpy(m[2].weight.detach().numpy().copy()),
        lambda m: m[4].bias.tolist().__repr__(),
        lambda m: m[2].weight[3, 4].item().__repr__(),
        lambda m: nn.utils.parameters_to_vector(m.parameters()),
        lambda m: torch._foreach_norm(list(m.parameters())),
        lambda m: F.linear(batch(0, 0, (2, 33)), m[2].weight, m[2].bias),
        lambda m: torch.func.functional_call(m, dict(m.named_parameters()), batch(3, 3)),
        lambda m: torch.cat([p.reshape(-1) for p in m.parameters()]),
        lambda m: copy.copy(m[0].weight).clone(),
        lambda m: torch.stack([p.norm() for p in reversed(list(m.parameters()))]),
        lambda m: m[0].weight.untyped_storage().tolist()[:40].__repr__(),
    ]
    for look in looks:
        watch(me, look, steps=3)


@case()
def readers_of_cpp_code_are_up_to_date(me: Me) -> None:
    """They call no ``__torch_function__``: see tests/unit/optimizer/test_pending.py for all of them."""
    script: Any = torch.jit.CompilationUnit("def square(x): return x * x\n")

    def gradient(model: nn.Module) -> torch.Tensor:
        weight = model[2].weight
        return torch.autograd.grad(script.square(weight).sum(), weight)[0]

    def memory_of(model: nn.Module) -> torch.Tensor:
        other = torch.zeros(1)
        other.data = model[2].weight
        return other.clone()

    looks: list[Callable[[nn.Module], Any]] = [
        lambda m: script.square(m[2].weight),
        gradient,
        memory_of,
        lambda m: torch.Tensor(m[2].weight).clone(),
        lambda m: torch.tensor(m[4].bias),
        lambda m: torch.ones(1).new_tensor(m[0].weight),
        lambda m: torch.zeros(1).set_(m[2].weight).clone(),
        lambda m: torch.func.grad(lambda w: (w * w).sum())(m[2].weight),
        lambda m: torch.func.vjp(torch.square, m[0].weight)[0],
        lambda m: torch.nested.nested_tensor([m[2].weight])[0],
    ]
    for look in looks:
        watch(me, look, steps=3)
        twin = Twin(me, mlp, gather="parameters")
        for step in range(3):
            twin.step(loss_of(step))
            seen = look(twin.model)
            twin.model.state_dict()  # waits
            assert_same_bits([seen], [look(twin.model)], f"what was seen in step {step}")
        release(twin.optimizer)


@case()
def scripted_and_traced_models_are_up_to_date(me: Me) -> None:
    """Compiled code asks for no parameter, so what it reads is complete after each step."""
    given = batch(99, 0)
    makes = [torch.jit.script, lambda model: torch.jit.trace(model, given, check_trace=False)]
    for make, gather in itertools.product(makes, ("gradients", "parameters")):
        twin = Twin(me, mlp, gather=gather)
        twin.step(loss_of(0))
        program = make(twin.model)
        for step in range(1, 5):
            twin.step(loss_of(step))
            with torch.no_grad():
                found = program(given)  # first: the model's own forward waits for what is pending
                assert_same_bits([found], [twin.model(given)], f"{make}, {gather}, step {step}")
        twin.compare(gather, exact=gather == "gradients")
        release(twin.optimizer)


@case()
def gradients_after_the_step_are_up_to_date(me: Me) -> None:
    twin = Twin(me, mlp)
    for step in range(5):
        twin.step(loss_of(step), zero=False)
        twin.compare_grads(f"after step {step}")
        twin.optimizer.zero_grad()
        twin.oracle.optimizer.zero_grad()
        twin.compare_grads(f"after zero_grad {step}")
    twin.end()


@case()
def older_aliases_see_new_values(me: Me) -> None:
    """``p.detach()``, ``p.data``, a ``state_dict`` or a numpy array share the memory."""
    takes: list[Callable[[nn.Module], Any]] = [
        lambda m: m.state_dict(),
        lambda m: [p.data for p in m.parameters()],
        lambda m: [m[2].weight.detach().view(-1), m[2].weight.detach()[3:5]],
        lambda m: torch.utils.dlpack.from_dlpack(m[2].weight.detach()),
    ]
    for take, zero in itertools.product(takes, (True, False)):
        twin = Twin(me, mlp)
        mine, plain = twin.both(take)
        for step in range(4):
            twin.step(loss_of(step), zero_before=zero)
            assert_same_bits(as_tensors(mine), as_tensors(plain), f"aliases in step {step}")
        twin.end(must_have_waited=False)
    twin = Twin(me, mlp)
    arrays = twin.both(lambda m: [p.detach().numpy() for p in m.parameters()])
    for step in range(4):
        twin.step(loss_of(step))
        assert all((a == b).all() for a, b in zip(*arrays, strict=True)), f"numpy arrays in step {step}"
    twin.end(must_have_waited=False)


@case()
def averaged_models_average_what_they_should(me: Me) -> None:
    for decay in (None, 0.9):
        ema = None if decay is None else torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
        twin = Twin(me, mlp)
        averages = twin.both(lambda model, ema=ema: AveragedModel(model, multi_avg_fn=ema))
        for step in range(6):
            twin.step(loss_of(step))
            for average, model in zip(averages, (twin.model, twin.plain), strict=True):
                average.update_parameters(model)
            assert_same_bits(averages[0], averages[1], f"average in step {step}")
        twin.end()


@case()
def edits_in_place_stay(me: Me) -> None:
    def scale(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.97)

    def through_data(model: nn.Module) -> None:
        for p in model.parameters():
            p.data.add_(0.01)
            p.data = p.data.clone()

    def replace_data(model: nn.Module) -> None:
        for p in model.parameters():
            p.data = p.data * 1.01

    def clamp(model: nn.Module) -> None:
        torch._foreach_clamp_max_([p.data for p in model.parameters()], 0.05)

    def reset(model: nn.Module) -> None:
        nn.init.constant_(model[2].weight, 0.01)

    def copy_over(model: nn.Module) -> None:
        with torch.no_grad():
            model[0].bias.copy_(model[2].bias)

    def spectral(model: nn.Module) -> None:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.99, model.parameters())

    with comparing(every=0):  # only the first step returns early
        for act in (scale, through_data, replace_data, clamp, reset, copy_over, spectral):
            twin = Twin(me, mlp)
            for step in range(4):
                twin.step(loss_of(step))
                twin.both(act)
                twin.compare(f"after {act.__name__} in step {step}")
            twin.end()


@case()
def load_state_dict_wins(me: Me) -> None:
    twin = Twin(me, mlp)
    first = copy.deepcopy(twin.plain.state_dict())
    for step in range(6):
        twin.step(loss_of(step))
        if step in (1, 3):
            twin.both(lambda model: model.load_state_dict(first))
            twin.compare(f"after load_state_dict in step {step}")
    twin.end()


@case()
def optimizer_state_is_up_to_date(me: Me) -> None:
    twin = Twin(me, mlp)
    for step in range(4):
        twin.step(loss_of(step))
        pairs = zip(twin.model.parameters(), twin.plain.parameters(), strict=True)
        for p, q in pairs:
            mine, plain = twin.optimizer.state[p], twin.oracle.optimizer.state[q]
            assert_same_bits(as_tensors(mine), as_tensors(plain), f"optimizer.state in step {step}")
    for step in range(4, 8):
        twin.step(loss_of(step))
        mine, plain = twin.optimizer.state_dict(), twin.oracle.optimizer.state_dict()
        assert_same_bits(as_tensors(mine["state"]), as_tensors(plain["state"]), f"state in step {step}")
        assert mine["param_groups"] == plain["param_groups"]
    for step in range(8, 12):
        twin.step(loss_of(step))
        mine, plain = twin.inner.state_dict(), twin.oracle.optimizer.state_dict()
        assert_same_bits(as_tensors(mine["state"]), as_tensors(plain["state"]), f"inner in step {step}")
    twin.end()


@case()
def zero_grad_of_the_model_waits_for_nothing(me: Me) -> None:
    """It reads every ``p.grad`` (Trainer calls it), which once completed all parameters too early."""
    for how in ({}, {"set_to_none": False}):
        twin = Twin(me, mlp)
        for step in range(6):
            twin.backward(loss_of(step))
            twin.update()
            before = twin.optimizer._session.round.pending
            twin.model.zero_grad(**how)
            assert twin.optimizer._session.round.pending == before
            twin.plain.zero_grad(**how)
            if step % 2:
                twin.compare_grads(f"step {step}, {how}")
        twin.end()


@case()
def zero_grad_of_one_module_clears_no_other(me: Me) -> None:
    """The other gradients add up, in another order than in the plain model."""
    twin = Twin(me, mlp64)
    for step in range(6):
        twin.backward(loss_of(step))
        twin.update()
        twin.both(lambda model: model[2].zero_grad())  # type: ignore[index]
    twin.compare(exact=False)
    release(twin.optimizer)


@case()
def a_released_optimizer_resumes(me: Me) -> None:
    twin = Twin(me, mlp)
    for _ in range(2):
        for step in range(4):
            twin.step(loss_of(step))
        twin.optimizer.release()
        assert twin.optimizer._session is None
        twin.compare("released")
        mine, plain = twin.optimizer.state_dict(), twin.oracle.optimizer.state_dict()
        assert_same_bits(as_tensors(mine["state"]), as_tensors(plain["state"]), "state")
        twin.optimizer.resume()
    twin.end()


@case()
def loading_optimizer_state_wins(me: Me) -> None:
    twin = Twin(me, mlp)
    twin.step(loss_of(0))
    early = copy.deepcopy(twin.oracle.optimizer.state_dict())
    for step in range(1, 6):
        twin.step(loss_of(step))
        if step == 3:
            twin.optimizer.load_state_dict(copy.deepcopy(early))
            twin.oracle.optimizer.load_state_dict(copy.deepcopy(early))
    twin.end()


main(__name__)
