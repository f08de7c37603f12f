#!/usr/bin/env bash
# docker/several_gpus.sh: checks commsched on the GPUs of this machine, times it beside its peers, writes one report.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: docker/several_gpus.sh [--gpus N] [--models "NAME ..."] [--minutes N] [--output FILE] [--cpu]

For people with GPUs: one to eight in this machine. Within 25 minutes, the first installation aside, it
  1. runs the tests of NCCL, streams, kernels, pipelines and tiles on these GPUs,
  2. times training: commsched, DDP, DDP with its bf16 hook, FSDP2 and HSDP in turns (A B C A B C),
  3. measures one GPU (python -m dnn_bench gpu, parts kernels and cost),
and writes a report with the machine's facts. Please send it back: docs/gpu.md lists what nobody has run yet.

  --gpus N       ranks, each with its own GPU (default: all)
  --models       what is trained (default: "resnet50 gpt2")
  --minutes N    time for everything; what does not fit is left out, and the report says so (default: 25)
  --output FILE  the report (default: build/several_gpus.md)
  --cpu          the same commands with --gpus ranks on the CPU, to try this script: the figures mean nothing

Exit status: 0 if all tests passed, 1 if one failed, 2 for a wrong argument or a machine without a GPU.
TEXT
}

wrong() {
    say "error: $*; see docker/several_gpus.sh --help"
    exit 2
}

PEERS=(auto auto_bf16 ddp ddp_bf16 fsdp2 hsdp)
ROUNDS=2
gpus= models="resnet50 gpt2" minutes=25 output=$ROOT/build/several_gpus.md cpu=0
while [ $# -gt 0 ]; do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --cpu) cpu=1 && shift && continue ;;
    --gpus | --models | --minutes | --output) [ $# -gt 1 ] || wrong "$1 needs a value" ;;
    *) wrong "unknown argument $1" ;;
    esac
    case $1 in
    --gpus) gpus=$2 ;;
    --models) models=$2 ;;
    --minutes) minutes=$2 ;;
    --output) output=$2 ;;
    esac
    shift 2
done
for number in ${gpus:-1} "$minutes"; do
    case $number in '' | *[!0-9]* | 0*) wrong "expected a whole number of at least 1, not '$number'" ;; esac
done

found=0
if [ "$cpu" = 0 ]; then
    found=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)
    [ "$found" -gt 0 ] || wrong "nvidia-smi shows no GPU here; --cpu tries the script without one"
    gpus=${gpus:-$found}
    [ "$gpus" -le "$found" ] || wrong "--gpus $gpus, but this machine has $found"
else
    gpus=${gpus:-2}
    export CUDA_VISIBLE_DEVICES=
fi

COMMSCHED_WITH_TESTS=1 COMMSCHED_WITH_HOROVOD=${COMMSCHED_WITH_HOROVOD:-0} "$ROOT/docker/install.sh"
find_environment
keep_home_clean
cd "$ROOT"
mkdir -p "$LOGS" "$(dirname "$output")"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
end=$((SECONDS + 60 * minutes)) failed=0

section() { printf '\n## %s\n\n' "$1" >>"$output"; }

# within LIMIT NAME COMMAND...: runs it for at most LIMIT seconds and until the end of all; its output goes to a log.
within() {
    local limit=$1 log=$LOGS/several-gpus-$2.log left=$((end - SECONDS)) status=0
    shift 2
    [ "$left" -ge 20 ] || return 125
    [ "$left" -ge "$limit" ] || limit=$left
    timeout --kill-after 20 "$limit" "$@" >"$log" 2>&1 </dev/null || status=$?
    return $status
}

# why STATUS NAME: what became of a command that failed.
why() {
    case $1 in
    124 | 137) echo "stopped after its time limit" ;;
    125) echo "left out: no time left" ;;
    *) echo "failed: $(tail -n 200 "$LOGS/several-gpus-$2.log" | grep -iE 'error|FAILED' | tail -n 1 | cut -c 1-200)" ;;
    esac
}

