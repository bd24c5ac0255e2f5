"""Rules about GPUs: driver, torch's build, memory, clocks, links, modes.

Numbers without a source beside them are NVIDIA's: the XID catalogue and the NVML reference (throttle reasons, P2P).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from common.machine.cards import OLDEST_DRIVER, card_of
from common.machine.facts import Gpu, Host
from common.machine.rules import all_alike, each_gpu, rule
from common.machine.verdict import NO_GPU, Line, of, passed, skipped

THROTTLES = {  # bit, reason, status
    0x8: ("hardware slowdown: too hot, or too little power", "fail"),
    0x20: ("software thermal slowdown", "fail"),
    0x40: ("hardware thermal slowdown", "fail"),
    0x80: ("power brake: the power supply asks for less", "fail"),
    0x4: ("power cap", "pass"),  # normal under load
}
XIDS = {  # those after which a GPU should not be used: NVIDIA, XID errors
    48: "double-bit ECC error",
    61: "internal microcontroller halt",
    62: "internal microcontroller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
}
HARMLESS_XIDS = {
    13: "a program's illegal access",
    31: "a program's page fault",
    43: "a program was stopped",
    45: "the end of a program that was killed",
    63: "row remapping recorded",
}


@rule()
def gpus_present(host: Host) -> Iterator[Line]:
    """Compare the GPUs on the PCI bus with those that the driver and torch see."""
    lost = [f"GPU {gpu.index}" for gpu in host.gpus if gpu.lost]
    on_bus, listed = len(host.on_bus), len(host.gpus)
    if lost or (host.driver and listed < on_bus):
        known = {gpu.bus for gpu in host.gpus}
        missing = lost or [address for address in host.on_bus if address not in known]
        if not lost and (host.container or host.job):
            cure = "give all to the container or the job: --gpus all, --gpus-per-node"
            yield Line(
                "GPUs", "warn", f"{listed} of the host's {on_bus} are given to this container or job", cure
            )
            return
        yield Line(
            "GPUs",
            "fail",
            f"{on_bus} on the PCI bus, {listed - len(lost)} answer; no answer from {', '.join(missing)}",
            "power the host off and on; if it comes back, reseat the card and its power cable",
        )
    elif on_bus and not host.driver:
        yield Line(
            "GPUs",
            "fail",
            f"{on_bus} NVIDIA GPUs on the PCI bus, no driver that answers",
            "install the driver (nvidia-smi must work); in a container: --gpus all, and the NVIDIA container toolkit",
        )
    elif not listed:
        yield skipped("GPUs", NO_GPU)
    else:
        names = Counter(gpu.name for gpu in host.gpus)
        shown = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield of(len(names) == 1, "GPUs", shown, "put equal ranks on equal GPUs", "warn")


@rule("GPUs of torch", gpus=1)
def seen_by_torch(host: Host) -> Iterator[Line]:
    """Compare the GPUs that torch sees with those of the driver."""
    name, listed = "GPUs of torch", len(host.gpus)
    if not host.torch_cuda:
        yield Line(
            name,
            "fail",
            f"torch {host.torch} is a build for CPUs, and the host has {listed} GPUs",
            "install torch's CUDA build: pip install torch, without TORCH=cpu",
        )
    elif host.torch_gpus < listed:
        why = f"CUDA_VISIBLE_DEVICES={host.visible}" if host.visible is not None else "no reason is known"
        if divided := [str(gpu.index) for gpu in host.gpus if gpu.mig]:
            why = f"MIG divides GPU {', '.join(divided)}, and a program sees one part"
        yield Line(
            name,
            "warn" if host.visible is not None else "fail",
            f"torch sees {host.torch_gpus} of {listed}: {why}",
            "unset CUDA_VISIBLE_DEVICES"
            if host.visible is not None
            else "check nvidia-smi, and /dev/nvidia*",
        )
    else:
        yield passed(name, f"{host.torch_gpus}")


@rule()
def driver_fits(host: Host) -> Iterator[Line]:
    """Compare the driver with torch's CUDA version."""
    name = "driver for torch's CUDA"
    if not host.driver or not host.torch_cuda:
        yield skipped(name, "no driver" if not host.driver else "torch is a build for CPUs")
        return
    numbers = tuple(int(n) for n in re.findall(r"\d+", host.driver)[:2])
    major = int(host.torch_cuda.split(".")[0])
    if major not in OLDEST_DRIVER:
        yield skipped(name, f"the oldest driver for CUDA {host.torch_cuda} is not in the table")
        return
    oldest = OLDEST_DRIVER[major]
    needed = ".".join(map(str, oldest))
    found = f"driver {host.driver}, torch's CUDA {host.torch_cuda}, which needs {needed}"
    yield of(numbers >= oldest, name, found, f"install driver {needed} or newer, or torch for an older CUDA")


