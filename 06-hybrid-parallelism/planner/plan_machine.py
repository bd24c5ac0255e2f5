"""A machine as numbers: what a rank computes, holds and sends in a second. Read from a TOML file in machines/.

    machine = read_machine("a100-80gb")           # or the path of a file of your own
    machine.product(4096, 12288, 4096, "bfloat16")      # seconds of a matrix product
    machine.links.all_reduce(nbytes, Ring(8, inside=8)) # seconds of an all-reduce over eight ranks of one host

A product takes its arithmetic at the rate that large ones sustain, the traffic of its three matrices, and a start;
an operation that only moves memory takes its traffic. The host needs `launch` seconds for each operation: where that
is more than the device needs, the host sets the pace.

A collective among n ranks takes time for its messages and its bytes (Thakur et al., "Optimization of collective
communication operations in MPICH", 2005). Inside a host both come from a curve measured for some numbers of ranks.
Between hosts the ranks of one host share its network cards, and a small message goes through a tree.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from common.errors import UsageError

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

FOLDER = Path(__file__).with_name("machines")
SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number


@dataclass(frozen=True)
class Ring:
    """Ranks of a collective: how many, and how many of them are on one host."""

    size: int
    inside: int


@dataclass(frozen=True)
class Links:
    """Links of a host's ranks to one another, and to other hosts.

    inside: number of ranks -> (latency of an all-reduce in s, bandwidth in B/s), by nccl-tests' bus bandwidth.
    """

    ranks_per_host: int
    inside: Mapping[int, tuple[float, float]]
    host_bandwidth: float
    """B/s that a host sends to others, through all its network cards."""
    efficiency: float
    """Share of host_bandwidth that collectives reach."""
    latency: float
    """Seconds of a message between hosts."""

    def curve(self, ranks: int) -> tuple[float, float]:
        """Return latency and bandwidth of that many ranks of one host: those of the nearest measured number."""
        return self.inside[min(self.inside, key=lambda n: (abs(n - ranks), n))]

    def share(self, inside: int) -> float:
        """Return the B/s that so many ranks of a host send to other hosts while all others send as well."""
        return self.host_bandwidth * self.efficiency * inside / self.ranks_per_host

    def all_reduce(self, nbytes: float, ring: Ring) -> float:
        """Return the seconds to sum `nbytes` over all ranks."""
        n = ring.size
        if n == 1:
            return 0.0
        latency, bandwidth = self.curve(ring.inside)
        if ring.inside < n:
            latency, bandwidth = 2 * math.log2(n) * self.latency, min(self.share(ring.inside), bandwidth)
        return latency + 2 * (n - 1) / n * nbytes / bandwidth

    def gather(self, nbytes: float, ring: Ring) -> float:
        """Return the seconds to all-gather or reduce-scatter `nbytes` in all: half of an all-reduce."""
        return self.all_reduce(nbytes, ring) / 2

    def all_to_all(self, nbytes: float, ring: Ring) -> float:
        """Return the seconds in which each rank sends `nbytes`, an equal part to each rank, itself included."""
        n = ring.size
        if n == 1:
            return 0.0
        latency, bandwidth = self.curve(ring.inside)
        near = latency / 2 + (ring.inside - 1) / n * nbytes / bandwidth
        if ring.inside == n:
            return near
        return max(near, self.latency + (n - ring.inside) / n * nbytes / self.share(1))

    def send(self, nbytes: float, far: bool) -> float:
        """Return the seconds of a message to the next rank; far: on another host."""
        if far:
            return self.latency + nbytes / self.share(1)
        latency, bandwidth = self.curve(2)
        return latency / 2 + nbytes / bandwidth


@dataclass(frozen=True)
class Machine:
    """Rates of one rank of a machine, and its links."""

    name: str
    memory: float
    """Bytes that a rank can hold."""
    bandwidth: float
    """B/s of that memory, by its data sheet or as calibrate.py measured it."""
    peak: Mapping[str, float]
    """FLOP/s of products by type, by the data sheet or as calibrate.py measured it."""
    sustained_products: float
    """Share of the peak that large products reach."""
    sustained_memory: float
    """Share of the bandwidth that operations reach."""
    start: float
    """Seconds of a product beyond its arithmetic and its traffic."""
    launch: float
    """Seconds of the host per operation, forward or backward."""
    launch_collective: float
    """Seconds of the host per collective."""
    step: float
    """Seconds of a step that depend on no size."""
    links: Links = field(repr=False)
    reserved: float = 0.0
    """Bytes of `memory` that the driver, the libraries' buffers and fragments take."""
    sustained_attention: float | None = None
    """Share of the peak that attention in one kernel reaches, all scores counted; default: as other products."""
    at_once: float = math.inf
    """Ranks of a host that its cores serve at full rate, perhaps with a fraction. Default: all."""
    source: str = ""

    @property
    def overlaps(self) -> bool:
        """True if messages travel while ranks compute: not where sending takes the same cores."""
        return math.isinf(self.at_once)

    def slowdown(self, ranks: int) -> float:
        """Return how much longer everything takes while so many ranks, or all of a host, share its cores."""
        return max(1.0, min(ranks, self.links.ranks_per_host) / self.at_once)

    def product(
        self, rows: float, columns: float, inner: float, dtype: str, count: float = 1, attention: bool = False
    ) -> float:
        """Return the seconds of `count` products [rows, inner] x [inner, columns] in one call.

        attention: they are those of attention, in one kernel.
        """
        share = self.sustained_products
        if attention and self.sustained_attention is not None:
            share = self.sustained_attention
        arithmetic = 2 * rows * columns * inner / (self.peak[dtype] * share)
        numbers = rows * inner + inner * columns + rows * columns
        return self.start + count * (arithmetic + self.moved(SIZES[dtype] * numbers))

    def moved(self, nbytes: float) -> float:
        """Return the seconds to read and write `nbytes` in all."""
        return nbytes / (self.bandwidth * self.sustained_memory)


