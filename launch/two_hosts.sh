#!/usr/bin/env bash
# Two machines, by hand: the same line on both, the first with 0, the second with 1.
#
#   STAGES=4 launch/two_hosts.sh 0 10.0.0.1 train.py [its arguments]     # on 10.0.0.1
#   STAGES=4 launch/two_hosts.sh 1 10.0.0.1 train.py [its arguments]     # on the other
#
# 10.0.0.1 is an address of the first that the second reaches; either may start before the other.
# The first has the first half of the stages, and the driver. Other hosts than these two must not
# reach the ports they open: see docs/security.md.
set -euo pipefail

rank=$1 address=$2
shift 2
# The same on both, and unlike any other job's: a process with another one is refused.
export RPCPIPE_TOKEN=${RPCPIPE_TOKEN:-two-hosts}
exec rpcpipe-run --nnodes 2 --node-rank "$rank" --master-addr "$address" \
    --master-port "${PORT:-29500}" --stages "${STAGES:-2}" "$@"
