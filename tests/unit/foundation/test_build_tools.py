"""The build tools that docker/install.sh gets are those that pyproject.toml asks for."""

import re
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]


def test_setuptools_knows_the_license_by_its_name() -> None:
    """setuptools 65, which comes with Python 3.11, was kept beside torch 2.6 and refused pyproject.toml.

    It reads `license = "Apache-2.0"` from 77 on. Newer versions of torch bring a newer one, which hid it.
    """
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^license = "', project, re.MULTILINE)
    script = (ROOT / "docker/install.sh").read_text()
    for text in (project, script):
        (wanted,) = re.findall(r"""["'](setuptools>=[\d.]+)["']""", text)
        assert not Requirement(wanted).specifier.contains("76.1")
