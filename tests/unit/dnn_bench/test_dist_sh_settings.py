"""The variables of dist.sh."""

import sys
from pathlib import Path

import pytest

from dnn_bench import launch, settings
from dnn_bench.settings import Settings, command_line, read


@pytest.fixture(autouse=True)
def launchers_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find", lambda name: name)
    monkeypatch.setattr(sys, "executable", "python")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "x")


def test_nothing_set_gives_the_defaults() -> None:
    assert read({"PATH": "/bin", "HOME": "/root"}) == Settings(launcher="horovodrun")


def test_names_are_found_in_any_case_and_spelling() -> None:
    assert read({"DNN": "ResNet-50", "Baseline": "PipeDAP", "nWorkers": "4", "BS": "64"}) == Settings(
        dnn="resnet50", baseline="pipedap", nworkers=4, bs=64, launcher="horovodrun"
    )


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert read({"dnn": "", "bs": ""}) == read({})


@pytest.mark.parametrize(
    ("baseline", "launcher"), [("auto", "horovodrun"), ("horovod", "horovodrun"), ("DDP", "torchrun")]
)
def test_the_launcher_follows_the_baseline(baseline: str, launcher: str) -> None:
    assert read({"baseline": baseline}).launcher == launcher


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"dnn": "resnet99"}, "unknown model 'resnet99'; choose one of: .*resnet50.*bert_base"),
        ({"baseline": "magic"}, "unknown baseline 'magic'; choose of: .*horovod.*pipedap"),
        ({"launcher": "srun"}, "unknown launcher 'srun'; choose of: horovodrun, torchrun, mpirun$"),
        ({"nworkers": "0"}, "nworkers must be a whole number of at least 1, not '0'"),
        ({"nworkers": "-2"}, "nworkers must be a whole number of at least 1, not '-2'"),
        ({"bs": "many"}, "bs must be a whole number of at least 1, not 'many'"),
        ({"niters": "0"}, "niters must be a whole number of at least 1"),
        ({"nwarmup": "-1"}, "nwarmup must be a whole number of at least 0"),
        ({"rdma": "2"}, "rdma must be 0 or 1, not '2'"),
        ({"senlen": "64"}, "senlen is for language models, and resnet_tiny is none"),
        ({"hosts": "a:x"}, "hosts must look like 'first:2,second:2'"),
        ({"hosts": ":2"}, "hosts must look like"),
        ({"hosts": "a:1,b", "nworkers": "4"}, "hosts=a:1,b has room for 2 workers, but nworkers=4"),
        ({"baseline": "ddp", "launcher": "mpirun"}, "ddp cannot run under mpirun; use launcher=torchrun"),
        ({"baseline": "horovod", "launcher": "torchrun"}, "use launcher=horovodrun or mpirun"),
        ({"baseline": "pipedap,magic"}, "unknown baseline 'magic'"),
        ({"baseline": "all", "launcher": "mpirun"}, "compared on this machine; unset hosts and launcher"),
        ({"baseline": "all", "hosts": "a:2"}, "compared on this machine; unset hosts and launcher"),
        ({"bs": "8", "BS": "16"}, "bs is set twice, to '8' and '16'"),
    ],
)
def test_what_is_wrong_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(environ)


def test_horovodrun_command() -> None:
    line = command_line(Settings(launcher="horovodrun", dnn="bert_tiny", bs=4, senlen=32, nworkers=3))
    assert line == (
        "env NCCL_IB_DISABLE=1 horovodrun --disable-cache --gloo -np 3 -H localhost:3 "
        "python -m dnn_bench synthetic --model bert_tiny --baseline auto --batch-size 4 --seq-len 32 "
        "--num-warmup-batches 10 --num-iters 10"
    )


def test_torchrun_command() -> None:
    line = command_line(Settings(launcher="torchrun"))
    assert "torchrun --standalone --nproc-per-node 2 --no-python python -m dnn_bench synthetic" in line


def test_mpirun_command_with_hosts_and_rdma() -> None:
    line = command_line(Settings(launcher="mpirun", hosts="a:1,b:1", rdma=1))
    assert line.startswith(
        "env NCCL_IB_DISABLE=0 mpirun --oversubscribe --bind-to none -np 2 -H a:1,b:1 -x PATH"
    )
    assert "btl" not in line
    assert "-x NCCL_IB_DISABLE python -m dnn_bench" in line


def test_without_horovod_another_launcher_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "find", lambda name: None if name == "horovodrun" else name)
    assert read({}).launcher == "torchrun"
    # torchrun starts ranks on its own host only, and was chosen and refused.
    assert read({"hosts": "a,b"}).launcher == "mpirun"


@pytest.mark.parametrize(("baseline", "names"), [("all", "all"), ("PipeDAP, ddp_4MB", "pipedap,ddp_4mb")])
def test_several_baselines_are_compared_side_by_side(baseline: str, names: str) -> None:
    line = command_line(read({"baseline": baseline, "dnn": "mlp_tiny", "bs": "8", "niters": "3"}))
    assert line == (
        "env NCCL_IB_DISABLE=1 python -m dnn_bench compare --local 2 --model mlp_tiny "
        f"--baseline {names} --batch-size 8 --warmup 10 --iters 3"
    )


def test_torchrun_refuses_other_hosts() -> None:
    with pytest.raises(ValueError, match="torchrun starts workers on its own host only.*--node-rank"):
        command_line(Settings(launcher="torchrun", hosts="a,b"))


def test_a_launcher_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="horovodrun is not installed; run COMMSCHED_WITH_HOROVOD=1"):
        command_line(Settings(launcher="horovodrun"))


def test_torch_is_not_imported() -> None:
    import subprocess

    # A typing error in a variable must be answered at once.
    code = "import sys, dnn_bench.settings as s; s.read({}); s.command_line; sys.exit('torch' in sys.modules)"
    python = Path(sys.prefix) / "bin" / "python"
    assert subprocess.run([python, "-c", code], cwd=Path(settings.__file__).parents[1]).returncode == 0


def test_without_variables_it_gives_a_first_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.environ", {"PATH": "/bin", "bs": ""})
    assert settings.main() == 0
    assert capsys.readouterr().out == "python -m dnn_bench first --html build/first.html\n"
    monkeypatch.setattr("os.environ", {"PATH": "/bin", "bs": "4"})
    assert settings.main() == 0
    assert " synthetic --model resnet_tiny " in capsys.readouterr().out
