#!/usr/bin/env bash
# Runs every file of this chapter in each way that it starts; stops at the first failure. RANKS=2 for fewer ranks.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/chapter.sh"

folder=03-tensor-parallelism/pytorch
three_ways 2 "$folder" tp_by_hand
three_ways "$ranks" "$folder" tp_column_parallel tp_row_parallel tp_vocabulary tp_megatron tp_memory tp_overlap tp_dtensor \
    tp_summa
run python "$folder/tp_megatron.py" --nproc "$ranks" --model llama-tiny --dropout 0.1
binaries tp_mpi tp_summa_mpi tp_libtorch
with_modules "tp_mpi tp_libtorch" "$ranks" "$folder/tp_languages.py"
printf '\nall of chapter 03 holds on %s ranks\n' "$ranks"
