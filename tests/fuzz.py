"""Mutates valid files and options at random: each parser gives a valid object or an ``InputError``.

    python -m tests.fuzz --mutations 10000

The error names the file; an answer takes at most ``SECONDS`` of the processor and ``ROOM`` bytes of memory.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import io
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from commsched import checkpoint
from commsched.cli import options, partition, simulate, training
from commsched.errors import CheckpointError
from commsched.pipeline.factory import Weights
from commsched.spatial.run import _opened
from commsched.training.data_jobs import read_table
from dnn_bench import baselines, cluster, command_line, settings
from dnn_bench.report import page, results
from scheduler import policies, profiles
from scheduler.formats.pipedream import Graph, format_graph, parse_hybrid_conf
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.actions import format_actions, parse_actions
from scheduler.ir.inputs import MOST_SHOWN, InputError
from scheduler.ir.layout import Samples, Tiles
from scheduler.ir.link import Cluster, Level, Link, network_link
from scheduler.ir.profile import Layer, Profile
from scheduler.ir.program import Program
from scheduler.pipelines.build import generate
from scheduler.pipelines.convert import read_plan, to_conf, to_plan
from scheduler.pipelines.partition import partition as cut
from scheduler.validate import violations
from tests.support import checkpoints

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = "00000001-01234567/manifest-0.json"
SECONDS = 1.0  # of the processor, for one input
HANG = 20.0  # seconds of the processor after which an input is given up
ROOM = 1 << 29  # bytes of memory that the parsers may need beside what the process has


class HangError(BaseException):
    """A parser did not end. No parser may catch it."""


# -- the parsers and what they read --------------------------------------------------------------------------


@dataclass(frozen=True)
class Parser:
    """``read`` gets the path of a file of this ``name``, or a text where there is no name."""

    name: str
    read: Callable[[Any], object]
    seeds: Callable[[], Sequence[str | bytes]]


def small() -> Profile:
    return Profile("small", tuple(Layer(f"l{i}", 1e-3, 2e-3, 4 * (i + 1), 8, 1e-3) for i in range(6)), 1e-9)


def dumped(*files: Any) -> list[str]:
    return [json.dumps(file.to_dict(), indent=1) for file in files]


def programs() -> list[str]:
    link = Link(1e-6, 1e-6)
    steps = [policies.plan(small(), link, name, gather="parameters") for name in ("dear", "optimal")]
    stages = generate("pipedream", 3, 2, replicas=2, profile=small(), cuts=(0, 2, 4))
    tiles = generate("1f1b", 2, 2, placements=[Tiles((1, 2)), Samples()], profile=small(), cuts=(0, 3))
    return dumped(*steps, stages, tiles)


def show(path: Path) -> None:
    """As ``commsched show`` reads a plan."""
    violations(Program.load(path))


def links() -> list[str]:
    wires = Level(2, 1e-5, 1e-10), Level(2, 1e-4, 1e-9)
    return dumped(Link(1e-4, 1e-9, "10gbit"), network_link(wires, "tiers"))


def stage_plans() -> list[PipelinePlan]:
    wires = Cluster.flat(3, Link(1e-6, 1e-9))
    tiled = cut(small(), wires, "1f1b", placements=[Tiles((1, 2)), Samples()])
    return [cut(small(), wires, "ashpipe"), tiled, cut(small(), wires, "wpipe", microbatches=2)]


def train(path: Path) -> None:
    """As ``commsched train --plan`` reads a plan."""
    _ = PipelinePlan.load(path).placements


def graphs() -> list[str]:
    return [format_graph(Graph.chain(small()).with_stages((0, 2, 4)))]


def graph(path: Path) -> None:
    """As ``commsched partition`` and ``convert`` read a graph."""
    profiles.find(str(path))
    Graph.load(path).cuts()


def confs() -> list[str]:
    three = {"0": [0, 1], "1": [2], "2": [3]}
    theirs = {"module_to_stage_map": [0, 1, 2, 2], "stage_to_rank_map": three, "recompute_stage": [1]}
    depths = {"0": 2, "1": 1, "2": 0}
    ours = to_plan(parse_hybrid_conf(theirs), Graph.chain(small()).with_stages((0, 2, 4)))
    return [to_conf(ours).text(), json.dumps({**theirs, "stage_to_depth_map": depths}), json.dumps(theirs)]


def conf(path: Path) -> None:
    """As ``commsched train --conf`` reads one, for layers that are its stage modules, and with a graph."""
    stages = path.with_name("gpus=4.txt")
    if not stages.exists():
        stages.write_text(format_graph(Graph.chain(small()).with_stages((0, 2, 4))))
    with contextlib.suppress(InputError):
        read_plan(path, sizes=(4,) * 3)
    read_plan(path, stages)


def reports() -> list[str]:
    trace = {
        "forward": [[0.1, 0.2], [0.2, 0.3]],
        "backward": [[0.5, 0.7], [0.3, 0.5]],
        "update": [0.7, 0.75],
        "end": 1.0,
        "operations": [["AG1", -0.2, 0.1, 8], ["RS1", 0.5, 0.7, 8], ["RS0", 0.52, 0.9, 8]],
    }
    place = {"ranks": 2, "links": ["250mbit", "250mbit"]}
    rows = [{"name": name, "trace": trace} for name in ("ddp", "auto", "ddp_4mb")]
    return [json.dumps({"kind": "compare", "job": {"model": "mlp"}, "place": place, "baselines": rows})]


def picture(path: Path) -> None:
    """As ``python -m dnn_bench picture`` and ``report`` read a comparison."""
    with contextlib.redirect_stdout(io.StringIO()):
        page.picture.__wrapped__([str(path), "--out", "/dev/null"])  # type: ignore[attr-defined]
        page.main.__wrapped__([str(path), "--html", "/dev/null"])  # type: ignore[attr-defined]


def tables() -> list[str]:
    return [path.read_text() for path in sorted((ROOT / "docs" / "results").glob("*.csv"))]


def sentences() -> list[str]:
    rows = ["sentence1\tsentence2\tlabel", "a b\tc d\t0", 'one "two\tthree\t1']
    return ["\n".join([*rows, ""])]


def weights() -> list[str]:
    names = {f"layer.{n}.weight": f"model-{n % 2}.safetensors" for n in range(4)}
    return [json.dumps({"metadata": {"total_size": 64}, "weight_map": names})]


def arrays() -> list[bytes]:
    file = io.BytesIO()
    np.save(file, np.arange(12.0).reshape(3, 4))
    return [file.getvalue()]


@functools.cache
def generation() -> tuple[bytes, str]:
    """Return the part and the manifest of a saved generation whose name is that in ``MANIFEST``."""
    token = mock.patch.object(checkpoint.secrets, "token_hex", lambda count: MANIFEST[9:17])
    with tempfile.TemporaryDirectory() as folder, checkpoints.alone(), token:
        checkpoint.save({"weights": [torch.ones(3), torch.zeros(2)], "epoch": 1}, folder).wait()
        manifest = Path(folder) / MANIFEST
        return manifest.with_name("__0_0.distcp").read_bytes(), manifest.read_text().partition("\n")[2]


def manifest(path: Path) -> None:
    """As ``load`` reads one, beside its part; whoever can change files can change their checksums."""
    checkpoints.sign(path, path.read_bytes())
    path.with_name("__0_0.distcp").write_bytes(generation()[0])
    if isinstance(fault := checkpoint._manifest(path, 0), str):
        raise InputError(fault)
    with checkpoints.alone(), contextlib.suppress(CheckpointError):
        checkpoint.load({}, path.parents[1])


def actions() -> list[str]:
    kernels = [kernel for program in programs() for kernel in json.loads(program)["kernel"]]
    return [format_actions(parse_actions(lane)) for kernel in kernels for lane in kernel.values()]


def texts(*seeds: str) -> Callable[[], list[str]]:
    return lambda: list(seeds)


def replicas(text: str) -> object:
    return training.replicas_of(argparse.Namespace(replicas=text))


PARSERS = {
    "profile": Parser("profile.json", lambda path: profiles.find(str(path)), lambda: dumped(small())),
    "program": Parser("plan.json", show, programs),
    "link file": Parser("link.json", lambda path: options.load_link(str(path)), links),
    "pipeline plan": Parser("stages.json", train, lambda: dumped(*stage_plans())),
    "graph": Parser("graph.txt", graph, graphs),
    "hybrid_conf": Parser("hybrid_conf.json", conf, confs),
    "report": Parser("report.json", picture, reports),
    "results": Parser("results.csv", results.read, tables),
    "sentences": Parser("train.tsv", lambda path: read_table(path, ()), sentences),
    "weights": Parser("model.safetensors.index.json", lambda path: Weights(path.parent), weights),
    "array": Parser("image.npy", _opened, arrays),
    "manifest": Parser(MANIFEST, manifest, lambda: [generation()[1]]),
    "actions": Parser("", parse_actions, actions),
    "link": Parser("", Link.parse, texts("alpha=2e-4,beta=8e-10", "10gbit", "250mbit,alpha=1e-3")),
    "sizes": Parser("", lambda text: options.bytes_of("--memory", text), texts("64k", "1.5GiB", "100")),
    "cuts": Parser("", options.cuts_of, texts("3,6", "second,head.3")),
    "model arguments": Parser("", options._model_arguments, texts("width=16,name=small", "a=(1),b=[2]")),
    "ranks": Parser("", simulate.parse_ranks, texts("8", "2..16384")),
    "placements": Parser("", partition._placements, texts("2x2,1", "1x4,2x2,3")),
    "replicas": Parser("", replicas, texts("4,3,1", "2")),
    "hosts": Parser("", settings.hosts_of, texts("first:2,second:2", "a,b")),
    "rates": Parser("", lambda text: cluster.links(text, 2), texts("1gbit,250mbit", "2.5gbit", "unlimited")),
    "baseline": Parser("", baselines.get, texts("ddp_4mb", "horovod_1.5mb", "auto")),
    "numbers": Parser("", lambda text: command_line.numbers("--hosts", text), texts("2,3,4", "8")),
}


# -- mutations -----------------------------------------------------------------------------------------------

PIECES = (
    *("-1", "0", "99999999999", str((1 << 53) + 1), "1" * 400, "1" * 5000, "1E+500000", "1E-500000"),
    *("1e308", "1e999", "NaN", "-Infinity", "null", "true", "{}", "[]", '""', "[" * 3000, '{"a":' * 3000),
    *("-" * 3000, "(" * 3000, "\x00", "\r\n", "\t", " -- ", ",", ":", "=", "x", "²", "٣", "\x85"),
    *("x" * 150_000, "[1-99999999999]", "F0+999", "2F1@-999", "0F0+99999999", "RS99999999999", "AG0"),
    *("stage_id=99999999999", "node1", "# over: x\n"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 3, 10_000, 99_999, 10**7, 10**12, 10**18, 2**53 + 1, 10**30, 10**400),
    *(0.5, -0.5, 1e308, float("inf"), float("nan")),
    *("", "x", "1", "F0", "[" * 100, [], {}, [[]], [0], {"0": []}, [1, "x"]),
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def mutated(seed: bytes, dice: random.Random) -> bytes:
    """Return the seed with a few changes: of its structure, if it is JSON, or of its characters."""
    data = None
    with contextlib.suppress(ValueError):
        data = json.loads(seed)
    if isinstance(data, dict) and dice.random() < 0.6:
        for _ in range(dice.choice((1, 1, 2))):
            _change_value(data, dice)
        if dice.random() < 0.8:
            data.pop("hash", None)
        return json.dumps(data).encode()
    content = seed
    for _ in range(dice.choice((1, 1, 2, 4))):
        content = _change_text(content, dice)
    return content


def _change_value(data: Any, dice: random.Random) -> None:
    places = list(_places(data))
    if not places:
        return
    holder, key = dice.choice(places)
    how = dice.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1:
        other, place = dice.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif how == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif how == 3:
        for _ in range(dice.choice((1, 30, 200))):
            holder[key] = [holder[key]]
    else:
        holder[key] = copy.deepcopy(dice.choice(VALUES))


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])


def _change_text(content: bytes, dice: random.Random) -> bytes:
    first, last = sorted(dice.randrange(len(content) + 1) for _ in range(2))
    last = min(last, first + dice.choice((1, 5, 50, 500)))
    how = dice.randrange(7)
    if how == 0:
        return content[:first] + content[last:]
    if how == 1:
        return content[:last] + content[first:]
    if how == 2:
        return content[:first] + bytes([dice.randrange(256)]) + content[first + 1 :]
    if how == 3:
        lines = content.splitlines(keepends=True)
        dice.shuffle(lines)
        return b"".join(lines)
    piece = dice.choice(PIECES).encode()
    numbers = list(NUMBER.finditer(content.decode("latin-1")))
    if how < 6 and numbers:
        first, last = dice.choice(numbers).span()
        return content[:first] + piece + content[last:]
    return content[:first] + piece + content[first:]


# -- one input, and many -------------------------------------------------------------------------------------


def problem(parser: Parser, content: bytes, folder: Path) -> str:
    """Return what is wrong with a parser's answer to an input; "" if nothing is."""
    given = _given(parser, content, folder)
    begin, wrong = time.thread_time(), ""
    signal.setitimer(signal.ITIMER_PROF, HANG)
    try:
        parser.read(given)
    except InputError as error:
        if parser.name and str(given) not in str(error):
            wrong = f"the error does not name the file: {error}"
        if len(str(error)) > 2 * MOST_SHOWN:
            wrong = f"the error has {len(str(error))} characters"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        wrong = "".join(traceback.format_exception(error)[-4:])[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.thread_time() - begin
    return wrong or (f"the answer took {seconds:.1f} s" if seconds > SECONDS else "")


def problems(name: str, mutations: int, seed: int) -> Iterator[str]:
    """Yield the wrong answers of a parser, each with its input."""
    parser, dice = PARSERS[name], random.Random(f"{name} {seed}")
    seeds = [seed if isinstance(seed, bytes) else seed.encode() for seed in parser.seeds()]
    with tempfile.TemporaryDirectory() as folder:
        for valid in seeds:  # the first call loads what the parser needs
            parser.read(_given(parser, valid, Path(folder)))
        with _guarded():
            for number in range(mutations):
                content = mutated(dice.choice(seeds), dice)
                if wrong := problem(parser, content, Path(folder)):
                    yield f"{name}, mutation {number} of seed {seed}: {wrong}\n{content[:400]!r}"


def _given(parser: Parser, content: bytes, folder: Path) -> Any:
    """Return what the parser gets: the path of a file with this content, or a text."""
    if not parser.name:
        return content.decode(errors="replace")
    (folder / parser.name).parent.mkdir(exist_ok=True)
    (folder / parser.name).write_bytes(content)
    return folder / parser.name


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Limit memory, and let a parser that hangs fail."""

    def hangs(number: int, frame: object) -> None:
        raise HangError(f"no answer within {HANG:g} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    handler = signal.signal(signal.SIGPROF, hangs)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mutations", type=int, default=1000, metavar="N", help="of each parser")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--parser", choices=PARSERS, action="append", help="default: all")
    parser.add_argument("--show", type=int, default=5, metavar="N", help="failures to print, of each parser")
    given = parser.parse_args()
    failed = 0
    for name in given.parser or PARSERS:
        begin, count = time.monotonic(), 0
        for wrong in problems(name, given.mutations, given.seed):
            count += 1
            if count <= given.show:
                print(wrong, flush=True)
        seconds = time.monotonic() - begin
        print(f"{name}: {given.mutations} mutations, {count} failed, {seconds:.0f} s", flush=True)
        failed += count
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
