# Sourced by install.sh, horovod.sh, matrix.sh, dist.sh and tests/run: paths, messages, logged steps.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
CACHE=${COMMSCHED_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/commsched}
LOGS=$ROOT/build/logs

say() { printf '[commsched] %s\n' "$*" >&2; }

fail() {
    printf '[commsched] error: %s\n' "$*" >&2
    exit 1
}

# attempt NAME TITLE COMMAND...: runs the command, writes its output to the log NAME, returns its status.
attempt() {
    local log=$LOGS/$1.log title=$2 begin=$SECONDS
    shift 2
    mkdir -p "$LOGS"
    say "$title ..."
    "$@" >"$log" 2>&1 </dev/null || return
    say "$title: done in $((SECONDS - begin)) s"
}

# step NAME TITLE COMMAND...: like attempt, but shows the end of the log and exits if the command fails.
step() {
    attempt "$@" && return
    tail -n 25 "$LOGS/$1.log" >&2
    fail "$2 failed; the lines above are the end of $LOGS/$1.log"
}

may_install_debian_packages() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

# A machine that has just started often updates itself and holds apt's locks. `install` waits for them; `update` does not,
# so repeat it.
install_debian_packages() {
    local pause
    for pause in 5 10 20 40 0; do
        if apt-get update; then break; fi
        [ "$pause" != 0 ] || return
        sleep "$pause"
    done
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
}

# Sets ENVIRONMENT and PYTHON: the active virtualenv or conda environment, else .venv in the checkout.
find_environment() {
    ENVIRONMENT=${VIRTUAL_ENV:-${CONDA_PREFIX:-$ROOT/.venv}}
    PYTHON=$ENVIRONMENT/bin/python
    if [ ! -x "$PYTHON" ] && [ "$ENVIRONMENT" != "$ROOT/.venv" ]; then
        fail "the active environment $ENVIRONMENT has no bin/python:" \
            "activate one that exists, or unset VIRTUAL_ENV and CONDA_PREFIX to get $ROOT/.venv"
    fi
}

# Redirects the caches that pip and matplotlib would write below HOME.
keep_home_clean() {
    export PIP_CACHE_DIR=$CACHE/pip MPLCONFIGDIR=$CACHE/matplotlib
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
}

# The variables that change how Horovod is built. Those for run time are left out, so that they cause no new build.
horovod_build_variables() {
    env | grep -E '^HOROVOD_(GPU|NCCL|CUDA|ROCM|CPU|MPI|GLOO|WITH|WITHOUT|BUILD|CMAKE)' | sort || true
}

# Copies tracked and untracked files, but no ignored ones. Keeps the environment and objects of an earlier run.
copy_checkout() {
    mkdir -p "$1"
    find "$1" -mindepth 1 -maxdepth 1 ! -name .venv ! -name build -exec rm -rf {} +
    git -C "$ROOT" ls-files -z --cached --others --exclude-standard --deduplicate |
        tar -C "$ROOT" --null --ignore-failed-read -cf - -T - 2>/dev/null | tar -C "$1" -xf -
}
