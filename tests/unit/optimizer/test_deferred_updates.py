"""Updates of some parameters at a time give what one step of the optimizer gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from commsched.optimizer.whole_step import deferred_update, is_separable, plain_step, register_separable

SEPARABLE: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True),
    "capturable rate": lambda p: torch.optim.AdamW(p, torch.tensor(0.1)),
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(n, 3)) for n in (1, 4, 2, 5)]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for p in params:
        p.grad = torch.randn_like(p)


@pytest.mark.parametrize("name", SEPARABLE)
def test_one_after_the_other_is_all_together(name: str) -> None:
    mine, plain = parameters(), parameters()
    optimizer, oracle = SEPARABLE[name](mine), SEPARABLE[name](plain)
    assert is_separable(type(optimizer))
    for step in range(4):
        give_gradients(mine, step)
        give_gradients(plain, step)
        update = deferred_update(optimizer, type(optimizer), mine)
        for some in ([2], [0, 3], [], [1]):
            update(some)
        oracle.step()
        for p, q in zip(mine, plain, strict=True):
            assert torch.equal(p, q), f"step {step}"
    both = [o.state_dict()["state"] for o in (optimizer, oracle)]
    assert both[0].keys() == both[1].keys()
    for i in both[0]:
        for key, value in both[1][i].items():
            assert torch.equal(torch.as_tensor(both[0][i][key]), torch.as_tensor(value)), key


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)])
def test_hyperparameters_are_those_of_the_step(rate: Any) -> None:
    mine, plain = parameters(), parameters()
    optimizer, oracle = (torch.optim.Adam(p, copy.deepcopy(rate)) for p in (mine, plain))
    give_gradients(mine, 0)
    give_gradients(plain, 0)
    update = deferred_update(optimizer, torch.optim.Adam, mine)
    oracle.step()
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(77.0)
    else:
        group["lr"] = 77.0
    update(range(4))
    assert all(torch.equal(p, q) for p, q in zip(mine, plain, strict=True))


def test_every_group_keeps_its_options_and_nobody_sees_other_groups() -> None:
    mine, plain = parameters(), parameters()

    def make(p: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": p[:2], "lr": 0.5}, {"params": p[2:], "momentum": 0.9}], lr=0.1)

    optimizer, oracle = make(mine), make(plain)
    groups = optimizer.param_groups
    for step in range(3):
        give_gradients(mine, step)
        give_gradients(plain, step)
        update = deferred_update(optimizer, torch.optim.SGD, mine)
        update([3, 0])
        assert optimizer.param_groups is groups and len(groups[0]["params"]) == 2
        update([1, 2])
        oracle.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, plain, strict=True))


def test_an_update_within_a_forward_ignores_its_modes() -> None:
    mine, plain = parameters(), parameters()
    optimizer, oracle = torch.optim.Adam(mine, 0.1), torch.optim.Adam(plain, 0.1)
    for step, mode in enumerate(
        (torch.autocast("cpu", torch.bfloat16), torch.enable_grad(), torch.inference_mode())
    ):
        give_gradients(mine, step)
        give_gradients(plain, step)
        with mode:
            deferred_update(optimizer, torch.optim.Adam, mine)(range(4))
        oracle.step()
    assert all(torch.equal(p, q) for p, q in zip(mine, plain, strict=True))
    state = optimizer.state[mine[0]]["exp_avg"]
    assert not state.is_inference() and state.dtype == torch.float32


def test_a_class_of_ones_own_is_not_separable_unless_declared() -> None:
    class Own(torch.optim.SGD):
        pass

    assert not is_separable(Own) and not is_separable(torch.optim.LBFGS)
    register_separable(Own)
    assert is_separable(Own)


def test_hooks_of_torch_do_not_run_for_parts() -> None:
    params = parameters()
    optimizer = torch.optim.SGD(params, 0.1)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    give_gradients(params, 0)
    deferred_update(optimizer, torch.optim.SGD, params)(range(4))
    assert not calls
    plain_step(torch.optim.SGD)(optimizer)
    assert not calls
    optimizer.step()
    assert calls == [1]
