"""Builds `comm_core._C` from comm_core/csrc and, with nvcc and a GPU, `comm_core._cuda` from comm_core/cuda.

Environment:
  COMMSCHED_WITH_CUDA=0|1  0: build without CUDA; 1: fail without nvcc, and build without a GPU too.
                           Default: CUDA if nvcc and a GPU (`nvidia-smi` works) are found.
  COMMSCHED_CUDA_ARCHS     compute capabilities, e.g. "90". Default: "80;90".
                           PTX of the last one is added, for newer GPUs.
  NVCC, CUDA_HOME          path of nvcc, or folder with bin/nvcc, where nvcc is not on PATH.

The CUDA sources include no torch header and take addresses and streams as numbers, so that they compile with
a CPU build of torch too. The CUDA runtime is linked statically, so that the extension loads without CUDA.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

ROOT = Path(__file__).resolve().parent


def sources(folder: str, suffix: str) -> list[str]:
    """Return the folder's files with this suffix, sorted, relative to the checkout as setuptools requires."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(f"*{suffix}"))


def newest(folder: str) -> float:
    """Return when a CUDA source or header of the folder was last changed."""
    kinds = (".cu", ".h", ".inl")
    return max(path.stat().st_mtime for path in (ROOT / folder).rglob("*") if path.suffix in kinds)


@functools.cache
def has_gpu() -> bool:
    """Return whether the driver's `nvidia-smi` finds a GPU."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def find_nvcc() -> str | None:
    """Return the nvcc to use, or None for a build without CUDA."""
    wanted = os.environ.get("COMMSCHED_WITH_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"COMMSCHED_WITH_CUDA must be 0, 1 or unset, not {wanted!r}")
    if wanted == "0" or (wanted == "" and not has_gpu()):
        return None
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or (str(home) if home.exists() else None)
    if wanted == "1" and (nvcc is None or shutil.which(nvcc) is None):
        raise SystemExit(
            "COMMSCHED_WITH_CUDA=1 but nvcc was not found: put it on PATH, set NVCC or CUDA_HOME, "
            "or set COMMSCHED_WITH_CUDA=0 to build without CUDA"
        )
    return nvcc


def cuda_library_folder(nvcc: str) -> str:
    """Ask nvcc for the folder of its libraries: nvcc may be a wrapper script outside of its toolkit."""
    dry_run = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True)
    for line in dry_run.stderr.splitlines():
        if line.startswith("#$ TOP="):
            top = Path(line.removeprefix("#$ TOP=").strip())
            for name in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
                if (top / name / "libcudart_static.a").exists():
                    return str(top / name)
    raise SystemExit(
        f"libcudart_static.a is not in the toolkit of {nvcc}: install the CUDA runtime's development files"
    )


class Build(BuildExtension):
    """BuildExtension that compiles the CUDA sources with nvcc itself.

    torch's CUDAExtension links libtorch_cuda, which a CPU build of torch does not have.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        # pip deletes the folder in which an editable install compiles. In a permanent one, ninja compiles
        # changed files only. Each torch version has its own, because headers differ at the same paths.
        self.build_temp = str(
            ROOT / "build" / f"objects-{sys.implementation.cache_tag}-torch{torch.__version__}"
        )

    def build_extension(self, ext: CppExtension) -> None:
        if ext.name == "comm_core._cuda":
            nvcc = find_nvcc()
            assert nvcc is not None  # the extension is only added where nvcc was found
            ext.extra_objects += [self.compile_cuda(nvcc, source) for source in cuda_sources()]
            ext.library_dirs.append(cuda_library_folder(nvcc))
            ext.libraries += ["cudart_static", "dl", "rt", "pthread"]
        super().build_extension(ext)

    def compile_cuda(self, nvcc: str, source: str) -> str:
        archs = os.environ.get("COMMSCHED_CUDA_ARCHS", "").replace(";", " ").split() or ["80", "90"]
        arch_flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        arch_flags.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        flags = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC", "-I", str(ROOT / "comm_core/cuda"), *arch_flags]
        command = [nvcc, *flags, "-c", str(ROOT / source), "-o"]
        name = f"{source}.{hashlib.sha256(' '.join(command).encode()).hexdigest()[:8]}.o"
        out = Path(self.build_temp).resolve() / name
        if not out.exists() or out.stat().st_mtime < newest("comm_core/cuda"):
            out.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run([*command, str(out)], check=True)
        return str(out)


def cuda_sources() -> list[str]:
    return sources("comm_core/cuda", ".cu")


def extension(name: str, files: list[str], **more: Any) -> CppExtension:
    return CppExtension(
        name,
        files,
        include_dirs=[str(ROOT / "comm_core/csrc"), str(ROOT / "comm_core/cuda")],
        depends=sources("comm_core", ".h") + sources("comm_core", ".inl"),
        # -g0: Python's own flags ask for debug information, most of the file's size and compile time.
        # -ffp-contract=off: the same bits on processors that can fuse a product into a sum.
        extra_compile_args=[
            "-O3",
            "-g0",
            "-Wall",
            "-Wno-unknown-pragmas",
            "-fvisibility=hidden",
            "-ffp-contract=off",
        ],
        **more,
    )


with_cuda = find_nvcc() is not None and bool(cuda_sources())
extensions = [
    extension(
        "comm_core._C",
        sources("comm_core/csrc", ".cpp"),
        define_macros=[("COMMSCHED_WITH_CUDA", "1")] if with_cuda else [],
    )
]
if with_cuda:
    extensions.append(extension("comm_core._cuda", sources("comm_core/cuda", ".cpp")))

setup(ext_modules=extensions, cmdclass={"build_ext": Build})
