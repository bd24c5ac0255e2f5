#!/usr/bin/env bash
# Finds the largest batch of ResNet-50 that fits, trains with it, logs the steps to a tracker and draws them.
#
#   bash scripts/machine/test_maxmem_tracker.sh              # TensorBoard
#   TRACKER=swanlab bash scripts/machine/test_maxmem_tracker.sh
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/machine/python.sh
"$python" scripts/machine/benchmark_resnet50_maxmem.py --tracker "${TRACKER:-tensorboard}" "$@"
"$python" scripts/machine/plot_tracker.py