@rule("torch for these GPUs", gpus=1)
def torch_fits(host: Host) -> Iterator[Line]:
    """Compare the GPUs' compute capability with what torch was compiled for."""
    name, gpus = "torch for these GPUs", [gpu for gpu in each_gpu(host) if gpu.capability]
    if not host.torch_archs:
        yield skipped(name, "torch does not say what it was compiled for")
        return
    archs = " ".join(host.torch_archs)
    codes = [int(number) for number in re.findall(r"\bsm_(\d+)", archs)]
    intermediate = [int(number) for number in re.findall(r"\bcompute_(\d+)", archs)]

    def runs(
        gpu: Gpu,
    ) -> bool:  # code of an older minor version runs; intermediate code is compiled at the start
        major, minor = gpu.capability or (0, 0)
        own = any(c // 10 == major and c % 10 <= minor for c in codes)
        return own or any(c <= 10 * major + minor for c in intermediate)

    bad = [
        f"GPU {g.index} ({g.name}) has {g.capability[0]}.{g.capability[1]}"
        for g in gpus
        if g.capability and not runs(g)
    ]
    good = f"{', '.join(host.torch_archs)}"
    yield all_alike(name, bad, good, "install a torch that was compiled for these GPUs")


@rule()
def versions(host: Host) -> Iterator[Line]:
    """Show torch's libraries."""
    if not host.torch_cuda:
        yield passed("libraries", f"torch {host.torch}, no CUDA")
        return
    cudnn = f"{host.cudnn // 10000}.{host.cudnn // 100 % 100}" if host.cudnn else "none"
    found = f"torch {host.torch}, CUDA {host.torch_cuda}, cuDNN {cudnn}, NCCL {host.nccl or 'none'}"
    yield of(bool(host.cudnn and host.nccl), "libraries", found, "install torch's CUDA build whole", "warn")


@rule("ECC memory errors", gpus=1)
def ecc(host: Host) -> Iterator[Line]:
    """Look for errors of the GPUs' memory."""
    name, gpus = "ECC memory errors", [g for g in each_gpu(host) if g.ecc is not None]
    if not gpus:
        yield skipped(name, "these GPUs have no ECC memory")
        return
    bad = [f"GPU {g.index} has {g.uncorrected} uncorrected" for g in gpus if g.uncorrected]
    bad += [f"GPU {g.index}: remapping a row has failed" for g in gpus if g.row_failure]
    yield all_alike(
        name, bad, "none uncorrected", "stop using the GPU; reset it, and replace it if they come back"
    )
    soft = [f"GPU {g.index} remaps a row at its next reset" for g in gpus if g.row_pending]
    soft += [f"GPU {g.index} has {g.corrected} corrected" for g in gpus if (g.corrected or 0) > 1000]
    soft += [f"GPU {g.index} has ECC switched off" for g in gpus if g.ecc is False]
    yield all_alike(
        "ECC state", soft, "on, nothing pending", "nvidia-smi -e 1; nvidia-smi --gpu-reset", "warn"
    )


@rule()
def xids(host: Host) -> Iterator[Line]:
    """Look for the driver's errors in the kernel's log."""
    name = "XID errors"
    if not host.gpus and not host.on_bus:
        yield skipped(name, NO_GPU)
        return
    if not host.kernel_log:
        yield skipped(name, "dmesg cannot be read: run as root, or in the host rather than a container")
        return
    shown = [
        f"XID {number} ({XIDS.get(number) or HARMLESS_XIDS.get(number, 'see the catalogue')}) at {address}"
        for address, number in dict.fromkeys(host.xids)
    ]
    serious = any(number in XIDS for _, number in host.xids)
    if shown:
        cure = "look the number up in NVIDIA's XID catalogue (docs.nvidia.com/deploy/xid-errors)"
        yield Line(name, "fail" if serious else "warn", "; ".join(shown), cure)
    else:
        yield passed(name, "none in the kernel's log")


@rule("clocks held down", gpus=1)
def throttling(host: Host) -> Iterator[Line]:
    """Look for reasons that hold the clocks down, and for heat."""
    gpus = each_gpu(host)
    bad = [
        f"GPU {g.index}: {reason}"
        for g in gpus
        for bit, (reason, status) in THROTTLES.items()
        if status == "fail" and (g.throttle or 0) & bit
    ]
    yield all_alike(
        "clocks held down",
        bad,
        "by nothing but load and power cap",
        "check fans, air flow and power supplies",
    )
    hot = [
        f"GPU {g.index} at {g.temperature} °C, slows down at {g.slowdown_at}"
        for g in gpus
        if g.temperature and g.slowdown_at and g.temperature > g.slowdown_at - 8
    ]
    temperatures = [g.temperature for g in gpus if g.temperature is not None]
    good = f"{min(temperatures)} to {max(temperatures)} °C" if temperatures else "not reported"
    yield all_alike("temperature", hot, good, "check fans, air flow and the room", "warn")


@rule("power limit", gpus=1)
def power(host: Host) -> Iterator[Line]:
    """Compare power limits with their defaults."""
    gpus = [g for g in each_gpu(host) if g.power_limit and g.power_default]
    if not gpus:
        yield skipped("power limit", "not reported by the GPUs")
        return
    bad = [
        f"GPU {g.index} is limited to {g.power_limit:.0f} of {g.power_default:.0f} W"
        for g in gpus
        if g.power_limit and g.power_default and g.power_limit < 0.98 * g.power_default
    ]
    yield all_alike(
        "power limit", bad, f"{gpus[0].power_limit:.0f} W", "nvidia-smi -pl WATTS as root", "warn"
    )


@rule("PCIe", gpus=1)
def pcie(host: Host) -> Iterator[Line]:
    """Compare PCIe lanes and generation with the possible ones. An idle GPU may lower its generation, never lanes."""
    gpus = [g for g in each_gpu(host) if g.pcie and g.pcie_most]
    if not gpus:
        yield skipped("PCIe", "not reported by the GPUs")
        return
    bad = [
        f"GPU {g.index} has {g.pcie[1]} of {g.pcie_most[1]} lanes"
        for g in gpus
        if g.pcie and g.pcie_most and g.pcie[1] < g.pcie_most[1]
    ]
    busy = [g for g in gpus if (g.utilisation or 0) > 0]
    bad += [
        f"GPU {g.index} runs at generation {g.pcie[0]} of {g.pcie_most[0]} under load"
        for g in busy
        if g.pcie and g.pcie_most and g.pcie[0] < g.pcie_most[0]
    ]
    most = gpus[0].pcie_most or (0, 0)
    yield all_alike(
        "PCIe",
        bad,
        f"generation {most[0]}, {most[1]} lanes",
        "reseat the card or its riser; check the BIOS",
        "warn",
    )


@rule("NVLink", gpus=2)
def nvlinks(host: Host) -> Iterator[Line]:
    """Compare the NVLinks that are up with those that the card has."""
    gpus = each_gpu(host)
    name, expected = (
        "NVLink",
        {g.index: card.nvlinks for g in gpus if (card := card_of(g.name)) and card.nvlinks},
    )
    if not any(g.links_up for g in gpus) and not expected:
        yield skipped(name, "these GPUs have none, or no bridge between them")
        return
    bad = [
        f"GPU {g.index} has {g.links_up} of {max(expected.get(g.index, 0), g.links_up + g.links_down)} up"
        for g in gpus
        if g.links_down or g.links_up < expected.get(g.index, 0)
    ]
    cure = "nvidia-smi nvlink --status; start nvidia-fabricmanager on hosts with NVSwitch"
    yield all_alike(name, bad, f"{gpus[0].links_up} links per GPU, all up", cure)


@rule("topology", gpus=2)
def topology(host: Host) -> Iterator[Line]:
    """Show how GPUs reach one another."""
    levels = Counter(host.peers.values())
    found = ", ".join(f"{count} pairs {level}" for level, count in levels.most_common()) or "not reported"
    far = [level for level in levels if level == "SYS"]
    cure = "messages between sockets are slow: let the ranks of a group share a socket"
    yield of(not far, "topology", found, cure, "warn")
    pairs = ", ".join(f"{a}-{b}" for a, b in host.no_peer_access[:4])
    more = f" and {len(host.no_peer_access) - 4} more" if len(host.no_peer_access) > 4 else ""
    consumer = any(card.nvlinks == 0 for g in host.gpus if (card := card_of(g.name)))
    yield of(
        not host.no_peer_access,
        "peer access",
        f"not between GPUs {pairs}{more}" if pairs else "between all GPUs",
        "consumer GPUs have none: messages go through the host's memory"
        if consumer
        else "switch ACS and the IOMMU off in the BIOS (iommu=pt)",
        "warn",
    )


@rule("IOMMU", gpus=2)
def iommu(host: Host) -> Iterator[Line]:
    """Look for an IOMMU that translates the GPUs' messages."""
    translates = re.search(r"(intel|amd)_iommu=on", host.iommu) and "iommu=pt" not in host.iommu
    found = host.iommu or "not named on the kernel's command line"
    yield of(not translates, "IOMMU", found, "add iommu=pt to the kernel's command line", "warn")


@rule("GPUs alike", gpus=2)
def alike(host: Host) -> Iterator[Line]:
    """Compare GPUs of one name with one another."""
    bad = []
    for what, unit in (
        ("memory", "bytes of memory"),
        ("clock_most", "MHz at most"),
        ("pcie_most", "PCIe at most"),
    ):
        values = {gpu.index: getattr(gpu, what) for gpu in each_gpu(host)}
        usual = Counter(values.values()).most_common(1)[0][0]
        bad += [
            f"GPU {i} has {value} {unit}, others {usual}" for i, value in values.items() if value != usual
        ]
    yield all_alike(
        "GPUs alike", bad, "memory, clocks and slots", "nvidia-smi -rgc; exchange slots and cards", "warn"
    )


@rule("GPU modes", gpus=1)
def modes(host: Host) -> Iterator[Line]:
    """Look at MIG, persistence, and programs that use the GPUs already."""
    gpus = each_gpu(host)
    parts = [f"GPU {g.index} is divided by MIG" for g in gpus if g.mig]
    yield all_alike("MIG", parts, "off", "nvidia-smi -mig 0: NCCL does not connect parts of a GPU", "warn")
    cold = [f"GPU {g.index}" for g in gpus if g.persistence is False]
    found = f"off on {', '.join(cold)}" if cold else "on"
    yield of(
        not cold,
        "persistence",
        found,
        "nvidia-smi -pm 1: without it, each program start initialises the GPU",
        "warn",
    )
    busy = [
        f"GPU {g.index}: {len(g.processes)} program(s), {(g.used or 0) / 2**30:.1f} GiB"
        for g in gpus
        if g.processes or (g.used or 0) > 2 * 2**30
    ]
    yield all_alike(
        "GPUs in use", busy, "by nothing else", "end the programs: they disturb every measurement", "warn"
    )
