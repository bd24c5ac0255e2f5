"""Generate text with a LLaMA whose layers lie on the ranks along pp, and heads and matrices on those along tp.

    engine = Engine(config, mesh, device, whole=read_weights(folder, config))
    a = engine.add(Request((1, 5, 7), tokens=20))            # every rank makes the same calls
    while engine.scheduler.running or engine.scheduler.waiting:
        for sequence, token in engine.step(): ...            # the tokens that this step chose

    rank 0 | embed  layers 0, 1 |  x_1TD  ->  rank 1 | layers 2, 3  head | logits_RV -> tokens_R, broadcast to all ranks

A rank reads its shards of a checkpoint one parameter at a time. The ranks along pp work one after the other: they
divide the memory, not the time of a token. Ranks along tp divide both. The first rank of the last stage chooses all
tokens, so rounding cannot make two ranks choose differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from common import comm
from common.comm import Group, sizes_of
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.models.configs import TransformerConfig
from common.models.transformer import FeedForward, Layer, Linear, angles
from common.utils.pages import in_large_pages

from hybrid_initial import Whole
from hybrid_layout import Layout
from hybrid_model import Hybrid
from infer_cache import Blocks, Cache
from infer_layers import CachedAttention, JoinedFeedForward, Norm, sum_in_place
from infer_sampling import choose
from infer_scheduler import Request, Scheduler, Sequence
from infer_step import Step, make_step
from tp_megatron import Region, SharedRows, kv_heads_read
from tp_row_parallel import RowParallelLinear
from tp_vocabulary import VocabularyParallelEmbedding

M = TypeVar("M", bound=nn.Module)


class Engine:
    """Model, cache and scheduler of a rank. All ranks of the mesh make the same calls in the same order.

    whole(name, shape): values of the model's parameters; default: those of `seed`. blocks: number of blocks of the
    cache, each of `block` tokens. most: sequences that run at once. budget: tokens of a forward pass. Raises UsageError
    if model and mesh do not fit together.
    """

    def __init__(
        self,
        config: TransformerConfig,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        whole: Whole | None = None,
        blocks: int = 256,
        block: int = 16,
        most: int = 16,
        budget: int = 512,
    ) -> None:
        check_model(config)
        if mesh.world.size != mesh.shape["pp"] * mesh.shape["tp"]:
            raise UsageError(
                "text is generated on ranks along pp and tp; start a program for each other replica"
            )
        hybrid = Hybrid(config, mesh, Layout(micro_batches=1), device, dtype, seed, whole)
        self.model = hybrid.model.eval().requires_grad_(False)
        (self.stage,) = hybrid.pipe.stages.values()
        self.config, self.mesh, self.device, self.dtype = config, mesh, device, dtype
        self.blocks = Blocks(blocks, block)
        self.scheduler = Scheduler(self.blocks, most, budget, config.sequence)
        layers = [layer for layer in self.stage.layers if isinstance(layer, Layer)]
        replace_each(self.stage, SharedRows, own_rows)
        replace_each(self.stage, nn.RMSNorm, Norm)
        for module in self.stage.modules():
            module._forward_pre_hooks.clear()  # of regions over tp: without gradients x is the same inside and outside
            if isinstance(module, RowParallelLinear | VocabularyParallelEmbedding):
                add_in_place(module, mesh.group("tp"))
        for parameter in self.stage.parameters():
            parameter.data = in_large_pages(parameter.data)
        queries, kv_heads = (
            projection.weight.shape[0] // config.head_width
            for projection in (layers[0].attention.q_proj, layers[0].attention.k_proj)
        )
        self.shared = queries // kv_heads
        self.cache = Cache(len(layers), self.blocks, kv_heads, config.head_width, dtype, device)
        self.rotary = partial(angles, width=config.head_width, base=config.rotary_base, dtype=dtype)
        self.attentions = [
            CachedAttention(layer.attention, self.cache, number) for number, layer in enumerate(layers)
        ]
        for layer, attention in zip(layers, self.attentions, strict=True):
            layer.add_module("attention", attention)
            if isinstance(layer.mlp, FeedForward) and layer.mlp.gate_proj is not None:
                layer.mlp = JoinedFeedForward(layer.mlp)

    def add(self, request: Request) -> Sequence:
        """Let a request wait for its first step. Raises UsageError if it can never run."""
        vocabulary = self.config.vocabulary
        if bad := [token for token in request.prompt if not 0 <= token < vocabulary]:
            raise UsageError(f"the prompt has a token {bad[0]}; the model's vocabulary is {vocabulary}")
        return self.scheduler.add(request)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before its last token, and free its blocks. No-op if it has ended."""
        self.scheduler.end(sequence, "cancelled")

    @property
    def busy(self) -> bool:
        """True while a sequence runs or waits."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, int]]:
        """Run one forward pass; return the tokens that were chosen, the same on all ranks."""
        scheduled = self.scheduler.schedule()
        step = make_step(scheduled, self.blocks.size, self.shared, self.rotary, self.dtype, self.device)
        logits_RV = self.forward(step)
        tokens = self.choose(logits_RV, step.sequences) if step.sequences else []
        for sequence, count in scheduled:
            sequence.cached += count
        chosen = list(zip(step.sequences, tokens, strict=True))
        for sequence, token in chosen:
            self.scheduler.write(sequence, token)
        return chosen

    def choose(self, logits_RV: Tensor, sequences: list[Sequence]) -> list[int]:
        """Return the next token of each sequence, which the first rank of the last stage chooses for all ranks."""
        tokens_R = torch.zeros(len(sequences), dtype=torch.int64)
        chooser = self.mesh.world.size - self.mesh.shape["tp"]
        if self.mesh.world.rank == chooser:
            tokens_R = choose(logits_RV, sequences)
        tokens_R = tokens_R.to(self.device)
        comm.broadcast(tokens_R, self.mesh.world, chooser)
        tokens: list[int] = tokens_R.tolist()
        return tokens

    def forward(self, step: Step) -> Tensor:
        """Return logits_RV after the rows `last_R`, on the last stage; elsewhere undefined."""
        for attention in self.attentions:
            attention.step = step
        stage, pp, tp = self.stage, self.mesh.group("pp"), self.mesh.group("tp")
        if stage.first:
            x_1TD = stage.embed(step.tokens_1T, step.positions_1T)
        else:
            shape = (*step.tokens_1T.shape, self.config.width)
            x_1TD = torch.empty(shape, dtype=self.dtype, device=self.device)
            comm.recv(x_1TD, pp, pp.rank - 1)
        for layer in stage.layers:
            x_1TD = layer(x_1TD, step.positions_1T)
        if not stage.last:
            comm.send(x_1TD, pp, pp.rank + 1)
            return x_1TD
        if not step.sequences:
            return x_1TD
        logits_Rv = stage.head(x_1TD[:, step.last_R])[0]
        return comm.all_gather(logits_Rv, tp, -1, sizes_of(self.config.vocabulary, tp.size))


def check_model(config: TransformerConfig) -> None:
    """Raise UsageError for a model whose tokens depend on more than the cache holds."""
    if config.positions != "rotary" or not config.causal:
        raise UsageError("only models with rotary positions and a causal mask can be run here, such as LLaMA")
    if config.capacity_factor is not None:
        raise UsageError("with a capacity factor the experts drop tokens by what else is in the batch")


def replace_each(part: nn.Module, kind: type[M], by: Callable[[M], nn.Module]) -> None:
    """Replace each module of that type by what `by` makes of it."""
    for module in list(part.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, kind):
                module.add_module(name, by(child))


def add_in_place(layer: RowParallelLinear | VocabularyParallelEmbedding, group: Group) -> None:
    """Sum the layer's result in its own memory if it ends a region; that of shared experts is summed later."""
    if getattr(layer.leave, "__func__", None) is Region.leave:
        layer.leave = partial(sum_in_place, group=group)


def own_rows(shared: SharedRows) -> Linear:
    """Return the rows that this rank reads of a projection that ranks share."""
    rows = shared.weight.detach()[shared.rows]
    with torch.device("meta"):
        linear = Linear(rows.shape[1], rows.shape[0], shared.bias is not None)
    linear.weight = nn.Parameter(rows, False)
    if shared.bias is not None:
        linear.bias = nn.Parameter(shared.bias.detach()[shared.rows], False)
    return linear


def cache_bytes(config: TransformerConfig, mesh: Mesh, dtype: torch.dtype, tokens: int) -> int:
    """Return the bytes of keys and values of that many tokens on this rank: 2 * layers * heads * width of a head.

    The heads are the key-value heads that the rank's query heads read.
    """
    layers = sizes_of(config.layers, mesh.shape["pp"])[mesh.at["pp"]]
    heads = len(kv_heads_read(config, mesh.at["tp"], mesh.shape["tp"]))
    return 2 * layers * heads * config.head_width * dtype.itemsize * tokens
