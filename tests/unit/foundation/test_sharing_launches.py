"""What shares a launch runs in one process: pytest-xdist had lost the groups, and nobody noticed."""

from __future__ import annotations

from tests.support.cases import scope_of

CASES = "tests/dist/test_optimizer_cases.py::test_optimizer"


def test_cases_of_a_launch_stay_together() -> None:
    one, other = (scope_of(f"{CASES}[optimizer_sums-{name}-2]") for name in ("sums", "sums_of_sums"))
    assert one == other != scope_of(f"{CASES}[optimizer_sums-sums-3]")
    assert one != scope_of(f"{CASES}[optimizer_rows-sums-2]")


def test_files_stay_together_and_random_programs_do_not() -> None:
    assert scope_of("tests/unit/test_a.py::test_b[x-y-2]") == scope_of("tests/unit/test_a.py::test_c")
    first, second = (scope_of(f"tests/unit/test_a.py::test_random_programs[{part}]") for part in (0, 1))
    assert first != second
