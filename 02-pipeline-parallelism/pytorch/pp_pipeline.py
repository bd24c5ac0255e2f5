"""Cut the plain Transformer into stages and run them by a schedule.

    model = Transformer(config)
    pipe = Pipeline(model, mesh, make_schedule("1f1b", ranks, micro_batches))     # model keeps this rank's part
    loss = pipe.run(parts, 1 / tokens, begin)                    # forward and backward of all micro-batches
    pipe.finish()                                                # gradients of what two ranks hold, summed

The loss is divided once, by the tokens of the whole batch: `scale`. A micro-batch's gradients add up to those of the
batch whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from pp_deferred import Deferred
from pp_executor import Executor, Part
from pp_schedule import Schedule, forward_only
from pp_simulator import Event
from pp_stages import cut_model, evenly
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.mesh import Mesh
from common.models.transformer import Transformer
from common.placement import sum_tied_gradients

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Pipeline:
    """A model in stages. `model` is this rank's part; its parameters have the names of the whole model.

    cuts: the layers of each stage, evenly when left out. checkpointing: keep the input of each layer alone.
    shape(tokens_BS): of what passes from stage to stage, [B, S, D] when left out.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        schedule: Schedule,
        cuts: Sequence[range] | None = None,
        checkpointing: bool = False,
        shape: Callable[[Tensor], tuple[int, ...]] | None = None,
    ) -> None:
        cuts = cuts or evenly(len(model.layers), schedule.stages)
        self.model, self.schedule, deferred = model, schedule, Deferred()
        self.stages = cut_model(model, schedule.owner, mesh, cuts)
        if any(i.op == "W" for i in schedule.lists[mesh.at["pp"]]):
            deferred.replace(model)
            if hasattr(model.unembed, "product"):
                model.unembed.product = deferred.linear
            else:
                model.unembed = deferred.linear
        if checkpointing:
            for stage in self.stages.values():
                stage.layers = nn.ModuleList(Checkpointed(layer) for layer in stage.layers)
        width = model.config.width
        parameter = next(iter(model.parameters()))
        self.loss: Loss = lambda logits, targets: model.loss(logits, targets)
        self.make_executor = partial(
            Executor,
            stages=self.stages,
            mesh=mesh,
            shape=shape or (lambda tokens_BS: (*tokens_BS.shape, width)),
            dtype=parameter.dtype,
            deferred=deferred,
        )
        self.executor = self.make_executor(schedule, loss=self.loss)
        self.run = self.executor.run

    @property
    def events(self) -> list[Event]:
        """What this rank computed in the last run, and when."""
        return self.executor.events

    @torch.no_grad()
    def evaluate(self, parts: list[Part], loss: Loss | None = None) -> Tensor:
        """Forward alone, a micro-batch for each part: the sum of the losses, the same on all ranks along pp.

        loss: what to make of the last stage's logits, if not the loss of training.
        """
        schedule = forward_only(self.schedule.owner, len(parts))
        return self.make_executor(schedule, loss=loss or self.loss).run(parts, 1.0, lambda m: None)

    def finish(self) -> None:
        """After the backward passes."""
        sum_tied_gradients(self.model.parameters())


class Checkpointed(nn.Module):
    """A layer that keeps its input alone and computes again what its backward pass needs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layer, *inputs, use_reentrant=False)
        return y
