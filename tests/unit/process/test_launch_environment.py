"""Launchers' variables in, rank and size (or one clear error) out."""

import pytest

from commsched.errors import CommError
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
