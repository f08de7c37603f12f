"""Runs the cases of programs/cuda_path.py; and, slow, the optimizer's whole suite over the GPU's way."""

import pytest

from tests.support.cases import check, launch, parameters
from tests.support.launch import start_ranks

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("program, ranks, name", parameters("cuda_path"))
def test_cuda_path(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)


BLOCKED = """
import sys, threading, time, torch, commsched as hvd
from commsched.errors import CommError
hvd.init()
model = torch.nn.Linear(8, 8)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), transport="stream")
model(torch.ones(2, 8)).sum().backward()
backend = optimizer._session.backend
backend.wait_gathered(optimizer._session.round.flags_bucket)
# As in loss.item(): the host waits for its GPU until the collectives are aborted.
blocked, reasons = threading.Event(), []
backend.exchange.abort = lambda reason: (reasons.append(reason), blocked.set())
print("sealed", flush=True)  # from here on rank 1 may be killed
if hvd.rank() == 1:
    time.sleep(900)
assert blocked.wait(300), "nobody aborted"
# Its connections or the coordinator tell first.
known = "rank 1 is gone", "rank 1 died"
assert any(text in reasons[0] for text in known), reasons
try:
    optimizer.step()
    model(torch.ones(2, 8)).sum().backward()
except CommError as error:
    assert any(text in str(error) for text in known), error
    print("told")
"""


def test_a_host_that_waits_for_its_gpu_is_freed_when_a_rank_dies() -> None:
    """It used to notice in its next step only, to which it never came."""
    with start_ranks(BLOCKED, 2) as ranks:
        for rank in range(2):
            ranks.wait_for_output(rank, "sealed")
        ranks.kill(1)
        result = ranks.wait()[0]
    assert "told" in result.stdout and result.returncode == 0, result.stderr[-3000:]


# What has no place in streams (early_step), and what compares with transports by name.
LEFT_OUT = {
    "optimizer_sharded": {
        "what_shards_cannot_do_is_refused",
        "closures_clip_and_step",
        "unused_parameters_on_shards",
        "odd_models_on_shards",
        "every_optimizer_on_shards",
    },
    # Rows travel over the engine only.
    "optimizer_sparse": {"no_zeros_travel_beside_sparse_gradients"},
    # Also where ranks meet two optimizers in different orders: an exchange through the host waits.
    "optimizer_quantised": {
        f"{name}_{code}"
        for code in ("int8", "fp8")
        for name in (
            "shards_are_updated_with_sums_of_rounded_gradients",  # with early_step
            "whole_matrices_are_quantised_too",
            "two_optimizers_with_a_rank_without_data",
        )
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "optimizer_between",
        "optimizer_bits",
        "optimizer_models",
        "optimizer_quantised",
        "optimizer_sharded",
        "optimizer_sparse",
    ],
)
def test_the_optimizers_own_cases(program: str) -> None:
    rows = [row.values for row in parameters(program) if all(mark.name != "slow" for mark in row.marks)]
    names = [name for _, ranks, name in rows if ranks == 2 and name not in LEFT_OUT.get(program, set())]
    found = launch(program, 2, names, {"COMMSCHED_TRANSPORT": "stream"}, timeout=400)
    failed = {name: troubles for name, troubles in found.items() if any(troubles)}
    assert not failed, "\n".join(f"{name}: {troubles}" for name, troubles in failed.items())
