"""An sshd per emulated host, with a throwaway key that only the cluster's hosts know.

`ip netns exec` lays /etc/netns/NAME/* over /etc, so inside a host plain `ssh host1` finds the key and the
settings, and nothing outside the cluster is touched.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from dnn_bench.cluster.system import ETC, command

TOOLS = ("sshd", "ssh", "ssh-keygen")
CLIENT = """Host *
  IdentityFile {key}
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 10
"""
SERVER = """ListenAddress {address}
HostKey {key}
AuthorizedKeysFile {key}.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
AcceptEnv *
"""
LISTEN = "0A"  # the state's code in /proc/net/tcp


def prepare(state: Path, namespaces: Sequence[str], addresses: Sequence[str]) -> list[list[str]]:
    """Write keys and settings; return each host's command that serves ssh in the foreground."""
    server, key = shutil.which("sshd"), state / "key"
    assert server is not None  # the caller has asked for TOOLS
    command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "throwaway", "-f", str(key)])
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where sshd confines itself before a login
    commands = []
    for namespace, address in zip(namespaces, addresses, strict=True):
        directory = ETC / namespace / "ssh"  # replaces /etc/ssh inside the namespace
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "ssh_config").write_text(CLIENT.format(key=key))
        config = state / f"{namespace}.sshd.conf"
        config.write_text(SERVER.format(address=address, key=key))
        commands.append([server, "-D", "-e", "-f", str(config)])
    return commands


def is_listening(pid: int, port: int = 22) -> bool:
    """Whether something listens on the port in the network namespace of process `pid`."""
    try:
        rows = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return False
    fields = [row.split() for row in rows]
    return any(row[1].endswith(f":{port:04X}") and row[3] == LISTEN for row in fields)
