#!/usr/bin/env bash
# mpirun over the hosts of a file: type the line on one of them, which reaches the others by ssh without a password.
#
#   scripts/launch/mpirun.sh HOSTFILE file.py [its options ...]
#   scripts/launch/mpirun.sh hosts build/bin/dp_mpi
#
# HOSTFILE has a line for each host, with its ranks:      node0 slots=8
#                                                         node1 slots=8
# What to change, as variables before the line:
#   RANKS=16              ranks in all (default: the sum of the slots)
#   OMP_NUM_THREADS=4     threads of a rank (default: 1)
#   INTERFACE=eth0        the network to use, where the hosts share several
#   AGENT="ssh -p 2222"   what to reach the other hosts with
# The checkout and its .venv lie under the same path on every host.
set -euo pipefail

fail() {
    echo "mpirun.sh: $*" >&2
    exit 2
}

[[ $# -ge 2 ]] || fail "needed are HOSTFILE and a program, given: ${*:-nothing}; such as hosts dp_basic.py"
[[ -r $1 ]] || fail "there is no file of hosts $1; write one with a line for each, such as: node0 slots=8"
[[ -f $2 ]] || fail "there is no file $2 in $PWD; the checkout lies under the same path on every host"
slots="$(awk '!/^ *(#|$)/ { n = match($0, /slots *= *[0-9]+/) ? substr($0, RSTART, RLENGTH) : "=1"; sub(/.*= */, "", n); sum += n }
    END { print sum + 0 }' "$1")"
[[ $slots -ge 1 ]] || fail "$1 names no host; write a line for each, such as: node0 slots=8"
venv="$(dirname "${BASH_SOURCE[0]}")/../../.venv"
[[ -n ${VIRTUAL_ENV:-} || ! -f $venv/bin/activate ]] || source "$venv/bin/activate"
command -v mpirun >/dev/null || fail "there is no mpirun on $(uname -n): run make setup, or activate its environment"

program=("$2")
[[ $2 != *.py ]] || program=(python "$2")
[[ $2 == *.py || $2 == */* ]] || program=("./$2")
options=()
[[ -z ${AGENT:-} ]] || options+=(--prtemca plm_ssh_agent "$AGENT")
[[ -z ${INTERFACE:-} ]] || options+=(--mca btl_tcp_if_include "$INTERFACE")
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # it warns of names that lead nowhere, and of hosts that leave first
exec mpirun --hostfile "$1" --map-by slot:oversubscribe -np "${RANKS:-$slots}" "${options[@]}" -x OMP_NUM_THREADS -x TORCH_CPP_LOG_LEVEL -x PATH "${program[@]}" "${@:3}"
