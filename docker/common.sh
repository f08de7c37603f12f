# Sourced by install.sh, horovod.sh, dist.sh and tests/run: where things are, and how to speak.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${COMMSCHED_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/commsched}
LOGS=$ROOT/build/logs

say() { printf '[commsched] %s\n' "$*" >&2; }

fail() {
    printf '[commsched] error: %s\n' "$*" >&2
    exit 1
}

# attempt NAME WHAT COMMAND...: runs the command with its output in a log, and returns its status.
attempt() {
    local log=$LOGS/$1.log what=$2 begin=$SECONDS
    shift 2
    mkdir -p "$LOGS"
    say "$what ..."
    "$@" >"$log" 2>&1 </dev/null || return
    say "$what: done in $((SECONDS - begin)) s"
}

# step NAME WHAT COMMAND...: an attempt that must succeed; shows the log's tail when it fails.
step() {
    attempt "$@" && return
    tail -n 25 "$LOGS/$1.log" >&2
    fail "$2 failed; the lines above are the end of $LOGS/$1.log"
}

may_install_debian_packages() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# A machine that has just started often updates itself. `install` waits for that; `update` does not, so it is tried again.
install_debian_packages() {
    local pause
    for pause in 5 10 20 40 0; do
        if apt-get update; then break; fi
        [ "$pause" != 0 ] || return
        sleep "$pause"
    done
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
}

# The environment in use: an active virtualenv or conda environment, else .venv in the checkout.
find_environment() {
    ENVIRONMENT=${VIRTUAL_ENV:-${CONDA_PREFIX:-$ROOT/.venv}}
    PYTHON=$ENVIRONMENT/bin/python
    if [ ! -x "$PYTHON" ] && [ "$ENVIRONMENT" != "$ROOT/.venv" ]; then
        fail "the active environment $ENVIRONMENT has no bin/python:" \
            "activate one that exists, or unset VIRTUAL_ENV and CONDA_PREFIX to get $ROOT/.venv"
    fi
}

# Nothing is to be written outside the checkout and the cache: pip and matplotlib would write below HOME.
keep_home_clean() {
    export PIP_CACHE_DIR=$CACHE/pip MPLCONFIGDIR=$CACHE/matplotlib
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
}

# The variables that change how Horovod is built; those that only matter at run time must not cause a new build.
horovod_build_variables() {
    env | grep -E '^HOROVOD_(GPU|NCCL|CUDA|ROCM|CPU|MPI|GLOO|WITH|WITHOUT|BUILD|CMAKE)' | sort || true
}
