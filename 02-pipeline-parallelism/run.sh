#!/usr/bin/env bash
# Runs every file of this chapter in each way that it starts; stops at the first failure. RANKS=2 for fewer ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    activate="${VENV:-.venv}/bin/activate"
    [[ -f "$activate" ]] || { echo "no environment at ${VENV:-.venv}: run make setup first" >&2; exit 1; }
    source "$activate"
fi
ranks="${RANKS:-4}"

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

chapter=02-pipeline-parallelism/pytorch
run python "$chapter/pp_manual.py" --nproc 2
run torchrun --standalone --nproc_per_node=2 "$chapter/pp_manual.py"
run mpirun -np 2 python "$chapter/pp_manual.py"

for lesson in pp_gpipe pp_1f1b pp_interleaved pp_zero_bubble pp_memory pp_torch; do
    run python "$chapter/$lesson.py" --nproc "$ranks"
    run torchrun --standalone --nproc_per_node="$ranks" "$chapter/$lesson.py"
    run mpirun -np "$ranks" python "$chapter/$lesson.py"
done

printf '\nall of chapter 02 holds on %s ranks\n' "$ranks"
