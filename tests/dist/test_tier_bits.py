"""Two tiers while ranks are late at random: the bits of sums by host, on three shapes of cluster."""

import pytest

from tests.support.cases import cases_for, launch, place_of

pytestmark = pytest.mark.dist
SHAPES = ("2+2", "4+4", "3+1")
RUNS = 7  # of each shape: 21 in all, in half an hour


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(RUNS)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_payload_policy_and_gather_has_the_bits_of_sums_by_host(shape, seed):
    ranks, launcher = place_of(shape)
    env = {"CASES_SEED": str(seed), "COMMSCHED_TIMEOUT": "300"}
    names = cases_for("tier_bits", ranks)
    troubles = launch("tier_bits", ranks, names, env, timeout=1800, launcher=launcher)
    wrong = {name: texts for name, texts in troubles.items() if any(texts)}
    assert not wrong, "\n".join(text for texts in wrong.values() for text in texts if text)
