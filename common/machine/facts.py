"""Facts of one host, read from a Source: its GPUs, their links, drivers, limits, networks.

A fact that a machine does not tell is None, or empty; the checks say so.
"""

from __future__ import annotations

import os
import re
import resource
import socket
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.machine.source import LOST, Source

ROOT = Path(__file__).resolve().parents[2]
NVIDIA = "0x10de"
LEVELS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # of nvidia-smi topo -m
MOST_LINKS = 18


@dataclass
class Gpu:
    """A GPU that the driver lists. Bytes, MHz, watts, degrees Celsius."""

    index: int
    lost: bool = False
    name: str = ""
    bus: str = ""
    uuid: str = ""
    capability: tuple[int, int] | None = None
    memory: int | None = None
    used: int | None = None
    ecc: bool | None = None
    uncorrected: int | None = None
    corrected: int | None = None
    row_failure: bool | None = None
    row_pending: bool | None = None
    mig: bool | None = None
    persistence: bool | None = None
    clock: int | None = None
    clock_most: int | None = None
    power: float | None = None
    power_limit: float | None = None
    power_default: float | None = None
    temperature: int | None = None
    slowdown_at: int | None = None
    pcie: tuple[int, int] | None = None  # generation, lanes
    pcie_most: tuple[int, int] | None = None
    throttle: int | None = None
    utilisation: int | None = None
    processes: tuple[int, ...] = ()
    links_up: int = 0
    links_down: int = 0
    links_to: Counter[str] = field(default_factory=Counter)  # PCI address of the other end; empty: not told


@dataclass
class Host:
    """A host. `peers` has a level of LEVELS, or NVn for n NVLinks, for each pair of GPUs."""

    name: str
    driver: str = ""
    on_bus: list[str] = field(default_factory=list)  # PCI addresses of NVIDIA GPUs
    gpus: list[Gpu] = field(default_factory=list)
    peers: dict[tuple[int, int], str] = field(default_factory=dict)
    no_peer_access: list[tuple[int, int]] = field(default_factory=list)
    xids: list[tuple[str, int]] = field(default_factory=list)  # PCI address, number
    kernel_log: bool = False
    torch: str = ""
    torch_cuda: str = ""
    torch_archs: list[str] = field(default_factory=list)
    torch_gpus: int = 0
    cudnn: int | None = None
    nccl: str = ""
    shm: int | None = None
    shm_free: int | None = None
    memlock: int | None = None  # bytes; -1: unlimited
    stack: int | None = None
    files: int | None = None
    container: bool = False
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    job: str | None = None  # of Slurm, which may give a part of the GPUs
    governors: set[str] = field(default_factory=set)
    numa_nodes: int = 0
    gpu_nodes: list[int] = field(default_factory=list)
    iommu: str = ""
    networks: dict[str, int] = field(default_factory=dict)  # Mbit/s of those that are up
    infiniband: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # state, rate, link layer
    cores: int = 0
    memory: int | None = None
    commit: str = ""


def read_host(source: Source) -> Host:
    """Return the facts of the machine that answers."""
    host = Host(source.ask("host name", socket.gethostname) or "?")
    host.driver = source.nvml("SystemGetDriverVersion") or ""
    for path in source.list("/sys/bus/pci/devices/*/vendor"):
        device = path.rpartition("/")[0]
        if source.read(path) == NVIDIA and (source.read(f"{device}/class") or "").startswith("0x03"):
            host.on_bus.append(device.rpartition("/")[2])
    host.gpus = [read_gpu(source, i) for i in range(source.nvml("DeviceGetCount") or 0)]
    _read_links(source, host)
    _read_torch(source, host)
    _read_system(source, host)
    return host


def read_gpu(source: Source, i: int) -> Gpu:
    """Return the facts of GPU i; `lost` is set if it does not answer."""

    def ask(call: str, *args: int) -> Any:
        found = source.nvml(f"DeviceGet{call}", i, *args)
        if found == LOST:
            gpu.lost = True
        return None if found == LOST else found

    def pair(call: str, first: str, then: str) -> tuple[int, int] | None:
        a, b = ask(call.format(first)), ask(call.format(then))
        return None if a is None or b is None else (a, b)

    gpu = Gpu(i)
    gpu.name, gpu.uuid = ask("Name") or "", ask("UUID") or ""
    gpu.bus = pci(ask("PciInfo"))
    capability = ask("CudaComputeCapability")
    gpu.capability = (capability[0], capability[1]) if capability else None
    memory = ask("MemoryInfo") or {}
    gpu.memory, gpu.used = memory.get("total"), memory.get("used")
    ecc = ask("EccMode")
    gpu.ecc = bool(ecc[0]) if ecc else None
    gpu.corrected, gpu.uncorrected = (ask("TotalEccErrors", kind, 0) for kind in (0, 1))
    if rows := ask("RemappedRows"):
        gpu.row_pending, gpu.row_failure = bool(rows[2]), bool(rows[3])
    mig = ask("MigMode")
    gpu.mig = bool(mig[0]) if mig else None
    persistence = ask("PersistenceMode")
    gpu.persistence = None if persistence is None else bool(persistence)
    gpu.clock, gpu.clock_most = ask("ClockInfo", 1), ask("MaxClockInfo", 1)
    watts = [ask(call) for call in ("PowerUsage", "EnforcedPowerLimit", "PowerManagementDefaultLimit")]
    gpu.power, gpu.power_limit, gpu.power_default = (None if w is None else w / 1000 for w in watts)
    gpu.temperature, gpu.slowdown_at = ask("Temperature", 0), ask("TemperatureThreshold", 1)
    gpu.pcie = pair("CurrPcieLink{}", "Generation", "Width")
    gpu.pcie_most = pair("MaxPcieLink{}", "Generation", "Width")
    gpu.throttle = ask("CurrentClocksThrottleReasons")
    gpu.utilisation = (ask("UtilizationRates") or {}).get("gpu")
    gpu.processes = tuple(p["pid"] for p in ask("ComputeRunningProcesses") or ())
    links = [ask("NvLinkState", n) for n in range(MOST_LINKS)]
    gpu.links_up, gpu.links_down = links.count(1), links.count(0)
    for n, state in enumerate(links):
        if state == 1:
            gpu.links_to[pci(ask("NvLinkRemotePciInfo", n))] += 1
    return gpu


