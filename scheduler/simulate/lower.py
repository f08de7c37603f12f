"""Lower a program of any kind to its task graph."""

from __future__ import annotations

from scheduler.ir.cluster import Cluster
from scheduler.ir.link import Links
from scheduler.ir.profile import Profile
from scheduler.ir.program import Program
from scheduler.simulate.lower_data_parallel import lower_data_parallel
from scheduler.simulate.lower_pipeline import lower_pipeline
from scheduler.simulate.task_graph import TaskGraph


def lower(program: Program, profile: Profile, link: Links | Cluster, ranks: int = 1) -> TaskGraph:
    """The task graph of ``ranks`` ranks: 1 is enough where all ranks do the same at the same speed. Programs
    with stages always get all of their ranks.
    """
    if program.layers != len(profile.layers):
        raise ValueError(
            f"the plan is for a model of {program.layers} layers, profile {profile.name!r} has"
            f" {len(profile.layers)}; make a plan for this profile"
        )
    if program.pipeline is not None:
        return lower_pipeline(program, profile, link)
    if isinstance(link, Cluster):
        raise ValueError("a cluster gives the wires of programs with stages; give a Link for this program")
    return lower_data_parallel(program, profile, link, ranks)
