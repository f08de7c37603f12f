#!/usr/bin/env bash
# docker/matrix.sh: builds and tests the project with several versions of torch, each in an environment of its own.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: docker/matrix.sh [--keep] [--horovod] VERSION...

For each VERSION of torch (2.6 means the newest 2.6.x) copies the checkout to build/matrix/VERSION, runs
docker/install.sh there and then a few tests with real processes: two ranks under torchrun, every exact comparison of
DistributedOptimizer on two ranks, a pipeline, images split over ranks. Prints one row per VERSION at the end. Exit
status: 0 if every VERSION passed, 1 if one failed, 2 for a wrong argument.

  --keep      keep the copies and environments for the next run (a CUDA build of torch takes up to 9 GB)
  --horovod   build Horovod too (several minutes for each VERSION)

Environment: see docker/install.sh --help. COMMSCHED_WITH_CUDA defaults to 0 here. COMMSCHED_MATRIX_GB is the disk
space that must be free before each VERSION, in GB (default: 16).

example: docker/matrix.sh 2.6 2.10 2.13 2.15
TEXT
}

SMOKE=(
    tests/dist/test_collectives_launchers.py::test_torchrun
    tests/dist/test_optimizer_cases.py
    tests/dist/test_pipeline_processes.py::test_profile_partition_train
    tests/dist/test_spatial_processes.py
)
# Selects the tests with two ranks (the names of cases end with the number of ranks), and of the optimizer's
# cases those that compare bits.
TWO_RANKS='test_torchrun or test_profile_partition_train or (2] and (optimizer_bits or spatial_runs))'
# Enough for a CUDA build of torch, unpacked, and pip's downloads of it.
NEEDED_GB=${COMMSCHED_MATRIX_GB:-16}

wrong() {
    say "error: $*; see docker/matrix.sh --help"
    exit 2
}

free_gb() { df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1048576) }'; }

# run_in FOLDER COMMAND...: runs it with the folder's own environment, even if another one is active.
run_in() {
    local folder=$1
    shift
    env -C "$folder" -u VIRTUAL_ENV -u CONDA_PREFIX -u PYTHONPATH -u COMMSCHED_TORCH COMMSCHED_TORCH="$requirement" \
        COMMSCHED_WITH_CUDA="${COMMSCHED_WITH_CUDA:-0}" COMMSCHED_WITH_HOROVOD=$with_horovod COMMSCHED_WITH_TESTS=1 \
        OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 "$@"
}

# Sets result, found (versions of torch and Python), build and tests (both in seconds).
try_version() {
    local version=$1 folder=$ROOT/build/matrix/$1 begin=$SECONDS python
    local requirement="torch==$version"
    [[ $version =~ ^[0-9]+\.[0-9]+$ ]] && requirement+=".*"
    python=$folder/.venv/bin/python
    result="not built" found="$version ?" build=- tests=-
    if [ "$(free_gb)" -lt "$NEEDED_GB" ]; then
        say "torch $version: only $(free_gb) GB are free below $ROOT, and $NEEDED_GB may be needed"
        return
    fi
    copy_checkout "$folder"
    attempt "matrix-$version-build" "torch $version: building" run_in "$folder" docker/install.sh || return 0
    build=$((SECONDS - begin)) begin=$SECONDS
    found=$("$python" -I -c 'import platform, torch; print(torch.__version__, platform.python_version())')
    result=failed
    attempt "matrix-$version-tests" "torch $version: testing" run_in "$folder" \
        "$python" -m pytest -q -k "$TWO_RANKS" "${SMOKE[@]}" || return 0
    tests=$((SECONDS - begin)) result=ok
}

keep=0 with_horovod=0 versions=()
for argument in "$@"; do
    case $argument in
    --help | -h) usage && exit ;;
    --keep) keep=1 ;;
    --horovod) with_horovod=1 ;;
    -*) wrong "unknown option '$argument'" ;;
    *) [[ $argument =~ ^[0-9]+\.[0-9]+(\.[0-9]+)?$ ]] || wrong "'$argument' is no version such as 2.6 or 2.6.0"
        versions+=("$argument") ;;
    esac
done
[ ${#versions[@]} -gt 0 ] || wrong "no version of torch is given"
keep_home_clean
failed=0
rows=$(printf '%-16s %-9s %9s %9s  %s' torch python "build, s" "tests, s" result)
for version in "${versions[@]}"; do
    try_version "$version"
    if [ "$result" != ok ]; then
        failed=1
        tail -n 5 "$LOGS/matrix-$version-"*.log >&2 2>/dev/null || true
        result+=" (build/logs/matrix-$version-*.log)"
    fi
    say "torch $version: $result"
    # shellcheck disable=SC2086  # two words
    rows+=$'\n'$(printf '%-16s %-9s %9s %9s  %s' $found "$build" "$tests" "$result")
    [ $keep = 1 ] || rm -rf "$ROOT/build/matrix/$version"
done
printf '%s\n' "$rows"
exit $failed
