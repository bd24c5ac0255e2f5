"""Managers: ranks, devices, pieces of tensors that rank 0 holds, cost by data sheet, sections timed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensor_cases as cases
import torch

from common.errors import RankError, UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.tensors.manager import (
    ClusterConfig,
    CostModel,
    GPUManager,
    MPIManager,
    Profiler,
    TensorDistributor,
    distributed_matmul,
)

ROOT = Path(__file__).resolve().parents[1]


def messages(rt: Runtime) -> None:
    """Call each method of MPIManager, and compare with what every rank must get."""
    mpi, n, me = MPIManager(rt), rt.world_size, rt.rank
    assert (mpi.get_rank(), mpi.get_size(), mpi.is_master_process()) == (me, n, me == 0)
    assert mpi.get_gpu_id() == -1
    root = n - 1
    mpi.barrier()
    mpi.synchronize()
    assert mpi.broadcast({"from": me}, root) == {"from": root}
    assert mpi.scatter([10 * r for r in range(n)] if me == root else None, root) == 10 * me
    assert mpi.gather(me, root) == (list(range(n)) if me == root else None)
    assert mpi.allgather("x" * me) == ["x" * r for r in range(n)]
    assert mpi.allreduce(me) == sum(range(n))
    assert mpi.allreduce(me, "max") == n - 1
    assert mpi.reduce(me + 1, "min", root) == (1 if me == root else None)
    whole = cases.numbers((3, 2), torch.complex128)
    assert torch.equal(mpi.broadcast_tensor(whole if me == root else None, root), whole)
    cases.assert_close(mpi.allreduce_tensor(whole * me), whole * sum(range(n)))
    least = mpi.reduce_tensor(torch.tensor([me, -me]), "min", root)
    assert (least is None) == (me != root)
    if least is not None:
        assert least.tolist() == [0, 1 - n]
    piece = torch.full((2, me), float(me))
    joined = torch.cat([torch.full((2, r), float(r)) for r in range(n)], 1)
    assert torch.equal(mpi.allgather_tensor(piece, 1), joined)
    before, after = mpi.ring_neighbours()
    assert mpi.sendrecv(["list", me], after, before) == ["list", before]
    if n > 1 and me < 2:
        if me == 0:
            mpi.send({"some": whole}, 1, tag=3)
        else:
            assert torch.equal(mpi.recv(0, tag=3)["some"], whole)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_messages(n: int) -> None:
    spawn(messages, n)


def pieces(rt: Runtime) -> None:
    """Cut tensors of rank 0 and join them again, in one and two dimensions, and in 16 bits."""
    mpi, n, me = MPIManager(rt), rt.world_size, rt.rank
    distributor = TensorDistributor(mpi)
    assert distributor.calculate_split_sizes(7) == [7 // n + (r < 7 % n) for r in range(n)]
    begin, end = distributor.get_local_range(7)
    whole = cases.numbers((7, 5))
    given = whole if me == 0 else None
    mine = distributor.distribute(given)
    assert torch.equal(mine, whole[begin:end])
    for dim in (0, 1, -1):
        back = distributor.gather(distributor.distribute(given, dim), dim)
        assert (back is None) == (me > 0)
        assert back is None or torch.equal(back, whole)
    ragged = torch.full((me, 2), me)
    joined = distributor.gather(ragged)
    assert joined is None or joined[:, 0].tolist() == [r for r in range(n) for _ in range(r)]
    assert torch.equal(distributor.allgather(mine), whole)
    assert torch.equal(distributor.broadcast(given), whole)
    some, all_ = distributor.distribute_with_broadcast(given, given, 1)
    assert torch.equal(all_, whole)
    assert some.shape[0] == 7
    total = distributor.reduce_sum(whole)
    assert (total is None) == (me > 0)
    if total is not None:
        cases.assert_close(total, n * whole)
    for grid in [(n, 1), (1, n), *([(2, n // 2)] if n == 4 else [])]:
        block = distributor.distribute_2d(given, grid)
        back = distributor.gather_2d(block, grid)
        assert back is None or torch.equal(back, whole)
    small = TensorDistributor(mpi, compress=torch.bfloat16)
    rounded = small.gather(small.distribute(given))
    assert small.distribute(given).dtype == torch.float64
    assert rounded is None or torch.equal(rounded, whole.bfloat16().double())
    assert torch.equal(small.broadcast(torch.arange(5) if me == 0 else None), torch.arange(5))
    half = small.broadcast(whole.half() if me == 0 else None)
    assert torch.equal(half, whole.half())  # bfloat16 has fewer digits and as many bytes
    array = whole.numpy() if me == 0 else None
    assert torch.equal(distributor.distribute(array), whole[begin:end])
    product = distributed_matmul(array, array.T if array is not None else None, mpi, distributor)
    assert (product is None) == (me > 0)
    if product is not None:
        cases.assert_close(product, whole @ whole.T, times=100)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_pieces(n: int) -> None:
    spawn(pieces, n)


def wrong(rt: Runtime, what: str) -> None:
    """Ask for what cannot be."""
    mpi = MPIManager(rt)
    if what == "root":
        mpi.broadcast(1, 5)
    elif what == "scatter":
        mpi.scatter([1] if rt.rank == 0 else None)
    elif what == "tensor":
        TensorDistributor(mpi).distribute(None)
    elif what == "words":
        TensorDistributor(mpi).distribute(np.array(["one"]) if rt.rank == 0 else None)
    elif what == "product of words":
        words = np.array([["one"]]) if rt.rank == 0 else None
        distributed_matmul(words, words, mpi, TensorDistributor(mpi))
    elif what == "op":
        mpi.allreduce(1, "mean")
    elif what == "grid":
        TensorDistributor(mpi).distribute_2d(torch.ones(2, 2) if rt.rank == 0 else None, (3, 1))
    elif what == "compress":
        TensorDistributor(mpi, compress=torch.int8)
    elif what == "shapes":
        mpi.allreduce_tensor(object())  # type: ignore[arg-type]


WRONG = {
    "root": "rank 5 of 2; give one from 0 to 1",
    "scatter": "gives 1 objects for 2 ranks",
    "tensor": "must give a tensor",
    "words": "an array of <U3: torch makes no tensor of it",
    "product of words": "an array of <U3: torch makes no tensor of it",
    "op": "'mean' is unknown; choose one of sum, max, min",
    "grid": "whose product is 2",
    "compress": "torch.float16, torch.bfloat16 or None",
    "shapes": r"rank \d, allreduce_tensor: ",
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input(what: str) -> None:
    with pytest.raises(RankError, match=WRONG[what]) as failure:
        spawn(wrong, 2, what)
    assert failure.value.code == (1 if what == "shapes" else 2)


PROGRAM = """
import sys
from common.tensors.manager import MPIManager
mpi = MPIManager(timeout=20)
total = mpi.allreduce(mpi.get_rank() + 1)
mpi.print_master("total", total)
mpi.print_all("here")
if len(sys.argv) > 1 and mpi.get_rank() == mpi.get_size() - 1:
    raise ValueError("on purpose")
