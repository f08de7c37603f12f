"""Where the flags stand in the engine's order."""

from commsched.backends.interface import link_order
from scheduler.ir.actions import parse_actions
from scheduler.ir.buckets import Bucket, Piece, one_per_layer
from scheduler.ir.program import data_parallel_program


def order(link, buckets=None, early_step=False):
    buckets = buckets or one_per_layer([4, 4, 4])
    gather = "parameters" if early_step else "gradients"
    program = data_parallel_program("p", buckets, parse_actions(link), 3, 2, gather, early_step)
    return " ".join(f"{op}{bucket}" for op, bucket in link_order(program))


def test_behind_the_first_layers_gradients():
    """Buckets go from the last layer to the first: bucket 2 holds layer 0."""
    assert order("RS0 RS1 RS2 AG2 AG1 AG0") == "RS0 RS1 RS2 AR3 AG2 AG1 AG0"


def test_not_behind_a_reduction_that_is_put_off():
    """They once stood behind the last reduction, and the forward waited for gradients it needs at its end."""
    assert order("RS1 RS2 AG2 AG1 RS0 AG0") == "RS1 RS2 AR3 AG2 AG1 RS0 AG0"


def test_behind_all_parts_of_the_first_layer():
    parts = [Bucket((Piece(1, 0, 4),)), Bucket((Piece(0, 0, 4),)), Bucket((Piece(0, 4, 8),))]
    assert order("RS0 RS1 AG1 RS2 AG2 AG0", parts) == "RS0 RS1 AG1 RS2 AR3 AG2 AG0"


def test_with_all_reduces_and_early_flags():
    assert order("AR0 AR1 AR2") == "AR0 AR1 AR2 AR3"
    assert order("RS0 RS1 AG0 RS2 AG1 AG2", early_step=True) == "RS0 AR4 RS1 AR5 AG0 RS2 AR6 AR3 AG1 AG2"
