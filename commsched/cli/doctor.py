"""Check whether this machine can build and run commsched; exit status 1 if there is a problem."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from commsched.doctor import PROBLEM, Finding, Machine, examine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    findings = examine(Machine())
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print("\n".join(lines(findings)))
    return int(any(finding.level == PROBLEM for finding in findings))


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding, and one more where there is something to do."""
    width = max(len(finding.check) for finding in findings)
    found = []
    for finding in findings:
        found.append(f"{finding.level:<8} {finding.check:<{width}}  {finding.found}")
        if finding.advice:
            found.append(f"{'':<8} {'':<{width}}  -> {finding.advice}")
    return found
