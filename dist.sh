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
# prints a table at the end; baseline=ddp,horovod,auto runs only those. data (or data_dir) is a folder with one
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
docker/install.sh
find_environment
keep_home_clean
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
command=$("$PYTHON" -m dnn_bench.settings)
echo "+ $command"
eval "exec $command"
