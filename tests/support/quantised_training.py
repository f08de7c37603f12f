"""Training with ``Compression.int8`` and ``fp8`` beside an oracle, and a count of what was delivered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import commsched as hvd
from commsched.collectives.private_groups import hosts_of
from commsched.optimizer.gradient import RESIDUAL
from commsched.optimizer.planner import travels_quantised
from commsched.optimizer.sharded_step import memory_order
from tests.support.cases import Me, case
from tests.support.oracle import assert_close, batch, fingerprint, release
from tests.support.quantised import LARGEST, exchanged
from tests.support.reference_run import Twin, momentum
from tests.support.two_tiers import TierOracle

COMPRESSIONS = {code: getattr(hvd.Compression, code) for code in LARGEST}

Body = Callable[[Me, str], None]


def case_of_each_code(ranks: Sequence[int] = (2, 3), slow: Sequence[int] = ()) -> Callable[[Body], Body]:
    """Register a case for int8 and another for fp8; its body gets the code's name."""

    def register(body: Body) -> Body:
        for code in COMPRESSIONS:

            def one(me: Me, code: str = code) -> None:
                body(me, code)

            one.__name__ = f"{body.__name__}_{code}"
            case(ranks, slow)(one)
        return body

    return register


class Wide(nn.Module):
    """Matrices that are quantised, one of them turned and one not of whole blocks, among small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 200)
        self.norm = nn.LayerNorm(200)
        self.turned = nn.Parameter(torch.randn(200, 70).mul(0.1).t())
        self.second = nn.Linear(70, 70)
        self.last = nn.Linear(70, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(x)))
        return self.last(torch.tanh(self.second(x @ self.turned.t())))


def loss_of(step: int) -> Callable[[nn.Module, int], torch.Tensor]:
    return lambda model, rank: model(batch(rank, step)).square().mean()


class QuantisedOracle(TierOracle):
    """Rounds large matrices, and keeps what that loses, as all ranks, or all of several hosts, and owners do
    together.
    """

    def __init__(self, model: nn.Module, optimizer: Any, ranks: int, rounds_sums: bool, code: str) -> None:
        super().__init__(model, optimizer, ranks)
        self.code = code
        self.quantised = [p for p in self.params if travels_quantised(p)]
        self.hosts = hosts_of()
        senders = max(self.hosts) + 1 if any(self.hosts) else ranks
        self.sent = {p: [torch.zeros(p.numel()).numpy() for _ in range(senders)] for p in self.quantised}
        self.sums = {p: torch.zeros(p.numel()).numpy() if rounds_sums else None for p in self.quantised}

    def backward(self, *losses: Any) -> None:
        by_rank = [self._local(rank, losses) for rank in range(self.ranks)]
        for p, grads in zip(self.params, zip(*by_rank, strict=True), strict=True):
            p.grad = self.rounded(p, grads) if p in self.sent else self.reduced(grads)

    def rounded(self, p: nn.Parameter, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        data = [memory_order(torch.zeros_like(p) if g is None else g, p).numpy() for g in grads]
        total = exchanged(
            data, self.sent[p], self.sums[p], [p.numel()], self.scale, code=self.code, hosts=self.hosts
        )
        result = torch.empty_like(p, requires_grad=False)
        result.as_strided((p.numel(),), (1,)).copy_(torch.from_numpy(total))
        return result

    def lacking(self, p: nn.Parameter) -> torch.Tensor:
        """What the reduced gradients still lack, in the order of memory."""
        total = sum(torch.from_numpy(mine).double() for mine in self.sent[p]) * self.scale
        sums = self.sums[p]
        return total if sums is None else total + torch.from_numpy(sums)


def quantised(
    me: Me, code: str, build: Callable[[], nn.Module] = Wide, make: Any = momentum, **options: Any
) -> Twin:
    twin = Twin(me, build, make, compression=COMPRESSIONS[code], **{"bucket_mb": 0.01, **options})
    rounds_sums = options.get("gather") != "parameters"
    twin.oracle = QuantisedOracle(twin.plain, twin.oracle.optimizer, me.size, rounds_sums, code)
    return twin


class Ledger:
    """Gradients of whole numbers, what was delivered of their sums over the ranks, and what is lacking."""

    def __init__(self, me: Me, code: str, **options: Any) -> None:
        self.me = me
        # The largest of each block: scales, and so losses, are whole numbers, or have few digits.
        self.largest = float(LARGEST[code]) * {"int8": 8, "fp8": 4}[code]
        self.params = [nn.Parameter(torch.zeros(64, 80)), nn.Parameter(torch.zeros(48, 100))]
        self.optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self.params, lr=1.0),
            compression=COMPRESSIONS[code],
            op=hvd.Sum,
            bucket_mb=0.01,
            **options,
        )
        self.summed = [torch.zeros(p.shape, dtype=torch.float64) for p in self.params]
        self.steps = 0

    def gradient(self, i: int, rank: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(1000 * self.steps + 10 * rank + i)
        values = torch.randint(-900, 901, self.params[i].shape, generator=dice).float()
        values.view(-1)[::256] = self.largest
        return values

    def step(self, *used: int, backwards: int = 1) -> None:
        """One step with gradients of these parameters (default: of all)."""
        used = used or (0, 1)
        for _ in range(backwards):
            losses = [(self.params[i] * self.gradient(i, self.me.rank)).sum() for i in used]
            torch.stack(losses).sum().backward()
            for i in used:
                self.summed[i] += sum(self.gradient(i, rank).double() for rank in range(self.me.size))
            self.steps += 1
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, what: str, exact: bool = False, before: Sequence[torch.Tensor] = ()) -> None:
        """With lr=1, a parameter is minus what was delivered."""
        state = self.optimizer.state_dict()["state"]
        for i, (p, summed) in enumerate(zip(self.params, self.summed, strict=True)):
            lacking = state.get(i, {}).get(RESIDUAL, torch.zeros_like(p)).double()
            apart = -p.detach().double() + lacking - summed
            if before:
                apart -= before[i]
            assert apart.abs().max() <= (0 if exact else 0.01), f"{what}: {i}: {apart.abs().max()}"


# -- what holds on one host as between hosts -----------------------------------------------------------------

GATHERS = ("gradients", "parameters")


def check_plans(me: Me, code: str) -> None:
    ways = [{"schedule": policy} for policy in ("wfbp", "dear", "bytescheduler", "sequential")]
    ways += [{"schedule": "optimal", "bucket_mb": size} for size in (0.001, 0.02, 10)]
    for way in ways:
        twin = quantised(me, code, **way)
        for step in range(6):
            twin.step(loss_of(step))
        twin.compare(f"{way}")
        prints = me.everybody(fingerprint(twin.model))
        assert len(set(prints)) == 1, prints
        release(twin.optimizer)


def check_state(me: Me, code: str) -> None:
    for gather in ("gradients", "parameters"):
        twin = quantised(me, code, gather=gather)
        for step in range(3):
            twin.step(loss_of(step))
            twin.compare_update(f"step {step}")
        saved = twin.optimizer.state_dict()
        params = list(twin.plain.parameters())
        assert {i for i, entries in saved["state"].items() if RESIDUAL in entries} == {
            i for i, p in enumerate(params) if travels_quantised(p)
        }
        for i, p in enumerate(params):
            if travels_quantised(p):
                wanted = twin.oracle.lacking(p)
                found = memory_order(saved["state"][i][RESIDUAL], p).double()
                assert wanted.abs().max() > 0
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
        other = quantised(me, code, gather=gather)
        other.optimizer.load_state_dict(saved)
        again = other.optimizer.state_dict()
        for i in saved["state"]:
            assert saved["state"][i].keys() == again["state"][i].keys()
            if RESIDUAL in saved["state"][i]:
                assert_close(
                    [again["state"][i][RESIDUAL]], [saved["state"][i][RESIDUAL]], 4, f"residual {i}", 1e-9
                )
        for entries in saved["state"].values():
            entries.pop(RESIDUAL, None)
        other.optimizer.load_state_dict(saved)  # what plain PyTorch saves
        assert not any(RESIDUAL in entries for entries in other.optimizer.state_dict()["state"].values())
        release(other.optimizer)
        release(twin.optimizer)


def check_saved_residual(me: Me, code: str) -> None:
    """The state is the same whole numbers at each number of ranks, and they arrive to the last."""
    for gather in GATHERS:
        ledger = Ledger(me, code, gather=gather)
        saved = ledger.optimizer.state_dict()
        before = [torch.randint(-50, 51, p.shape, generator=torch.Generator().manual_seed(i)).double()
                  for i, p in enumerate(ledger.params)]  # fmt: skip
        for values in before:
            values.view(-1)[::256] = 0
        saved["state"] = {i: {RESIDUAL: values.float()} for i, values in enumerate(before)}
        ledger.optimizer.load_state_dict(saved)
        for _ in range(4):
            ledger.step()
            ledger.check("after loading", exact=True, before=before)
        release(ledger.optimizer)


def check_changes(me: Me, code: str) -> None:
    for gather in GATHERS:
        ledger = Ledger(me, code, gather=gather)
        ledger.step()
        ledger.params[1].requires_grad_(False)
        ledger.step(0)
        ledger.check("frozen")
        ledger.params[1].requires_grad_(True)
        ledger.step()
        ledger.check("unfrozen")
        ledger.optimizer.release()
        ledger.optimizer.resume()
        ledger.step()
        ledger.check("resumed")
        hvd.broadcast_optimizer_state(ledger.optimizer, root_rank=0)
        ledger.step()
        ledger.check("broadcast")
        release(ledger.optimizer)
