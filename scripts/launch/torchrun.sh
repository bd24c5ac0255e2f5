#!/usr/bin/env bash
# torchrun on one host or several: type the same line on each. The hosts meet at HOST:PORT and number themselves.
#
#   scripts/launch/torchrun.sh NODES HOST:PORT file.py [its options ...]
#   scripts/launch/torchrun.sh 2 node0:29500 01-data-parallelism/pytorch/dp_basic.py --batch 32
#
# HOST is one of the hosts, by a name or an address that all of them know; PORT is free there.
# What to change, as variables before the line:
#   NPROC=8               ranks on this host (default: one for each GPU, else one for each core)
#   OMP_NUM_THREADS=4     threads of a rank (default: 1)
#   RESTARTS=3            times that all ranks start again when one fails (default: 0)
#   WAIT=600              seconds until all hosts must be there (default: 300)
#   RUN=second            a name for the run, where several meet at one HOST:PORT
set -euo pipefail

fail() {
    echo "torchrun.sh: $*" >&2
    exit 2
}

[[ $# -ge 3 ]] || fail "needed are NODES HOST:PORT file.py, given: ${*:-nothing}; such as 2 node0:29500 dp_basic.py"
[[ $1 =~ ^[1-9][0-9]*$ ]] || fail "NODES is $1; give the number of hosts, such as 2"
[[ $2 =~ ^([^:]+):([0-9]+)$ ]] || fail "$2 is not HOST:PORT; give one of the hosts and a free port, such as node0:29500"
nodes="$1" host="${BASH_REMATCH[1]}" port="${BASH_REMATCH[2]}"
[[ -f $3 ]] || fail "there is no file $3 in $PWD; the checkout lies under the same path on every host"
venv="$(dirname "${BASH_SOURCE[0]}")/../../.venv"
[[ -n ${VIRTUAL_ENV:-} || ! -f $venv/bin/activate ]] || source "$venv/bin/activate"
command -v torchrun >/dev/null || fail "there is no torchrun on $(uname -n): run make setup, or activate its environment"

# This host's address on the network that leads to HOST. Left to itself, torchrun takes the host's own name, which on
# many a machine leads nowhere or to itself.
address="$(python - "$host" "$port" <<'PYTHON'
import socket, sys
try:
    there = socket.getaddrinfo(sys.argv[1], int(sys.argv[2]), type=socket.SOCK_DGRAM)[0]
    with socket.socket(*there[:3]) as s:  # chooses a way, sends nothing
        s.connect(there[4])
        here = s.getsockname()[0]
    print(here, str(here == there[4][0] or here.startswith("127.")).lower())
except OSError:
    sys.exit(1)
PYTHON
)" || fail "no way leads from $(uname -n) to $host; give a name or an address that every host knows"
[[ $nodes == 1 || $address != 127.* ]] || fail "$host leads $(uname -n) back to itself (${address% *}); give its address"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # it warns of names that lead nowhere, and of hosts that leave first
exec torchrun --nnodes="$nodes" --nproc_per_node="${NPROC:-auto}" --max_restarts="${RESTARTS:-0}" \
    --rdzv_backend=c10d --rdzv_endpoint="$host:$port" --rdzv_id="${RUN:-run}" --local_addr="${address% *}" \
    --rdzv_conf="is_host=${address#* },join_timeout=${WAIT:-300},read_timeout=60" "${@:3}"
