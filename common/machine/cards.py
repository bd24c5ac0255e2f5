"""Data of GPUs, and the bandwidths and speeds to expect of machines with several of them.

Peaks are dense, in TFLOP/s, memory in GB/s. Sources: NVIDIA's data sheets A100 (2021), H100 (2023), H200 (2024), V100
(2020), and the whitepapers Ada and Ampere GA102, which give Tensor-core peaks with float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Model of GPU: peaks in TFLOP/s, memory in GB, memory_speed in GB/s, generation of PCIe, number of NVLinks.

    half: TFLOP/s in float16 and bfloat16; V100 has float16 alone. tf32: 0 where there is none. nvlinks: of a GPU.
    all_reduce: bus bandwidth in GB/s, of 8 GPUs of a host at `at` MiB, the range to expect.
    """

    name: str
    words: tuple[str, ...]  # all in the driver's name of it
    without: tuple[str, ...]  # none in it: cards for PCIe slots have other links and peaks
    capability: tuple[int, int]
    float32: float
    tf32: float
    half: float
    memory_gb: int
    memory_speed: float
    pcie: int
    nvlinks: int
    all_reduce: tuple[float, float]
    at: int = 64


CARDS = (
    Card("H200", ("H200",), ("NVL", "PCIe"), (9, 0), 67, 494, 989, 141, 4800, 5, 18, (350, 410), 128),
    Card(
        "H100 SXM", ("H100", "HBM3"), ("NVL", "PCIe"), (9, 0), 67, 494, 989, 80, 3350, 5, 18, (350, 410), 128
    ),
    Card("A100 80GB", ("A100-SXM", "80GB"), (), (8, 0), 19.5, 156, 312, 80, 2039, 4, 12, (200, 300)),
    Card("A100 40GB", ("A100-SXM", "40GB"), (), (8, 0), 19.5, 156, 312, 40, 1555, 4, 12, (200, 300)),
    Card("V100", ("V100-SXM", "32GB"), (), (7, 0), 15.7, 0, 125, 32, 900, 3, 6, (100, 150)),
    Card("RTX 4090", ("RTX 4090",), (), (8, 9), 82.6, 82.6, 165, 24, 1008, 4, 0, (30, 50)),
    Card("RTX 3090", ("RTX 3090",), (), (8, 6), 35.6, 35.6, 71, 24, 936, 4, 0, (20, 40)),
)


def card_of(name: str) -> Card | None:
    """Return the card that the driver calls `name`; None for one that is not in the table."""

    def fits(card: Card) -> bool:
        return all(word in name for word in card.words) and not any(word in name for word in card.without)

    return next(filter(fits, CARDS), None)


# Images per second of 8 GPUs together, ResNet-50 at 64 images per GPU: float32, and with AMP.
IMAGES_PER_SECOND = {
    "A100 80GB": ((1800, 2200), (3500, 4500)),
    "A100 40GB": ((1700, 2100), (3400, 4300)),
    "V100": ((1200, 1500), (2400, 3000)),
    "RTX 4090": ((1400, 1800), (2800, 3600)),
    "RTX 3090": ((1000, 1300), (2000, 2600)),
}

PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # GB/s per lane and direction, PCI-SIG

# Oldest driver on Linux for a CUDA version: NVIDIA, CUDA Toolkit release notes, tables 2 and 3. Within a major version
# the first driver serves all minor ones.
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
