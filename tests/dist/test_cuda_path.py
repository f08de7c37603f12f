"""Runs the cases of programs/cuda_path.py; and, slow, the optimizer's whole suite over the GPU's way."""

import pytest

from tests.support.cases import check, launch, parameters

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("program, ranks, name", parameters("cuda_path"))
def test_cuda_path(program: str, ranks: int, name: str) -> None:
    check(program, ranks, name)


# What has no place in streams (early_step), and what compares with transports by name.
LEFT_OUT = {
    "optimizer_sharded": {
        "what_shards_cannot_do_is_refused",
        "unused_parameters_on_shards",
        "odd_models_on_shards",
        "every_optimizer_on_shards",
    }
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", ["optimizer_between", "optimizer_bits", "optimizer_models", "optimizer_sharded"]
)
def test_the_optimizers_own_cases(program: str) -> None:
    rows = [row.values for row in parameters(program) if not row.marks]
    names = [name for _, ranks, name in rows if ranks == 2 and name not in LEFT_OUT.get(program, set())]
    found = launch(program, 2, names, {"COMMSCHED_TRANSPORT": "stream"}, timeout=400)
    failed = {name: troubles for name, troubles in found.items() if any(troubles)}
    assert not failed, "\n".join(f"{name}: {troubles}" for name, troubles in failed.items())
