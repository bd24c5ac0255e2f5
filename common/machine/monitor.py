"""The load of a machine, now: GPUs by the driver; processors, memory and network everywhere.

    python -m common.machine monitor                        # a table that changes every second; Ctrl-C ends it
    python -m common.machine monitor --seconds 60 --json load.jsonl
    ssh node1 python -m common.machine monitor --plain      # a line per sample

The title states the monitor's own load: its processor time over the time that has passed.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import psutil
from rich.live import Live
from rich.table import Table

from common.errors import UsageError
from common.launch.command_line import Checked, Within, parse
from common.launch.program import run_program
from common.launch.terminal import make_table, terminal
from common.machine.facts import read_gpu
from common.machine.source import Source

NVLINK_KIB = (
    138,
    139,
)  # NVML's fields of sent and received data, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX
Counts = tuple[float, list[int]]  # seconds, counters


@dataclass
class MonitorOptions(Checked):
    """Options of the monitor."""

    every: Annotated[float, Within(0.05, 3600)] = 1.0
    """Seconds between samples."""
    seconds: Annotated[float, Within(0.05, 1e9)] | None = None
    """Time after which it ends; default: at Ctrl-C."""
    json: Path | None = None
    """File to which each sample is appended, one JSON object per line."""
    plain: bool = False
    """Print a line per sample instead of a table that changes; so too into a pipe."""


class Monitor:
    """Samples of a machine. Rates are since the sample before."""

    def __init__(self, source: Source) -> None:
        self.source, self.began, self.cpu = source, time.monotonic(), time.process_time()
        self.gpus = source.nvml("DeviceGetCount") or 0
        self.network, self.at = psutil.net_io_counters(), time.monotonic()
        self.links: dict[int, Counts] = {}
        psutil.cpu_percent()

    def sample(self) -> dict[str, Any]:
        """Return the load now; GB/s of PCIe are those that the driver counts over 20 ms."""
        self.source.again()
        network, at = psutil.net_io_counters(), time.monotonic()
        passed = max(at - self.at, 1e-6)
        sent, received = (
            (new - old) / passed / 1e9
            for new, old in (
                (network.bytes_sent, self.network.bytes_sent),
                (network.bytes_recv, self.network.bytes_recv),
            )
        )
        self.network, self.at = network, at
        memory = psutil.virtual_memory()
        return {
            "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
            "cpu_percent": psutil.cpu_percent(),
            "memory_used_gib": memory.used / 2**30,
            "memory_gib": memory.total / 2**30,
            "network_sent_gb_s": sent,
            "network_received_gb_s": received,
            "gpus": [self._gpu(i) for i in range(self.gpus)],
            "own_load_percent": 100 * (time.process_time() - self.cpu) / max(at - self.began, 1e-6),
        }

    def _gpu(self, i: int) -> dict[str, Any]:
        gpu = read_gpu(self.source, i)
        pcie = [self.source.nvml("DeviceGetPcieThroughput", i, kind) for kind in (0, 1)]
        links = self.source.nvml("DeviceGetFieldValues", i, *NVLINK_KIB)
        counts = [f["value"] for f in links if f["nvmlReturn"] == 0] if isinstance(links, list) else []
        before, self.links[i] = self.links.get(i), (time.monotonic(), counts)
        return {
            "index": i,
            "name": gpu.name,
            "lost": gpu.lost,
            "utilisation_percent": gpu.utilisation,
            "memory_used_gib": None if gpu.used is None else gpu.used / 2**30,
            "memory_gib": None if gpu.memory is None else gpu.memory / 2**30,
            "temperature_c": gpu.temperature,
            "power_w": gpu.power,
            "clock_mhz": gpu.clock,
            "pcie_gb_s": [None if isinstance(k, str) or k is None else k / 1e6 for k in pcie],
            "nvlink_gb_s": rates(before, self.links[i]),
            "processes": list(gpu.processes),
        }


def rates(before: Counts | None, now: Counts) -> list[float]:
    """Return GB/s from two readings of counters of KiB; empty if there are none."""
    if before is None or len(before[1]) != len(now[1]):
        return []
    return [
        (b - a) * 1024 / max(now[0] - before[0], 1e-6) / 1e9 for a, b in zip(before[1], now[1], strict=True)
    ]


def shown(value: Any, form: str = ".0f") -> str:
    """Return a number as text; a dash for what the machine does not tell."""
    return "–" if value is None else format(value, form)


def as_table(sample: dict[str, Any]) -> Table:
    """Return a sample as a table."""
    heads = (
        "",
        ">load %",
        ">memory GiB",
        ">of",
        ">°C",
        ">W",
        ">MHz",
        ">to GB/s",
        ">from GB/s",
        ">NVLink GB/s",
        ">programs",
    )
    title = f"{sample['time']}; the monitor takes {sample['own_load_percent']:.1f} % of a core"
    made = make_table(title, heads)
    for g in sample["gpus"]:
        cells = [
            shown(g["utilisation_percent"]),
            shown(g["memory_used_gib"], ".1f"),
            shown(g["memory_gib"], ".1f"),
        ]
        cells += [shown(g[k]) for k in ("temperature_c", "power_w", "clock_mhz")]
        cells += [shown(k, ".2f") for k in g["pcie_gb_s"]]
        cells.append(shown(sum(g["nvlink_gb_s"]) if g["nvlink_gb_s"] else None, ".1f"))
        made.add_row(f"GPU {g['index']}{' LOST' if g['lost'] else ''}", *cells, str(len(g["processes"])))
    host = [
        shown(sample["cpu_percent"]),
        shown(sample["memory_used_gib"], ".1f"),
        shown(sample["memory_gib"], ".1f"),
    ]
    network = [shown(sample[f"network_{way}_gb_s"], ".3f") for way in ("sent", "received")]
    made.add_row("host, network", *host, "", "", "", *network, "", "")
    return made


def as_line(sample: dict[str, Any]) -> str:
    """Return a sample as a line."""
    parts = [
        f"GPU {g['index']} {shown(g['utilisation_percent'])} % {shown(g['memory_used_gib'], '.1f')} GiB "
        f"{shown(g['temperature_c'])} °C {shown(g['power_w'])} W"
        for g in sample["gpus"]
    ]
    host = f"host {sample['cpu_percent']:.0f} % {sample['memory_used_gib']:.1f} GiB"
    return f"{sample['time']}  {' | '.join([*parts, host])}"


def main(o: MonitorOptions) -> int:
    """Show samples until the time is over, or Ctrl-C."""
    monitor, out = Monitor(Source()), terminal()
    live = None if o.plain or not out.is_terminal else Live(console=out, auto_refresh=False)
    end = time.monotonic() + (o.seconds or float("inf"))
    try:
        file = o.json.open("a") if o.json else None
    except OSError as error:
        raise UsageError(f"--json {o.json} cannot be written: {error.strerror}") from None
    with suppress(KeyboardInterrupt), live or nullcontext():
        while time.monotonic() < end:
            time.sleep(min(o.every, max(0.0, end - time.monotonic())))
            sample = monitor.sample()
            if file:
                print(json.dumps(sample), file=file, flush=True)
            if live:
                live.update(as_table(sample), refresh=True)
            else:
                print(as_line(sample), flush=True)
    if file:
        file.close()
    return 0


def start() -> None:
    """Run the command line."""
    run_program(lambda: main(parse(MonitorOptions, sys.modules[__name__].__doc__)))