facts() {
    echo "# commsched on $gpus rank(s), $(date -u +%FT%RZ)"
    echo
    [ "$cpu" = 0 ] || printf '**These figures mean nothing:** CPUs have run what is made for GPUs, to test the script.\n\n'
    echo "commsched $(cat VERSION) $(git rev-parse --short HEAD 2>/dev/null || true)"
    printf '\n```\n'
    if [ "$cpu" = 0 ]; then
        nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.width.max --format=csv
        nvidia-smi topo -m || true
    fi
    "$PYTHON" -m commsched doctor || true
    printf '```\n'
}

tests() {
    local name=$1 limit=$2 status=0 log=$LOGS/several-gpus-$1.log
    shift 2
    say "tests: $name ..."
    within "$limit" "$name" "$PYTHON" -m pytest -q -p no:cacheprovider "$@" || status=$?
    case $status in
    0) echo "- $name: $(tail -n 1 "$log")" ;;
    5) echo "- $name: no test fits this machine" ;; # pytest: nothing was collected
    125) echo "- $name: $(why 125 "$name")" ;;
    *)
        failed=1
        printf -- '- **%s: %s**\n\n```\n' "$name" "$(why "$status" "$name")"
        grep -E '^(FAILED|ERROR|E  )' "$log" | cut -c 1-300 | tail -n 30 || true
        printf '```\n'
        ;;
    esac >>"$output"
}

rate() { sed -nE 's/^[A-Z][a-z]*\/sec per [CG]PU: ([0-9.]+).*/\1/p' "$LOGS/several-gpus-$1.log" | tail -n 1; }

speed() {
    local model=$1 round peer name status value
    local -A rates=()
    for round in $(seq $ROUNDS); do
        for peer in "${PEERS[@]}"; do
            name=$model-$peer
            say "$model, $peer, round $round of $ROUNDS ..."
            status=0
            within 150 "$name" "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$gpus" \
                -m dnn_bench synthetic --model "$model" --baseline "$peer" --num-warmup-batches "$WARMUP" \
                --num-iters "$ITERATIONS" || status=$?
            value=
            [ "$status" != 0 ] || value=$(rate "$name") # without time left there is no log
            [ -n "$value" ] || value=$(why "$status" "$name")
            rates[$peer]+="${rates[$peer]:+ | }$value"
        done
    done
    printf '\n%s, samples per second and rank:\n\n| baseline | %s\n|---|%s\n' "$model" \
        "$(seq -s ' | ' -f 'round %g' $ROUNDS) |" "$(printf -- '---|%.0s' $(seq $ROUNDS))"
    for peer in "${PEERS[@]}"; do echo "| $peer | ${rates[$peer]} |"; done
}

WARMUP=60 ITERATIONS=20
[ "$cpu" = 0 ] || WARMUP=2 ITERATIONS=2
say "checks of $gpus rank(s), at most $minutes min; the report goes to $output"
facts >"$output" 2>&1
section "Correctness"
if [ "$cpu" = 0 ]; then
    tests kernels 300 -m "gpu and not bench and not slow" tests/gpu/test_gpu_kernels.py
    tests optimizer 420 -m "gpu and not bench and not slow" tests/gpu/test_gpu_training.py
    tests collectives 180 -m "gpu and not bench and not slow" tests/dist/test_collectives_gpu.py
    tests stages 300 -m "gpu and not bench and not slow" tests/gpu/test_gpu_stages.py
else
    tests stages 300 -m "not gpu" tests/gpu/test_gpu_stages.py
fi
section "Speed"
for model in $models; do speed "$model" >>"$output"; done
if [ "$cpu" = 0 ]; then
    section "One GPU"
    say "python -m dnn_bench gpu ..."
    status=0
    within 420 gpu "$PYTHON" -m dnn_bench gpu --parts kernels,cost --iterations 15 --json "$LOGS/several-gpus.json" ||
        status=$?
    [ "$status" = 0 ] && cat "$LOGS/several-gpus.md" >>"$output" || why "$status" gpu >>"$output"
fi
say "done in $((SECONDS / 60)) min: please send back $output"
exit "$failed"
