"""`python -m dnn_bench report`: a page from saved comparisons."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dnn_bench.cli_errors import one_line_errors


@one_line_errors(ValueError, OSError)
def main(arguments: list[str]) -> int:
    from dnn_bench.report import page

    parser = argparse.ArgumentParser(
        prog="python -m dnn_bench report",
        description="Makes one HTML page of the JSON files that compare wrote. Files of the same model with "
        "different numbers of ranks give scaling curves.",
    )
    parser.add_argument("reports", nargs="+", type=Path, metavar="JSON")
    parser.add_argument("--html", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    options.html.write_text(page.render([load(path) for path in options.reports]))
    print(f"wrote {options.html}")
    return 0


def load(path: Path) -> dict[str, Any]:
    """A report, checked to be one."""
    try:
        report = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(report, dict) or report.get("kind") != "compare":
        raise ValueError(f"{path} is no report of dnn_bench compare: it has no kind 'compare'")
    return report
