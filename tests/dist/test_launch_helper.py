"""The helper that other distributed tests stand on: it must report, kill and clean up."""

import signal

import pytest

from tests.support.launch import run_ranks, start_ranks
from tests.support.needs import needs

pytestmark = pytest.mark.dist

HELLO = """
    import os, sys
    rank = next(os.environ[n] for n in ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "RANK") if n in os.environ)
    print("rank", rank, *sys.argv[1:])
    print("to stderr", rank, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "launcher", ["torchrun-env", "torchrun", "horovodrun", pytest.param("mpirun", marks=needs("mpirun"))]
)
def test_output_of_each_rank_is_kept_apart(launcher: str) -> None:
    results = run_ranks(HELLO, nprocs=2, args=["a", "b c"], launcher=launcher, check=True)
    assert [r.stdout for r in results] == ["rank 0 a b c\n", "rank 1 a b c\n"]
    assert ["to stderr 0" in results[0].stderr, "to stderr 1" in results[1].stderr] == [True, True]


def program_as_function() -> None:
    import os

    print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["EXTRA"])


def test_a_function_can_be_the_program() -> None:
    results = run_ranks(program_as_function, nprocs=2, env={"EXTRA": "x"}, check=True)
    assert [r.stdout for r in results] == ["0 2 x\n", "1 2 x\n"]


def test_exit_codes_are_per_rank() -> None:
    results = run_ranks("import os, sys; sys.exit(3 * int(os.environ['RANK']))", nprocs=2)
    assert [r.returncode for r in results] == [0, 3]
    with pytest.raises(AssertionError, match=r"\[1, 1\](.|\n)*division by zero"):
        run_ranks("1 / 0", nprocs=2, check=True)


def test_a_timeout_shows_the_output_and_kills() -> None:
    source = "import time; print('before the hang'); time.sleep(600)"
    with pytest.raises(AssertionError, match="still running after 2 s(.|\n)*before the hang"):
        with start_ranks(source, nprocs=2) as ranks:
            for rank in range(2):
                ranks.wait_for_output(rank, "before the hang")
            ranks.wait(timeout=2)
    assert not ranks.left_behind(0.0)


@pytest.mark.parametrize("launcher", ["torchrun-env", "horovodrun"])
def test_one_rank_can_be_killed(launcher: str) -> None:
    source = "import time; print('ready'); time.sleep(600)"
    with start_ranks(source, nprocs=2, launcher=launcher) as ranks:
        for rank in range(2):
            ranks.wait_for_output(rank, "ready")
        ranks.kill(1)
        if launcher == "torchrun-env":
            assert ranks.processes[1].wait(400) == -signal.SIGKILL
            assert ranks.processes[0].poll() is None
        else:
            assert all(result.returncode != 0 for result in ranks.wait())


def test_a_process_left_behind_fails_the_test() -> None:
    source = """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    """
    with pytest.raises(AssertionError, match="left behind"):
        with start_ranks(source, nprocs=1) as ranks:
            ranks.grace = 0.5
            ranks.wait()
    assert not ranks.left_behind(0.0)


TELL = """
    import os, sys
    forked = "torch" in sys.modules  # nobody has imported it here
    in_folder, leads_session = os.getcwd() == os.path.dirname(sys.argv[0]), os.getsid(0) == os.getpid()
    print(forked, in_folder, leads_session, os.environ["RANK"],
          os.environ.get("COMMSCHED_X"), hash("a string"), flush=True)
"""


def test_ranks_are_forked_each_with_a_session_an_environment_and_a_seed_of_hashes() -> None:
    results = run_ranks(TELL, nprocs=3, env={"COMMSCHED_X": "y"}, check=True)
    told = [result.stdout.split() for result in results]
    assert [words[:5] for words in told] == [["True", "True", "True", str(rank), "y"] for rank in range(3)]
    seeds = [words[5] for words in told]
    assert seeds[0] != seeds[1] != seeds[2]


def test_ranks_that_a_rank_starts_come_from_the_tests_servers() -> None:
    source = """
        import psutil
        from dnn_bench.launch import ThisMachine
        (rank,) = ThisMachine(1).start(["-m", "dnn_bench", "--help"])
        print(rank.wait(60), psutil.Process().children())
    """
    (result,) = run_ranks(source, nprocs=1, check=True)
    assert result.stdout.startswith("usage: python -m dnn_bench") and result.stdout.endswith("\n0 []\n")


def test_what_is_read_before_the_fork_makes_a_process_of_its_own() -> None:
    (result,) = run_ranks(TELL, nprocs=1, env={"PYTHONHASHSEED": "0"}, check=True)
    assert result.stdout.startswith("False True True 0 None")
