"""Random numbers by position, without a state: number k of a stream is a function of (seed, stream, k).

Any rank can make any part of a tensor alone, in any order, and a resumed run needs no saved state (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", 2011). The bits come from the finaliser of splitmix64
(Steele, Lea and Flood, 2014); cpp/include/fived/math/random.hpp makes the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bits = NDArray[np.uint64]
Floats = NDArray[np.float64]

GOLDEN = 0x9E3779B97F4A7C15
CHUNK = 1 << 15  # numbers made at a time, so that the temporaries stay in cache


def mix(z: ArrayLike) -> Bits:
    """Apply the finaliser of splitmix64: a bijection of 64-bit numbers, any shape."""
    z = np.array(z, np.uint64, ndmin=1)  # integer overflow wraps around silently in arrays; scalars warn
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def bits(seed: int, stream: int, index: ArrayLike) -> Bits:
    """Return 64 random bits per index (non-negative integers of any shape; a scalar gives shape [1])."""
    index = np.array(index, np.uint64, ndmin=1)
    key = mix((seed * GOLDEN + stream + GOLDEN) % 2**64)
    return mix(key + index * np.uint64(GOLDEN))


def uniform(seed: int, stream: int, index: ArrayLike) -> Floats:
    """Return numbers in [0, 1), multiples of 2^-53."""
    return (bits(seed, stream, index) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normal(seed: int, stream: int, index: ArrayLike) -> Floats:
    """Return standard normal numbers (Box and Muller, 1958): number k uses uniform numbers 2k and 2k + 1."""
    index = np.array(index, np.uint64, ndmin=1)
    even = index << np.uint64(1)
    radius: Floats = np.sqrt(-2 * np.log(1 - uniform(seed, stream, even)))  # 1 - u lies in (0, 1]
    angle = 2 * np.pi * uniform(seed, stream, even + np.uint64(1))
    radius *= np.cos(angle)
    return radius


def normals(seed: int, stream: int, count: int) -> Floats:
    """Return numbers 0 to count - 1 of a normal stream, shape [count]."""
    out = np.empty(count)
    for lo in range(0, count, CHUNK):
        hi = min(lo + CHUNK, count)
        out[lo:hi] = normal(seed, stream, np.arange(lo, hi, dtype=np.uint64))
    return out


def stream_of(name: str) -> int:
    """Return the stream of a name: the first 8 bytes of its SHA-256, little-endian."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