mpi.barrier()
"""


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_a_program_of_its_own(ranks: int, fails: bool, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    start = ["mpirun", "-np", str(ranks), "--oversubscribe"] if ranks else []
    command = [*start, sys.executable, "program.py", *(["fail"] if fails else [])]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert (run.returncode != 0) == fails, run.stderr
    assert f"total {3 if ranks else 1}" in run.stdout
    for rank in range(ranks or 1):
        assert f"[rank {rank}] here" in run.stdout
    assert ("on purpose" in run.stderr) == fails


def test_devices() -> None:
    host = GPUManager(-1)
    assert host.get_info()["name"] == "cpu"
    memory = host.get_memory()
    assert 0 < memory["free"] <= memory["total"]
    assert 0 <= memory["percent"] <= 100
    assert host.estimate_memory_requirement((3, 4), (5,), dtype=torch.float64) == 17 * 8
    assert host.can_fit((10, 10))
    assert not host.can_fit((1 << 20, 1 << 20))
    x = torch.ones(2)
    assert host.to_device(x) is x
    host.empty_cache()
    host.synchronize()


def test_sections(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = Profiler()
    for _ in range(3):
        profiler.start("multiply")
        profiler.end("multiply")
    profiler.print_summary()
    assert "multiply" in capsys.readouterr().out
    assert len(profiler.seconds["multiply"]) == 3
    with pytest.raises(UsageError, match="does not run"):
        profiler.end("multiply")
    profiler.start("a")
    with pytest.raises(UsageError, match="runs already"):
        profiler.start("a")
    off = Profiler(enabled=False)
    off.end("never begun")
    off.print_summary()
    assert not off.seconds


def test_costs_of_two_equal_gpus() -> None:
    """By hand: 2 x 1024^3 FLOPs on two GPUs of 1 TFLOP/s, and 2 MiB of B to the other over 1 GB/s."""
    model = CostModel(ClusterConfig(1, [1, 1], [1, 1], intra_node_bandwidth=1, network_latency_ms=0.5))
    cost = model.estimate_matmul_cost(1024, 1024, 1024, "row")
    assert cost.compute == pytest.approx(1024**3 / 1e12)
    assert cost.comm == pytest.approx(2 * 2**20 / 1e9 + 0.5e-3)
    assert cost.memory == pytest.approx(2 * 2**21 + 2**22)
    assert cost.speedup == pytest.approx(2 * 1024**3 / 1e12 / cost.total)
    batch = model.estimate_matmul_cost(64, 64, 64, "batch", batch=10)
    assert (batch.comm, batch.speedup, batch.efficiency) == (0, 2, 1)
    assert model.find_optimal_strategy(4096, 64, 64).strategy == "row"
    assert model.find_optimal_strategy(64, 64, 4096).strategy == "column"
    assert model.find_optimal_strategy(64, 64, 64, batch=8).strategy == "batch"


def test_uneven_gpus_get_rows_in_proportion(capsys: pytest.CaptureFixture[str]) -> None:
    model = CostModel(ClusterConfig(1, [8, 8, 8], [1, 2, 3]))
    plan = model.find_optimal_strategy(6000, 512, 512)
    assert plan.chunk_sizes == [1000, 2000, 3000]
    even = CostModel(ClusterConfig(1, [8, 8, 8], [1, 1, 1])).estimate_matmul_cost(6000, 512, 512)
    assert plan.cost.compute == pytest.approx(even.compute / 2)
    assert model.should_use_distributed(20000, 20000, 20000)
    with pytest.raises(UsageError, match=r"the smallest has 0\.001 GB"):
        CostModel(ClusterConfig(1, [1e-3] * 2, [1, 1])).find_optimal_strategy(4096, 4096, 4096)
    model.print_analysis(1024, 1024, 1024)
    assert "column" in capsys.readouterr().out
    with pytest.raises(UsageError, match="one of row, column, block, batch"):
        model.estimate_matmul_cost(1, 1, 1, "diagonal")  # type: ignore[arg-type]
    for bad in ({"num_nodes": 2}, {"gpu_tflops": [-1]}, {"gpu_tflops": [1, 2]}):
        with pytest.raises(UsageError):
            ClusterConfig(**{"num_nodes": 1, "gpu_memory_gb": [1], "gpu_tflops": [1]} | bad)
    assert ClusterConfig.from_auto_detect(2).num_gpus >= 2
