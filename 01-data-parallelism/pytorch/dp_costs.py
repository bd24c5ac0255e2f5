"""Bytes that a rank sends in chapter 01, by formula: before the first step, and in a step.

n ranks  M micro-batches
"""

from __future__ import annotations

import math
from fractions import Fraction

from torch import nn

from common.comm import Group, sizes_of
from common.lesson.matrices import ProductOptions
from common.lesson.runner import DTYPES
from common.lesson.training import TrainingOptions

LIBRARY = ("ddp", "zero-redundancy", "fsdp-keep", "fsdp")
"""The library's versions in dp_fsdp.py."""


def bytes_of_step(model: nn.Module, group: Group, flags: bool = True) -> Fraction:
    """Return the bytes a rank sends in a step.

    They are 2(n-1)/n of: gradients, one flag per parameter (not in DDP), the loss, the targets (8 bytes).
    """
    parameters = list(model.parameters())
    numbers = sum(p.numel() for p in parameters) + flags * len(parameters) + 1
    return Fraction(2 * (group.size - 1) * (numbers * parameters[0].element_size() + 8), group.size)


def bytes_of_start(model: nn.Module, group: Group, order: bool) -> Fraction:
    """Return the bytes a rank sends before the first step.

    They are (n-1)/n of the model and, with `order`, of 8 bytes per parameter for the order of the buckets.
    """
    parameters = list(model.parameters())
    start = sum(p.numel() * p.element_size() for p in parameters) + order * 8 * len(parameters)
    return Fraction((group.size - 1) * start, group.size)


def bytes_of_run(model: nn.Module, group: Group, steps: int, order: bool, flags: bool = True) -> Fraction:
    """Return the bytes a rank sends in a run: the start, then steps with 8 bytes of gradient norm, all-reduced."""
    step = bytes_of_step(model, group, flags) + Fraction(2 * (group.size - 1) * 8, group.size)
    return bytes_of_start(model, group, order) + steps * step


