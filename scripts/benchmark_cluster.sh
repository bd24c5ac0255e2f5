#!/usr/bin/env bash
# The benchmark over several hosts: the cases of every chapter, up to as many ranks as there are slots, one report.
#
#   scripts/benchmark_cluster.sh hosts [options of benchmark_all.py ...]     a file with a line a host: node0 slots=8
#   sbatch --nodes=2 --ntasks-per-node=8 scripts/benchmark_cluster.sh        in a Slurm allocation, from the checkout
#   scripts/benchmark_cluster.sh --only 'dp_*'                               neither: this machine alone
#
# The report is in results/, or where --output says. The checkout, built, and its .venv lie under the same path on every
# host. What to change, as variables: AGENT="ssh -p 2222", what reaches the hosts of a file; INTERFACE=eth0, the network
# to use where they share several.
set -euo pipefail

fail() {
    echo "benchmark_cluster.sh: $*" >&2
    exit 2
}

hosts=""
if [[ $# -ge 1 && $1 != -* ]]; then
    [[ -r $1 ]] || fail "there is no file of hosts $1; write one with a line for each, such as: node0 slots=8"
    hosts="$(realpath "$1")"
    shift
fi
root="$(dirname "${BASH_SOURCE[0]}")/.."
[[ -d $root/common ]] || root="${SLURM_SUBMIT_DIR:-}" # sbatch runs a copy from elsewhere
[[ -f $root/common/benchmarks/benchmark_all.py ]] || fail "there is no checkout in '$root'; submit from its root"
if [[ -z ${VIRTUAL_ENV:-} ]]; then
    [[ -f $root/.venv/bin/activate ]] || command -v mpirun >/dev/null || fail "there is no environment in $root/.venv: run make setup"
    [[ ! -f $root/.venv/bin/activate ]] || source "$root/.venv/bin/activate"
fi

if [[ -n $hosts ]]; then
    start="mpirun --hostfile $hosts --map-by slot:oversubscribe -x OMP_NUM_THREADS -x PATH"
    [[ -z ${AGENT:-} ]] || export PRTE_MCA_plm_ssh_agent="$AGENT"
    [[ -z ${INTERFACE:-} ]] || export OMPI_MCA_btl_tcp_if_include="$INTERFACE"
    ranks="-np {ranks}"
elif [[ -n ${SLURM_JOB_ID:-} ]]; then
    # programs that are MPI themselves need PMIx under srun, or each is rank 0 of 1
    [[ $(srun --mpi=list 2>&1) == *pmix* ]] || fail "this Slurm has no PMIx (srun --mpi=list); write the job's hosts into a" \
        "file (scontrol show hostnames) and give that"
    start="srun --mpi=pmix"
    ranks="--ntasks={ranks}"
else
    echo "one host: $(uname -n), since no file of hosts is given and this is no Slurm job"
    exec python "$root/common/benchmarks/benchmark_all.py" "$@"
fi

export OMP_NUM_THREADS=1
names="$($start uname -n)" || fail "not every host answers: $start uname -n"
sort <<<"$names" | uniq -c | awk '{ print $2 ": " $1 " ranks" }'
exec python "$root/common/benchmarks/benchmark_all.py" \
    --launch "$start $ranks" --cores "$(wc -l <<<"$names")" "$@"
