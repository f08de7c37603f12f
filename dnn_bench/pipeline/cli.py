"""Measure a pipeline: on this machine, on emulated hosts, or as a rank of a launcher.

python -m dnn_bench pipeline --schedule wpipe --depth 4 --num-data-parallel 2 --model bert_tiny
python -m dnn_bench pipeline bundle --num-hp 2 --world-size 2 --rank 0 --IP 10.0.0.1 [--DP-ONLY]
python -m dnn_bench pipeline --config hybrid_conf.json --graph gpus=4.txt --model vgg_tiny
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from commsched.cli.options import cuts_of
from dnn_bench import models
from dnn_bench.cluster import Cluster, ClusterError
from dnn_bench.launch import Hosts, Place, ThisMachine, end, launched
from dnn_bench.pipeline.options import Options, Result
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.weight_versions import delays
from scheduler.pipelines.build import generate
from scheduler.pipelines.planner.convert import read_plan
from scheduler.pipelines.schedules.bundle import bundle_ranks, bundle_ranks_across

WORKER = "dnn_bench.pipeline.worker"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m dnn_bench pipeline", description=__doc__.splitlines()[0])
    parser.add_argument("kind", nargs="?", choices=("bundle",), help="bundles, with options of their own")
    parser.add_argument(
        "--model",
        default="mlp_tiny",
        help="a model's name, or paced: layers that sleep (default: %(default)s)",
    )
    parser.add_argument(
        "--task",
        choices=models.HEADS,
        help="head of a language model (default: classification for BERT under an asynchronous schedule,"
        " which refuses the tied embedding of pre-training; otherwise as --model says)",
    )
    parser.add_argument(
        "--schedule", help="order of the micro-batches (default: 1f1b; with --config: ashpipe)"
    )
    parser.add_argument(
        "--depth", type=int, default=2, metavar="S", help="ranks of one replica (default: %(default)s)"
    )
    parser.add_argument(
        "--num-data-parallel",
        default="1",
        metavar="R",
        help="replicas, or one number per stage such as 4,3,1 (default: %(default)s)",
    )
    parser.add_argument(
        "--num-microbatches",
        type=int,
        metavar="M",
        help="micro-batches of a step (default: 4; ashpipe and bundle: 1)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=0,
        metavar="N",
        help="rows of a step over all replicas (default: 4 per micro-batch, at least 1 per replica)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="take the stages from this hybrid_conf.json of PipeDream or AshPipe"
    )
    parser.add_argument("--graph", metavar="FILE", help="with --config: the partitioned graph, gpus=N.txt")
    parser.add_argument(
        "--plan", default="", metavar="FILE", help="take the stages from this plan of `commsched partition`"
    )
    parser.add_argument(
        "--cuts", metavar="A,B,...", help="layers with which stages begin: numbers, or names of modules"
    )
    parser.add_argument(
        "--placement",
        default="bubble",
        choices=("eager", "bubble", "aligned"),
        help="where collectives stand among the messages (default: %(default)s)",
    )
    parser.add_argument(
        "--against",
        default="",
        choices=("eager", "bubble", "aligned"),
        help="also measure this placement of collectives, in turn with the other",
    )
    parser.add_argument(
        "--recompute", action="store_true", help="keep a stage's inputs only and repeat its forward"
    )
    parser.add_argument(
        "--warmup",
        type=int,
        default=4,
        metavar="N",
        help="untimed steps before each round (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="timed steps of each round (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        metavar="N",
        help="rounds; the table reports medians (default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="layers of the paced model")
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.005,
        help="seconds that F, B and W of a paced layer take each (default: %(default)s)",
    )
    parser.add_argument(
        "--layer-bytes",
        type=int,
        default=256,
        metavar="N",
        help="bytes of a paced layer's weights (default: %(default)s)",
    )
    parser.add_argument(
        "--hop",
        type=int,
        default=1,
        help="1f1b and 2bw: micro-batches ahead for each later stage (default: %(default)s)",
    )
    parser.add_argument("--peer", action="store_true", help="also measure torch.distributed.pipelining")
    parser.add_argument(
        "--link", metavar="L", help="one rank on each emulated host, with links of this speed (needs root)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    bundles = parser.add_argument_group("bundles")
    bundles.add_argument(
        "--num-hp", type=int, default=1, metavar="N", help="bundles on each host (default: %(default)s)"
    )
    bundles.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="number of hosts (default: %(default)s)"
    )
    bundles.add_argument(
        "--rank", type=int, default=0, metavar="N", help="this host's number (default: %(default)s)"
    )
    bundles.add_argument(
        "--IP", default="127.0.0.1", metavar="A", help="address of host 0 (default: %(default)s)"
    )
    bundles.add_argument(
        "--port", type=int, default=29531, help="a free port of host 0 (default: %(default)s)"
    )
    bundles.add_argument("--shape", metavar="F,R", help="fronts and rears of a host, instead of --num-hp")
    bundles.add_argument(
        "--across",
        action="store_true",
        help="fronts on the first half of the hosts, rears on the others; --num-hp ranks on each",
    )
    bundles.add_argument("--DP-ONLY", action="store_true", help="the whole model on every rank")
    return parser.parse_args(arguments)


def options_of(given: argparse.Namespace) -> Options:
    replicas = [int(word) for word in given.num_data_parallel.split(",")]
    options = Options(
        model=given.model,
        schedule=given.schedule or "1f1b",
        depth=given.depth,
        replicas=replicas * given.depth if len(replicas) == 1 else replicas,
        plan=given.plan,
        cuts=cuts_of(given.cuts),
        rows=given.batch_size,
        placement=given.placement,
        against=given.against,
        recompute=given.recompute,
        warmup=given.warmup,
        steps=given.steps,
        rounds=given.rounds,
        layers=given.layers,
        seconds=given.seconds,
        layer_bytes=given.layer_bytes,
        hop=given.hop,
        peer=given.peer,
    )
    if given.cuts and (given.config or given.plan):
        raise ValueError("--cuts cannot be combined with --config or --plan, which have cuts of their own")
    if given.config:
        options.schedule = given.schedule or "ashpipe"
    if given.kind == "bundle":
        _bundle(given, options)
    options.microbatches = _microbatches(given, options.schedule)
    options.model = _model(given, options)
    if given.config:
        _files(given, options)
    return options


def _microbatches(given: argparse.Namespace, schedule: str) -> int:
    return given.num_microbatches or (1 if schedule in ("ashpipe", "bundle") else 4)


def _files(given: argparse.Namespace, options: Options) -> None:
    """Stages, ranks and recomputation of AshPipe's files."""
    from commsched.pipeline.chain import Chain
    from dnn_bench.pipeline.jobs import job_of

    sizes = Chain(job_of(options.model, given.layers).model).sizes
    own = {"schedule": given.schedule, "microbatches": _microbatches(given, given.schedule or "ashpipe")}
    chosen = own if given.schedule or given.num_microbatches else {}
    plan = read_plan(given.config, given.graph, sizes, **{name: v for name, v in chosen.items() if v})
    options.schedule, options.microbatches = plan.schedule, plan.microbatches
    options.cuts, options.ranks = list(plan.cuts), [list(row) for row in plan.rank_map]
    options.depth = len(plan.cuts)
    options.recompute = given.recompute or list(plan.recompute)


