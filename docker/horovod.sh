#!/usr/bin/env bash
# docker/horovod.sh [--where] PYTHON
#
# Builds a wheel of Horovod for PYTHON and its torch, unless the cache has it, and prints the wheel's path.
# With --where only prints where the wheel is or would be. Environment: see install.sh --help.
# Exit status 3: the wheel cannot be built here; a line on stderr names the log.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
keep_home_clean

VERSION=0.28.1

# Sets tag, torch_version, torch_cuda, cxx_standard, nccl_home.
probe_python() {
    local probe
    probe=$("$python" -I - <<'PY'
import importlib.util, inspect, platform, re, sys
import torch, torch.utils.cpp_extension as cpp
standards = re.findall(r"-std=c\+\+(\d\d)", inspect.getsource(cpp))
nccl = importlib.util.find_spec("nvidia.nccl") if importlib.util.find_spec("nvidia") else None
print(f"tag=cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}")
print(f"torch_version={torch.__version__}")
print(f"torch_cuda={torch.version.cuda or ''}")
print(f"cxx_standard={max(standards, default='17')}")
print(f"nccl_home={list(nccl.submodule_search_locations)[0] if nccl else ''}")
PY
    ) || fail "torch cannot be imported by $python: repair or remove it (pip uninstall torch) and run again"
    eval "$probe"
}

# Sets options (variables for the build) and wheel (its path in the cache).
choose_options() {
    options=(HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1)
    local features=gloo
    if [ "${COMMSCHED_WITHOUT_MPI:-0}" = 1 ]; then
        options+=(HOROVOD_WITHOUT_MPI=1)
    else
        options+=(HOROVOD_WITH_MPI=1)
        features+=-mpi$(mpirun --version 2>/dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n 1)
    fi
    if [ -n "$torch_cuda" ] && [ "${COMMSCHED_WITH_CUDA:-1}" != 0 ] && command -v nvcc >/dev/null; then
        options+=("HOROVOD_GPU_OPERATIONS=${HOROVOD_GPU_OPERATIONS:-NCCL}")
        features+=-nccl
    fi
    local own
    own=$(horovod_build_variables)
    [ -z "$own" ] || features+=-$(sha256sum <<<"$own" | cut -c1-8)
    wheel=$CACHE/wheels/horovod-$VERSION-$tag-torch$torch_version-$features
    wheel+=/horovod-$VERSION-${tag%%-*}-${tag%%-*}-linux_${tag#*-}.whl
}

# NCCL comes with torch as a wheel, whose library lacks the unversioned name that the linker needs.
point_at_nccl() {
    [ -n "$nccl_home" ] && [ -z "${HOROVOD_NCCL_HOME:-}" ] || return 0
    mkdir -p "$work/nccl/lib"
    ln -s "$nccl_home/include" "$work/nccl/include"
    ln -s "$nccl_home/lib/libnccl.so.2" "$work/nccl/lib/libnccl.so"
    options+=("HOROVOD_NCCL_HOME=$work/nccl" HOROVOD_NCCL_LINK=SHARED)
}

# Horovod's CMakeLists.txt set C++14; torch's headers need a newer standard.
raise_cxx_standard() {
    local file
    for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do
        sed -i "s/set(CMAKE_CXX_STANDARD 1[0-9])/set(CMAKE_CXX_STANDARD $cxx_standard)/" "$1/$file"
        grep -q "set(CMAKE_CXX_STANDARD $cxx_standard)" "$1/$file" ||
            fail "$file of Horovod $VERSION does not set CMAKE_CXX_STANDARD where it did: adapt docker/horovod.sh"
    done
}

# nvcc may be a script outside of its toolkit, or come without headers and libcudart, which are then in wheels.
point_at_cuda() {
    local nvcc found
    [ -n "$torch_cuda" ] && [ -z "${HOROVOD_CUDA_HOME:-}" ] && nvcc=$(command -v nvcc) || return 0
    found=$("$python" -I "$ROOT/docker/cuda_toolkit.py" "$nvcc" "$work/cuda" 2>"$LOGS/horovod-cuda.log") ||
        give_up horovod-cuda
    mapfile -t -O "${#options[@]}" options <<<"$found"
}

give_up() {
    say "Horovod $VERSION cannot be built here: $LOGS/$1.log says why"
    exit 3
}

build() {
    work=$(mktemp -d "$CACHE/build.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    export TMPDIR=$work
    attempt horovod-download "getting the sources of Horovod $VERSION" "$python" -m pip download --no-deps \
        --no-binary horovod --no-build-isolation -d "$work" "horovod==$VERSION" || give_up horovod-download
    tar -xzf "$work/horovod-$VERSION.tar.gz" -C "$work"
    raise_cxx_standard "$work/horovod-$VERSION"
    point_at_cuda
    [[ $wheel != *-nccl* ]] || point_at_nccl
    # Only the environment's own cmake (below 4) can read Horovod's CMakeLists.txt.
    attempt horovod-build "building Horovod $VERSION for torch $torch_version (two to five minutes)" \
        env "${options[@]}" PATH="$(dirname "$python"):$PATH" \
        "$python" -m pip wheel --no-deps --no-build-isolation --no-cache-dir -w "$work/wheel" "$work/horovod-$VERSION" || give_up horovod-build
    mkdir -p "$(dirname "$wheel")"
    sha256sum <"$work/wheel/$(basename "$wheel")" >"$wheel.sha256"
    mv "$work/wheel/$(basename "$wheel")" "$wheel"
}

where=0
if [ "${1:-}" = --where ]; then where=1 && shift; fi
[ $# = 1 ] || fail "usage: docker/horovod.sh [--where] PYTHON"
python=$1
probe_python
choose_options
if [ $where = 0 ]; then
    mkdir -p "$CACHE"
    [ -f "$wheel" ] || build
    [ "$(sha256sum <"$wheel")" = "$(cat "$wheel.sha256" 2>/dev/null)" ] ||
        fail "the cached Horovod wheel is damaged (its checksum differs): remove it with" \
            "'rm -r \"$(dirname "$wheel")\"' and run again to rebuild it"
fi
echo "$wheel"
