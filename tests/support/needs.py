"""The programs and packages that some tests need; a skipped test names what is missing and how to get it.

`python -m tests.support.needs` prints the Debian packages of the missing programs; `tests/run` installs them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Iterable

import pytest

PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "mpirun": "openmpi-bin",
    "srun": "slurm-client",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "chromium": "chromium",
    "chromedriver": "chromium-driver",
}
OTHER_NAMES = {"chromium": ("chromium-browser", "google-chrome")}


def find(program: str) -> str | None:
    """The program's path under any of its names."""
    return next(filter(None, map(shutil.which, (program, *OTHER_NAMES.get(program, ())))), None)


def missing_packages(programs: Iterable[str] = PACKAGES) -> list[str]:
    return sorted({PACKAGES[program] for program in programs if find(program) is None})


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skip a test where one of the programs is missing."""
    packages = missing_packages(programs)
    missing = ", ".join(program for program in programs if find(program) is None)
    return pytest.mark.skipif(bool(packages), reason=f"needs {missing}: apt-get install {' '.join(packages)}")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces: run it as root")

HAS_HOROVOD = importlib.util.find_spec("horovod") is not None
NO_HOROVOD = (
    "needs Horovod: COMMSCHED_WITH_HOROVOD=1 docker/install.sh builds it, and build/logs/horovod-build.log "
    "says why it could not; rm build/stamps/horovod to try again"
)
needs_horovod = pytest.mark.skipif(not HAS_HOROVOD, reason=NO_HOROVOD)


def skip_without_horovod() -> None:
    if not HAS_HOROVOD:
        pytest.skip(NO_HOROVOD)


def summary(reasons: Iterable[str]) -> list[str]:
    """One line per reason, the most frequent first."""
    counted = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    plural = {1: "test"}
    return [f"{count:4} {plural.get(count, 'tests')}: {reason}" for reason, count in counted.most_common()]


def main() -> None:
    print(*missing_packages())


if __name__ == "__main__":
    main()
