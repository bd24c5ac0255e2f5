"""Terms of an operation, and the seconds that a rank of this machine needs for each.

rates = Rates()                    # round figures of a laptop, enough to choose by
rates = calibrate(grid)            # of this machine, see calibrate.py
rates.save("machine.json"); grid.rates = Rates.load("machine.json")
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from common.errors import UsageError

ARITHMETIC = {"product", "convolution", "transform"}
LINES = 256  # strides that are multiples of so many numbers map to few lines of the cache


@dataclass(frozen=True)
class Term:
    """One step of a way on the rank that has most to do.

    kind and sizes:

        product      (batch, m, k, n)       batched matrix product
        convolution  (images, channels in, channels out, places, kernel)   of one group: numbers per image and channel
        transform    (rows, length, apart)  complex Fourier transforms of numbers that are so far apart in memory
        copy         (bytes,)               read and written in memory, each byte counted once
        exchange     (bytes sent, messages) all-to-all with a piece that stays, halos, shifts between neighbours
        all-gather   (bytes sent,)
        reduce-scatter  (bytes sent,)
        all-reduce   (bytes sent,)
    """

    kind: str
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    times: int = 1
    hidden: bool = False
    """True if it travels while the way's arithmetic goes on."""
    banded: bool = False
    """True for a transform whose rows are copied into the cache, band by band; see `slab`."""


def product_features(sizes: Sequence[int], dtype: torch.dtype) -> tuple[float, ...]:
    """Return what a batched product's time is linear in: its start, real FLOPs, bytes read, and bytes written."""
    b, m, k, n = sizes
    flops = 2.0 * b * m * k * n * (4 if dtype.is_complex else 1)
    return 1.0, flops, float(b * (m * k + k * n) * dtype.itemsize), float(b * m * n * dtype.itemsize)


