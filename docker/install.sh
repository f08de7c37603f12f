#!/usr/bin/env bash
# docker/install.sh: makes or completes the environment and builds this project; Horovod and the tests' tools on request.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: docker/install.sh [--help]

Installs everything that commsched needs; ends at once if nothing has changed since its last run. Uses the active
virtualenv or conda environment, else .venv in the checkout; keeps an installed torch, else installs one; builds this
project as an editable install. With COMMSCHED_WITH_HOROVOD=1 also builds Horovod from its sources and caches the wheel;
dist.sh asks for it when a baseline or the launcher needs it, and tests/run always.

Needs: Python 3.10 or newer with its headers and venv, and a C++ compiler; for Horovod also Open MPI (openmpi-bin and
libopenmpi-dev on Debian, installed automatically when run as root). Where Horovod cannot be built, continues without
it: torchrun and mpirun then start the ranks. Benchmarks over emulated hosts also need iproute2, and openssh-server for
Horovod; tests/run installs those.

Environment:
  COMMSCHED_CACHE             folder of the cache (default: $XDG_CACHE_HOME/commsched or ~/.cache/commsched)
  COMMSCHED_PYTHON            Python to make .venv with (default: the first on PATH that is new enough)
  COMMSCHED_TORCH             requirement to install where torch is missing (default: torch>=2.6,<2.16 with a GPU or
                              COMMSCHED_WITH_CUDA=1, else torch==2.13.0, the newest release with a CPU build)
  COMMSCHED_WITH_HOROVOD=0|1  1: build Horovod (several minutes, once); 0: never, also for tests/run (default: 0)
  COMMSCHED_WITHOUT_MPI=1     build Horovod without MPI, with Gloo only
  COMMSCHED_WITH_TESTS=1      install what tests/run needs: pytest, ruff, mypy and others
  COMMSCHED_WITH_CUDA=0|1     0: build without CUDA; 1: fail where nvcc is missing (default: CUDA if nvcc and a GPU are
                              found)
  HOROVOD_GPU_OPERATIONS      passed to Horovod's build (default with CUDA: NCCL), like its other build variables
TEXT
}

check_switch() {
    case ${!1:-0} in 0 | 1) ;; *) fail "$1 must be 0, 1 or unset, not '${!1}'" ;; esac
}

# --- what is installed already -------------------------------------------------------------------------------------------

site_packages() { echo "$ENVIRONMENT"/lib/python3.*/site-packages; }

# Prints all that the built extension depends on: paths, sources, torch and build options.
project_key() {
    cd "$ROOT"
    echo "$ROOT" "$ENVIRONMENT" "$(site_packages)"/torch-*.dist-info "${COMMSCHED_WITH_CUDA:-}" "${COMMSCHED_CUDA_ARCHS:-}"
    command -v nvcc || true
    echo */__init__.py
    find setup.py pyproject.toml VERSION comm_core -type f ! -name '*.py[co]' \
        \( -path 'comm_core/c*' -o -path 'comm_core/*.h' -o ! -path 'comm_core/*' \) -print0 | sort -z | xargs -0 sha256sum
}

# Prints all that Horovod depends on.
horovod_key() {
    echo "$ENVIRONMENT" "$(site_packages)"/torch-*.dist-info "$(site_packages)"/horovod-*.dist-info
    echo "${COMMSCHED_WITHOUT_MPI:-0}" "${COMMSCHED_WITH_CUDA:-}"
    command -v nvcc || true
    horovod_build_variables
}

# Prints all that the tests' tools depend on.
tests_key() { project_key; }

# stamped NAME: succeeds if the last successful run had the key that NAME_key prints now.
stamped() { [ "$("$1_key" | sha256sum)" = "$(cat "$ROOT/build/stamps/$1" 2>/dev/null)" ]; }

stamp() {
    mkdir -p "$ROOT/build/stamps"
    "$1_key" | sha256sum >"$ROOT/build/stamps/$1"
}

project_is_installed() {
    compgen -G "$ROOT/comm_core/_C.*.so" >/dev/null &&
        grep -qsF "\"file://$ROOT\"" "$(site_packages)"/commsched-*.dist-info/direct_url.json && stamped project
}

wants() { [ "${!1:-0}" = 1 ]; }

up_to_date() {
    [ -x "$PYTHON" ] && project_is_installed || return
    ! wants COMMSCHED_WITH_TESTS || stamped tests || return
    ! wants COMMSCHED_WITH_HOROVOD || stamped horovod
}

