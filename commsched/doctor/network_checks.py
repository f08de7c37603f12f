"""Checks of ports, network interfaces, host names and congestion control."""

from __future__ import annotations

from collections.abc import Callable

from commsched.doctor.finding import NOTE, OK, PROBLEM, Finding
from commsched.doctor.machine import Machine
from commsched.process.network import is_loopback

CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
PORTS = "/proc/sys/net/ipv4/ip_local_port_range"
NAMES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
FEW_PORTS = 1000


def ports(machine: Machine) -> Finding:
    try:
        port = machine.free_port()
    except OSError as error:
        return Finding("ports", PROBLEM, f"cannot listen: {error}", "allow this user to listen on TCP ports")
    low, _, high = machine.read(PORTS).partition("\t")
    text = f"listening works (port {port})"
    if not (low.isdigit() and high.strip().isdigit()):
        return Finding("ports", OK, text)
    text += (
        f"; free ports are taken from {low} to {high.strip()}, which a firewall between hosts must let pass"
    )
    if int(high) - int(low) < FEW_PORTS:
        return Finding(
            "ports", NOTE, text, f"widen the range: sysctl -w net.ipv4.ip_local_port_range='{low} 60999'"
        )
    return Finding("ports", OK, text)


def interfaces(machine: Machine) -> Finding:
    found = machine.interfaces()
    shown = ", ".join(f"{name} {address}{_speed(machine, name)}" for name, address in found.items())
    variable = next((name for name in NAMES if machine.environ.get(name)), "")
    if variable:
        wanted = machine.environ[variable].split(",")[0].strip()
        if wanted not in found:
            text = f"{variable}={wanted}, but the interfaces with an IPv4 address are {shown or 'none'}"
            return Finding("interfaces", PROBLEM, text, f"set {variable} to one of these, or unset it")
        return Finding("interfaces", OK, f"{shown}; {wanted} is used ({variable})")
    others = [name for name, address in found.items() if not is_loopback(address)]
    if not others:
        return Finding(
            "interfaces", NOTE, f"loopback only ({shown or 'none'})", "ranks of other hosts cannot connect"
        )
    if len(others) == 1:
        return Finding("interfaces", OK, f"{shown}; several hosts use {others[0]}")
    text = f"{shown}; several hosts use the one that reaches rank 0"
    return Finding("interfaces", OK, text, "set GLOO_SOCKET_IFNAME to choose another")


def _speed(machine: Machine, name: str) -> str:
    speed = machine.read(f"/sys/class/net/{name}/speed")
    return f" ({int(speed)} Mbit/s)" if speed.isdigit() and int(speed) else ""


def host_name(machine: Machine) -> Finding:
    name, address = machine.host_address()
    if not address:
        return Finding("host name", PROBLEM, f"{name} does not resolve", f"add {name} to /etc/hosts")
    text = f"{name} is {address}"
    several = any(not is_loopback(other) for other in machine.interfaces().values())
    if is_loopback(address) and several:
        advice = "on several hosts, map it to the host's own address in /etc/hosts, or set GLOO_SOCKET_IFNAME"
        return Finding("host name", NOTE, f"{text}, which other hosts cannot reach", advice)
    return Finding("host name", OK, text)


def congestion(machine: Machine) -> Finding:
    name = machine.read(CONGESTION)
    if name == "bbr":
        advice = (
            "with four or more ranks it leaves the link idle: sysctl -w net.ipv4.tcp_congestion_control=cubic"
        )
        return Finding("congestion control", NOTE, name, advice)
    return Finding("congestion control", OK, name or "the kernel does not say")


CHECKS: tuple[Callable[[Machine], Finding], ...] = (ports, interfaces, host_name, congestion)
