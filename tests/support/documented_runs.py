"""How tests run documented commands: smaller, on this machine, in a folder that has what they expect."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import psutil

from commsched.pipeline import Chain
from dnn_bench import models
from dnn_bench.pipeline.jobs import job_of
from scheduler.formats.pipedream import Graph, format_graph
from scheduler.ir.profile import Layer, Profile
from tests.support import small_data
from tests.support.checkout import make_script
from tests.support.documented_commands import ROOT, Block, Call, blocks
from tests.support.launch import MARK, carries, clean_environment, kill_quietly

# -- which are not run, and why ------------------------------------------------------------------------------

NOT_RUN = {
    r"(pytest|tests/run|python -m pytest)\b": "the suite runs its own tests; each of these selects some",
    r"docker ": "needs Docker",
    r"pip wheel": "compiles for minutes; tests/dist/test_wheel.py builds one",
    r"srun ": "needs Slurm; tests/dist/test_slurm.py runs it",
    r"docker/install\.sh$": "builds for minutes; tests/dist/test_install_sh.py runs it",
    r"(pip|apt-get) install|sysctl -w": "changes the machine or its environment",
    r"sysctl net|ssh host1$": "no command of this project",
    r".* -m tests.models.held_memory .*": "needs the libraries of tests/run --models and 15 GB",
    r"python tests/models/bench_trainers\.py$": "needs the libraries of tests/run --models",
    r"python -m tests\.horovod_suite CHECKOUT\b": "needs a checkout of Horovod",
    r"torchrun --nproc-per-node 2$|horovodrun --gloo$": "options only, without a program to start",
    r"commsched profile --job \S+$": "one option only",
    r"commsched advise|torchrun .* commsched advise": "needs DDP; tests/dist/test_advise.py runs it",
    r"python tests/native/bench_advise.py": "trains for minutes",
    r"tests/native/run": "compiles for minutes; tests/unit/comm_core/test_engine_sanitizers.py runs it",
    r"commsched train .*--rank 0": "one rank of several; tests/dist/test_training_commands.py starts all",
    r"python -m dnn_bench gpu$": "needs a GPU; tests/unit/dnn_bench/test_gpu_figures.py runs it on the CPU",
    r"docker/several_gpus\.sh": "needs GPUs; tests/dist/test_several_gpus_sh.py runs it",
    r"commsched train .*--device cuda": "needs GPUs; tests/gpu/test_gpu_stages.py runs it",
    r"python -m tests\.support\.unsteady": "runs the whole suite",
    r".* --peer --model bert_tiny .*--schedule interleaved --depth 4": "torch's own fails, as the page says",
}
QUICK = (
    r"python script\.py",
    r"python -m dnn_bench( --help)?$",
    r"python -c",
    r"docker/install\.sh --help",
    r"commsched partition --profile bert_base",
)


def reason(call: Call) -> str:
    """Why a command is not run; empty if it is."""
    line = " ".join(call.words)
    listed = [why for pattern, why in NOT_RUN.items() if re.match(pattern, line)]
    options = [word for word in call.words if word.startswith("-") and word != "-m"]
    if not listed and call.block.kind == "inline" and not options and not is_quick(call):
        return "only named"
    return listed[0] if listed else ""


def is_quick(call: Call) -> bool:
    return any(re.match(pattern, " ".join(call.words)) for pattern in QUICK)


def blocks_to_run() -> list[Block]:
    """Blocks of commands on pages, but those of which every line is listed above."""
    listed = re.compile("|".join([*NOT_RUN, *QUICK]))
    found = []
    for block in blocks(docstrings=False):
        if block.kind == "shell":
            lines = block.text.replace("\\\n", " ").splitlines()
            bare = [re.sub(r" +#.*|^time |^[A-Z_]+=\S+ ", "", line) for line in lines]
            if not all(map(listed.match, bare)):
                found.append(block)
    return found


# -- smaller -------------------------------------------------------------------------------------------------

Value = str | Callable[[str], str]


def _first(text: str) -> str:
    return text.partition(",")[0]


def _ends(text: str) -> str:
    """The first and the last of a list."""
    names = text.split(",")
    return ",".join(dict.fromkeys((names[0], names[-1])))


def _tiny(name: str) -> str:
    """The tiny model of the same family."""
    if name not in models.names() or "_tiny" in name:
        return name
    family = models.spec(name).builder
    return next(n for n in models.names() if "_tiny" in n and models.spec(n).builder == family)


# Every one of these options gets this value, whether a command gives it or not.
SIZES: dict[str, dict[str, Value]] = {
    "compare": {"--model": _tiny, "--reps": "1", "--iters": "1", "--baseline": _ends, "--batch-size": "4"},
    "picture": {"--baseline": _ends},
    "suite": {
        "--models": "mlp_tiny",
        "--ratios": _first,
        "--hosts": _first,
        "--per-host": _first,
        "--reps": "1",
        "--iters": "1",
        "--baseline": "ddp,auto",
    },
    "converge": {"--workers": "1,2", "--steps": "4", "--baseline": "auto"},
    "pipeline": {"--model": _tiny, "--warmup": "1", "--steps": "1", "--rounds": "1"},
    "spatial": {"--image-size": "64", "--warmup": "1", "--iterations": "1"},
    "halo": {"--warmup": "1", "--iterations": "1"},
    "emulate": {
        "--model": _tiny,
        "--device": "cpu",
        "--batch-size": "2",
        "--warmup": "1",
        "--iterations": "1",
    },
    "faults": {"--faults": "2", "--only": "kill,back"},
    "synthetic": {"--num-warmup-batches": "1", "--num-iters": "1", "--batch-size": "4"},
    "train": {"--steps": "3", "--epochs": "1", "--image-size": "64", "--rows": "24"},
    "profile": {"--repeat": "1", "--image-size": "64"},
    "bench_link.py": {"--megabytes": "1", "--repeats": "1"},
    "bench_overlap.py": {"--megabytes": "1", "--repeats": "1"},
    "scheduler.table": {"--ratios": "1", "--startups": "2e-4"},
    "scheduler.many_hosts": {"--links": "10gbe", "--per-host": "2", "--hosts": "4"},
    "tests.checker": {"--programs": lambda _: "8", "--seed": "1"},
    "tests.fuzz": {"--mutations": "20"},
    "tests.checker.stages": {"--programs": lambda _: "8", "--seed": "1"},
    "tests.checker.tiles": {"--programs": lambda _: "8", "--seed": "1"},
    "tests.support.checkpoints": {"--times": lambda _: "8"},
    "hosts.sh": {"-np": "2", "--min-np": "1", "--max-np": "2"},
}
# These are smaller wherever they stand.
WORDS = {
    "first:4,second:4": "localhost:2",
    "dnn_bench.pipeline.jobs:alexnet": "dnn_bench.pipeline.jobs:alexnet_tiny",
    "name=resnet50": "name=resnet_tiny",
    "resnext101": "resnext_tiny",
    "name=resnext101": "name=resnext_tiny",
    "name=bert_base_classifier": "name=bert_tiny_classifier",
    "8192x64": "256x64",
    "8192x10": "256x10",
    "2..16384": "2..64",
    "0.02": "0.002",
    "0.03": "0.003",
    "10.0.0.1": "127.0.0.1",
}
# Of dist.sh, in the same way.
VARIABLES: dict[str, Value] = {"dnn": _tiny, "bs": "2", "nworkers": "2", "nwarmup": "1", "niters": "1"}


def smaller(words: Sequence[str]) -> list[str]:
    """The same command with sizes for a test."""
    found = [WORDS.get(word, word) for word in words]
    names = [Path(word).name for word in found]
    for command, sizes in SIZES.items():
        if command in names:
            for option, value in sizes.items():
                _set(found, option, value)
    if "localhost:2" in found:
        _set(found, "-np", "2")
    if "--nnodes" in found:
        at = found.index("--nproc-per-node") + 1
        found[at : at + 1] = ["1", "--max-restarts", "0"]
        found[found.index("first")] = "127.0.0.1"
    return found


def _set(words: list[str], option: str, value: Value) -> None:
    if option in words:
        place = words.index(option) + 1
        words[place] = value if isinstance(value, str) else value(words[place])
    elif isinstance(value, str):
        words += [option, value]


# -- running -------------------------------------------------------------------------------------------------

# Layers that take so long that a plan needs every device.
JOB = """
from dnn_bench.pipeline.jobs import job_of
from tests.support.file_models import convolutions, pixels