def basic_start(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes a rank sends before the first step: the model and, with our buckets, their order."""
    return bytes_of_start(model, group, order=name not in ("naive", "ddp"))


def basic_step(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes a rank sends in a step."""
    return bytes_of_step(model, group, flags=name != "ddp")


def bytes_by_rank(model: nn.Module, o: TrainingOptions, n: int) -> list[tuple[int, int]]:
    """Return (sent, received) of each rank in a step of dp_data_parallel.py: tokens in int64, the rest in --dtype."""
    item, samples = DTYPES[o.dtype].itemsize, sizes_of(o.batch, n)
    weights = item * sum(p.numel() for p in model.parameters())
    logits = [b * o.sequence * o.model_config().vocabulary * item for b in samples]
    tokens = [b * o.sequence * 8 for b in samples]
    helpers = [(weights + logits[r], tokens[r] + weights + logits[r]) for r in range(1, n)]
    return [(sum(received for _, received in helpers), sum(sent for sent, _ in helpers)), *helpers]


def one_process_step(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes that this rank sends in a step."""
    if name == "bucketed":
        return basic_step(name, model, group, o)
    return Fraction(bytes_by_rank(model, o, group.size)[group.rank][0] if name == "one process" else 0)


def one_process_run(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes that this rank sends in `o.steps` steps; only "bucketed" sums its gradient norm."""
    if name == "bucketed":
        return bytes_of_run(model, group, o.steps, order=True)
    return o.steps * one_process_step(name, model, group, o)


def bytes_of_weights(stage: int, model: nn.Module, group: Group, micro_batches: int) -> tuple[int, int]:
    """Return the bytes of the tensors (reduce-scattered, all-gathered) in a step, padding included."""
    of = lambda module: [p for p in module.parameters() if p.requires_grad]  # noqa: E731
    size = of(model)[0].element_size()
    layers = [sum(p.numel() for p in of(layer)) for layer in model.layers]  # type: ignore[union-attr]
    rest = sum(p.numel() for p in of(model)) - sum(layers)
    padded = [-(-numbers // group.size) * group.size * size for numbers in (rest, *layers)]
    if stage == 3:
        return micro_batches * sum(padded), micro_batches * (2 * sum(padded) - padded[0])
    return (micro_batches if stage == 2 else 1) * sum(padded), sum(padded)


def zero_step(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes a rank sends in a step: reduce-scatter, all-gather, flags, loss and targets."""
    if not name.startswith("zero"):
        return basic_step(name, model, group, o)
    parameters = list(model.parameters())
    rest = 2 * ((len(parameters) + 1) * parameters[0].element_size() + 8)
    moved = sum(bytes_of_weights(int(name[-1]), model, group, o.micro_batches))
    return Fraction((group.size - 1) * (moved + rest), group.size)


def zero_start(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes a rank sends before the first step, less the all-gather that this step does not need."""
    if not name.startswith("zero"):
        return basic_start(name, model, group, o)
    stage = int(name[-1])
    gathered = 0 if stage == 3 else bytes_of_weights(stage, model, group, o.micro_batches)[1]
    return bytes_of_start(model, group, order=False) - Fraction((group.size - 1) * gathered, group.size)


def fsdp_bytes(model: nn.Module, group: Group, micro_batches: int, keep: bool) -> int:
    """Return the bytes of the tensors that FSDP2 gathers and reduce-scatters in a step.

    Rows are padded to a multiple of n.
    """

    def padded(module: nn.Module) -> int:
        rows = [(len(p), p.numel() // len(p) * p.element_size()) for p in module.parameters()]
        return sum(-(-length // group.size) * group.size * width for length, width in rows)

    layers = sum(padded(layer) for layer in model.layers)  # type: ignore[union-attr, misc]
    return micro_batches * (2 * padded(model) + (0 if keep else layers))


def fsdp_step(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes a rank sends in a step."""
    if not name.startswith("fsdp"):
        zero = zero_step(name if name not in LIBRARY else "ddp", model, group, o)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        return zero + Fraction((group.size - 1) * weights * (name == "zero-redundancy"), group.size)
    loss_and_targets = 2 * (next(model.parameters()).element_size() + 8)
    moved = fsdp_bytes(model, group, o.micro_batches, keep=name == "fsdp-keep")
    return Fraction((group.size - 1) * (moved + loss_and_targets), group.size)


def fsdp_start(name: str, model: nn.Module, group: Group, o: TrainingOptions) -> Fraction:
    """Return the bytes a rank sends before the first step; the library's versions broadcast the model."""
    return zero_start("ddp" if name in LIBRARY else name, model, group, o)


def padding_of_step(model: nn.Module, group: Group, bucket_mb: float) -> Fraction:
    """Return the bytes that ZeRO-1 sends beyond an all-reduce.

    Each bucket is padded to n equal runs, in the reduce-scatter and in the all-gather.
    """
    numbers, size, padding = 0, next(model.parameters()).element_size(), 0
    for p in reversed(list(model.parameters())):
        if numbers * size >= int(bucket_mb * 2**20):
            numbers, padding = 0, padding + -numbers % group.size
        numbers += p.numel()
    return Fraction(2 * (group.size - 1) * (padding + -numbers % group.size) * size, group.size)


def mlp_step(name: str, model: nn.Module, group: Group, bucket_mb: float) -> Fraction:
    """Return the bytes a rank sends in a step of dp_mlp.py.

    The versions of dp_mpi count only gradients. The others also count the loss, the number of targets and,
    except ddp-mlp, the flags.
    """
    if name.startswith("dp_mpi"):
        gradients = sum(p.numel() * p.element_size() for p in model.parameters())
        return Fraction(2 * (group.size - 1) * gradients, group.size)
    padding = padding_of_step(model, group, bucket_mb) if name == "dp_libtorch-zero1" else 0
    return bytes_of_step(model, group, flags=name != "ddp-mlp") + padding


def mlp_run(name: str, model: nn.Module, group: Group, bucket_mb: float, steps: int) -> Fraction:
    """Return the bytes a rank sends in a run of dp_mlp.py."""
    step = steps * mlp_step(name, model, group, bucket_mb)
    if name.startswith("dp_mpi"):
        return step
    ours = name != "ddp-mlp"
    start = bytes_of_run(model, group, 0, order=ours and name != "dp_libtorch-zero1")
    return start + step + steps * Fraction(2 * (group.size - 1) * 8, group.size)


def product_bytes(split: str, o: ProductOptions, n: int) -> tuple[Fraction, Fraction]:
    """Return the bytes a rank sends in dp_matrix_multiply.py (forward, backward).

    Uneven shards are padded to the longest.
    """
    (M, K, J), item = o.shape, DTYPES[o.dtype].itemsize
    if split in ("rows", "columns"):
        return Fraction(0), Fraction(2 * (n - 1) * (K * J if split == "rows" else M * K) * item, n)
    longest = math.ceil((M if split == "inner" else K) / n)
    return Fraction((n - 1) * longest * J * item), Fraction((n - 1) * longest * J * item)