# --- what the system must have ---------------------------------------------------------------------------------------

check_compiler() {
    local compiler=${CXX:-g++}
    command -v "${compiler%% *}" >/dev/null ||
        fail "no C++ compiler: $compiler is not on PATH. Install one (Debian: apt-get install g++) or set CXX"
    # shellcheck disable=SC2086  # CXX may hold a command with arguments
    echo 'int main() {}' | $compiler -std=c++20 -x c++ -fsyntax-only - 2>/dev/null ||
        fail "$compiler does not take -std=c++20, which the headers of torch need: install GCC 10 or newer, or set CXX"
}

has_mpi() { command -v mpirun >/dev/null && command -v mpicxx >/dev/null; }

check_mpi() {
    wants COMMSCHED_WITH_HOROVOD && ! wants COMMSCHED_WITHOUT_MPI || return 0
    has_mpi && return
    if may_install_debian_packages; then
        step apt "installing Open MPI" install_debian_packages openmpi-bin libopenmpi-dev
    fi
    has_mpi || fail "no MPI: mpirun or mpicxx is not on PATH. Install Open MPI (Debian, as root: apt-get install" \
        "openmpi-bin libopenmpi-dev), or set COMMSCHED_WITHOUT_MPI=1 to do without"
}

# --- the environment -------------------------------------------------------------------------------------------------

fits() {
    "$1" -I -c 'import os, sys, sysconfig, venv, ensurepip
assert sys.version_info >= (3, 10) and os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
}

find_python() {
    local candidate
    for candidate in ${COMMSCHED_PYTHON:-python3 python3.12 python3.11 python3.13 python3.10 python3.14}; do
        if fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python that fits (tried: ${COMMSCHED_PYTHON:-python3 and python3.10 to python3.14}): install Python 3.10 or" \
        "newer with its headers and venv (Debian: apt-get install python3-dev python3-venv), or set COMMSCHED_PYTHON"
}

make_environment() {
    [ ! -x "$PYTHON" ] || return 0
    local base
    base=$(find_python)
    # Use a torch of the base Python, as PyTorch's own images have it.
    local site_packages=()
    if "$base" -I -c 'import torch' 2>/dev/null; then site_packages=(--system-site-packages); fi
    step venv "making $ENVIRONMENT with $base" "$base" -m venv --clear "${site_packages[@]}" "$ENVIRONMENT"
}

