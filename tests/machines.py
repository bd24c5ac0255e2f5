"""Answers of machines for the check, as `Source` keeps them: whole machines, and what can be wrong with one.

The answers have the form of nvidia-ml-py's on such machines; the values are those of the cards' data sheets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common.machine.source import LOST

Answers = dict[str, Any]
KINDS = {  # name, bytes, capability, ECC, NVLinks, PCIe generation, watts, MHz
    "a100": ("NVIDIA A100-SXM4-80GB", 85899345920, [8, 0], True, 12, 4, 400, 1410),
    "h100": ("NVIDIA H100 80GB HBM3", 85520809984, [9, 0], True, 18, 5, 700, 1980),
    "4090": ("NVIDIA GeForce RTX 4090", 25757220864, [8, 9], None, 0, 4, 450, 3105),
}
ARCHS = ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


def bus(i: int) -> str:
    """Return the PCI address of GPU i."""
    return f"0000:{0x10 + 0x11 * i:02x}:00.0"


def machine(kind: str, count: int) -> Answers:
    """Return the answers of a host in good order with so many GPUs of a kind."""
    name, memory, capability, ecc, links, generation, watts, clock = KINDS[kind]
    found: Answers = {
        "host name": "node0",
        "SystemGetDriverVersion": "570.86.15",
        "SystemGetCudaDriverVersion_v2": 12080,
        "DeviceGetCount": count,
        "torch": "2.13.0+cu126",
        "torch cuda": "12.6",
        "torch archs": ARCHS,
        "torch gpus": count,
        "cudnn": 91002,
        "nccl": "2.27.5",
        "run df -B1 --output=size,avail /dev/shm": "1B-blocks Avail\n540000000000 530000000000",
        "run dmesg": "[    0.0] Linux",
        "limit memlock": -1,
        "limit stack": 2**23,
        "limit files": 65536,
        "list /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor": ["/cpu0"],
        "read /cpu0": "performance",
        "list /sys/devices/system/node/node[0-9]*": ["/node0", "/node1"],
        "read /proc/cmdline": "quiet iommu=pt",
        "read /proc/meminfo": "MemTotal: 1056000000 kB",
        "cores": 128,
        "list /sys/class/net/*/operstate": ["/sys/class/net/eth0/operstate"],
        "read /sys/class/net/eth0/operstate": "up",
        "read /sys/class/net/eth0/speed": "100000",
        "list /sys/bus/pci/devices/*/vendor": [f"/sys/bus/pci/devices/{bus(i)}/vendor" for i in range(count)],
        "commit": "0123456789abcdef",
    }
    for i in range(count):
        device = f"/sys/bus/pci/devices/{bus(i)}"
        found |= {f"read {device}/vendor": "0x10de", f"read {device}/class": "0x030200"}
        found[f"read {device}/numa_node"] = str(2 * i // count)
        of_gpu = {
            "Name": name,
            "UUID": f"GPU-{i}",
            "PciInfo": {"busId": "0000" + bus(i).upper()},
            "CudaComputeCapability": capability,
            "MemoryInfo": {"total": memory, "free": memory - 2**29, "used": 2**29},
            "EccMode": None if ecc is None else [1, 1],
            "TotalEccErrors:0 0": None if ecc is None else 0,
            "TotalEccErrors:1 0": None if ecc is None else 0,
            "RemappedRows": None if ecc is None else [0, 0, 0, 0],
            "MigMode": None if ecc is None else [0, 0],
            "PersistenceMode": 1,
            "ClockInfo:1": 210,
            "MaxClockInfo:1": clock,
            "PowerUsage": 60_000,
            "EnforcedPowerLimit": 1000 * watts,
            "PowerManagementDefaultLimit": 1000 * watts,
            "Temperature:0": 34,
            "TemperatureThreshold:1": 90,
            "CurrPcieLinkGeneration": 1,  # idle
            "CurrPcieLinkWidth": 16,
            "MaxPcieLinkGeneration": generation,
            "MaxPcieLinkWidth": 16,
            "CurrentClocksThrottleReasons": 1,
            "UtilizationRates": {"gpu": 0, "memory": 0},
            "ComputeRunningProcesses": [],
        } | {f"NvLinkState:{n}": 1 if n < links else None for n in range(18)}
        of_gpu |= {
            f"NvLinkRemotePciInfo:{n}": {"busId": "00000000:C4:00.0"} for n in range(links)
        }  # a switch
        for key, value in of_gpu.items():
            call, _, more = key.partition(":")
            found[f"DeviceGet{call} {i}{' ' if more else ''}{more}"] = value
        for j in range(i + 1, count):
            together = 2 * i // count == 2 * j // count
            found[f"DeviceGetTopologyCommonAncestor {i} {j}"] = 40 if together else 50
            found[f"DeviceGetP2PStatus {i} {j} 0"] = 0 if links else 4
    return found


def lose(answers: Answers, i: int) -> None:
    """Let GPU i not answer any more."""
    for key in answers:
        if key.startswith("DeviceGet") and key.split()[1:2] == [str(i)]:
            answers[key] = LOST


def missing(answers: Answers) -> None:
    """Let the driver not list the last GPU."""
    answers["DeviceGetCount"] -= 1
    answers["torch gpus"] -= 1


def alone(answers: Answers, **others: Any) -> None:
    """Let the machine be a container that got four of the host's GPUs."""
    answers.update({"DeviceGetCount": 4, "torch gpus": 4, "list /.dockerenv": ["/.dockerenv"], **others})


