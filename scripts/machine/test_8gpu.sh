#!/usr/bin/env bash
# Checks a machine in a few minutes: what is there, whether ranks can talk, whether they train right.
#
#   bash scripts/machine/test_8gpu.sh            # a rank per GPU, or a few on the CPU
#   NPROC=2 bash scripts/machine/test_8gpu.sh    # so many ranks
#
# Writes gpu_test_YYYYMMDD_HHMMSS.log, the records beside it (.jsonl) and a page (.html). Exit code 1: something failed.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
source scripts/machine/python.sh

name="gpu_test_$(date +%Y%m%d_%H%M%S)"
outputs=(--log "$name.log" --json "$name.jsonl")
ranks=(${NPROC:+--nproc "$NPROC"})
failed=0

command -v nvidia-smi >/dev/null && nvidia-smi && nvidia-smi topo -m
"$python" -m common.machine check "${outputs[@]}" || failed=1
"$python" -m common.machine communication "${outputs[@]}" "${ranks[@]}" || failed=1
"$python" -m common.machine training "${outputs[@]}" "${ranks[@]}" || failed=1
"$python" -m common.machine report "$name.jsonl" --output "$name.html" || failed=1
echo "log: $name.log  page: $name.html"
exit "$failed"
