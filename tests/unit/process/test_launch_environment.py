"""Launchers' variables in, rank and size (or one clear error) out."""

import pytest

from commsched.errors import CommError
from commsched.process import slurm
from commsched.process.launch import ALONE, detect_launch

HOROVODRUN = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_HOSTNAME": "b",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_HOSTNAME": "b",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[01-03,7],login",
    "SLURM_STEP_NODELIST": "gpu[02-03]",
    "SLURMD_NODENAME": "gpu03",
}
HOROVODRUN_OVER_MPI = MPIRUN | {
    "OMPI_MCA_orte_tag_output": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "^openib",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "mpi"),
    [
        (HOROVODRUN, "horovodrun", False),
        (TORCHRUN, "torchrun", False),
        (MPIRUN, "mpirun", True),
        (MPICH, "mpirun", True),
        (HOROVODRUN_OVER_MPI, "horovodrun", True),
        (SRUN, "slurm", False),
        (SRUN | {"PMI_RANK": "3", "PMI_SIZE": "4"}, "slurm", False),  # srun --mpi=pmi2
        (SRUN | {"WORLD_SIZE": "4", "MASTER_ADDR": "gpu02"}, "slurm", False),  # exported by a batch script
        (SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN, "torchrun", False),
        (SRUN | {"SLURM_PROCID": "1"} | MPIRUN, "mpirun", True),
        (SRUN | {"SLURM_PROCID": "1"} | MPICH, "mpirun", True),  # Hydra starts its helpers with srun
    ],
)
def test_every_launcher(environ, launcher, mpi):
    launch = detect_launch(environ)
    assert (launch.launcher, launch.mpi) == (launcher, mpi)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (3, 4, 1, 2)
    assert not launch.one_host and launch.node


def test_nothing_set_means_alone():
    assert detect_launch({"PATH": "/bin", "SLURM_PROCID": "3"}) == ALONE
    assert (ALONE.rank, ALONE.size, ALONE.one_host) == (0, 1, True)


def test_rank_and_world_size_by_hand_count_as_one_host():
    launch = detect_launch({"RANK": "1", "WORLD_SIZE": "2"})
    assert (launch.local_rank, launch.local_size, launch.one_host) == (1, 2, True)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (TORCHRUN | MPIRUN, ("torchrun (RANK)", "mpirun (OMPI_COMM_WORLD_RANK)")),
        (HOROVODRUN | TORCHRUN, ("horovodrun (HOROVOD_RANK)", "torchrun (RANK)")),
        (HOROVODRUN | MPIRUN, ("horovodrun (HOROVOD_RANK)", "mpirun (OMPI_COMM_WORLD_RANK)")),
        (HOROVODRUN_OVER_MPI | TORCHRUN, ("horovodrun (OMPI_COMM_WORLD_RANK)", "torchrun (RANK)")),
    ],
)
def test_two_launchers_at_once(environ, names):
    with pytest.raises(CommError) as caught:
        detect_launch(environ)
    assert all(name in str(caught.value) for name in (*names, "COMMSCHED_LAUNCHER="))


def test_the_user_may_choose_between_two_launchers():
    both = TORCHRUN | MPIRUN | {"RANK": "2"}
    assert detect_launch(both, "torchrun").rank == 2
    assert detect_launch(both, "mpirun").rank == 3
    assert detect_launch(both, "none") == ALONE


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"HOROVOD_RANK": "0"}, "HOROVOD_SIZE is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK or PMI_RANK is not set"),
        (TORCHRUN | {"RANK": "one"}, "RANK (set by torchrun) must be an integer, but is 'one'"),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        (TORCHRUN | {"RANK": "-1"}, "rank -1 of 4"),
    ],
)
def test_incomplete_or_wrong(environ, text):
    with pytest.raises(CommError) as caught:
        detect_launch(environ)
    assert text in str(caught.value)


def test_slurm_tells_where_rank_0_is():
    launch = detect_launch(SRUN)
    assert (launch.node, launch.address) == ("gpu03", "gpu02")
    assert launch.port == 20000 + (131 * 1234) % 12000
    assert detect_launch(SRUN | {"SLURM_STEP_ID": "1"}).port == launch.port + 1
    given = detect_launch(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
    assert (given.address, given.port) == ("10.0.0.1", 29500)


def test_a_batch_script_runs_alone():
    """It has all variables of the job and of one task, but srun did not start it."""
    without = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert detect_launch(without) == ALONE
    assert detect_launch(without | {"SLURM_STEP_ID": str(0xFFFFFFFB)}) == ALONE
    assert detect_launch(SRUN, wanted="none") == ALONE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2,1"}, "disagree: 4 tasks, 2,1 per node"),
        ({"SLURM_NODEID": "2"}, "this is node 2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, r"must look like '2\(x3\),1', but is 'two'"),
        ({"SLURM_LOCALID": ""}, "SLURM_LOCALID .* must be a whole number, but is ''"),
        ({"SLURM_LOCALID": "2"}, "slurm gave local rank 2 of 2"),
        ({"SLURM_STEP_NODELIST": "gpu[02-03"}, "a bracket has no partner"),
        ({"SLURM_STEP_NODELIST": "gpu[a-b]"}, "no list of numbers"),
        # These took all memory.
        ({"SLURM_STEP_NODELIST": "gpu[1-99999999999]"}, "stands for more than 100000 nodes"),
        ({"SLURM_STEP_NODELIST": "a[1-1000]b[1-1000]"}, "stands for more than 100000 nodes"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x99999999999)"}, "stands for more than 100000 nodes"),
        ({"SLURM_LOCALID": "²"}, "SLURM_LOCALID .* must be a whole number, but is '²'"),
    ],
)
def test_slurm_variables_that_cannot_be(changed, message):
    with pytest.raises(CommError, match=message):
        detect_launch(SRUN | changed)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("node[01-03,7],login", ["node01", "node02", "node03", "node7", "login"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("r[1-2]n[1-2]-ib,b", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib", "b"]),
        ("", []),
    ],
)
def test_lists_of_hosts(text, names):
    assert slurm.hosts(text) == names


def test_a_pod_of_pytorchjob_is_a_host_of_its_own():
    """The operator sets no local rank: rank 1 looked for the second GPU of its pod."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "PET_NNODES": "2", "MASTER_ADDR": "job-master-0"}
    launch = detect_launch(pod | {"RANK": "1", "WORLD_SIZE": "2"})
    assert (launch.launcher, launch.rank, launch.local_rank, launch.local_size) == ("torchrun", 1, 0, 1)
    assert detect_launch(pod | TORCHRUN).local_rank == 1  # torchrun inside a pod
    assert detect_launch(pod | MPIRUN).launcher == "mpirun"  # MPIJob
    assert detect_launch(pod) == ALONE  # before torchrun has started ranks
