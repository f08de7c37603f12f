"""One Horovod-style script under every launcher, with Horovod and without; and launches that are wrong."""

from pathlib import Path

import pytest

from tests.support.launch import run_ranks
from tests.support.needs import HAS_HOROVOD, needs, needs_horovod

pytestmark = pytest.mark.dist
PROGRAM = Path(__file__).with_name("programs") / "horovod_script.py"
needs_mpirun = needs("mpirun")

# Python reads sitecustomize.py from PYTHONPATH before anything else: here it hides an installed Horovod.
HIDE_HOROVOD = """
import importlib.machinery
find = importlib.machinery.PathFinder.find_spec
def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] == "horovod" else find(name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(find_spec)
"""
BROKEN = "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN3c105ErrorC2E')"
INIT = "import commsched as hvd\nhvd.init()\nprint('came through', hvd.allgather_object(hvd.rank()))\n"


@pytest.fixture(scope="module")
def expected():
    """What the script prints alone, with the whole batch."""
    (alone,) = run_ranks(PROGRAM, 1, launcher="alone", check=True)
    return next(line for line in alone.stdout.splitlines() if line.startswith("final loss"))


def without_horovod(folder):
    (folder / "sitecustomize.py").write_text(HIDE_HOROVOD)
    return {"PYTHONPATH": str(folder) + ":" + str(Path(__file__).parents[2])}


def run_script(launcher, expected, engine, env=None, size=2):
    results = run_ranks(PROGRAM, size, env=env, launcher=launcher, check=True)
    # Not the first line: gloo of torch 2.10 prints lines of its own to stdout.
    assert expected in results[0].stdout.splitlines()
    for rank, result in enumerate(results):
        assert f"rank {rank} of {size} engine {engine}" in result.stdout
        assert ("final loss" in result.stdout) == (rank == 0)


def test_torchrun(expected):
    run_script("torchrun", expected, "torch")


AGENT = """
import os, subprocess, sys
node, port = os.environ["RANK"], os.environ["MASTER_PORT"]
for name in [name for name in os.environ if "RANK" in name or "WORLD" in name or name.startswith("MASTER")]:
    del os.environ[name]
agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--local-addr", "127.0.0.1"]
raise SystemExit(subprocess.call([*agent, *place, "--max-restarts", "1", *sys.argv[1:], node, port]))
"""
FAILS_ONCE = """
import os, pathlib, sys, time
import commsched as hvd
failed, node = pathlib.Path(__file__).with_name("failed"), sys.argv[1]
again = failed.exists()
hvd.init()
hvd.barrier()
if not again and (node, hvd.local_rank()) == ("1", 0):
    failed.touch()
    os._exit(3)
time.sleep(0 if again else 600)  # the agent ends the ranks of the first attempt
for _ in range(2):
    line = f"came through {hvd.allgather_object(hvd.rank())} {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n"
    os.write(1, line.encode())  # at once: the ranks of a node share the file, and print() writes in pieces
    hvd.shutdown()
    hvd.init()
"""


def test_torchrun_on_two_nodes_starts_all_ranks_again(tmp_path):
    """Only the agent of the node whose rank failed counts the restart; the counts kept the nodes apart."""
    (tmp_path / "fails_once.py").write_text(FAILS_ONCE)
    results = run_ranks(AGENT, 2, [str(tmp_path / "fails_once.py")], check=True)
    counts = {line.split("] ")[1] for result in results for line in result.stdout.splitlines()}
    assert [r.stdout.count("came through [0, 1, 2, 3]") for r in results] == [4, 4] and counts == {"0", "1"}


def test_variables_of_torchrun_set_by_hand(expected):
    run_script("torchrun-env", expected, "torch", size=3)


def test_srun_on_two_nodes(expected):
    run_script("srun-env", expected, "torch", size=4)


@needs_mpirun
def test_mpirun(expected):
    run_script("mpirun", expected, "torch")


@needs_horovod
def test_horovodrun(expected):
    run_script("horovodrun", expected, "horovod")


@pytest.mark.slow
@needs_horovod
def test_horovodrun_with_horovod_hidden_from_the_script(expected, tmp_path):
    # horovodrun itself, in the launcher's process, must see Horovod: hide it only from the ranks.
    hide = f"import os\nif 'HOROVOD_RANK' in os.environ:\n{_indented(HIDE_HOROVOD)}"
    (tmp_path / "sitecustomize.py").write_text(hide)
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    run_script("horovodrun", expected, "torch", env=env)


@pytest.mark.slow
@needs_horovod
@needs_mpirun
def test_mpirun_carried_by_horovod(expected):
    run_script("mpirun", expected, "horovod", env={"COMMSCHED_RUNTIME": "horovod"})


@pytest.mark.slow
def test_torchrun_without_horovod(expected, tmp_path):
    run_script("torchrun-env", expected, "torch", env=without_horovod(tmp_path))


def _indented(text):
    return "\n".join("    " + line for line in text.splitlines())


def assert_all_fail(results, *parts):
    """Every rank ends with an error, in a message that has all `parts`."""
    for result in results:
        assert result.returncode != 0 and "came through" not in result.stdout
        assert all(part in result.stderr for part in parts), f"rank {result.rank}: {result.stderr[-1500:]}"


