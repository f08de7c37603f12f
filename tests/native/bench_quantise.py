"""Throughput of the codes of quantised blocks on one core, in GB/s of float32, by processor time.

python tests/native/bench_quantise.py

Rows: the code for any x86-64, and for this processor. Columns: quantising with a residual, without one, and
adding two parts. Each figure is the best of --repeats.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from comm_core import quantise_blocks, sum_blocks

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def rate(call: Callable[[], object], size: int, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        begin = time.thread_time()
        for _ in range(20):
            call()
        best = min(best, (time.thread_time() - begin) / 20)
    return size / best / 1e9


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--elements", type=int, default=1 << 16)
    options.add_argument("--repeats", type=int, default=25)
    asked = options.parse_args()
    values = torch.randn(asked.elements)
    residual = torch.zeros(asked.elements)
    for code, wire in CODES.items():
        blocks = quantise_blocks(values, wire)
        for baseline in (True, False):
            calls = [
                partial(quantise_blocks, values, wire, residual, baseline=baseline),
                partial(quantise_blocks, values, wire, baseline=baseline),
                partial(sum_blocks, [blocks, blocks], asked.elements, wire, baseline=baseline),
            ]
            found = [rate(call, 4 * asked.elements, asked.repeats) for call in calls]
            rates = f"{found[0]:.1f} with residual, {found[1]:.1f} without, {found[2]:.1f} adding two"
            print(f"{code}, {'any x86-64' if baseline else 'this processor'}: {rates}")


if __name__ == "__main__":
    main()
