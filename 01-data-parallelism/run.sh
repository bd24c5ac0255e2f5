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

chapter=01-data-parallelism/pytorch
run python "$chapter/dp_basic.py" --nproc "$ranks"
run torchrun --standalone --nproc_per_node="$ranks" "$chapter/dp_basic.py"
run mpirun -np "$ranks" python "$chapter/dp_basic.py"
for lesson in dp_accumulation dp_checkpointing dp_mixed_precision dp_loss_scaling dp_zero dp_fsdp dp_compression \
    dp_local_sgd dp_matrix_multiply dp_data_parallel; do
    run python "$chapter/$lesson.py" --nproc "$ranks"
    run torchrun --standalone --nproc_per_node="$ranks" "$chapter/$lesson.py"
    run mpirun -np "$ranks" python "$chapter/$lesson.py"
done

for binary in dp_mpi dp_matmul_mpi dp_libtorch; do
    if [[ -x "build/bin/$binary" ]]; then
        run mpirun -np "$ranks" "build/bin/$binary"
    else
        printf '\nleft out: build/bin/%s is not built; run make setup\n' "$binary"
    fi
done
if python -c 'import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, ["dp_mpi", "dp_libtorch"])))'; then
    run mpirun -np "$ranks" python "$chapter/dp_languages.py"
else
    printf '\nleft out: dp_languages.py, whose modules dp_mpi and dp_libtorch are not built; run make setup\n'
fi
printf '\nall of chapter 01 holds on %s ranks\n' "$ranks"