def make():
    return job_of("paced", 8, seconds=0.02)
"""
CONF = '{"module_to_stage_map": [0, 1, 2, 2], "stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3]}}'


def partitioned(path: Path) -> None:
    """Write the graph that CONF is for: vgg_tiny in three stages."""
    sizes = Chain(job_of("vgg_tiny").model).sizes
    layers = tuple(Layer(f"layer{number}", 1.0, 2.0, size) for number, size in enumerate(sizes))
    path.write_text(format_graph(Graph.chain(Profile("vgg_tiny", layers)).with_stages((0, 4, 6))))


@dataclass
class Ran:
    call: Call
    words: list[str]
    status: int
    output: str

    def __str__(self) -> str:
        return f"{self.call}\n  run as {' '.join(self.words)}\n  status {self.status}: {self.output[-1500:]}"


def prepare(folder: Path) -> None:
    """What the commands expect where they are called: the README's script, a job, hosts, a configuration."""
    readme = [b.text for b in blocks(docstrings=False) if b.page == "README.md" and b.kind == "python"]
    for name in ("script.py", "train.py"):
        (folder / name).write_text(readme[0])
    (folder / "my_module.py").write_text(JOB)
    make_script(folder / "hosts.sh", "echo localhost:2")
    small_data.shapes(folder / "pictures")
    small_data.sentences(folder / "qqp", 64, 16)
    for part in ("train", "val"):
        small_data.masks(folder / "photos" / part, 24)
    (folder / "hybrid_conf.json").write_text(CONF)
    partitioned(folder / "gpus=4.txt")
    (folder / "tests").symlink_to(ROOT / "tests")
    (folder / "docs" / "images").mkdir(parents=True)
    shutil.copytree(ROOT / "docs" / "results", folder / "docs" / "results")
    (folder / "dist.sh").write_bytes((ROOT / "dist.sh").read_bytes())
    (folder / "docker").mkdir()
    (folder / "docker" / "common.sh").symlink_to(ROOT / "docker" / "common.sh")
    # The environment that runs the tests is complete, and stays as it is.
    make_script(folder / "docker" / "install.sh", f'[ $# = 0 ] || exec {ROOT}/docker/install.sh "$@"')


