"""The variables of `dist.sh`: read, checked, and turned into the command that starts the benchmark.

Nothing here imports torch, so that a typing error is answered at once and before anything is started.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from dnn_bench import baselines, launch, models
from dnn_bench.command_line import chosen
from scheduler.ir.inputs import LARGEST, InputError, whole

COMPARE = "compare"  # in the place of a launcher
FIRST = ["first", "--html", "build/first.html"]  # without any variable
ALIASES = {"data_dir": "data"}
RDMA = "NCCL_IB_DISABLE"  # decides between RDMA and TCP; the sockets of gloo are TCP always


@dataclass(frozen=True)
class Settings:
    """One run; the field names are the variables of `dist.sh`, in any case."""

    dnn: str = "resnet_tiny"
    bs: int = 0  # per worker; 0: what the model usually takes
    nworkers: int = 2
    baseline: str = "auto"  # "all" or several with commas between them: side by side
    data: str = ""  # images or text; empty for synthetic data
    senlen: int = 0  # tokens per sentence, for language models; 0: the model's usual length
    rdma: int = 0
    hosts: str = ""
    launcher: str = ""  # the first of those that can start the baseline
    nwarmup: int = 10
    niters: int = 10


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `dist.sh` that are set and not empty, by their names in `Settings`."""
    values: dict[str, str] = {}
    known = {field.name for field in fields(Settings)}
    for variable, value in environ.items():
        name = ALIASES.get(variable.lower(), variable.lower())
        if name in known and value and values.setdefault(name, value) != value:
            raise InputError(f"{name} is set twice, to {values[name]!r} and {value!r}; set it once")
    return values