def _model(given: argparse.Namespace, options: Options) -> str:
    """The name of the model with the head that --task or the schedule asks for."""
    if given.model == "paced":
        if given.task:
            raise ValueError(f"model 'paced' has no head, so --task {given.task} cannot be had; leave it out")
        return "paced"
    if given.task:
        return models.with_head(given.model, given.task)
    if models.spec(given.model).task == "masked_lm" and _late(options):
        return models.with_head(given.model, "classification")
    return str(given.model)


def _late(options: Options) -> bool:
    """Whether a stage applies gradients of earlier steps."""
    if options.plan:
        plan = PipelinePlan.load(options.plan)
        return any(delays(generate(plan.schedule, len(plan.cuts), plan.microbatches)))
    return any(delays(generate(options.schedule, options.depth, options.microbatches)))


def _bundle(given: argparse.Namespace, options: Options) -> None:
    shape = tuple(int(w) for w in given.shape.split(",")) if given.shape else (given.num_hp, given.num_hp)
    if given.DP_ONLY:
        shape = (sum(shape),)
    if given.across:
        each, ranks = given.num_hp, bundle_ranks_across(given.world_size, given.num_hp)
    else:
        each, ranks = sum(shape), bundle_ranks(given.world_size, shape)
    options.schedule, options.depth = "bundle", len(ranks)
    options.ranks = [list(row) for row in ranks]
    options.hosts = [list(range(h * each, (h + 1) * each)) for h in range(given.world_size)]


