#!/usr/bin/env bash
# ./dist.sh: installs everything and measures training, as environment variables (in any case) describe it:
#
#   dnn=resnet50 bs=64 nworkers=4 baseline=PipeDAP ./dist.sh
#
#   dnn       model, library/model (resnet_tiny)   nworkers  number of workers (2)
#   bs        batch per worker (the model's own)   hosts     hosts and workers, as first:2,second:2 (this machine)
#   senlen    tokens per sentence (the model's)    launcher  horovodrun, torchrun or mpirun (by baseline and hosts)
#   data      images or text (synthetic data)      rdma      1: RDMA, 0: TCP (0)
#   nwarmup   batches before measuring (10)        niters    measurements (10)
#   baseline  auto, a policy of the scheduler, or a peer: horovod, ddp, fsdp2, zero1, ... (auto)
#
# Defaults stand in parentheses. baseline=all runs every baseline on this machine in turns (A B C A B C) and
# prints a table at the end; baseline=ddp,horovod,auto runs only those. Horovod is built (once, in several minutes) when
# the baseline or the launcher needs it, or with COMMSCHED_WITH_HOROVOD=1. With no variable set it answers within
# minutes what the network costs a small model, and what commsched saves of it. data (or data_dir) is a folder with one
# subfolder of images per class, a text file, or a folder of .txt files. A wrong value gets a list of right ones.
set -euo pipefail
export COMMSCHED_CALLED_FROM=$PWD  # base of a relative data folder
cd "$(dirname "${BASH_SOURCE[0]}")"
. docker/common.sh
usage() { grep '^#' "${BASH_SOURCE[0]}" | sed -e 1d -e 's/^# \{0,1\}//'; }
case ${1-} in
"") ;;
-h | --help) usage && exit 0 ;;
*) usage >&2 && exit 2 ;;
esac
# given NAME...: prints the values of these variables, in any case and in lower case.
given() {
    local names
    names=$(IFS='|' && echo "$*")
    env | grep -iE "^($names)=." | cut -d= -f2- | tr '[:upper:]' '[:lower:]' || true
}
horovod=0
case $(given baseline launcher) in *horovod* | *all*) horovod=1 ;; esac
# Workers on several hosts need horovodrun or mpirun.
case $(given hosts) in *,*) command -v mpirun >/dev/null || horovod=1 ;; esac
export COMMSCHED_WITH_HOROVOD=${COMMSCHED_WITH_HOROVOD:-$horovod}
docker/install.sh
find_environment
keep_home_clean
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
command=$("$PYTHON" -m dnn_bench.settings)
echo "+ $command"
eval "exec $command"
