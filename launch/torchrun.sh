#!/usr/bin/env bash
# One machine, by torchrun alone: STAGES=2 launch/torchrun.sh train.py [its arguments]
#
# torchrun's own two stores listen on all interfaces; rpcpipe-run's listens on loopback.
set -euo pipefail

export RPCPIPE_STAGES=${STAGES:-2} # what run() takes where the script does not say
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would warn; run() sets threads itself
exec torchrun --standalone --nproc-per-node "$RPCPIPE_STAGES" "$@"