BOTH = "import os\nos.environ |= {'OMPI_COMM_WORLD_RANK': '0', 'OMPI_COMM_WORLD_SIZE': '1'}\n" + INIT


def test_two_launchers_at_once():
    parts = ("CommError", "torchrun (RANK)", "mpirun (OMPI_COMM_WORLD_RANK)", "COMMSCHED_LAUNCHER")
    assert_all_fail(run_ranks(BOTH, 2), *parts)


def test_two_launchers_settled_by_the_user():
    for result in run_ranks(BOTH, 2, env={"COMMSCHED_LAUNCHER": "torchrun"}, check=True):
        assert "came through [0, 1]" in result.stdout


def test_ranks_that_disagree_about_their_number():
    program = "import os\nos.environ['WORLD_SIZE'] = str(2 + int(os.environ['RANK']))\n" + INIT
    assert_all_fail(
        run_ranks(program, 2), "disagree about the number of ranks", "2 on rank 0", "3 on rank 1", "launcher"
    )


def test_two_processes_with_one_rank():
    program = (
        "import os\nos.environ['RANK'] = '1' if os.environ['RANK'] == '2' else os.environ['RANK']\n" + INIT
    )
    assert_all_fail(run_ranks(program, 3), "both started as rank 1")


def test_a_rank_that_never_comes():
    program = "import os\nif os.environ['RANK'] == '1': raise SystemExit(3)\n" + INIT
    results = run_ranks(program, 2, env={"COMMSCHED_START_TIMEOUT": "3"})
    assert_all_fail(results[:1], "missing: [1]", "3 s (COMMSCHED_START_TIMEOUT)")


def test_no_rank_zero_to_talk_to():
    program = "import os\nif os.environ['RANK'] == '0': raise SystemExit(3)\n" + INIT
    results = run_ranks(program, 2, env={"COMMSCHED_START_TIMEOUT": "3"})
    assert_all_fail(results[1:], "rank 0 did not answer on 127.0.0.1", "COMMSCHED_START_TIMEOUT")


def test_horovod_asked_for_where_it_can_not_run():
    results = run_ranks(INIT, 2, env={"COMMSCHED_RUNTIME": "horovod"})
    assert_all_fail(
        results, "CommError", "horovodrun" if HAS_HOROVOD else "not installed", "COMMSCHED_RUNTIME"
    )


def test_broken_horovod(tmp_path):
    package = tmp_path / "horovod" / "torch"
    package.mkdir(parents=True)
    (tmp_path / "horovod" / "__init__.py").touch()
    (package / "__init__.py").write_text(BROKEN)
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "COMMSCHED_RUNTIME": "horovod"}
    results = run_ranks(INIT, 1, env=env, launcher="alone")
    assert_all_fail(results, "undefined symbol", "docker/install.sh", "COMMSCHED_RUNTIME=torch")


def test_horovod_asked_for_but_absent(tmp_path):
    env = without_horovod(tmp_path) | {"COMMSCHED_RUNTIME": "horovod"}
    results = run_ranks(INIT, 1, env=env, launcher="alone")
    assert_all_fail(results, "Horovod is not installed", "COMMSCHED_RUNTIME=torch")


def test_the_script_may_use_torch_distributed_beside():
    program = """
    import torch, commsched as hvd
    def mine():
        tensor = torch.ones(2)
        torch.distributed.all_reduce(tensor)
        return tensor[0].item()
    hvd.init()
    torch.distributed.init_process_group("gloo")
    assert mine() == hvd.size() and hvd.allreduce(torch.ones(2), op=hvd.Sum)[0] == hvd.size()
    hvd.shutdown()
    assert mine() == torch.distributed.get_world_size()
    hvd.init()
    assert hvd.data_group() is not torch.distributed.group.WORLD and mine() == hvd.size()
    torch.distributed.destroy_process_group()
    print("came through", hvd.allgather_object(hvd.rank()))
    """
    for launcher in ("torchrun-env", "torchrun"):
        for result in run_ranks(program, 2, launcher=launcher, check=True):
            assert "came through [0, 1]" in result.stdout


@pytest.mark.slow
@needs_horovod
def test_no_rank_goes_on_while_another_still_waits_for_its_process_set():
    """Horovod says a set is there when a look, once in a millisecond, finds it. A rank that looked late, on a
    busy machine, was told "Horovod is shutting down": the other one had the set and left the job by then."""
    program = """
    import time, commsched as hvd
    from horovod.torch import mpi_ops
    from commsched.collectives.carrier import carrier
    hvd.init()
    store = carrier().meeting.store
    add = mpi_ops.add_process_set
    def looks_late(ranks):
        added = add(ranks)
        if hvd.rank() == 0:
            time.sleep(0.5)
            print("rank 1 went on:", store.check(["went on"]))
        return added
    mpi_ops.add_process_set = looks_late
    hvd.add_process_set([0])
    if hvd.rank() == 1:
        store.set("went on", "yes")
    hvd.shutdown()
    """
    env = {"COMMSCHED_RUNTIME": "horovod"}
    first, _ = run_ranks(program, 2, env=env, launcher="horovodrun", check=True)
    assert first.stdout == "rank 1 went on: False\n"
