"""Speed of one core in a matrix product, with each BLAS that the course computes with.

    python common/benchmarks/peaks.py

PyTorch and C++ on LibTorch use torch's BLAS, C++ on MPI uses the other one. If one uses wider vector
instructions, as OpenBLAS may on a machine where MKL does not, a language is faster for that reason alone; so
the report compares each implementation with the peak of its own BLAS. The peak is the fastest of five
products.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

SIZE, ROUNDS = 1536, 5
Peaks = dict[str, dict[str, float]]  # BLAS -> type -> floating-point operations per second of one core


def products() -> dict[str, Callable[[Any, Any], object]]:
    """Return the product of each BLAS on one core; without C++'s if the module is not built."""
    torch.set_num_threads(1)
    found: dict[str, Callable[[Any, Any], object]] = {
        "torch": lambda a, b: torch.from_numpy(a) @ torch.from_numpy(b)
    }
    try:
        blas = importlib.import_module("fived").blas
    except ImportError:
        return found
    blas.set_threads(1)
    return found | {"C++": blas.gemm}


def measure(size: int = SIZE) -> Peaks:
    """Time the products of all BLASes in turn."""
    peaks: Peaks = {}
    for dtype in ("float32", "float64"):
        a, b = np.random.default_rng(0).standard_normal((2, size, size)).astype(dtype)
        for _ in range(ROUNDS):
            for blas, product in products().items():
                start = time.perf_counter()
                product(a, b)
                rate = 2 * size**3 / (time.perf_counter() - start)
                of = peaks.setdefault(blas, {})
                of[dtype] = max(rate, of.get(dtype, 0.0))
    return peaks


def measured(env: Mapping[str, str], timeout: float) -> Peaks:
    """`measure` in a process of its own, in the environment of the runs. Empty if it fails or exceeds `timeout` s."""
    command = [sys.executable, __file__, "--json"]
    try:
        said = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=timeout).stdout
        return dict(json.loads(said))
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}


if __name__ == "__main__":
    peaks = measure()
    if "--json" in sys.argv:
        print(json.dumps(peaks))
    else:
        for blas, by_type in peaks.items():
            for dtype, rate in by_type.items():
                print(f"{blas:7}{dtype}  {rate / 1e9:7.1f} GFLOP/s")
