"""Run the module fived's collectives on the first 1 to 4 ranks; rank 0 writes results as JSON.

python cpp_worker.py RESULT, under mpirun.
"""

import numpy as np
from fived import collectives, mpi
from mpi.worker import on_comms, write
from mpi4py import MPI

SIZES = [0, 1, 5, 1000, 300_001]


def numbers(n, dtype, rank):
    """Return whole numbers, so that every order of summation gives the same sum."""
    return ((np.arange(n) * 7 + rank * 13) % 32).astype(dtype)


def all_reduces(ranks, comm, dtype):
    """Return, for each function and length, if the sum is right, and the bytes sent per rank."""
    rows = []
    for name in ("ring_all_reduce", "recursive_doubling_all_reduce"):
        for n in SIZES:
            array = numbers(n, dtype, comm.rank)
            sent = getattr(collectives, name)(comm, array)
            right = np.array_equal(array, sum(numbers(n, dtype, r) for r in range(comm.size)))
            rows.append([name, n, ranks.allreduce(right, MPI.LAND), ranks.allgather(sent)])
    return rows


def scatter_gather(ranks, comm):
    """Check that reduce-scatter completes this rank's shard, and all-gather the others."""
    n = 1001
    array, total = numbers(n, np.float64, comm.rank), sum(numbers(n, np.float64, r) for r in range(comm.size))
    begin, end = collectives.piece(n, comm.size, comm.rank)
    collectives.ring_reduce_scatter(comm, array)
    mine = np.array_equal(array[begin:end], total[begin:end])
    collectives.ring_all_gather(comm, array)
    return ranks.allreduce(mine and np.array_equal(array, total), MPI.LAND)


def broadcasts(ranks, comm):
    right = True
    for root in range(comm.size):
        array = numbers(1000, np.float32, comm.rank)
        collectives.tree_broadcast(comm, array, root)
        right &= np.array_equal(array, numbers(1000, np.float32, root))
    return ranks.allreduce(right, MPI.LAND)


def mismatch(comm):
    """Return this rank's error message when rank 0 sends 3 elements and rank 1 expects 5."""
    try:
        if comm.rank == 0:
            mpi.send(comm, np.zeros(3), to=1)
        if comm.rank == 1:
            mpi.receive(comm, np.zeros(5), source=0)
        return ""
    except mpi.MpiError as error:
        return str(error)


def waits_without_the_gil(comm):
    """Let rank 1 wait in a thread while its main thread sends the message that the wait needs."""
    from threading import Thread

    if comm.size == 1 or comm.rank > 1:
        return True
    if comm.rank == 0:
        got = np.zeros(2)
        mpi.receive(comm, got, source=1, tag=1)
        mpi.send(comm, got, to=1, tag=2)
        return True
    back = np.zeros(2)
    waiting = Thread(target=mpi.receive, args=(comm, back), kwargs={"source": 0, "tag": 2})
    waiting.start()
    mpi.send(comm, np.ones(2), to=0, tag=1)
    waiting.join()
    return bool(np.all(back == 1))


def work(ranks):
    comm = mpi.Communicator(ranks)
    half = comm.split(color=comm.rank % 2, key=0, name="half")
    return {
        "float32": all_reduces(ranks, comm, np.float32),
        "float64": all_reduces(ranks, comm, np.float64),
        "scatter_gather": scatter_gather(ranks, comm),
        "broadcasts": broadcasts(ranks, comm),
        "halves": ranks.allgather([half.name, half.rank, half.size]),
        "mismatch": ranks.allgather(mismatch(comm)),
        "threads": ranks.allreduce(waits_without_the_gil(comm), MPI.LAND),
    }


if __name__ == "__main__":
    write(on_comms(work))
