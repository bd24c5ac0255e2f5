#!/usr/bin/env bash
# Runs every file of this chapter in each way that it starts; stops at the first failure. RANKS=2 for fewer ranks.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/chapter.sh"

folder=01-data-parallelism/pytorch
three_ways 2 "$folder" dp_by_hand
three_ways "$ranks" "$folder" dp_basic dp_accumulation dp_checkpointing dp_mixed_precision dp_loss_scaling dp_zero \
    dp_fsdp dp_compression dp_local_sgd dp_matrix_multiply dp_data_parallel
binaries dp_mpi dp_matmul_mpi dp_libtorch
with_modules "dp_mpi dp_libtorch" "$ranks" "$folder/dp_languages.py"
printf '\nall of chapter 01 holds on %s ranks\n' "$ranks"
