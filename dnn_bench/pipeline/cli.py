"""Measure a pipeline: on this machine, on emulated hosts, or as a rank of a launcher.

python -m dnn_bench pipeline --schedule wpipe --depth 4 --num-data-parallel 2 --model bert_tiny
python -m dnn_bench pipeline bundle --num-hp 2 --world-size 2 --rank 0 --IP 10.0.0.1 [--DP-ONLY]
python -m dnn_bench pipeline --config hybrid_conf.json --graph gpus=4.txt --model vgg_tiny
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from commsched.cli.options import cuts_of
from dnn_bench import models
from dnn_bench.cluster import Cluster
from dnn_bench.command_line import numbers, one_line_errors, parser
from dnn_bench.launch import Hosts, Place, ThisMachine, end, launched
from scheduler.formats.pipeline_plan import PipelinePlan
from scheduler.ir.layout import PLACEMENTS
from scheduler.ir.program import delays
from scheduler.pipelines.build import generate, virtual_option
from scheduler.pipelines.convert import read_plan
from scheduler.pipelines.schedules import bundle_ranks, bundle_ranks_across

WORKER = "dnn_bench.pipeline.worker"


def parse(arguments: list[str]) -> argparse.Namespace:
    command = parser("pipeline", __doc__.splitlines()[0])
    command.set_defaults(ranks=None, host_ranks=None)
    add = command.add_argument
    add("kind", nargs="?", choices=("bundle",), help="bundles, with options of their own")
    text = f"a model's name, {models.FORMS}, or paced: layers that sleep"
    add("--model", default="mlp_tiny", help=text)
    text = "head of a language model (default: classification for BERT under an asynchronous schedule, which"
    text += " refuses the tied embedding of pre-training; otherwise as --model says)"
    add("--task", choices=models.HEADS, help=text)
    add("--schedule", help="order of the micro-batches (default: 1f1b; with --config: ashpipe)")
    add("--depth", type=int, default=2, metavar="S", help="ranks of one replica")
    text = "replicas, or one number per stage such as 4,3,1"
    add("--num-data-parallel", dest="replicas", default="1", metavar="R", help=text)
    text = "micro-batches of a step (default: 4; ashpipe and bundle: 1)"
    add("--num-microbatches", dest="microbatches", type=int, metavar="M", help=text)
    text = "rows of a step over all replicas (default: 4 per micro-batch, at least 1 per replica)"
    add("--batch-size", type=int, default=0, metavar="N", help=text)
    add("--config", metavar="FILE", help="take the stages from this hybrid_conf.json of PipeDream or AshPipe")
    add("--graph", metavar="FILE", help="with --config: the partitioned graph, gpus=N.txt")
    text = "take the stages from this plan of `commsched partition`"
    add("--plan", default="", metavar="FILE", help=text)
    text = "layers with which stages begin: numbers, or names of modules"
    add("--cuts", metavar="A,B,...", help=text)
    text = "where collectives stand among the messages"
    add("--placement", default="bubble", choices=PLACEMENTS, help=text)
    text = "also measure this placement of collectives, in turn with the other"
    add("--against", default="", choices=PLACEMENTS, help=text)
    add("--recompute", action="store_true", help="keep a stage's inputs only and repeat its forward")
    _add_measuring(command)
    _add_bundles(command)
    return command.parse_args(arguments)


def _add_measuring(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--warmup", type=int, default=4, metavar="N", help="untimed steps before each round")
    add("--steps", type=int, default=10, metavar="N", help="timed steps of each round")
    add("--rounds", type=int, default=1, metavar="N", help="rounds; the table reports medians")
    add("--layers", type=int, default=0, metavar="N", help="layers of the paced model (default: 8)")
    text = "seconds that F, B and W of a paced layer take each"
    add("--seconds", type=float, default=0.005, help=text)
    add("--layer-bytes", type=int, default=256, metavar="N", help="bytes of a paced layer's weights")
    text = "1f1b and 2bw: micro-batches ahead for each later stage"
    add("--hop", type=int, default=1, help=text)
    add("--peer", action="store_true", help="also measure torch.distributed.pipelining")
    text = "one rank on each emulated host, with links of this speed (needs root)"
    add("--link", metavar="L", help=text)
    add("--json", action="store_true", help="print one JSON object")


def _add_bundles(command: argparse.ArgumentParser) -> None:
    add = command.add_argument_group("bundles").add_argument
    add("--num-hp", type=int, default=1, metavar="N", help="bundles on each host")
    add("--world-size", type=int, default=1, metavar="N", help="number of hosts")
    add("--rank", type=int, default=0, metavar="N", help="this host's number")
    add("--IP", default="127.0.0.1", metavar="A", help="address of host 0")
    add("--port", type=int, default=29531, help="a free port of host 0")
    add("--shape", metavar="F,R", help="fronts and rears of a host, instead of --num-hp")
    text = "fronts on the first half of the hosts, rears on the others; --num-hp ranks on each"
    add("--across", action="store_true", help=text)
    add("--DP-ONLY", action="store_true", help="the whole model on every rank")


def options_of(options: argparse.Namespace) -> argparse.Namespace:
    """The options with everything decided that depends on several of them."""
    if options.cuts and (options.config or options.plan):
        raise ValueError("--cuts cannot be combined with --config or --plan, which have cuts of their own")
    _check_ignored(options)
    options.cuts = cuts_of(options.cuts)
    replicas = numbers("--num-data-parallel", options.replicas)
    options.replicas = replicas * options.depth if len(replicas) == 1 else replicas
    own = {"schedule": options.schedule, "microbatches": options.microbatches}
    options.schedule = options.schedule or ("ashpipe" if options.config else "1f1b")
    if options.plan:
        plan = PipelinePlan.load(options.plan)
        options.schedule, options.microbatches = plan.schedule, plan.microbatches
        options.placement, options.depth = plan.placement, len(plan.replicas)
    if options.kind == "bundle":
        _bundle(options)
    options.microbatches = options.microbatches or (1 if options.schedule in ("ashpipe", "bundle") else 4)
    if any(own.values()):
        own["microbatches"] = options.microbatches
    options.model = _model(options)
    if options.config:
        _files(options, {name: value for name, value in own.items() if value})
    return options


_FLAGS = {"replicas": "--num-data-parallel", "microbatches": "--num-microbatches", "kind": "bundle"}


def _check_ignored(options: argparse.Namespace) -> None:
    """``ValueError`` for options that would change nothing."""
    plain, shape = parse([]), "depth replicas"
    decided = f"{shape} schedule microbatches placement recompute hop config kind"
    bundles = "num_hp world_size rank IP port shape across DP_ONLY"
    for names, is_read, why in (
        (decided, not options.plan, "--plan decides it"),
        (shape, not options.config, "--config decides it"),
        ("graph", options.config, "it belongs to --config"),
        (bundles, options.kind == "bundle", "it belongs to bundle"),
        ("depth replicas schedule", options.kind != "bundle", "bundle decides it"),
        ("layers seconds layer_bytes", options.model == "paced", "it belongs to --model paced"),
    ):
        for name in names.split():
            if not is_read and getattr(options, name) != getattr(plain, name):
                flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
                raise ValueError(f"{flag}: {why}, leave it out")


def _files(options: argparse.Namespace, chosen: dict[str, object]) -> None:
    """Stages, ranks and recomputation of AshPipe's files."""
    from commsched.pipeline.chain import Chain
    from dnn_bench.pipeline.jobs import job_of

    sizes = Chain(job_of(options.model, options.layers).model).sizes
    plan = read_plan(options.config, options.graph, sizes, **chosen)
    options.schedule, options.microbatches = plan.schedule, plan.microbatches
    options.cuts, options.ranks = list(plan.cuts), [list(row) for row in plan.rank_map]
    options.depth = len(plan.cuts)
    options.recompute = options.recompute or list(plan.recompute)