# name: the machine, the change, words of the verdict
FAULTS: dict[str, tuple[str, int, Callable[[Answers], object], str]] = {
    "a card that does not answer": (
        "h100",
        8,
        lambda a: lose(a, 3),
        "FAIL: GPUs: 8 on the PCI bus, 7 answer; no answer from GPU 3",
    ),
    "a card that is not listed": (
        "a100",
        8,
        missing,
        "FAIL: GPUs: 8 on the PCI bus, 7 answer; no answer from 0000:87:00.0",
    ),
    "ECC errors on one GPU": (
        "a100",
        1,
        lambda a: a.update({"DeviceGetTotalEccErrors 0 1 0": 12}),
        "FAIL: ECC memory errors: GPU 0 has 12 uncorrected",
    ),
    "a row that cannot be remapped": (
        "h100",
        8,
        lambda a: a.update({"DeviceGetRemappedRows 5": [0, 9, 0, 1]}),
        "FAIL: ECC memory errors: GPU 5: remapping a row has failed",
    ),
    "a container with a small /dev/shm": (
        "a100",
        8,
        lambda a: a.update(
            {
                "list /.dockerenv": ["/.dockerenv"],
                "run df -B1 --output=size,avail /dev/shm": "1B-blocks Avail\n67108864 67108864",
            }
        ),
        r"FAIL: /dev/shm: 0\.06 GiB",
    ),
    "no driver": (
        "h100",
        8,
        lambda a: a.update({"SystemGetDriverVersion": None, "DeviceGetCount": None, "torch gpus": 0}),
        "FAIL: GPUs: 8 NVIDIA GPUs on the PCI bus, no driver",
    ),
    "an old driver": (
        "a100",
        8,
        lambda a: a.update({"SystemGetDriverVersion": "470.82.01"}),
        r"FAIL: driver for torch's CUDA: driver 470\.82\.01, torch's CUDA 12\.6, which needs 525\.60",
    ),
    "torch for CPUs": (
        "h100",
        8,
        lambda a: a.update({"torch": "2.13.0+cpu", "torch cuda": None, "torch gpus": 0, "torch archs": []}),
        r"FAIL: GPUs of torch: torch 2\.13\.0\+cpu is a build for CPUs",
    ),
    "torch for other GPUs": (
        "h100",
        8,
        lambda a: a.update({"torch archs": ["sm_70", "sm_80"]}),
        r"FAIL: torch for these GPUs: GPU 0 \(NVIDIA H100 80GB HBM3\) has 9\.0",
    ),
    "hidden GPUs": (
        "a100",
        8,
        lambda a: a.update({"torch gpus": 4, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}),
        "WARN: GPUs of torch: torch sees 4 of 8: CUDA_VISIBLE_DEVICES=0,1,2,3",
    ),
    "an XID": (
        "a100",
        8,
        lambda a: a.update({"run dmesg": f"[ 9.1] NVRM: Xid (PCI:{bus(2)}): 79, pid=1, GPU has fallen off"}),
        "FAIL: XID errors: XID 79 .GPU has fallen off the bus. at 0000:32:00.0",
    ),
    "a hot card": (
        "h100",
        8,
        lambda a: a.update({"DeviceGetCurrentClocksThrottleReasons 6": 0x48, "DeviceGetTemperature 6 0": 91}),
        "FAIL: clocks held down: GPU 6: hardware slowdown",
    ),
    "a lower power limit": (
        "4090",
        4,
        lambda a: a.update({"DeviceGetEnforcedPowerLimit 1": 300_000}),
        "WARN: power limit: GPU 1 is limited to 300 of 450 W",
    ),
    "a riser of 8 lanes": (
        "4090",
        4,
        lambda a: a.update({"DeviceGetCurrPcieLinkWidth 2": 8}),
        "WARN: PCIe: GPU 2 has 8 of 16 lanes",
    ),
    "an NVLink down": (
        "a100",
        8,
        lambda a: a.update({"DeviceGetNvLinkState 4 7": 0}),
        "FAIL: NVLink: GPU 4 has 11 of 12 up",
    ),
    "no fabric manager": (
        "h100",
        8,
        lambda a: a.update({f"DeviceGetNvLinkState {i} {n}": 0 for i in range(8) for n in range(18)}),
        "FAIL: NVLink: GPU 0 has 0 of 18 up",
    ),
    "a container with some of the GPUs": (
        "a100",
        8,
        alone,
        "WARN: GPUs: 4 of the host's 8 are given to this container",
    ),
    "MIG hides GPUs": (
        "a100",
        8,
        lambda a: a.update({"torch gpus": 1} | {f"DeviceGetMigMode {i}": [1, 1] for i in range(8)}),
        "FAIL: GPUs of torch: torch sees 1 of 8: MIG divides GPU 0, 1",
    ),
    "locked clocks": (
        "h100",
        8,
        lambda a: a.update({"DeviceGetMaxClockInfo 3 1": 600}),
        "WARN: GPUs alike: GPU 3 has 600 MHz at most, others 1980",
    ),
    "a program without a name": (
        "a100",
        8,
        lambda a: a.update({"DeviceGetMemoryInfo 2": {"total": 85899345920, "free": 0, "used": 85899345920}}),
        r"WARN: GPUs in use: GPU 2: 0 program\(s\), 80\.0 GiB",
    ),
    "an XID of a MIG instance": (
        "h100",
        8,
        lambda a: a.update({"run dmesg": f"NVRM: Xid (PCI:{bus(2)} GPU-I:05): 94, pid=1"}),
        "FAIL: XID errors: XID 94 .contained ECC error. at 0000:32:00.0",
    ),
    "MIG": ("a100", 8, lambda a: a.update({"DeviceGetMigMode 1": [1, 1]}), "WARN: MIG: GPU 1 is divided"),
    "a program on the GPU": (
        "a100",
        8,
        lambda a: a.update({"DeviceGetComputeRunningProcesses 0": [{"pid": 7}]}),
        "WARN: GPUs in use: GPU 0: 1 program",
    ),
    "an IOMMU that translates": (
        "a100",
        8,
        lambda a: a.update({"read /proc/cmdline": "quiet intel_iommu=on"}),
        "WARN: IOMMU: intel_iommu=on",
    ),
    "little locked memory for InfiniBand": (
        "h100",
        8,
        lambda a: a.update(
            {
                "limit memlock": 65536,
                "list /sys/class/infiniband/*/ports/*/state": ["/sys/class/infiniband/mlx5_0/ports/1/state"],
                "read /sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
                "read /sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            }
        ),
        "FAIL: locked memory: 0 MiB",
    ),
    "InfiniBand down": (
        "h100",
        8,
        lambda a: a.update(
            {
                "list /sys/class/infiniband/*/ports/*/state": ["/sys/class/infiniband/mlx5_0/ports/1/state"],
                "read /sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN",
            }
        ),
        "FAIL: InfiniBand: mlx5_0/1: 1: DOWN",
    ),
    "a card of another kind": (
        "a100",
        8,
        lambda a: a.update({"DeviceGetName 7": "NVIDIA A100-SXM4-40GB"}),
        "WARN: GPUs: 7 x NVIDIA A100-SXM4-80GB, 1 x NVIDIA A100-SXM4-40GB",
    ),
    "a slow governor": (
        "h100",
        8,
        lambda a: a.update({"read /cpu0": "powersave"}),
        "WARN: CPU governor: powersave",
    ),
    "persistence off": (
        "a100",
        8,
        lambda a: a.update({f"DeviceGetPersistenceMode {i}": 0 for i in range(8)}),
        "WARN: persistence: off on GPU 0",
    ),
}
