#!/usr/bin/env bash
# Runs every file of this chapter in each way that it starts; stops at the first failure. RANKS=2 for fewer ranks.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/chapter.sh"

folder=05-expert-parallelism/pytorch
three_ways 2 "$folder" ep_by_hand
three_ways "$ranks" "$folder" ep_switch_router ep_moe ep_load_balance ep_imbalance ep_layer ep_tensor_parallel ep_overlap
binaries ep_mpi ep_libtorch
with_modules "ep_mpi ep_libtorch" "$ranks" "$folder/ep_languages.py"
printf '\nall of chapter 05 holds on %s ranks\n' "$ranks"
