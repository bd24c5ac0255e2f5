#!/usr/bin/env bash
# Shows utilisation, memory, temperature and power of all GPUs every second, until Ctrl-C.
#
#   bash scripts/machine/monitor_gpu.sh [--every SECONDS] [--json FILE] [--seconds SECONDS]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/machine/python.sh
exec "$python" -m common.machine monitor "$@"