def read(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`; a ValueError says which variable is wrong and what it may be."""
    kinds = {field.name: field.type for field in fields(Settings)}
    values = {n: number(n, value) if kinds[n] == "int" else value for n, value in given(environ).items()}
    settings = Settings(**values)  # type: ignore[arg-type]
    return checked(replace(settings, data=found(settings.data, environ.get("COMMSCHED_CALLED_FROM", ""))))


def found(data: str, called_from: str) -> str:
    """The whole path of a data folder or file that the user gave relative to where dist.sh was called."""
    path = Path(called_from, data).absolute()
    if data and not path.exists():
        raise InputError(f"data={data}: there is no {path}; name a folder of images or text, or a text file")
    return str(path) if data else ""


def number(name: str, value: str) -> int:
    least = 1 if name in ("bs", "nworkers", "niters", "senlen") else 0
    try:
        given = int(value)
    except ValueError:
        given = least - 1
    if not least <= given <= (1 if name == "rdma" else LARGEST):
        allowed = "0 or 1" if name == "rdma" else f"a whole number of at least {least}"
        raise InputError(f"{name} must be {allowed}, not {value!r}")
    return given


def checked(settings: Settings) -> Settings:
    """The settings with every name as its registry spells it, and with a launcher."""
    dnn = models.spelt(settings.dnn)
    if settings.senlen and "seq_len" not in models.spec(dnn).shape:
        raise InputError(f"senlen is for language models, and {dnn} is none; unset it")
    slots = sum(count for _, count in hosts_of(settings.hosts))
    if settings.hosts and slots < settings.nworkers:
        raise InputError(
            f"hosts={settings.hosts} has room for {slots} workers, but nworkers={settings.nworkers}"
        )
    names = [part.strip() for part in settings.baseline.split(",")]
    known = names if names == ["all"] else [baselines.get(name).name for name in names]
    if names != ["all"] and len(names) == 1:
        launcher = launcher_for(known[0], settings)
    elif settings.hosts or settings.launcher:
        raise InputError("several baselines are compared on this machine; unset hosts and launcher")
    else:
        launcher = COMPARE  # which starts each under the launcher that suits it
    return replace(settings, dnn=dnn, baseline=",".join(known), launcher=launcher)


def launcher_for(baseline: str, settings: Settings) -> str:
    """The wanted launcher if it can start the baseline; else the first installed one that can do it there."""
    entry = baselines.get(baseline)
    if entry.kind == baselines.OURS:
        possible = ["horovodrun", "torchrun", "mpirun"]
    else:
        possible = ["horovodrun", "mpirun"] if entry.launcher == "horovod" else ["torchrun"]
    if not settings.launcher:
        several = len(hosts_of(settings.hosts)) > 1 and len(possible) > 1
        usable = [name for name in possible if name != "torchrun"] if several else possible
        return next(filter(launch.find, usable), usable[0])
    (launcher,) = chosen("launcher", settings.launcher.lower(), [*LAUNCHERS])
    if launcher not in possible:
        raise InputError(
            f"baseline {baseline} cannot run under {launcher}; use launcher={' or '.join(possible)}"
        )
    return launcher


def hosts_of(text: str) -> list[tuple[str, int]]:
    """`a:2,b` as [("a", 2), ("b", 1)]."""
    rule = f"hosts must look like 'first:2,second:2' (host:workers), not {text!r}"
    pairs = []
    for part in filter(None, text.split(",")):
        host, _, count = part.partition(":")
        pairs.append((host, whole(count or "1", f"{rule}: workers")))
        if not all(pairs[-1]):
            raise InputError(rule)
    return pairs


def command(settings: Settings) -> list[str]:
    """The program that `dist.sh` starts."""
    python = [sys.executable, "-m", "dnn_bench"]
    given = {"--batch-size": settings.bs, "--seq-len": settings.senlen, "--data-dir": settings.data}
    what = ["--model", settings.dnn, "--baseline", settings.baseline]
    what += [part for flag, value in given.items() if value for part in (flag, str(value))]
    if settings.launcher == COMPARE:  # the comparison starts the workers of every baseline itself
        effort = ["--warmup", str(settings.nwarmup), "--iters", str(settings.niters)]
        return [*python, "compare", "--local", str(settings.nworkers), *what, *effort]
    effort = ["--num-warmup-batches", str(settings.nwarmup), "--num-iters", str(settings.niters)]
    return [*LAUNCHERS[settings.launcher](settings), *python, "synthetic", *what, *effort]


def torchrun(settings: Settings) -> list[str]:
    if len(hosts_of(settings.hosts)) > 1:
        raise InputError(
            "torchrun starts workers on its own host only; for several use launcher=horovodrun or mpirun, "
            "or call torchrun on each with --nnodes, --node-rank and --master-addr"
        )
    options = ["--standalone", "--nproc-per-node", str(settings.nworkers), "--no-python"]
    return [launch.installed("torchrun"), *options]


def mpirun(settings: Settings) -> list[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = ["--oversubscribe", "--bind-to", "none", "-np", str(settings.nworkers)]
    hosts = ["-H", settings.hosts] if settings.hosts else []
    names = [name for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ]
    exported = [part for name in (*names, RDMA) for part in ("-x", name)]
    # Hosts may have several networks, and Open MPI's InfiniBand transport warns where there is none.
    tcp = [] if settings.rdma else ["--mca", "btl", "self,tcp"]
    return [launch.installed("mpirun"), *root, *options, *hosts, *tcp, *exported]


LAUNCHERS: dict[str, Callable[[Settings], list[str]]] = {
    "horovodrun": lambda settings: launch.horovodrun(settings.nworkers, settings.hosts),
    "torchrun": torchrun,
    "mpirun": mpirun,
}


def command_line(settings: Settings) -> str:
    """The whole command as one would type it."""
    return f"env {RDMA}={int(not settings.rdma)} {shlex.join(command(settings))}"


def main() -> int:
    try:
        if given(os.environ):
            print(command_line(read(os.environ)))
        else:
            print(shlex.join([sys.executable, "-m", "dnn_bench", *FIRST]))
    except ValueError as error:
        print(f"dist.sh: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
