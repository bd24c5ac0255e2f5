"""Cost of a matrix product on a cluster, from its data sheet, and the best way to split it there.

    cluster = ClusterConfig(2, gpu_memory_gb=[24, 24, 80, 80], gpu_tflops=[80, 80, 300, 300])
    plan = CostModel(cluster).find_optimal_strategy(8192, 8192, 8192)
    plan.chunk_sizes            # rows or columns of each GPU, in proportion to what it computes

A plan by data sheets, before there is a machine. `calibrate` measures the rates of a machine that is there, and
`explain` compares with them all ways that the operations of this library have.

    seconds = max over GPUs of FLOPs / rate  +  bytes / bandwidth  +  messages x latency
    subject to  bytes held by GPU i <= its memory
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import psutil
import torch

from common.errors import UsageError
from common.launch.terminal import make_table, terminal
from common.tensors.balance import proportional

Strategy = Literal["row", "column", "block", "batch"]
STRATEGIES: tuple[Strategy, ...] = ("row", "column", "block", "batch")
MOST_OF_MEMORY = 0.8  # a single GPU is not filled further


@dataclass(frozen=True)
class ClusterConfig:
    """Hosts and their GPUs, one entry per GPU, the GPUs of a host beside each other.

    gpu_memory_gb: 10^9 bytes. gpu_tflops: 10^12 FLOP/s that products reach. Bandwidths: 10^9 B/s of a GPU to others
    on its host, and of a host to other hosts. Raises UsageError for lists of different lengths or numbers that are
    not positive.
    """

    num_nodes: int = 1
    gpu_memory_gb: Sequence[float] = (24.0,)
    gpu_tflops: Sequence[float] = (50.0,)
    intra_node_bandwidth: float = 50.0
    inter_node_bandwidth: float = 12.5
    network_latency_ms: float = 0.01

    def __post_init__(self) -> None:
        gpus = len(self.gpu_tflops)
        if len(self.gpu_memory_gb) != gpus or not gpus:
            raise UsageError(
                f"{len(self.gpu_memory_gb)} memories and {gpus} rates: give one of each for every GPU"
            )
        if self.num_nodes < 1 or gpus % self.num_nodes:
            raise UsageError(f"{gpus} GPUs on {self.num_nodes} hosts: give the same number on each")
        numbers = (
            *self.gpu_memory_gb,
            *self.gpu_tflops,
            self.intra_node_bandwidth,
            self.inter_node_bandwidth,
        )
        if min(numbers) <= 0 or self.network_latency_ms < 0:
            raise UsageError("memories, rates and bandwidths must be positive, and the latency not negative")

    @property
    def num_gpus(self) -> int:
        """GPUs of all hosts."""
        return len(self.gpu_tflops)

    @property
    def bandwidth(self) -> float:
        """B/s of the slowest link that a collective of all GPUs takes."""
        if self.num_nodes == 1:
            return self.intra_node_bandwidth * 1e9
        per_gpu = self.inter_node_bandwidth * self.num_nodes / self.num_gpus
        return min(self.intra_node_bandwidth, per_gpu) * 1e9

    @classmethod
    def from_auto_detect(cls, num_nodes: int = 1) -> ClusterConfig:
        """Return a cluster of hosts like this one: its GPUs, or its CPU as one, at a rate that is measured now."""
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")]
        memory = [
            torch.cuda.get_device_properties(d).total_memory if gpus else psutil.virtual_memory().available
            for d in devices
        ]
        rates = [_tflops(d) for d in devices]
        return cls(num_nodes, [m / 1e9 for m in memory] * num_nodes, rates * num_nodes)


def _tflops(device: torch.device) -> float:
    """Return 10^12 FLOP/s of a float32 product, the best of three."""
    n = 4096 if device.type == "cuda" else 1024
    a = torch.ones(n, n, device=device)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * n**3 / min(seconds[1:]) / 1e12


@dataclass(frozen=True)
class MatmulCost:
    """Seconds of a product, bytes on the GPU that holds most, and how good that is.

    speedup: against the fastest GPU alone. efficiency: of what all GPUs together would reach without communication.
    """

    compute: float
    comm: float
    memory: float
    total: float
    efficiency: float
    speedup: float
    feasible: bool


@dataclass(frozen=True)
class MatmulPlan:
    """A strategy, the dimension of the result that it cuts, each GPU's length there, its cost, and the grid.

    block: chunk_sizes has the rows of each row of the grid.
    """

    strategy: Strategy
    split_dim: int
    chunk_sizes: list[int]
    cost: MatmulCost
    grid: tuple[int, int] = field(default=(1, 1))


class CostModel:
    """Costs of [M, K] @ [K, N] on a cluster; `batch` is of that many such products."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.cluster = cluster

    def _grid(self) -> tuple[int, int]:
        n = self.cluster.num_gpus
        rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
        return rows, n // rows

    def _chunks(self, M: int, N: int, strategy: Strategy, batch: int) -> list[int]:
        rates = self.cluster.gpu_tflops
        if strategy == "block":
            rows, columns = self._grid()
            slowest = [min(rates[i * columns : (i + 1) * columns]) for i in range(rows)]
            return proportional(M, slowest)
        return proportional({"row": M, "column": N, "batch": batch}[strategy], rates)

    def estimate_matmul_cost(
        self, M: int, K: int, N: int, strategy: Strategy = "row", dtype_bytes: int = 4, batch: int = 1
    ) -> MatmulCost:
        """Return the cost of a strategy. The operands lie cut, and so does the result.

        row: every GPU has rows of A and of B; B is all-gathered, then each computes its rows of the result.
        column: every GPU has rows of A and columns of B; A is all-gathered.
        block: every GPU has a block of each; GPUs in a row gather A, GPUs in a column gather B.
        batch: every GPU has some of the products; nothing is sent.
        """
        if strategy not in STRATEGIES:
            raise UsageError(f"strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
        if min(M, K, N, batch, dtype_bytes) < 1:
            raise UsageError(f"[{M}, {K}] @ [{K}, {N}], batch {batch}: lengths must be at least 1")
        c, n = self.cluster, self.cluster.num_gpus
        chunks, (rows, columns) = self._chunks(M, N, strategy, batch), self._grid()
        whole = 2.0 * M * K * N * batch
        unit = whole / {"row": M, "column": N, "block": M * columns, "batch": batch}[strategy]
        flops = [chunks[i // columns if strategy == "block" else i] * unit for i in range(n)]
        compute = max(f / (rate * 1e12) for f, rate in zip(flops, c.gpu_tflops, strict=True))
        a, b, out = (x * batch * dtype_bytes for x in (M * K, K * N, M * N))
        gathered = {"row": b, "column": a, "block": a / rows + b / columns, "batch": 0}[strategy]
        sent = {
            "row": (n - 1) / n * b,
            "column": (n - 1) / n * a,
            "block": (columns - 1) / n * a + (rows - 1) / n * b,
            "batch": 0.0,
        }[strategy]
        messages = 0 if sent == 0 else math.ceil(math.log2(n))
        comm = sent / c.bandwidth + messages * c.network_latency_ms / 1e3
        kept = {"row": a + out, "column": b + out, "block": out, "batch": a + b + out}[strategy]
        held = [kept * f / whole + gathered for f in flops]
        feasible = all(h <= m * 1e9 for h, m in zip(held, c.gpu_memory_gb, strict=True))
        alone = whole / (max(c.gpu_tflops) * 1e12)
        ideal = whole / (sum(c.gpu_tflops) * 1e12)
        total = compute + comm
        return MatmulCost(compute, comm, max(held), total, ideal / total, alone / total, feasible)

    def find_optimal_strategy(
        self, M: int, K: int, N: int, dtype_bytes: int = 4, batch: int = 1
    ) -> MatmulPlan:
        """Return the fastest plan that fits. Raises UsageError if none does."""
        plans = [
            MatmulPlan(
                s,
                {"row": 0, "column": 1, "block": 0, "batch": 0}[s],
                self._chunks(M, N, s, batch),
                self.estimate_matmul_cost(M, K, N, s, dtype_bytes, batch),
                self._grid() if s == "block" else (self.cluster.num_gpus, 1),
            )
            for s in STRATEGIES
            if s != "batch" or batch > 1
        ]
        fits = [p for p in plans if p.cost.feasible]
        if not fits:
            least = min(plans, key=lambda p: p.cost.memory)
            raise UsageError(
                f"[{M}, {K}] @ [{K}, {N}]: no strategy fits; {least.strategy!r} needs least, "
                f"{least.cost.memory / 1e9:.1f} GB per GPU, and the smallest has {min(self.cluster.gpu_memory_gb):g} GB"
            )
        return min(fits, key=lambda p: p.cost.total)

    def should_use_distributed(self, M: int, K: int, N: int, dtype_bytes: int = 4) -> bool:
        """Return True if the product fills more than 80 % of the largest GPU, or several GPUs are faster than one."""
        held = (M * K + K * N + M * N) * dtype_bytes
        if held > MOST_OF_MEMORY * max(self.cluster.gpu_memory_gb) * 1e9:
            return True
        return any(
            cost.feasible and cost.speedup > 1
            for cost in (self.estimate_matmul_cost(M, K, N, s, dtype_bytes) for s in STRATEGIES[:3])
        )

    def print_analysis(self, M: int, K: int, N: int, dtype_bytes: int = 4, batch: int = 1) -> None:
        """Print the cost of every strategy."""
        rows = []
        for s in STRATEGIES:
            c = self.estimate_matmul_cost(M, K, N, s, dtype_bytes, batch)
            rows.append(
                (
                    s,
                    f"{c.compute * 1e3:.3f}",
                    f"{c.comm * 1e3:.3f}",
                    f"{c.total * 1e3:.3f}",
                    f"{c.memory / 1e9:.2f}",
                    f"{c.speedup:.2f}",
                    f"{c.efficiency:.0%}",
                    "" if c.feasible else "does not fit",
                )
            )
        heads = ("strategy", ">compute ms", ">comm ms", ">total ms", ">GB", ">speedup", ">efficiency", "")
        terminal().print(
            make_table(f"[{M}, {K}] @ [{K}, {N}] on {self.cluster.num_gpus} GPU(s)", heads, rows)
        )
