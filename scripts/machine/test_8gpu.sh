#!/usr/bin/env bash
# Checks a machine in a few minutes: what is there, whether ranks can talk, whether they train right.
#
#   bash scripts/machine/test_8gpu.sh            # a rank per GPU, or a few on the CPU
#   GPUS=8 bash scripts/machine/test_8gpu.sh     # fails if there are not so many GPUs
#   NPROC=2 bash scripts/machine/test_8gpu.sh    # so many ranks
#
# Writes gpu_test_YYYYMMDD_HHMMSS.log, whose first line is the verdict, the records beside it (.jsonl) and a page (.html).
# The last lines of the output are the verdict and these names. Exit code 1: something failed.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
source scripts/machine/python.sh

name="gpu_test_$(date +%Y%m%d_%H%M%S)"
outputs=(--log "$name.log" --json "$name.jsonl")
ranks=(${NPROC:+--nproc "$NPROC"})
failed=0

if command -v nvidia-smi >/dev/null; then
    { nvidia-smi && nvidia-smi topo -m; } | tee -a "$name.log"
fi
"$python" -m common.machine check "${outputs[@]}" ${GPUS:+--gpus "$GPUS"} || failed=1
"$python" -m common.machine communication "${outputs[@]}" "${ranks[@]}" || failed=1
"$python" -m common.machine training "${outputs[@]}" "${ranks[@]}" || failed=1
verdict="$("$python" -m common.machine report "$name.jsonl" --output "$name.html")" || failed=1
{ echo "$verdict" && cat "$name.log"; } >"$name.new" && mv "$name.new" "$name.log"
echo "$verdict"
echo "log: $name.log  page: $name.html"
exit "$failed"
