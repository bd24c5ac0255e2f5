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

chapter=03-tensor-parallelism/pytorch
for lesson in tp_column_parallel tp_row_parallel tp_vocabulary tp_megatron tp_memory tp_overlap tp_dtensor tp_summa; do
    run python "$chapter/$lesson.py" --nproc "$ranks"
    run torchrun --standalone --nproc_per_node="$ranks" "$chapter/$lesson.py"
    run mpirun -np "$ranks" python "$chapter/$lesson.py"
done
run python "$chapter/tp_megatron.py" --nproc "$ranks" --model llama-tiny --dropout 0.1

for binary in tp_mpi tp_summa_mpi tp_libtorch; do
    if [[ -x "build/bin/$binary" ]]; then
        run mpirun -np "$ranks" "build/bin/$binary"
    else
        printf '\nleft out: build/bin/%s is not built; run make setup\n' "$binary"
    fi
done
if python -c 'import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, ["tp_mpi", "tp_libtorch"])))'; then
    run mpirun -np "$ranks" python "$chapter/tp_languages.py"
else
    printf '\nleft out: tp_languages.py, whose modules tp_mpi and tp_libtorch are not built; run make setup\n'
fi
printf '\nall of chapter 03 holds on %s ranks\n' "$ranks"
