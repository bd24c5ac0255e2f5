"""Shared code of the lessons of chapter 05: options and checks, the experts of a model, its routers' choices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from common import comm
from common.comm import sizes_of
from common.errors import UsageError
from common.launch.command_line import Size, Within
from common.launch.runtime import Runtime
from common.lesson import comparison
from common.lesson.equality import largest
from common.lesson.training import TrainingOptions
from common.models.moe import MoE, Routing
from common.models.transformer import TransformerConfig


@dataclass
class ExpertOptions(TrainingOptions):
    """Model and batch of the lessons of chapter 05."""

    model: str = "mixtral-tiny"
    """Name of a model with experts in common/models/configs.py."""
    batch: Size = 16
    """Samples of the global batch; the parts of the ranks differ by at most one sample."""

    def model_config(self) -> TransformerConfig:
        """Return the model's shape. Raises UsageError for a model without experts."""
        c = super().model_config()
        if not c.experts:
            raise UsageError(f"--model {self.model} has no experts; mixtral-tiny and switch-tiny have 8")
        return c


@dataclass
class MoEOptions(ExpertOptions):
    """Options: the capacity."""

    capacity_factor: Annotated[float, Within(1e-6, 1000)] = 1.25
    """Capacity factor c of the version `capacity`: an expert takes c times an even share of a sequence."""


def check_split(experts: int, n: int) -> None:
    """Raise UsageError where n ranks cannot each hold an expert."""
    if not experts:
        raise UsageError("expert parallelism needs a model with experts, such as mixtral-tiny")
    if n > experts:
        raise UsageError(
            f"{n} ranks along ep are more than the {experts} experts; at most {experts} would do"
        )


def check(rt: Runtime, o: ExpertOptions, versions: Iterable[str]) -> None:
    """Raise UsageError for options that cannot run, before any rank waits for another.

    All ranks communicate in each micro-batch, so they must run equally many.
    """
    comparison.check(rt, tuple(versions), o)
    check_split(o.model_config().experts, rt.world_size)
    if o.batch // rt.world_size < o.micro_batches:
        raise UsageError(
            f"--batch {o.batch} gives a rank {o.batch // rt.world_size} samples, too few for {o.micro_batches} "
            f"micro-batches; give at least --batch {rt.world_size * o.micro_batches}"
        )


def check_slices(config: TransformerConfig, n: int) -> None:
    """Raise UsageError where n ranks cannot each hold a slice of every expert."""
    check_split(config.experts, 1)
    if config.bias or config.shared_experts:
        raise UsageError(
            "slices of experts are shown for experts without biases and shared ones: mixtral-tiny"
        )
    if n > config.mlp_width:
        raise UsageError(
            f"{n} ranks are more than an expert's width {config.mlp_width}; at most {config.mlp_width} would do"
        )


def check_equal_samples(rt: Runtime, o: TrainingOptions) -> None:
    """Raise UsageError if ranks would gather different numbers of samples."""
    step = rt.world_size * o.micro_batches
    if o.batch % step:
        raise UsageError(
            f"--batch {o.batch} does not divide over {rt.world_size} ranks with {o.micro_batches} micro-batches; "
            f"{max(1, o.batch // step) * step} would do"
        )


def mixtures(model: nn.Module) -> list[MoE]:
    """Return the mixtures of experts of a model, from the first layer to the last."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def observed(model: nn.Module) -> list[list[Routing]]:
    """Return one list per mixture, to which every forward pass appends the router's result."""
    lists: list[list[Routing]] = []
    for moe in mixtures(model):
        lists.append([])
        moe.observe = lists[-1].append
    return lists


def drain(lists: list[list[Routing]]) -> Iterator[list[Routing]]:
    """Yield the observed routings, layer by layer, and empty the lists."""
    for routings in lists:
        yield list(routings)
        routings.clear()


def load(experts_BSK: Tensor, E: int) -> Tensor:
    """Return the number of choices of each expert, int64 [E]."""
    return torch.bincount(experts_BSK.flatten(), minlength=E)


def largest_difference(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], rt: Runtime) -> float:
    """Return the largest relative difference of all ranks' tensors, `found`, to one device's.

    Of the experts, `found` holds this rank's. The difference is infinite where a tensor is missing or not
    finite.
    """
    mine = {
        name: x
        if name not in found or x.shape == found[name].shape
        else x.split(sizes_of(len(x), rt.world_size))[rt.rank]
        for name, x in expected.items()
    }
    return max(comm.everyones(largest(mine, found, "").value, rt.world))
