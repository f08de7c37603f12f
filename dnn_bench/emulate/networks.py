"""The networks by name: start-up and rate of one wire, from the standards' rates; start-ups are
assumptions.
"""

from __future__ import annotations

from scheduler.ir.link import Link, Network

# Seconds to start one message, seconds per byte of the wire's rate.
WIRES = {
    "1gbe": Link(30e-6, 8 / 1e9),
    "10gbe": Link(20e-6, 8 / 10e9),
    "25gbe": Link(15e-6, 8 / 25e9),
    "100gib": Link(3e-6, 8 / 100e9),
    "nvlink": Link(1e-6, 1 / 450e9),
}


def link_of(network: str, ranks: int, algorithm: str = "ring") -> Link:
    """What one RS or AG costs on ``ranks`` ranks; ``network`` may also be
    ``alpha=SECONDS,beta=SECONDS`` of a wire.
    """
    name = network.lower().replace("-", "")
    if name not in WIRES and "=" not in name:
        raise ValueError(
            f"there is no network {network!r}; the networks are {', '.join(WIRES)}, or alpha=...,beta=..."
        )
    if ranks < 2:
        raise ValueError(f"a network joins at least 2 ranks, got {ranks}")
    wire = WIRES[name] if name in WIRES else Link.parse(network)
    return Network.flat(wire, ranks, algorithm).link()