has_module() { "$PYTHON" -I -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$1'))"; }

# The tools for builds without isolation, numba for compile_kernels, and cffi, which Horovod's setup.py would download
# otherwise.
install_build_tools() {
    local horovod=()
    if wants COMMSCHED_WITH_HOROVOD; then horovod=('cmake>=3.18,<4' 'cffi>=1.4'); fi
    has_module pip || step pip "getting pip" "$PYTHON" -m ensurepip
    step build-tools "getting the build tools" "$PYTHON" -m pip install --no-compile \
        'setuptools>=77.0.3' wheel packaging numpy pybind11 ninja numba "${horovod[@]}"
}

# Releases after 2.13 have no CPU build: they install several GB that a machine without a GPU cannot use.
default_torch() {
    local gpu=${COMMSCHED_WITH_CUDA:-}
    [ -n "$gpu" ] || { nvidia-smi >/dev/null 2>&1 && gpu=1; }
    if [ "$gpu" = 1 ]; then echo "torch>=2.6,<2.16"; else echo "torch==2.13.0"; fi
}

# Reads the metadata, because an interrupted installation leaves importable modules without metadata.
torch_requirement() {
    "$PYTHON" -I -c 'from importlib.metadata import version; print("torch==" + version("torch"))' 2>/dev/null
}

install_torch() {
    ! torch_requirement >/dev/null || return 0
    local torch=${COMMSCHED_TORCH:-$(default_torch)}
    # Python compiles the few modules that are imported by itself; pip would compile all of them.
    step torch "installing $torch" "$PYTHON" -m pip install --no-compile "$torch"
}

horovod_imports() { (cd / && "$PYTHON" -c 'import horovod.torch as hvd; hvd.gloo_built()'); }

# do_without_horovod STATUS: removes an older Horovod, which was built for another torch and cannot be imported.
do_without_horovod() {
    [ "$1" = 3 ] || exit "$1"
    if has_module horovod; then
        step horovod-remove "removing the Horovod of another build" "$PYTHON" -m pip uninstall -y horovod
    fi
    say "going on without Horovod: torchrun starts the ranks (to try again: rm '$ROOT/build/stamps/horovod')"
}

# Keeps a Horovod that this script did not install; replaces its own one once torch or the options have changed.
install_horovod() {
    wants COMMSCHED_WITH_HOROVOD && ! stamped horovod || return 0
    local mark=$ENVIRONMENT/.commsched-horovod wheel
    if has_module horovod && [ ! -f "$mark" ]; then
        say "keeping the Horovod that is in $ENVIRONMENT"
        wheel="that Horovod (pip uninstall horovod)"
    else
        wheel=$("$ROOT/docker/horovod.sh" "$PYTHON") || { do_without_horovod $? && return; }
        if ! has_module horovod || [ "$(cat "$mark" 2>/dev/null)" != "$wheel" ]; then
            : >"$mark" # before: an interrupted installation must not look like somebody else's
            step horovod-install "installing Horovod" "$PYTHON" -m pip install --force-reinstall --no-deps "$wheel"
            step horovod-needs "installing what Horovod needs" "$PYTHON" -m pip install "$wheel"
            echo "$wheel" >"$mark"
        fi
        wheel="it (rm -r \"$(dirname "$wheel")\"; $PYTHON -m pip uninstall horovod)"
    fi
    horovod_imports 2>"$LOGS/horovod-import.log" ||
        fail "Horovod is installed but cannot be imported: $(tail -n 1 "$LOGS/horovod-import.log")." \
            "Remove $wheel and run again, or set COMMSCHED_WITH_HOROVOD=0 to do without"
}

install_project() {
    local torch extras=images
    if wants COMMSCHED_WITH_TESTS; then extras=dev; fi
    if project_is_installed && { [ $extras = images ] || stamped tests; }; then return; fi
    rm -f "$ROOT/build/stamps/project"
    # Require the installed torch, so that pip fails for one that is too old instead of replacing it.
    torch=$(torch_requirement)
    step project "building commsched (a minute or two)" "$PYTHON" -m pip install --no-compile --no-build-isolation \
        -e "$ROOT[$extras]" "$torch"
    (cd / && "$PYTHON" -c 'import comm_core') || fail "comm_core was built but cannot be imported: see the lines above"
    stamp project
    if wants COMMSCHED_WITH_TESTS; then stamp tests; fi
}

# The first plan compiles the search's kernels and caches them in the checkout: do it now, while no ranks wait for it.
# They need neither torch nor the extension, so one core compiles them while pip unpacks torch.
compile_kernels() {
    (cd "$ROOT" && NUMBA_NUM_THREADS=1 "$PYTHON" -c '
from scheduler import policies, profiles
from scheduler.ir.link import Link
for gather in ("gradients", "parameters"):
    policies.plan(profiles.shipped("resnet50"), Link(1e-4, 1e-9), "optimal", gather=gather, budget=1000)') \
        >"$LOGS/kernels.log" 2>&1 </dev/null ||
        say "the first plan will take longer: $(tail -n 1 "$LOGS/kernels.log")"
}

# --- main ------------------------------------------------------------------------------------------------------------

case ${1:-} in
--help | -h) usage && exit ;;
'') ;;
*) fail "unknown argument '$1'; docker/install.sh takes only --help" ;;
esac
for switch in COMMSCHED_WITHOUT_MPI COMMSCHED_WITH_HOROVOD COMMSCHED_WITH_TESTS COMMSCHED_WITH_CUDA; do
    check_switch $switch
done
[ -z "${COMMSCHED_WITHOUT_HOROVOD:-}" ] ||
    fail "COMMSCHED_WITHOUT_HOROVOD is no variable any more: set COMMSCHED_WITH_HOROVOD=0 or 1"
find_environment
keep_home_clean
if up_to_date; then exit; fi

check_compiler
command -v flock >/dev/null || fail "flock is not on PATH: install it (Debian: apt-get install util-linux)"
mkdir -p "$CACHE" "$LOGS"
exec 9>"$CACHE/lock"
flock -n 9 || { say "another installation is under way; waiting for it" && flock 9; }
if up_to_date; then exit; fi
check_mpi
make_environment
install_build_tools
compile_kernels 9>&- &
trap wait EXIT
install_torch
install_horovod
install_project
wait
if wants COMMSCHED_WITH_HOROVOD; then stamp horovod; fi
say "ready: $ENVIRONMENT"
