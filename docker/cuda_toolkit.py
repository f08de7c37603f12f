"""Prints the variables with which Horovod's CMake finds the CUDA runtime, as NAME=value lines.

    python docker/cuda_toolkit.py NVCC FOLDER

nvcc may be a wrapper script, or come without headers and libcudart. The toolkit that nvcc reports is searched
first, then the wheels that come with a CUDA build of torch: nvidia/cuda_runtime and its neighbours (CUDA 12),
or nvidia/cu13 (CUDA 13). Wheels lack the unversioned library names that linkers need: FOLDER gets links with
these names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HEADER = "cuda_runtime.h"


def toolkit(nvcc: str) -> Path | None:
    """Return the folder from which nvcc takes headers and libraries, as nvcc reports it."""
    dry_run = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    tops = [line.removeprefix("#$ TOP=").strip() for line in dry_run.stderr.splitlines() if "TOP=" in line]
    return Path(tops[0]).resolve() if tops else None


def wheel_folders() -> list[Path]:
    """Return the folders of all nvidia wheels in this environment, the one with the runtime first."""
    found = find_spec("nvidia")
    places = [Path(place) for place in found.submodule_search_locations or []] if found else []
    folders = [folder for place in places for folder in sorted(place.iterdir()) if folder.is_dir()]
    return sorted(folders, key=lambda folder: not (folder / "include" / HEADER).exists())


def includes(folders: list[Path]) -> list[Path]:
    return [folder / "include" for folder in folders if (folder / "include").is_dir()]


def cudart(folders: list[Path]) -> Path | None:
    """Return the shared runtime library, under its plain name or a versioned one."""
    for folder in folders:
        for place in (folder / "lib64", folder / "lib"):
            if names := sorted(place.glob("libcudart.so*"), key=lambda path: len(path.name)):
                return names[0]
    return None


def variables(nvcc: str, links: Path) -> dict[str, str]:
    """Create lib/libcudart.so and bin/nvcc in `links` and return variables that use it as a toolkit."""
    top = toolkit(nvcc)
    folders = [*([top] if top else []), *wheel_folders()]
    headers, library = includes(folders), cudart(folders)
    if library is None or not any((folder / HEADER).exists() for folder in headers):
        where = ", ".join(map(str, folders)) or "no folder"
        raise SystemExit(
            f"{HEADER} and libcudart.so are neither in nvcc's toolkit nor in nvidia wheels ({where}): "
            "install the CUDA runtime's development files"
        )
    for name, target in (("lib/libcudart.so", library), ("bin/nvcc", Path(nvcc))):
        link = links / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target.absolute())
    path = ":".join(map(str, headers))
    flags = [os.environ.get("NVCC_APPEND_FLAGS", ""), f"-L{links / 'lib'}", f"-L{library.parent}"]
    return {
        "CUDA_HOME": str(top if top and (top / "include" / HEADER).exists() else links),
        "CPATH": ":".join(filter(None, [os.environ.get("CPATH"), path])),
        "CMAKE_INCLUDE_PATH": path,
        "CMAKE_LIBRARY_PATH": str(links / "lib"),
        "NVCC_APPEND_FLAGS": " ".join(filter(None, flags)),
    }


if __name__ == "__main__":
    for name, value in variables(sys.argv[1], Path(sys.argv[2])).items():
        print(f"{name}={value}")
