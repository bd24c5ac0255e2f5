#!/usr/bin/env bash
# Runs every file of this chapter in each way that it starts; stops at the first failure. RANKS=2 for fewer ranks.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/chapter.sh"

folder=04-sequence-parallelism/pytorch
three_ways 2 "$folder" sp_by_hand
three_ways "$ranks" "$folder" sp_basic sp_ulysses sp_ring_attention sp_hybrid sp_memory sp_library
binaries sp_mpi sp_libtorch
with_modules "sp_mpi sp_libtorch" "$ranks" "$folder/sp_languages.py"
printf '\nall of chapter 04 holds on %s ranks\n' "$ranks"
