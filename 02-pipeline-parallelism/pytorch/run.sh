#!/usr/bin/env bash
# Runs every file of this chapter in each way that it starts; stops at the first failure. RANKS=2 for fewer ranks.
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/chapter.sh"

folder=02-pipeline-parallelism/pytorch
three_ways 2 "$folder" pp_by_hand pp_manual
three_ways "$ranks" "$folder" pp_gpipe pp_1f1b pp_interleaved pp_zero_bubble pp_memory pp_torch
binaries pp_mpi pp_libtorch
with_modules "pp_mpi pp_libtorch" "$ranks" "$folder/pp_languages.py"
printf '\nall of chapter 02 holds on %s ranks\n' "$ranks"
