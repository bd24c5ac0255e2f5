"""Measure the rates of this machine: products, transforms, convolutions, copies, and moves between ranks.

    grid.rates = calibrate(grid)

    mpirun -np 2 --bind-to core python common/tensors/calibrate.py --write machine.json

Call `keep_freed_memory` first if the program does, as this one does: otherwise new memory is most of what large
operations cost. All ranks measure at once, so that they share memory and links as they do in an operation. Each time
is the median, over repeated calls, of the slowest rank's seconds.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from scipy.optimize import nnls
from torch import Tensor

from common import comm
from common.comm import Group, ledger
from common.errors import UsageError
from common.launch.command_line import check_folder
from common.launch.runtime import Runtime
from common.lesson.runner import DTYPES, LessonOptions, console, run
from common.tensors.grid import Grid
from common.tensors.rates import (
    LINES,
    Rates,
    Term,
    convolution_features,
    product_features,
    transform_curve,
    transform_work,
)
from common.tensors.slab import height_of, transformed
from common.tensors.trials import SEEN, TRIALS, corrected, draw, times_of
from common.utils.pages import keep_freed_memory, new_empty, new_result

SHAPES = (  # (batch, m, k, n): small and large, thin in each direction, as the parts of split products are
    *((1, n, n, n) for n in (32, 64, 128, 256, 512, 1024, 1536)),
    *(
        (1, 64, 2048, 2048),
        (1, 2048, 64, 2048),
        (1, 2048, 2048, 64),
        (1, 256, 2048, 256),
        (1, 512, 1024, 2048),
    ),
    *((1, 1, 2048, 2048), (1, 2048, 2048, 1), (1, 2048, 8, 2048), (1, 8, 2048, 2048), (1, 3072, 256, 3072)),
    *((16, 64, 64, 64), (16, 128, 256, 128), (256, 16, 32, 16), (8, 256, 256, 256)),
)
LENGTHS = (8, 32, 128, 512, 1024, 2048, 4096, 16384, 65536, 1 << 18, 1 << 20)
BYTES = tuple(1 << k for k in range(6, 28, 2))
Clock = Callable[[Callable[[], object]], float]  # median seconds of a call
PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 31, 37, 47, 61, 79, 101, 113, 127, 131, 167, 211, 307, 503, 1009, 2003)
IMAGES = (  # (images, channels in, channels out, side, kernel)
    *((2, 16, 16, 48, 3), (8, 16, 16, 96, 3), (4, 32, 32, 64, 3), (2, 64, 64, 24, 3), (4, 64, 64, 96, 3)),
    *((4, 8, 32, 64, 3), (4, 32, 8, 64, 3), (2, 24, 24, 40, 3), (8, 64, 32, 48, 3), (2, 32, 64, 32, 3)),
    *((4, 32, 32, 64, 1), (2, 32, 32, 48, 5), (1, 128, 128, 32, 3)),
)


def measured(call: Callable[[], object], group: Group, least: int = 5, seconds: float = 0.15) -> float:
    """Return the median seconds of a call that all ranks make at once; the slowest rank's."""
    times: list[float] = []
    began, elapsed = time.perf_counter(), 0.0
    while len(times) < least + 1 or (elapsed < seconds and len(times) < 200):
        comm.barrier(group)
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - start, time.perf_counter() - began], dtype=torch.float64)
        comm.all_reduce(took, group, "max")  # all ranks see the same times, and stop together
        times.append(float(took[0]))
        elapsed = float(took[1])
    return statistics.median(times[1:])