def driver_index(device: torch.device, host: Host) -> int:
    """Return the driver's number of a rank's GPU: CUDA numbers only those that a process sees."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return next((gpu.index for gpu in host.gpus if gpu.uuid == uuid), device.index or 0)


def pci(info: Any) -> str:
    """Return the address of NVML's PCI information as /sys writes it, with a domain of four digits."""
    return str((info or {}).get("busId", "")).lower()[-12:]


def _read_links(source: Source, host: Host) -> None:
    buses = {gpu.bus for gpu in host.gpus}
    for a in range(len(host.gpus)):
        for b in range(a + 1, len(host.gpus)):
            level = source.nvml("DeviceGetTopologyCommonAncestor", a, b)
            to_switch = [sum(n for to, n in host.gpus[x].links_to.items() if to not in buses) for x in (a, b)]
            links = host.gpus[a].links_to[host.gpus[b].bus] or min(to_switch)
            if links:
                host.peers[a, b] = f"NV{links}"
            elif level in LEVELS:
                host.peers[a, b] = LEVELS[level]
            if source.nvml("DeviceGetP2PStatus", a, b, 0) not in (0, None, LOST):
                host.no_peer_access.append((a, b))


def _read_torch(source: Source, host: Host) -> None:
    def archs() -> list[str]:
        return list(torch.cuda.get_arch_list()) if torch.cuda.is_available() else []

    def nccl() -> str:
        return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else ""

    host.torch = source.ask("torch", lambda: torch.__version__) or ""
    host.torch_cuda = source.ask("torch cuda", lambda: torch.version.cuda) or ""
    host.torch_archs = source.ask("torch archs", archs) or []
    host.torch_gpus = source.ask("torch gpus", torch.cuda.device_count) or 0
    host.cudnn = source.ask("cudnn", lambda: torch.backends.cudnn.version())
    host.nccl = source.ask("nccl", nccl) or ""


def _read_system(source: Source, host: Host) -> None:
    def limit(which: int) -> int:
        soft = resource.getrlimit(which)[0]
        return -1 if soft == resource.RLIM_INFINITY else soft

    def commit() -> str:
        return source.run("git", "-C", str(ROOT), "rev-parse", "HEAD") or ""

    df = (source.run("df", "-B1", "--output=size,avail", "/dev/shm") or "").split()
    if len(df) == 4:
        host.shm, host.shm_free = int(df[2]), int(df[3])
    host.memlock = source.ask("limit memlock", lambda: limit(resource.RLIMIT_MEMLOCK))
    host.stack = source.ask("limit stack", lambda: limit(resource.RLIMIT_STACK))
    host.files = source.ask("limit files", lambda: limit(resource.RLIMIT_NOFILE))
    first = source.read("/proc/1/cgroup") or ""
    marks = source.list("/.dockerenv") + source.list("/run/.containerenv")
    pod = source.ask("KUBERNETES_SERVICE_HOST", lambda: os.environ.get("KUBERNETES_SERVICE_HOST"))
    host.container = bool(marks or pod) or "docker" in first or "kubepods" in first
    host.visible = source.ask("CUDA_VISIBLE_DEVICES", lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
    host.job = source.ask("SLURM_JOB_ID", lambda: os.environ.get("SLURM_JOB_ID"))
    governors = source.list("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    host.governors = {source.read(path) or "" for path in governors}
    host.numa_nodes = len(source.list("/sys/devices/system/node/node[0-9]*"))
    nodes = (source.read(f"/sys/bus/pci/devices/{address}/numa_node") for address in host.on_bus)
    host.gpu_nodes = [int(node) for node in nodes if node is not None]
    kernel = source.read("/proc/cmdline") or ""
    host.iommu = " ".join(re.findall(r"\S*iommu\S*", kernel))
    for path in source.list("/sys/class/net/*/operstate"):
        name = path.split("/")[4]
        if source.read(path) == "up":
            speed = source.read(f"/sys/class/net/{name}/speed")
            host.networks[name] = int(speed) if speed and speed.lstrip("-").isdigit() else -1
    for path in source.list("/sys/class/infiniband/*/ports/*/state"):
        port = path.rpartition("/")[0]
        words = [source.read(f"{port}/{what}") or "?" for what in ("state", "rate", "link_layer")]
        host.infiniband[f"{path.split('/')[4]}/{path.split('/')[6]}"] = (words[0], words[1], words[2])
    log = source.run("dmesg")
    host.kernel_log = log is not None
    found = re.findall(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)[^)]*\): (\d+)", log or "")
    host.xids = [(address.lower(), int(number)) for address, number in found]
    host.cores = source.ask("cores", lambda: os.cpu_count()) or 0
    total = re.search(r"MemTotal:\s+(\d+) kB", source.read("/proc/meminfo") or "")
    host.memory = int(total[1]) * 1024 if total else None
    host.commit = source.ask("commit", commit) or ""
