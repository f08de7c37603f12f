"""`python -m dnn_bench COMMAND ...`: each command is a function of its arguments that returns
an exit status.
"""

from __future__ import annotations

import importlib
import sys

# Module, or module:function where the function is not `main`. Only the module of the command is imported.
COMMANDS = {
    "first": (
        "dnn_bench.first",
        "a first answer within minutes; what dist.sh runs without variables",
    ),
    "synthetic": ("dnn_bench.synthetic", "training throughput in Horovod's format; what dist.sh runs"),
    "compare": ("dnn_bench.runner.compare", "baselines side by side on an emulated cluster"),
    "suite": ("dnn_bench.suite", "comparisons of several models and links, summed up in one table"),
    "collectives": (
        "dnn_bench.collectives",
        "reduce-scatter, all-gather, all-reduce over every transport",
    ),
    "converge": ("dnn_bench.converge", "real training with every schedule: loss curves and accuracy"),
    "faults": ("dnn_bench.faults", "elastic training on emulated hosts while ranks, links and disks fail"),
    "pipeline": ("dnn_bench.pipeline.cli", "pipelines of any schedule, and torch's beside them"),
    "report": ("dnn_bench.report.page", "a page with charts from saved comparisons"),
    "picture": ("dnn_bench.report.page:picture", "steps of a saved comparison, one above the other, as SVG"),
    "results": ("dnn_bench.report.results", "the plots of the measurements in docs/results"),
    "spatial": ("dnn_bench.spatial.cli", "training on tiles of large images, with layers and replicas"),
    "halo": ("dnn_bench.spatial.cli:halo", "the halo exchange of a convolution, alone and with compute"),
    "emulate": ("dnn_bench.emulate", "one device's compute under the modelled network of many ranks"),
    "gpu": ("dnn_bench.gpu", "the figures of docs/gpu.md: kernels, steps, host cost, emulated networks"),
    "cluster": ("dnn_bench.launch:run_on_hosts", "run a command on every host of an emulated cluster"),
}


def main(arguments: list[str]) -> int:
    lines = [f"  {name:<12} {text}" for name, (_, text) in COMMANDS.items()]
    usage = "\n".join(["usage: python -m dnn_bench COMMAND [--help | ...]", "", *lines])
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return 0
    if arguments[0] not in COMMANDS:
        print(f"dnn_bench: there is no command {arguments[0]!r}\n{usage}", file=sys.stderr)
        return 2
    module, _, function = COMMANDS[arguments[0]][0].partition(":")
    return getattr(importlib.import_module(module), function or "main")(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