def fitted(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the coefficients, none negative, whose sums of features differ least from the times, relatively."""
    A = np.array(features) / np.array(seconds)[:, None]
    scale = A.max(0) + 1e-300
    found, _ = nnls(A / scale, np.ones(len(seconds)))
    return tuple(float(x) for x in found / scale)


def calibrate(
    grid: Grid,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: str = "cpu",
    seconds: float = 0.15,
    largest: int = 1 << 26,
    trials: int = TRIALS,
) -> Rates:
    """Return the rates of this machine's ranks, the same on all; memory: what is free, shared by the ranks here.

    dtypes: of products and convolutions; transforms are measured in their complex type. seconds: for which each of
    about 150 calls of one dtype, and 90 of each further one, is repeated, five times at least. largest: bytes of the
    largest tensors. trials: random operations from which to correct for what terms in a loop do not show. All ranks
    call it.

    Raises UsageError if `largest` is less than 2^18 numbers have.
    """
    least = max(dtype.itemsize for dtype in dtypes) << 18
    if largest < least:
        raise UsageError(f"calibrate: largest={largest}: give at least {least} bytes")
    group, sizes = grid.world, [n for n in BYTES if n <= largest]
    clock = partial(measured, group=group, seconds=seconds)
    with grid.operation(f"calibrate({dtypes})"), ledger.uncounted(), torch.no_grad():
        grid.meet()
        products: dict[str, tuple[float, ...]] = {}
        convolutions: dict[str, tuple[float, ...]] = {}
        curves: dict[str, list[tuple[float, float]]] = {}
        for dtype in dtypes:
            kind, item = str(dtype).removeprefix("torch."), dtype.itemsize
            shapes = [s for s in SHAPES if max(product_features(s, dtype)[2:4]) <= largest]
            times = [clock(_product(s, dtype, device)) for s in shapes]
            products[kind] = fitted([product_features(s, dtype) for s in shapes], times)
            if dtype.is_complex:
                continue
            images = [i for i in IMAGES if 2 * i[0] * max(i[1:3]) * i[3] ** 2 * item <= largest]
            convolutions[kind] = fitted(
                [convolution_features(_sizes(i), dtype) for i in images],
                [clock(_convolution(i, dtype, device)) for i in images],
            )
            curves |= _transforms(dtype.to_complex(), largest, device, clock)
        curves["copy"] = [(n, clock(_cold(partial(_copy, n // 2, device), n, 256 << 20))) for n in sizes]
        if group.size > 1:
            for name in ("exchange", "all-gather", "reduce-scatter", "all-reduce"):
                make = partial(_move, name, device=device, group=group)
                curves[name] = [(n, clock(_cold(partial(make, n), n))) for n in sizes]
        rates = comm.everyones(Rates(_free(device, group), products, convolutions, curves), group)[0]
    if not trials:
        return rates
    before, grid.rates = grid.rates, rates
    try:
        seen = draw(grid, trials, SEEN, device)
        return corrected(rates, seen, times_of(seen, rounds=5))
    finally:
        grid.rates = before


def _free(device: str, group: Group) -> float:
    """Return the least free memory of a rank, where ranks share a host's memory, or a GPU's, equally."""
    place, free = (platform.node(), -1), psutil.virtual_memory().available
    if device.startswith("cuda"):
        place, free = (platform.node(), torch.cuda.current_device()), torch.cuda.mem_get_info()[0]
    found = comm.everyones((place, free), group)
    places = [at for at, _ in found]
    return min(float(there) / places.count(at) for at, there in found)


def _product(sizes: Sequence[int], dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    b, m, k, n = sizes
    x, y = torch.ones(b, m, k, dtype=dtype, device=device), torch.ones(b, k, n, dtype=dtype, device=device)
    if b == 1:
        return lambda: torch.mm(x[0], y[0])
    return lambda: torch.bmm(x, y)


def _cold(
    make: Callable[[], Callable[[], object]], nbytes: int, total: int = 16 << 20
) -> Callable[[], object]:
    """Return a call that takes other operands each time, so that they lie in no near cache, as in an operation.

    total: bytes of all operands.
    """
    calls = itertools.cycle([make() for _ in range(max(1, min(64, total // nbytes)))])
    return lambda: next(calls)()


def _sizes(image: Sequence[int]) -> tuple[int, ...]:
    images, given, made, side, kernel = image
    return images, given, made, side**2, kernel**2


def _convolution(image: Sequence[int], dtype: torch.dtype, device: str) -> Callable[[], Tensor]:
    images, given, made, side, kernel = image
    x = torch.ones(images, given, side, side, dtype=dtype, device=device)
    w = torch.ones(made, given, kernel, kernel, dtype=dtype, device=device)
    return lambda: torch.conv2d(x, w, padding=kernel // 2)


def _transforms(
    dtype: torch.dtype, largest: int, device: str, clock: Clock
) -> dict[str, list[tuple[float, float]]]:
    """Return the curves of transforms: by length, in bands, by largest prime factor, and of numbers that are apart."""

    def per_flop(n: int, banded: bool = False, apart: int = 1) -> float:
        rows = max(1, min(1 << 20, largest // dtype.itemsize) // n // apart)
        x = torch.ones(rows, n, apart, dtype=dtype, device=device)
        call: Callable[[], object] = partial(torch.fft.fft, x, dim=1)
        if banded:
            bands = x[..., 0].split(height_of(n, dtype.itemsize))
            call = partial(_in_bands, bands)
        return clock(call) / transform_work(rows * apart, n)

    found: dict[str, list[tuple[float, float]]] = {}
    alone = Rates(curves=found)

    def rate(n: int) -> float:
        return alone.seconds(Term("transform", (1, n, 1), dtype)) / transform_work(1, n)

    lengths = [n for n in LENGTHS if n * dtype.itemsize <= largest]
    for banded in (False, True) if device == "cpu" else (False,):
        found[transform_curve(dtype, banded)] = [(float(n), per_flop(n, banded)) for n in lengths]
    primes = [(p, p << max(0, (1024 // p).bit_length() - 1)) for p in PRIMES]
    by_prime = [(float(p), per_flop(n) / rate(n)) for p, n in primes]
    found[f"{transform_curve(dtype)} primes"] = [(2.0, 1.0), *by_prime]
    middle = [n for n in lengths if 32 <= n <= 4096]
    for how, apart in (("aligned", LINES), ("apart", LINES + 8)):
        found[f"{transform_curve(dtype)} {how}"] = [
            (float(n), per_flop(n, apart=apart * max(1, n // LINES)) / rate(n)) for n in middle
        ]
    return found


def _in_bands(bands: Sequence[Tensor]) -> None:
    for band in bands:
        transformed(band, "fft", "backward")


def _copy(half: int, device: str) -> Callable[[], Tensor]:
    """Return a copy of that many bytes: columns of a matrix, as in most operations."""
    width = min(half, 1024)
    x = torch.ones(half // width, 2, width, dtype=torch.uint8, device=device)
    return lambda: x[:, 0].contiguous()


def _move(name: str, nbytes: int, device: str, group: Group) -> Callable[[], object]:
    """Return a call in which each rank sends that many bytes."""
    n = group.size
    each = max(1, nbytes // (n - 1) // 4)  # float32 numbers of a piece
    whole = torch.ones(n * each, device=device)
    if name == "all-reduce":
        part = torch.ones(max(1, nbytes * n // (2 * (n - 1)) // 4), device=device)
        return lambda: comm.all_reduce(part, group)
    if name == "all-gather":
        return lambda: comm.all_gather_into(
            new_empty((n * each,), torch.float32, device), whole[:each], group
        )
    if name == "reduce-scatter":
        return lambda: comm.reduce_scatter_into(new_empty((each,), torch.float32, device), whole, group)
    width = min(each, 256)  # columns of a matrix go, as in most moves
    columns = whole[: each // width * width * n].view(-1, n, width)
    shape, where = (n * len(columns), width), torch.device(device)
    return lambda: comm.all_to_all_views(
        new_result(shape, torch.float32, where, group).chunk(n), columns.unbind(1), group
    )


@dataclass
class CalibrateOptions(
    LessonOptions, without=("steps", "seed", "data", "json", "trace", "plot", "debug", "check", "dtype")
):
    """Options of the calibration."""

    write: Path = Path("machine.json")
    """File for the rates, as JSON; `Rates.load` reads it."""


def main(rt: Runtime, o: CalibrateOptions) -> bool:
    """Measure, and write the rates on rank 0."""
    check_folder("write", o.write, o.write.absolute().parent)
    keep_freed_memory()
    console(rt).print("Measuring for about a minute, longer on a busy machine.")
    rates = calibrate(Grid(rt.world), list(DTYPES.values()), rt.device.type)
    if rt.rank == 0:
        rates.save(o.write)
    console(rt).print(f"{o.write}: rates of {rt.world_size} rank(s)")
    return True


if __name__ == "__main__":
    run(main, CalibrateOptions)