def size_of(options: Options) -> int:
    """How many ranks there are."""
    if options.plan:
        return PipelinePlan.load(options.plan).ranks
    if options.ranks:
        return len({rank for row in options.ranks for rank in row})
    return sum(options.replicas)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    try:
        options = options_of(given)
        if launched():
            from dnn_bench.pipeline.worker import measure

            result = measure(options)
        else:
            result = _launch(given, options)
    except (ValueError, ClusterError) as error:
        print(f"dnn_bench pipeline: {error}", file=sys.stderr)
        return 2
    if result is not None:
        print(json.dumps(asdict(result)) if given.json else described(result))
    return 0


def _launch(given: argparse.Namespace, options: Options) -> Result | None:
    """Start this host's ranks and return rank 0's result, if it is one of them."""
    size = size_of(options)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="dnn_bench-")))
        place: Place
        if given.link:
            place = Hosts(stack.enter_context(Cluster(size, given.link)))
        elif given.kind == "bundle" and given.world_size > 1:
            place = ThisMachine(
                size, host=given.rank, hosts=given.world_size, address=given.IP, port=given.port
            )
        else:
            place = ThisMachine(size)
        logs = [stack.enter_context((folder / f"rank.{i}.log").open("w+")) for i in range(size)]
        processes = place.start(["-m", WORKER, str(folder), json.dumps(asdict(options))], logs)
        stack.callback(end, processes)
        codes = [process.wait() for process in processes]
        answers = [json.loads(path.read_text()) for path in sorted(folder.glob("rank.*.json"))]
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise ValueError(errors[0])
        if answers:
            return Result(**answers[0]["result"])
        if any(codes):
            said = "\n".join(path.read_text() for path in sorted(folder.glob("rank.*.log")))
            raise ValueError(f"the ranks ended with {codes}\n{said[:3000]}")
    return None


def described(result: Result) -> str:
    lines = [
        f"{result.schedule} of {result.model}: {result.period * 1e3:.2f} ms per step,"
        f" {result.rows / result.period:.1f} rows per second; delays {' '.join(map(str, result.delays))}",
        f"  simulated {result.simulated * 1e3:.2f} ms ({result.simulated / result.period - 1:+.1%})",
        f"  bubble {result.bubble:.1%}, simulated {result.simulated_bubble:.1%};"
        f" {result.reached:.3f} of the rate without any; {result.handling * 1e3:.2f} ms between two actions",
        f"  losses {result.losses[0]:.6f} ... {result.losses[-1]:.6f}",
    ]
    if result.peer is not None and result.ratio is not None:
        lines.append(
            f"  torch.distributed.pipelining {result.peer * 1e3:.2f} ms: {result.ratio} times its throughput"
        )
    if result.gain is not None and result.simulated_gain is not None:
        lines.append(
            f"  {result.gain} times the throughput of the other placement, simulated"
            f" {result.simulated_gain:.3f}"
        )
    if result.difference is not None:
        lines.append(f"  largest relative difference of a loss {result.difference:.1e}")
    return "\n".join(lines)
