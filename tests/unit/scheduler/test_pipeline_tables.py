"""What every schedule looks like, to the letter. Micro-batches are numbered through all periods, ``!`` is a
step.
"""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest

from scheduler.ir.program import data_parallel_program
from scheduler.pipelines import generate
from scheduler.pipelines.replay import replay, table


def drawn(text: str) -> str:
    return dedent(text).lstrip("\n")


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "periods", "options", "picture"),
    [
        (
            "gpipe",
            3,
            4,
            1,
            {},
            """
            0 | F0  F1  F2  F3                  B0  B1  B2  B3!
            1 |     F0  F1  F2  F3          B0  B1  B2  B3!
            2 |         F0  F1  F2  F3  B0  B1  B2  B3!
            """,
        ),
        (
            "1f1b",
            4,
            4,
            1,
            {},
            """
            0 | F0  F1  F2  F3              B0      B1      B2      B3!
            1 |     F0  F1  F2          B0  F3  B1      B2      B3!
            2 |         F0  F1      B0  F2  B1  F3  B2      B3!
            3 |             F0  B0  F1  B1  F2  B2  F3  B3!
            """,
        ),
        (
            "1f1b",
            3,
            2,
            2,
            {},
            """
            0 | F0  F1              B0      B1! F2  F3              B2      B3!
            1 |     F0  F1      B0      B1!         F2  F3      B2      B3!
            2 |         F0  B0  F1  B1!                 F2  B2  F3  B3!
            """,
        ),
        (
            "interleaved",
            2,
            2,
            1,
            {},
            """
            0 | 0F0  0F1  2F0  2F1       2B0       2B1! 0B0  0B1!
            1 |      1F0  1F1  3F0  3B0  3F1  3B1! 1B0  1B1!
            """,
        ),
        (
            "zero_bubble",
            3,
            4,
            1,
            {},
            """
            0 | F0  F1  F2          B0  W0  F3  B1  W1  B2  W2  B3  W3!
            1 |     F0  F1      B0  F2  B1  W0  F3  B2  W1  B3  W2  W3!
            2 |         F0  B0  F1  B1  F2  B2  W0  F3  B3  W1  W2  W3!
            """,
        ),
        (
            "pipedream",
            3,
            1,
            4,
            {},
            """
            0 | F0  F1  F2          B0! F3  B1!     B2!     B3!
            1 |     F0  F1      B0! F2  B1! F3  B2!     B3!
            2 |         F0  B0! F1  B1! F2  B2! F3  B3!
            """,
        ),
        (
            "2bw",
            2,
            2,
            3,
            {},
            """
            0 | F0  F1      B0  F2  B1! F3  B2  F4  B3! F5  B4      B5!
            1 |     F0  B0  F1  B1! F2  B2  F3  B3! F4  B4  F5  B5!
            """,
        ),
        (
            "wpipe",
            2,
            2,
            2,
            {},
            """
            0 | 0F0  0F1  2F0  2F1       2B0  0F2  2B1! 0F3  0B0  2F2  0B1! 2F3  2B2       2B3! 0B2  0B3!
            1 |      1F0  1F1  3F0  3B0  3F1  3B1! 1F2  1B0  1F3  1B1! 3F2  3B2  3F3  3B3! 1B2  1B3!
            """,
        ),
        (
            "ashpipe",
            2,
            1,
            3,
            {"replicas": [2, 1]},
            """
            0 | F0  F1      B0! F2  B1!     B2!
            1 | F0  F1      B0! F2  B1!     B2!
            2 |     F0  B0! F1  B1! F2  B2!
            """,
        ),
        (
            "bundle",
            2,
            1,
            2,
            {},
            """
            0 | F0          B0! F1          B1!
            1 |     F0  B0!         F1  B1!
            """,
        ),
    ],
)
def test_table(
    schedule: str, stages: int, microbatches: int, periods: int, options: dict[str, Any], picture: str
) -> None:
    assert table(generate(schedule, stages, microbatches, **options), periods) == drawn(picture)


def test_runs_shorter_than_the_pipeline_are_cut_out_of_it() -> None:
    assert table(generate("pipedream", 4), 1) == drawn(
        """
        0 | F0                          B0!
        1 |     F0                  B0!
        2 |         F0          B0!
        3 |             F0  B0!
        """
    )


def test_only_programs_with_stages_are_replayed() -> None:
    with pytest.raises(ValueError, match="this is for pipeline programs"):
        list(replay(data_parallel_program("x", (), (), 2), 1))
