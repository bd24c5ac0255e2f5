#!/usr/bin/env bash
# Runs every file of this chapter in each way that it starts; stops at the first failure. RANKS=8 for more ranks.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/chapter.sh"

folder=06-hybrid-parallelism/pytorch
three_ways "$ranks" "$folder" hybrid_3d hybrid_4d hybrid_5d hybrid_torch
[[ "$ranks" -lt 4 ]] || run torchrun --standalone --nproc_per_node="$ranks" "$folder/hybrid_5d.py" --pp 2 --tp 2 --explain
run torchrun --standalone --nproc_per_node=8 "$folder/hybrid_5d.py" --pp 2 --dp 2 --tp 2
run torchrun --standalone --nproc_per_node=8 "$folder/hybrid_5d.py" --dp 2 --ep 2 --tp 2
run torchrun --standalone --nproc_per_node=8 "$folder/hybrid_5d.py" --pp 2 --sp 2 --ep 2
binaries hybrid_mpi hybrid_libtorch
with_modules "hybrid_mpi hybrid_libtorch" "$ranks" "$folder/hybrid_languages.py"
run python 06-hybrid-parallelism/trainer/hybrid_plain_loop.py --dtype float64
planner=06-hybrid-parallelism/planner
run python "$planner/plan.py" --model llama2-70b --gpus 64 --why pp=4,tp=8
run python "$planner/validate.py"
run python "$planner/measure_step.py" --nproc "$ranks" --dp 2 --model llama-tiny
run python "$folder/hybrid_proof.py" --every 31 --ranks 8
checkpoints="$(mktemp -d)"
trap 'rm -rf "$checkpoints"' EXIT
train=06-hybrid-parallelism/examples/train_llama.py
run python "$train" --nproc "$ranks" --steps 20 --checkpoints "$checkpoints"
run torchrun --standalone --nproc_per_node=2 "$train" --tp 2 --steps 30 --checkpoints "$checkpoints"
if [[ -x build/bin/hybrid_mpi ]]; then # a run that goes on in Python, on another mesh
    run mpirun -np "$ranks" build/bin/hybrid_mpi --train --steps 20 --save "$checkpoints/whole"
    run python "$train" --nproc 2 --tp 2 --model gpt2-tiny --steps 30 --resume "$checkpoints/whole"
fi
printf '\nall of chapter 06 holds on %s ranks\n' "$ranks"
