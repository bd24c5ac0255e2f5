"""Throughput of a run, and the peak speed of its machine.

    MFU = operations of a token * tokens a second / peak of all devices            (model FLOPs utilisation)

Operations of a token: Transformer.flops_per_token, forward and backward, attention included; recomputation by
activation checkpointing does not count (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B). The peak per
rank is `--peak-tflops`, the number of the device's data sheet. Without the option it is measured: all ranks
multiply square matrices at the same time, in the type in which the model multiplies, and their rates are
added. Ranks that share cores or a GPU then share its peak, so that MFU is relative to this machine.

Tokens per second are those of training steps, from the first forward pass to the end of the optimizer's step;
evaluation, text and checkpoints are not included.
"""

from __future__ import annotations

import time

import torch

from common import comm
from common.launch.runtime import Runtime
from common.lesson.measure import peak_memory
from common.lesson.runner import DTYPES
from common.lesson.training import shape_of

from hybrid_options import TrainOptions


class Meter:
    """Speed and memory of the steps since the last reading."""

    def __init__(self, rt: Runtime, o: TrainOptions) -> None:
        self.rt, self.batch_tokens = rt, o.batch * o.sequence
        plain = shape_of(o)
        self.parameters, self.flops_per_token = plain.parameter_count(), plain.flops_per_token(o.sequence)
        self.peak = rt.world_size * o.peak_tflops * 1e12 if o.peak_tflops else measured_peak(rt, o)
        self.seconds, self.steps = 0.0, 0

    def add(self, seconds: float) -> None:
        """Add the seconds of one step."""
        self.seconds, self.steps = self.seconds + seconds, self.steps + 1

    def read(self) -> dict[str, float]:
        """Return tokens/s, MFU, seconds per step, and the largest peak memory of a rank in MB (10^6 bytes).

        The next reading begins anew, except for memory. All ranks call it.
        """
        rate = self.steps * self.batch_tokens / max(self.seconds, 1e-9)
        found = {
            "tokens_per_second": rate,
            "mfu": self.flops_per_token * rate / self.peak,
            "step_seconds": self.seconds / max(self.steps, 1),
            "memory_mb": peak_memory(self.rt.world) / 1e6,
        }
        self.seconds, self.steps = 0.0, 0
        return found


def measured_peak(rt: Runtime, o: TrainOptions) -> float:
    """Measure operations per second of all ranks together, in products of square matrices."""
    cuda = rt.device.type == "cuda"
    dtype = torch.bfloat16 if o.precision == "bfloat16" else DTYPES[o.dtype]
    n = 4096 if cuda else 512
    a = torch.ones(n, n, dtype=dtype, device=rt.device)
    a @ a
    comm.barrier(rt.world)
    start, times = time.perf_counter(), 0
    while times < 4 or time.perf_counter() - start < 0.4:
        a @ a
        times += 1
        if cuda:
            torch.cuda.synchronize()
    rate = torch.tensor(
        times * 2 * n**3 / (time.perf_counter() - start), dtype=torch.float64, device=rt.device
    )
    comm.all_reduce(rate, rt.world)
    return rate.item()
