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

chapter=04-sequence-parallelism/pytorch
for lesson in sp_basic sp_ulysses sp_ring_attention sp_hybrid sp_memory; do
    run python "$chapter/$lesson.py" --nproc "$ranks"
    run torchrun --standalone --nproc_per_node="$ranks" "$chapter/$lesson.py"
    run mpirun -np "$ranks" python "$chapter/$lesson.py"
done

for binary in sp_mpi sp_libtorch; do
    if [[ -x "build/bin/$binary" ]]; then
        run mpirun -np "$ranks" "build/bin/$binary"
    else
        printf '\nleft out: build/bin/%s is not built; run make setup\n' "$binary"
    fi
done
if python -c 'import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, ["sp_mpi", "sp_libtorch"])))'; then
    run mpirun -np "$ranks" python "$chapter/sp_languages.py"
    run mpirun -np 2 python "$chapter/sp_mpi_against_torch.py"
else
    printf '\nleft out: sp_languages.py and sp_mpi_against_torch.py, whose modules are not built; run make setup\n'
fi
printf '\nall of chapter 04 holds on %s ranks\n' "$ranks"