def names() -> list[str]:
    """Return the names of the machines that are shipped."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def read_machine(name: str) -> Machine:
    """Return a shipped machine, by name, or one described in a file.

    Raises UsageError if there is none, or where the file lacks a number or has one that is out of range.
    """
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not file.is_file():
        raise UsageError(f"--machine {name}: choose one of {', '.join(names())}, or give a .toml file")
    try:
        told = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    return Machine(name=str(told.pop("name", file.stem)), **_numbers(Machine, told, str(file)))


def _numbers(kind: type, told: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of `kind` found in a table. Raises UsageError for one that is missing, unknown or negative."""
    known = {f.name: f.default for f in fields(kind) if f.name != "name"}
    for key in told:
        if key not in known:
            raise UsageError(
                f"{where}: {key} is no number of a machine; these are: {', '.join(sorted(known))}"
            )
    found: dict[str, Any] = {}
    for key, default in known.items():
        if key not in told and default is not MISSING:
            continue
        value = told.get(key)
        if value is None:
            raise UsageError(f"{where} lacks {key}; machines/a100-80gb.toml shows all numbers")
        if key == "links":
            value = Links(**_numbers(Links, _table(value, key, where), f"{where}, [links]"))
        elif key == "inside":
            table = _table(value, key, where).items()
            value = {_count(n, f"{where}: inside", 2): _pair(pair, f"inside.{n}", where) for n, pair in table}
        elif key == "peak":
            table = _table(value, key, where).items()
            value = {dtype: _number(rate, f"peak.{dtype}", where) for dtype, rate in table}
        elif key == "ranks_per_host":
            value = _count(str(value), f"{where}: {key}", 1)
        elif key != "source":
            value = _number(value, key, where)
        found[key] = value
    return found


def _table(value: object, key: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        raise UsageError(f"{where}: {key} is a table of numbers, as in machines/a100-80gb.toml")
    return value


def _count(text: str, where: str, least: int) -> int:
    if not (text.isdecimal() and len(text) < 7 and int(text) >= least):
        raise UsageError(f"{where}: {text:.20} is no number of ranks, which is at least {least}")
    return int(text)


def _pair(value: object, key: str, where: str) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{where}: {key} is a latency in s and a bandwidth in B/s, such as [50e-6, 200e9]")
    return _number(value[0], key, where), _number(value[1], key, where)


SHARES = ("efficiency", "sustained_products", "sustained_memory")  # at most 1
FIRST = {"at_once": 1.0, "bandwidth": 1e3, "host_bandwidth": 1e3, "memory": 1e6}  # least values; else above 0
ZERO = ("reserved", "step", "launch", "launch_collective", "start")


def _number(value: object, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e30 < value < 1e30:
        raise UsageError(f"{where}: {key} is a number, not {value!r:.40}")
    least, most = FIRST.get(key, 0 if key in ZERO else 1e-12), 1 if key in SHARES else 1e30
    if not least <= value <= most:
        what = (
            f"at least {least:g}"
            if value < least and least >= 1
            else "above 0"
            if value < least
            else "at most 1"
        )
        raise UsageError(f"{where}: {key} must be {what}, not {value:g}")
    return float(value)
