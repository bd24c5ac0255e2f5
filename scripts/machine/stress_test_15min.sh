#!/usr/bin/env bash
# Full load on all GPUs for 15 minutes; ends earlier at the first wrong bit. A run that is stopped goes on where it was,
# one that was over begins anew.
#
#   bash scripts/machine/stress_test_15min.sh [--minutes MINUTES] [--nproc RANKS]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/machine/python.sh
mkdir -p results
state=results/stress.jsonl
exec "$python" -m common.machine stress --state "$state" --log results/stress.log "$@"
