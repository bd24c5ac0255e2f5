"""The device of a rank: what it is, how much memory it has, and whether tensors fit. Answers without a GPU too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import psutil
import torch
from torch import Tensor


class GPUManager:
    """GPU number `gpu_id`, as `MPIManager.get_gpu_id()` gives it; -1 stands for the host and its memory."""

    def __init__(self, gpu_id: int = -1) -> None:
        self.gpu_id = gpu_id if torch.cuda.is_available() else -1
        self.device = torch.device("cuda", self.gpu_id) if self.gpu_id >= 0 else torch.device("cpu")

    def get_info(self) -> dict[str, object]:
        """Return the name, the total memory in bytes, and CUDA's compute capability (None for the host)."""
        if self.gpu_id < 0:
            return {"name": "cpu", "total_memory": psutil.virtual_memory().total, "capability": None}
        about = torch.cuda.get_device_properties(self.device)
        return {
            "name": about.name,
            "total_memory": about.total_memory,
            "capability": (about.major, about.minor),
        }

    def get_memory(self) -> dict[str, float]:
        """Return bytes: total, used by tensors, reserved by the allocator, free for new ones; and the percent in use.

        For the host: used by and reserved for all processes.
        """
        if self.gpu_id < 0:
            host = psutil.virtual_memory()
            total, used, reserved, free = host.total, host.used, host.total - host.available, host.available
        else:
            unused, total = torch.cuda.mem_get_info(self.device)
            used = torch.cuda.memory_allocated(self.device)
            reserved = torch.cuda.memory_reserved(self.device)
            free = unused + reserved - used
        return {
            "total": total,
            "used": used,
            "reserved": reserved,
            "free": free,
            "percent": 100 * (total - free) / total,
        }

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return the tensor on this device."""
        return tensor.to(self.device)

    def empty_cache(self) -> None:
        """Give the allocator's unused memory back to the GPU; does nothing for the host."""
        if self.gpu_id >= 0:
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait until the GPU has done all its work; does nothing for the host."""
        if self.gpu_id >= 0:
            torch.cuda.synchronize(self.device)

    def estimate_memory_requirement(self, *shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> int:
        """Return the bytes of tensors of these shapes."""
        return sum(math.prod(shape) for shape in shapes) * dtype.itemsize

    def can_fit(
        self, *shapes: Sequence[int], dtype: torch.dtype = torch.float32, safety_margin: float = 0.1
    ) -> bool:
        """Return True if the tensors fit into the free memory and leave a share `safety_margin` of it."""
        needed = self.estimate_memory_requirement(*shapes, dtype=dtype)
        return needed <= self.get_memory()["free"] * (1 - safety_margin)