def run(calls: Sequence[Call], folder: Path, timeout: float = 900.0) -> list[Ran]:
    """Runs the commands one after the other, those of several hosts at the same time."""
    found: list[Ran] = []
    for together in _groups(calls):
        mark = uuid.uuid4().hex
        try:
            started = [(call, words, _start(call, words, folder, mark)) for call, words in together]
            deadline = time.monotonic() + timeout
            for call, words, process in started:
                try:
                    output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    output = process.communicate()[0] + f"\nkilled after {timeout} s"
                found.append(Ran(call, words, process.returncode, output))
        finally:
            for left in psutil.process_iter():
                if carries(left, mark):
                    kill_quietly(left)
    return found


def _groups(calls: Sequence[Call]) -> list[list[tuple[Call, list[str]]]]:
    groups: list[list[tuple[Call, list[str]]]] = []
    for call in calls:
        words = smaller(call.words)
        if "--world-size" in words:  # the same on each host
            hosts = range(int(words[words.index("--world-size") + 1]))
            for variant in ([w for w in words if w[0] != "["], [w.strip("[]") for w in words]):
                at = variant.index("--rank") + 1
                groups.append([(call, [*variant[:at], str(host), *variant[at + 1 :]]) for host in hosts])
        elif groups and "--node-rank" in words and words[words.index("--node-rank") + 1] != "0":
            groups[-1].append((call, words))
        else:
            groups.append([(call, words)])
    return groups


def _start(call: Call, words: list[str], folder: Path, mark: str) -> subprocess.Popen[str]:
    variables = {name: WORDS.get(value, value) for name, value in call.variables.items()}
    if words[0] == "./dist.sh":
        for name, value in VARIABLES.items():
            given = variables.get(name, "resnet_tiny")
            variables[name] = value if isinstance(value, str) else value(given)
    names = [name for word in words for name in (sorted(glob(word, root_dir=folder)) or [word])]
    program = {"python": [sys.executable], "./dist.sh": ["bash", "dist.sh"]}.get(names[0], [names[0]])
    env = clean_environment({MARK: mark, "HOME": str(folder), "VIRTUAL_ENV": sys.prefix, **variables})
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "NUMBA_NUM_THREADS": "1"}
    env |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    return subprocess.Popen(
        [*program, *names[1:]],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
