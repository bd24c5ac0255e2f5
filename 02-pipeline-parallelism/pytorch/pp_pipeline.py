"""Cut the plain Transformer into stages and run them by a schedule.

    model = Transformer(config)
    pipe = Pipeline(model, mesh, make_schedule("1f1b", ranks, micro_batches))     # model keeps this rank's part
    loss = pipe.run(parts, 1 / tokens, begin)                    # forward and backward of all micro-batches
    pipe.finish()                                                # sums the gradients of tied weights

`scale` divides the loss once, by the tokens of the whole batch. So the gradients of micro-batches of any size
add up to those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common.comm.mesh import Mesh
from common.comm.placement import sum_tied_gradients
from common.models.transformer import Transformer, need_transformer

from pp_deferred import Deferred
from pp_executor import Executor, Part
from pp_schedule import Schedule, forward_only
from pp_stages import cut_model, evenly

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Pipeline:
    """Model in stages. `model` is this rank's part; its parameters have the names of the whole model.

    cuts: the layers of each stage, by default split evenly. checkpointing: keep only the input of each layer.
    shape(tokens_BS): the shape of activations between stages, by default [B, S, D]. Raises TypeError for a model
    that is no Transformer of ours; `Executor` runs any modules.
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
        need_transformer(model, "Pipeline", "Executor, as examples/your_own_model.py does")
        cuts = cuts or evenly(len(model.layers), schedule.stages)
        self.model, self.schedule, deferred = model, schedule, Deferred()
        if checkpointing:
            model.run_layer = partial(checkpoint, use_reentrant=False)
        self.stages = cut_model(model, schedule.owner, mesh, cuts)
        if schedule.micro_batches > 1 or any(i.op == "W" for i in schedule.lists[mesh.at["pp"]]):
            deferred.replace(model)
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

    @torch.no_grad()
    def evaluate(self, parts: list[Part], loss: Loss | None = None) -> Tensor:
        """Run only forward, one micro-batch per part; return the sum of the losses, on all ranks along pp.

        loss: function of the last stage's logits and the targets, by default the loss of training.
        """
        schedule = forward_only(self.schedule.owner, len(parts))
        return self.make_executor(schedule, loss=loss or self.loss).run(parts, 1.0, lambda m: None)

    def finish(self) -> None:
        """Sum the gradients of tied weights, after the backward passes."""
        sum_tied_gradients(self.model.parameters())
