"""The environment variables of commsched."""

import math
from dataclasses import fields

import pytest

from commsched.env import Settings, describe, read_settings


def test_defaults():
    assert read_settings({}) == Settings()
    assert Settings().timeout == 1800.0 and Settings().runtime == ""


def test_values_are_read():
    read = read_settings(
        {"COMMSCHED_TIMEOUT": "12.5", "COMMSCHED_RUNTIME": "torch", "COMMSCHED_MASTER_PORT": "29511"}
    )
    assert (read.timeout, read.runtime, read.master_port) == (12.5, "torch", 29511)
    assert read_settings({"COMMSCHED_TIMEOUT": " "}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("COMMSCHED_TIMEOUT", "soon", "must be a number"),
        ("COMMSCHED_TIMEOUT", "0", "must be positive"),
        ("COMMSCHED_TIMEOUT", "-3", "must be positive"),
        ("COMMSCHED_TIMEOUT", "inf", "must be positive and at most 2592000"),
        ("COMMSCHED_TIMEOUT", "nan", "must be positive and at most 2592000"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "a minute", "must be a number"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "-1", "must be at least 0"),
        ("HOROVOD_STALL_CHECK_DISABLE", "yes", "must be one of 0, 1"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-1", "must be at least 0 and at most 2592000"),
        ("COMMSCHED_START_TIMEOUT", "1e12", "must be positive and at most 2592000"),
        ("COMMSCHED_MASTER_PORT", "70000", "must be at least 0 and at most 65535"),
        ("COMMSCHED_MASTER_PORT", "-1", "must be at least 0"),
        ("COMMSCHED_MASTER_PORT", "1.5", "must be a number"),
        ("COMMSCHED_METRICS_PORT", "http", "must be a number"),
        ("COMMSCHED_LOG_EVERY", "-5", "must be at least 0"),
        ("COMMSCHED_WAIT_FOR_PLAN", "-1", "must be at least 0 and at most 9007199254740992"),
        ("COMMSCHED_RUNTIME", "mpi", "must be one of horovod, torch"),
        ("COMMSCHED_LAUNCHER", "srun", "must be one of horovodrun, torchrun, mpirun, slurm, none"),
    ],
)
def test_a_wrong_value_is_named(variable, value, text):
    with pytest.raises(ValueError) as caught:
        read_settings({variable: value})
    assert variable in str(caught.value) and text in str(caught.value) and value in str(caught.value)


def test_horovods_variables_set_the_warning_and_the_limit():
    """They were ignored: every job warned after 30 s."""
    asked = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "120", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600"}
    read = read_settings(asked)
    assert (read.warning, read.timeout) == (120, 600)
    read = read_settings(asked | {"HOROVOD_STALL_CHECK_DISABLE": "1", "COMMSCHED_TIMEOUT": "900"})
    assert (read.warning, read.timeout) == (math.inf, 900)
    read = read_settings({"HOROVOD_STALL_CHECK_DISABLE": "0", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"})
    assert (read.warning, read.given_warning, read.timeout) == (30, 0, 1800)


def test_every_variable_is_documented():
    lines = describe().splitlines()
    assert len(lines) == len(fields(Settings))
    for item, line in zip(fields(Settings), lines, strict=True):
        assert line.startswith(item.metadata["variable"]) and item.metadata["doc"] in line
        assert item.metadata["variable"].startswith(("COMMSCHED_", "HOROVOD_STALL_"))
