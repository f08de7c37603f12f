"""Every collective, with gradients, process sets, join and errors: on real ranks, over both engines."""

from pathlib import Path

import pytest

from tests.support.launch import run_ranks

pytestmark = pytest.mark.dist
PROGRAM = Path(__file__).with_name("programs") / "collectives_checks.py"
CHECKS = [
    line.split("check_")[1].split("(")[0]
    for name in ("collectives_tensor_checks.py", "collectives_job_checks.py")
    for line in PROGRAM.with_name(name).read_text().splitlines()
    if line.startswith("def check_")
]
JOBS = {
    "alone": ("alone", 1, "torch"),
    "torch-2": ("torchrun-env", 2, "torch"),
    "torch-3": ("torchrun-env", 3, "torch"),
    "horovod-2": ("horovodrun", 2, "horovod"),
}


@pytest.fixture(scope="module", params=JOBS)
def job(request):
    launcher, size, engine = JOBS[request.param]
    env = {"COMMSCHED_TIMEOUT": "100", "COMMSCHED_RUNTIME": engine}
    return run_ranks(PROGRAM, size, env=env, launcher=launcher)


@pytest.mark.parametrize("check", CHECKS)
def test_on_every_rank(job, check):
    for result in job:
        assert f"ok {check}\n" in result.stdout, (
            f"rank {result.rank}:\n{result.stdout}\n{result.stderr[-3000:]}"
        )


def test_ranks_end_cleanly(job):
    assert [result.returncode for result in job] == [0] * len(job), job[0].stderr[-2000:]
