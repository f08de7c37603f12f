"""Arguments of ``DistributedOptimizer`` that a trainer passes on."""

from __future__ import annotations

import pytest

from commsched.integrations import split_options


def test_the_librarys_arguments_are_told_apart() -> None:
    given = {"gather": "parameters", "timeout": 3, "num_groups": 2}
    assert split_options("it", given, others=("timeout", "precision")) == (
        {"gather": "parameters", "num_groups": 2},
        {"timeout": 3},
    )


@pytest.mark.parametrize("name", ["gathers", "model", "backward_passes_per_step", "process_set"])
def test_other_arguments_are_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^it takes arguments of DistributedOptimizer \(.*gather,.* but got {name}$"
    ):
        split_options("it", {name: 1, "gather": "parameters"}, {"process_set"})


def test_ddps_own_option_is_explained() -> None:
    with pytest.raises(ValueError, match="but got find_unused_parameters; leave find_unused_parameters out"):
        split_options("it", {"find_unused_parameters": True})