def convolution_features(sizes: Sequence[int], dtype: torch.dtype) -> tuple[float, ...]:
    """Return what a convolution's time is linear in: its start, FLOPs, bytes read and bytes written.

    Kernels take channels in blocks of 16: fewer cost as many.
    """
    images, given, made, places, kernel = sizes
    wide_given, wide_made = (-(-c // 16) * 16 for c in (given, made))
    flops = 2.0 * images * wide_given * wide_made * places * kernel
    numbers = images * given * places + given * made * kernel, images * made * places
    return 1.0, flops, *(float(n * dtype.itemsize) for n in numbers)


def transform_work(rows: int, length: int) -> float:
    """Return the FLOPs of complex transforms by the usual count, 5 n log2 n each."""
    return 5.0 * rows * length * math.log2(max(length, 2))


def transform_curve(dtype: torch.dtype, banded: bool = False) -> str:
    """Return the name of the curve of transforms of this complex type; banded: of those of `slab`, in bands of rows."""
    name = f"transform {str(dtype).removeprefix('torch.')}"
    return f"{name} in bands" if banded else name


def largest_prime(n: int) -> int:
    """Return the largest prime factor of n, 2 for n = 1; the time of a transform per FLOP depends on it."""
    found, p = 2, 2
    while n > 1:
        if p * p > n:
            return max(found, n)
        if n % p:
            p += 1
        else:
            n, found = n // p, p
    return found


@dataclass(frozen=True)
class Rates:
    """Speeds and memory of a rank, equal on all ranks.

    products, convolutions: per dtype, seconds for each of `product_features` and `convolution_features`.

    curves: points (amount, seconds), between which it is interpolated on logarithmic axes. Of moves and copies the
    amount is bytes. Of a transform it is the length, a power of two, and the seconds are those of a FLOP. Transforms in
    bands have their own curve. Three further curves of transforms hold factors instead of seconds: "primes", of a
    length with this largest prime factor; "aligned", of numbers that lie a multiple of LINES apart; "apart", of others
    that are not neighbours. The last two are 1.5 where they were not measured.

    corrections: by kind, the factor from a term that is measured alone to the same term in an operation; "move",
    seconds that each message takes beyond its term; "way product" and its like, seconds that each way with such
    arithmetic takes beyond its terms; "hidden", the share of min(arithmetic, hidden messages) that is not saved.
    memory: bytes that an operation may need beyond its operands.
    """

    memory: float = math.inf
    products: Mapping[str, Sequence[float]] = field(default_factory=dict)
    convolutions: Mapping[str, Sequence[float]] = field(default_factory=dict)
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    corrections: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, term: Term) -> float:
        """Return the predicted seconds of a term."""
        kind, wide = str(term.dtype).removeprefix("torch."), term.dtype.to_real().itemsize / 4
        if term.kind == "product":
            default: tuple[float, ...] = (2e-6, wide / 50e9, 1 / 20e9, 1 / 10e9)
            features = product_features(term.sizes, term.dtype)
            one = sum(f * c for f, c in zip(features, self.products.get(kind, default), strict=True))
        elif term.kind == "transform":
            rows, length, apart = term.sizes
            name = transform_curve(term.dtype)
            banded = transform_curve(term.dtype, term.banded)
            rate = self._curve(banded if banded in self.curves else name, length, wide / 4e9)
            rate *= self._curve(f"{name} primes", largest_prime(length), 1.0)
            if apart > 1:
                rate *= self._curve(f"{name} {'apart' if apart % LINES else 'aligned'}", length, 1.5)
            one = transform_work(rows, length) * rate
        elif term.kind == "convolution":
            default = (5e-6, wide / 50e9, 1 / 20e9, 1 / 10e9)
            features = convolution_features(term.sizes, term.dtype)
            one = sum(f * c for f, c in zip(features, self.convolutions.get(kind, default), strict=True))
        elif term.kind == "copy":
            one = self._curve("copy", term.sizes[0], 1e-6 + term.sizes[0] / 8e9)
        else:
            one = self._curve(term.kind, term.sizes[0], 20e-6 + term.sizes[0] / 5e9)
        return term.times * one * self.corrections.get(term.kind, 1.0)

    def _curve(self, name: str, amount: float, default: float) -> float:
        points = self.curves.get(name)
        if not points:
            return default
        x, y = np.log(np.maximum(np.array(points, float), 1e-30)).T
        at = math.log(max(amount, 1e-30))
        if at > x[-1] and not name.startswith("transform"):
            return float(np.exp(y[-1] + at - x[-1]))  # beyond what was measured, in proportion
        return float(np.exp(np.interp(at, x, y)))

    def predict(self, terms: Sequence[Term]) -> float:
        """Return the predicted seconds of an operation; what travels meanwhile counts beyond the arithmetic."""
        hidden = sum(self.seconds(t) for t in terms if t.hidden)
        shown = [t for t in terms if not t.hidden]
        work = sum(self.seconds(t) for t in shown if t.kind in ARITHMETIC)
        rest = sum(self.seconds(t) for t in shown if t.kind not in ARITHMETIC)
        moves = sum(t.times for t in terms if t.kind not in ARITHMETIC and t.kind != "copy")
        begun = moves * self.corrections.get("move", 0.0)
        begun += sum(
            self.corrections.get(f"way {kind}", 0.0) for kind in {t.kind for t in terms} & ARITHMETIC
        )
        return begun + rest + max(work, hidden) + self.corrections.get("hidden", 0.0) * min(work, hidden)

    def save(self, path: str | Path) -> None:
        """Write the rates as JSON."""
        about = asdict(self) | {"memory": None if math.isinf(self.memory) else self.memory}
        Path(path).write_text(json.dumps(about, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """Return the rates of a JSON file that `save` wrote, or of a machine's TOML file of the planner.

        A planner's file has the rates of products and the links. Raises UsageError for any other file.
        """
        path = Path(path)
        try:
            if path.suffix == ".toml":
                return _of_planner(path.read_text())
            about = json.loads(path.read_text())
            memory = math.inf if about["memory"] is None else float(about["memory"])
            products, convolutions = (
                {kind: tuple(map(float, c)) for kind, c in about[name].items()}
                for name in ("products", "convolutions")
            )
            if any(len(c) != 4 for c in (*products.values(), *convolutions.values())) or not memory >= 0:
                raise ValueError("it has other numbers; calibrate again")
            curves = {
                kind: [(float(n), float(s)) for n, s in points] for kind, points in about["curves"].items()
            }
            corrections = {kind: float(c) for kind, c in about["corrections"].items()}
            return cls(memory, products, convolutions, curves, corrections)
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}; calibrate.py --write makes the file") from None
        except (AttributeError, KeyError, ValueError, TypeError) as error:
            raise UsageError(f"{path}: not the rates of a machine: {error}") from None


def _of_planner(text: str) -> Rates:
    import importlib
    import sys

    about = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)
    moved = 1 / (about["bandwidth"] * about["sustained_memory"])
    flops = {kind: 1 / (peak * about["sustained_products"]) for kind, peak in about["peak"].items()}
    products = {kind: (about["start"], each, moved, moved) for kind, each in flops.items()}
    inside = about["links"]["inside"]
    latency, bandwidth = inside[min(inside, key=int)]
    line = [(n, latency + n / bandwidth) for n in (1.0, 1e4, 1e6, 1e8, 1e10)]
    curves = dict.fromkeys(("exchange", "all-gather", "reduce-scatter", "all-reduce"), line)
    curves["copy"] = [(n, about["launch"] + n * moved) for n in (1.0, 1e4, 1e6, 1e8, 1e10)]
    return Rates(about["memory"], products, curves=curves)
