"""docker/matrix.sh: one row per version, with real folders and an install.sh that only says so."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.checkout import ROOT, make_script

pytestmark = pytest.mark.dist
# torch 2.5 cannot be built, 2.6 fails its tests, others pass.
INSTALL = """
[ "$COMMSCHED_TORCH" != "torch==2.5.*" ] || exit 1
mkdir -p .venv/bin
cat > .venv/bin/python <<END
#!/bin/sh
case "\\$*" in
*platform*) echo "${COMMSCHED_TORCH#torch==} 3.11.7" ;;
*pytest*) [ "$COMMSCHED_TORCH" != "torch==2.6.*" ] ;;
esac
END
chmod +x .venv/bin/python
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "docker").mkdir()
    for name in ("matrix.sh", "common.sh"):
        shutil.copy(ROOT / "docker" / name, tmp_path / "docker" / name)
    make_script(tmp_path / "docker/install.sh", INSTALL)
    (tmp_path / ".gitignore").write_text("/build/\n/.venv/\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def matrix(checkout: Path, *arguments: str, gigabytes: int = 0) -> subprocess.CompletedProcess[str]:
    command = ["/bin/bash", str(checkout / "docker/matrix.sh"), *arguments]
    env = os.environ | {"COMMSCHED_CACHE": str(checkout / "cache"), "COMMSCHED_MATRIX_GB": str(gigabytes)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)


def test_every_version_has_its_row_and_one_that_fails_fails_all(checkout: Path) -> None:
    result = matrix(checkout, "2.5", "2.6", "2.9.1")
    head, unbuilt, failing, passing = (line.split() for line in result.stdout.splitlines())
    assert head == ["torch", "python", "build,", "s", "tests,", "s", "result"]
    assert unbuilt[:6] == ["2.5", "?", "-", "-", "not", "built"]
    assert failing[:2] == ["2.6.*", "3.11.7"] and failing[3:5] == ["-", "failed"]
    assert passing[:2] == ["2.9.1", "3.11.7"] and passing[-1] == "ok"
    assert "(build/logs/matrix-2.6-*.log)" in result.stdout
    assert result.returncode == 1


@pytest.mark.parametrize("keep", [True, False])
def test_environments_are_removed_unless_they_are_to_be_kept(checkout: Path, keep: bool) -> None:
    result = matrix(checkout, *(["--keep"] if keep else []), "2.9.1")
    assert result.returncode == 0, result.stderr
    assert (checkout / "build/matrix/2.9.1/.venv").exists() == keep


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "no version of torch"), (["--fast"], "unknown option '--fast'"), (["new"], "'new' is no version")],
)
def test_wrong_arguments(checkout: Path, arguments: list[str], message: str) -> None:
    result = matrix(checkout, *arguments)
    assert result.returncode == 2 and result.stdout == ""
    assert message in result.stderr and "--help" in result.stderr


def test_a_full_disk_is_told_before_anything_is_installed(checkout: Path) -> None:
    result = matrix(checkout, "2.9.1", gigabytes=9_999_999)
    assert result.returncode == 1 and "GB are free" in result.stderr
    assert not (checkout / "build/matrix").exists()
