"""A job: the model to train, the code that trains it, the machine, and the batch. A plan says how."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from common.models.configs import TransformerConfig

from plan_layout import Code, split
from plan_machine import SIZES, Machine
from plan_models import layer_shapes
from plan_size import flops_per_token


@dataclass(frozen=True, eq=False)  # compared by identity, so that results can be cached by job and plan
class Job:
    """What is to be trained: `batch` samples of `sequence` tokens a step."""

    config: TransformerConfig
    code: Code
    machine: Machine
    batch: int
    sequence: int

    @cached_property
    def shapes(self) -> tuple[TransformerConfig, ...]:
        """The shape of each layer, first to last."""
        return tuple(layer_shapes(self.config))

    @cached_property
    def kinds(self) -> tuple[TransformerConfig, ...]:
        """The different shapes of layers."""
        return tuple(dict.fromkeys(self.shapes))

    def layers(self, stages: int) -> tuple[tuple[int, ...], ...]:
        """Return, for each of so many stages, how many layers of each kind it has."""
        if stages not in self._layers:
            chunks = split(self.shapes, stages)
            self._layers[stages] = tuple(tuple(map(chunk.count, self.kinds)) for chunk in chunks)
        return self._layers[stages]

    @cached_property
    def _layers(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        return {}

    @cached_property
    def flops(self) -> float:
        """Operations of the model in a step, of all ranks."""
        return flops_per_token(self.config, self.sequence) * self.batch * self.sequence

    @property
    def number_bytes(self) -> int:
        """Bytes of a number of the activations."""
        return SIZES[self.code.dtype]

    @property
    def peak(self) -> float:
        """FLOP/s of a rank by the data sheet."""
        return self.machine.peak[self.code.dtype]
