"""The other way to spread experts: a slice of every expert on each rank, and all tokens to all ranks.

    experts    whole experts on ranks     each token to its k experts' ranks     y_t from k ranks, weighted
    tensor     a slice of each on ranks   each token to all ranks                y_t is a sum over ranks

    tensor:    x_bSD --all-gather--> x_BSD  route, gate and up by columns, down by rows  --reduce-scatter--> y_bSD

Inside an expert it is chapter 03: columns, then rows, then a sum. Since combining is linear, the weighted sum over a
token's experts is taken first, of what each rank has, and the sum over ranks after it: one message of T D numbers
instead of k T D. Every rank routes all tokens, so the router's gradient is partial, as for all that sees split tokens,
and the slices' gradients are complete: each saw all tokens.

Cost, t tokens of a rank, forward and backward: experts 4 k t D (n-1)/n numbers a layer when the load is even, tensor
4 t D (n-1) always: n / k times as many. Below n = k slices send less. And every rank does an n-th of all work whatever
the router does: nothing to balance; but products are n times narrower, and the router runs n times.

    python ep_tensor_parallel.py --nproc 2      torchrun --nproc_per_node=2 ep_tensor_parallel.py
    OMP_NUM_THREADS=1 mpirun -np 2 --bind-to core python ep_tensor_parallel.py --benchmark --dtype float32

B batch, b of a rank  S sequence  D width  E experts  k experts a token  n ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from ep_moe import Lesson, MoEOptions, check_split, prove_or_time, refuse
from ep_training import mixtures
from torch import nn

from common import collectives
from common.comm import Group
from common.errors import UsageError
from common.lesson import DTYPES, run
from common.mesh import Mesh
from common.models.transformer import Transformer, TransformerConfig
from common.placement import shard, sum_gradients
from common.runtime import Runtime
from common.training import Version

VERSIONS = ("experts", "tensor")


@dataclass
class TensorOptions(MoEOptions):
    """Which versions."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""


def slice_experts(model: Transformer, group: Group) -> None:
    """Cut every expert over the ranks of `group`, in place; the same whole model must be on all of them.

    Each rank then runs the model on its own samples, equally many on all of them. Raises UsageError where it cannot.
    """
    check_slices(model.config, group.size)
    for moe in mixtures(model):
        for name, part in moe.experts.named_children():
            rows = 2 if name == "down_proj" else 1  # weight_EOI: columns are O, rows are I
            part.weight = shard(part.weight, group, rows)  # type: ignore[arg-type]
        moe.register_forward_pre_hook(lambda _, given: (collectives.gather(given[0], group, 0, "partial"),))
        moe.register_forward_hook(lambda _, given, y_BSD: collectives.reduce_scatter(y_BSD, group, 0))


def check_slices(config: TransformerConfig, n: int) -> None:
    """Raises UsageError where n ranks cannot each hold a slice of every expert."""
    check_split(config.experts, 1)
    if config.bias or config.shared_experts:
        raise UsageError(
            "slices of experts are shown for experts without biases and shared ones: mixtral-tiny"
        )
    if n > config.mlp_width:
        raise UsageError(
            f"{n} ranks are more than an expert's width {config.mlp_width}; at most {config.mlp_width} would do"
        )


class TensorLesson(Lesson):
    """Whole experts and slices, with their bytes by formula."""

    def make_version(self, name: str, model: nn.Module, rt: Runtime, o: MoEOptions) -> Version:
        """The model with its experts over all ranks, in this way."""
        if name == "experts":
            return super().make_version(name, model, rt, o)
        assert isinstance(model, Transformer)
        mesh = Mesh(rt.world, ep=rt.world_size)
        slice_experts(model, mesh.group("ep"))
        return Version(model, finish=partial(sum_gradients, list(model.parameters()), mesh))

    def steps_bytes(self, name: str, model: nn.Module, group: Group, o: MoEOptions) -> list[Fraction]:
        """Bytes this rank sends in each step: with slices the same in all."""
        if name == "experts":
            return super().steps_bytes(name, model, group, o)
        c, n, size = o.model_config(), group.size, DTYPES[o.dtype].itemsize
        always = self.always(model, group, o)
        return [always + c.layers * 4 * (n - 1) * o.batch * o.sequence // n * c.width * size]


def equal_samples(rt: Runtime, o: MoEOptions) -> None:
    """Raises UsageError where ranks would gather different numbers of samples."""
    if o.batch % (rt.world_size * o.micro_batches):
        step = rt.world_size * o.micro_batches
        raise UsageError(
            f"--batch {o.batch} does not divide over {rt.world_size} ranks with {o.micro_batches} micro-batches; "
            f"{max(1, o.batch // step) * step} would do"
        )


def main(rt: Runtime, o: TensorOptions) -> bool:
    """Prove both, or with --benchmark time them."""
    refuse(rt, o, VERSIONS)
    check_slices(o.model_config(), rt.world_size)
    equal_samples(rt, o)
    return prove_or_time(rt, o, TensorLesson())


if __name__ == "__main__":
    run(main, TensorOptions)
