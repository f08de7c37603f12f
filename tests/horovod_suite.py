"""Runs Horovod's own test suite over commsched and, beside it, over Horovod itself.

    python -m tests.horovod_suite CHECKOUT [--ranks 2] [--runs 1] [--files FILE...] [-k EXPRESSION]
    python -m tests.horovod_suite CHECKOUT --elastic [--unskip] [--runs 1] [-k EXPRESSION]

CHECKOUT is a checkout of Horovod at the installed version; source packages leave the tests out. Once the
files run as they are, once with ``import commsched as hvd`` in the place of ``import horovod.torch as hvd``.
A test has passed where it passed on every rank. The last lines are the seconds that the runs took, and
"commsched P of N, Horovod Q of N"; N leaves out what a system skips. The exit status is 1 where a test passes
with Horovod alone, or did not run. ``--runs 20`` looks for rare hangs: it runs the files 20 times over
commsched, and a test must pass each time.

``--elastic`` runs the tests of elastic training, which start horovodrun themselves. ``--unskip`` also runs
those that Horovod skips because it fails them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from dnn_bench.rank_environment import environment
from tests.support.launch import run_ranks

FILES = ["test/parallel/test_torch.py"]
ELASTIC = ["test/single/test_torch_elastic.py", "test/integration/test_elastic_torch.py"]
PROGRAM = "test/integration/data/elastic_torch_main.py"  # what the elastic tests start
WITH = {"commsched": "import commsched as hvd", "Horovod": "import horovod.torch as hvd"}
TIMEOUT = 1800.0  # seconds for all ranks of one run
_ORDER = ("passed", "skipped", "failed")
# Each rank leaves a report of its own; horovodrun tells it its number.
_RANK = """
import os, sys, pytest
if __name__ == "__main__":  # horovodrun, which the elastic tests run in this process, spawns processes
    report, *arguments = sys.argv[1:]
    sys.exit(pytest.main([*arguments, f"--junitxml={report}.{os.environ.get('HOROVOD_RANK', 0)}"]))
"""


def worst(before: dict[str, str], now: dict[str, str]) -> dict[str, str]:
    """The worse outcome of each test."""
    return before | {name: max(before.get(name, one), one, key=_ORDER.index) for name, one in now.items()}


def outcomes(reports: list[Path]) -> dict[str, str]:
    """The worst outcome that a rank reports of each test. A rank without a report has failed all of them."""
    found: dict[str, str] = {}
    for report in reports:
        for case in ET.parse(report).getroot().iter("testcase") if report.exists() else ():
            kinds = {child.tag for child in case}
            now = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found = worst(found, {case.attrib["name"]: now})
    return found if all(map(Path.exists, reports)) else dict.fromkeys(found, "failed")


def run(
    checkout: Path, files: list[str], system: str, ranks: int, arguments: list[str], unskip: bool = False
) -> dict[str, str]:
    """The outcomes of the files' tests with one of the two systems."""
    with tempfile.TemporaryDirectory(prefix="horovod-suite-") as name:
        folder = Path(name)
        shutil.copytree(checkout / "test", folder / "test")
        # Horovod's helpers import the package `mock`, which Python has by another name.
        (folder / "test" / "utils" / "mock.py").write_text("from unittest.mock import *\n")
        elastic = files == ELASTIC
        for file in [*files, PROGRAM] if elastic else files:
            text = (folder / file).read_text().replace(WITH["Horovod"], WITH[system])
            if unskip:  # the base class has the tests that are skipped
                text = re.sub(r"def (\w+)(\(.*\):\s+)self\.skipTest\(.*\)", r"def \1\2super().\1()", text)
                # It passes a number by a name that the function does not have.
                base = (folder / file).with_name("elastic_common.py")
                if base.exists():
                    base.write_text(base.read_text().replace("np=4, min", "num_proc=4, min"))
            (folder / file).write_text(text)
        report, tests = folder / "report", [str(folder / file) for file in files]
        pytest = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *arguments, *tests]
        launcher, ranks = ("alone", 1) if elastic else ("horovodrun", ranks)
        paths = [str(folder / "test" / "utils"), environment()["PYTHONPATH"]]
        env = {"PYTHONPATH": os.pathsep.join(paths)}
        results = run_ranks(_RANK, ranks, [str(report), *pytest], env, timeout=TIMEOUT, launcher=launcher)
        said = "\n".join(text[-6000:] for text in (results[0].stdout, results[0].stderr))
        print(f"--- {system}, rank 0\n{said}", file=sys.stderr)
        return outcomes([folder / f"report.{rank}" for rank in range(ranks)])


def compare(found: dict[str, dict[str, str]]) -> tuple[str, int]:
    """What differs or fails and how many passed, as text; and the exit status."""
    ours, theirs = (
        {name: found[system].get(name, "did not run") for rows in found.values() for name in rows}
        for system in WITH
    )
    lines = [
        f"{name}: commsched {ours[name]}, Horovod {theirs[name]}"
        for name in sorted(ours)
        if ours[name] != theirs[name] or ours[name] == "failed"
    ]
    ran = [name for name in ours if "skipped" not in (ours[name], theirs[name])]
    mine, others = ([name for name in ran if rows[name] == "passed"] for rows in (ours, theirs))
    lines.append(f"commsched {len(mine)} of {len(ran)}, Horovod {len(others)} of {len(ran)}")
    incomplete = not ran or "did not run" in (*ours.values(), *theirs.values())
    return "\n".join(lines), int(incomplete or bool(set(others) - set(mine)))


def main(words: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="horovod_suite", description=__doc__, formatter_class=form)
    parser.add_argument("checkout", type=Path, help="Horovod's sources, with their tests")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of each run (default 2)")
    parser.add_argument("--runs", type=int, default=1, help="runs over commsched (default 1)")
    parser.add_argument("--files", nargs="+", default=FILES, help=f"test files (default {' '.join(FILES)})")
    parser.add_argument("-k", dest="expression", help="run only the tests that match, as in pytest")
    parser.add_argument("--elastic", action="store_true", help="run the tests of elastic training")
    parser.add_argument("--unskip", action="store_true", help="also run those that Horovod skips")
    options = parser.parse_args(words)
    files = ELASTIC if options.elastic else options.files
    for file in files:
        path = options.checkout / file
        if not path.is_file():
            parser.error(f"{path} is missing: a source package leaves the tests out, take a checkout")
        if file != ELASTIC[1] and WITH["Horovod"] not in path.read_text():
            parser.error(f"{path} does not say {WITH['Horovod']!r}: it is no test of horovod.torch")
    chosen = ["-k", options.expression] if options.expression else []
    found: dict[str, dict[str, str]] = {system: {} for system in WITH}
    seconds: dict[str, list[float]] = {system: [] for system in WITH}
    for system, runs in zip(WITH, (options.runs, 1), strict=True):
        for _ in range(runs):
            start = time.monotonic()
            now = run(options.checkout, files, system, options.ranks, chosen, options.unskip)
            seconds[system].append(time.monotonic() - start)
            found[system] = worst(found[system], now)
    text, status = compare(found)
    *differences, last = text.splitlines()
    times = [f"{system} {', '.join(f'{one:.0f}' for one in seconds[system])}" for system in WITH]
    print(*differences, f"seconds: {'; '.join(times)}", last, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