def _model(options: argparse.Namespace) -> str:
    """The name of the model with the head that --task or the schedule asks for."""
    if options.model == "paced":
        if options.task:
            raise ValueError(f"model 'paced' has no head; leave --task {options.task} out")
        return "paced"
    if options.task:
        return models.with_head(options.model, options.task)
    if models.spec(options.model).task == "masked_lm" and _late(options):
        return models.with_head(options.model, "classification")
    return str(options.model)


def _late(options: argparse.Namespace) -> bool:
    """Whether a stage applies gradients of earlier steps."""
    virtual = {}
    if options.plan:
        plan = PipelinePlan.load(options.plan)
        virtual = virtual_option(plan.schedule, len(plan.cuts) // len(plan.replicas))
    return any(delays(generate(options.schedule, options.depth, options.microbatches, **virtual)))


def _bundle(options: argparse.Namespace) -> None:
    shape = tuple(numbers("--shape", options.shape)) if options.shape else (options.num_hp, options.num_hp)
    if options.DP_ONLY:
        shape = (sum(shape),)
    each, ranks = sum(shape), bundle_ranks(options.world_size, shape)
    if options.across:
        each, ranks = options.num_hp, bundle_ranks_across(options.world_size, options.num_hp)
    options.schedule, options.depth = "bundle", len(ranks)
    options.ranks = [list(row) for row in ranks]
    options.host_ranks = [list(range(h * each, (h + 1) * each)) for h in range(options.world_size)]


def size_of(options: argparse.Namespace) -> int:
    """How many ranks there are."""
    if options.plan:
        return PipelinePlan.load(options.plan).ranks
    if options.ranks:
        return len({rank for row in options.ranks for rank in row})
    return sum(options.replicas)


@one_line_errors(ValueError, prefix="dnn_bench pipeline")
def main(arguments: list[str]) -> int:
    options = options_of(parse(arguments))
    if launched():
        from dnn_bench.pipeline.worker import measure

        said = measure(options)
    else:
        said = _launch(options)
    if said:
        print(said)
    return 0


def _launch(options: argparse.Namespace) -> str:
    """Start this host's ranks and return rank 0's report, if it is one of them."""
    size = size_of(options)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="dnn_bench-")))
        place: Place = ThisMachine(size)
        if options.link:
            place = Hosts(stack.enter_context(Cluster(size, options.link)))
        elif options.kind == "bundle" and options.world_size > 1:
            where = {"host": options.rank, "hosts": options.world_size}
            place = ThisMachine(size, **where, address=options.IP, port=options.port)
        logs = [stack.enter_context((folder / f"rank.{i}.log").open("w+")) for i in range(size)]
        processes = place.start(["-m", WORKER, str(folder), json.dumps(vars(options))], logs)
        stack.callback(end, processes)
        codes = [process.wait() for process in processes]
        answers = [json.loads(path.read_text()) for path in sorted(folder.glob("rank.*.json"))]
        if errors := [answer["error"] for answer in answers if "error" in answer]:
            raise ValueError(errors[0])
        if any(codes):
            said = "\n".join(path.read_text() for path in sorted(folder.glob("rank.*.log")))
            raise ValueError(f"the ranks ended with {codes}\n{said[:3000]}")
        return str(answers[0]["said"]) if answers else ""
