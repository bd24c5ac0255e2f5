"""Targets of ZeRO-3: outputs and shards of one device, whole weights of two layers at most, 3 M S (n-1)/n bytes."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from common.comm import Group
from common.grade.targets import OPTIMIZERS, at_most, counted, exactly, holds, same, share, target
from common.utils.memory import LiveBytes

ALLOWED = {"torch.func"}
D, H, B = 5, 7, 3  # width, inner width, samples per micro-batch


class Mlp(nn.Module):
    """x + W2 tanh(W1 x + b)."""

    def __init__(self, width: int, inner: int, rng: torch.Generator) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=rng, dtype=torch.float64) / p.shape[-1] ** 0.5

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return y_BD."""
        return x_BD + self.down(self.up(x_BD).tanh())


def layers_of(seed: int, number: int = 3) -> list[nn.Module]:
    """Return layers of different sizes, 77, 88 and 99 parameters; most numbers of ranks divide none."""
    rng = torch.Generator().manual_seed(seed)
    return [Mlp(D, H + i % 3, rng) for i in range(number)]


def padded(tensors: list[Tensor], n: int) -> Tensor:
    """Return tensors flattened, joined, and padded with zeros to a multiple of n."""
    joined = torch.cat([x.flatten() for x in tensors])
    return F.pad(joined, (0, -len(joined) % n))


def same_shards(
    what: str, got: list[Tensor | None], layers: list[list[Tensor]], group: Group, when: str = ""
) -> None:
    """Compare each shard with that of one device's tensors, which are listed by layer."""
    exactly("shards", len(got), len(layers))
    for i, (mine, whole) in enumerate(zip(got, layers, strict=True)):
        shards = padded(whole, group.size).chunk(group.size)
        mistakes = {f"that of rank {r}": shards[r] for r in range(group.size)}
        same(f"{what}shards[{i}]{when}", mine, shards[group.rank], mistakes)


def loss_of(y_BD: Tensor, samples: int) -> Tensor:
    """Return the part of these samples in the mean over all samples."""
    return (y_BD - 0.5).square().sum() / samples


def inputs(group: Group, rng: torch.Generator, *sizes: int) -> tuple[int, Tensor]:
    """Return (a seed for weights, samples of every rank)."""
    seed = int(torch.randint(10**6, (1,), generator=rng))
    return seed, torch.randn(group.size, *sizes, B, D, generator=rng, dtype=torch.float64)


@target("this rank's shard of every layer", ranks=(1, 2, 3, 4))
def the_shards(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Equal lengths, zeros at the end; the layers' own memory is free."""
    seed, _ = inputs(group, rng)
    layers, right = layers_of(seed), layers_of(seed)
    storages = [(StorageWeakRef(p.untyped_storage()), p.nbytes) for x in layers for p in x.parameters()]
    with LiveBytes() as live:
        model = mine.Zero3(layers, group)
        made = live.now
    same_shards("", model.shards, [list(layer.parameters()) for layer in right], group)
    alive = sum(size for storage, size in storages if not storage.expired())
    at_most("bytes of the layers' own parameters that are still in memory", alive, 0)
    at_most("bytes that Zero3(...) keeps", made, sum(shard.nbytes for shard in model.shards))


@target("outputs, and the gradient of x", ranks=(1, 2, 3))
def the_outputs(mine: Any, group: Group, rng: torch.Generator) -> None:
    """With and without autograd."""
    seed, x_RBD = inputs(group, rng)
    model, plain = mine.Zero3(layers_of(seed), group), nn.Sequential(*layers_of(seed))
    x_BD, also_BD = (x_RBD[group.rank].clone().requires_grad_() for _ in range(2))
    with torch.no_grad():
        same("the output under no_grad", model.forward(x_BD), plain(x_BD))
    y_BD, right_BD = model.forward(x_BD), plain(also_BD)
    same("the output", y_BD, right_BD)
    holds(y_BD.requires_grad, "the output has no backward pass: it is a constant for autograd")
    loss_of(y_BD, B).backward()
    loss_of(right_BD, B).backward()
    assert also_BD.grad is not None
    same("the gradient of x", x_BD.grad, also_BD.grad)


@target("gradients of the shards, summed over ranks and micro-batches", ranks=(1, 2, 3))
def the_gradients(mine: Any, group: Group, rng: torch.Generator) -> None:
    """One and two micro-batches."""
    for micro_batches in (1, 2):
        seed, x_RMBD = inputs(group, rng, micro_batches)
        samples = x_RMBD[..., 0].numel()
        model = mine.Zero3(layers_of(seed), group)
        for x_BD in x_RMBD[group.rank]:
            loss_of(model.forward(x_BD), samples).backward()

        def gradients(x_BD: Tensor, seed: int = seed, samples: int = samples) -> list[Tensor]:
            plain = nn.Sequential(*layers_of(seed))
            loss_of(plain(x_BD), samples).backward()
            return [padded([p.grad for p in layer.parameters()], group.size) for layer in plain]

        right, own = gradients(x_RMBD.flatten(0, 2)), gradients(x_RMBD[group.rank].flatten(0, 1))
        last = gradients(x_RMBD[:, -1].flatten(0, 1))
        for i, shard in enumerate(model.shards):
            r, n = group.rank, group.size
            mistakes = {
                "that of this rank's samples alone": own[i].chunk(n)[r],
                "that of the last micro-batch; those before it are missing": last[i].chunk(n)[r],
            }
            same(f"the gradient of shards[{i}]", shard.grad, right[i].chunk(n)[r], mistakes)


@target("weights after three steps of SGD and AdamW", ranks=(2, 3))
def three_steps(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Each step uses the weights of the last one."""
    for name, optimizer in OPTIMIZERS.items():
        seed, x_RSBD = inputs(group, rng, 3)
        model, plain = mine.Zero3(layers_of(seed), group), nn.Sequential(*layers_of(seed))
        of_model, of_plain = optimizer(model.shards), optimizer(plain.parameters())
        for step in range(3):
            for run, x_BD, stepped in (
                (model.forward, x_RSBD[group.rank, step], of_model),
                (plain, x_RSBD[:, step].flatten(0, 1), of_plain),
            ):
                stepped.zero_grad()
                loss_of(run(x_BD), B * group.size).backward()
                stepped.step()
        layers = [list(layer.parameters()) for layer in plain]
        same_shards("", model.shards, layers, group, f" after 3 steps of {name}")


@target("whole weights of two layers at most", ranks=(2,))
def the_memory(mine: Any, group: Group, rng: torch.Generator) -> None:
    """Twelve large layers and one sample: what is alive are weights, gradients and messages."""
    width, inner = 32, 96
    layers = [Mlp(width, inner, rng) for _ in range(12)]
    layer = sum(p.nbytes for p in layers[0].parameters())
    model = mine.Zero3(layers, group)
    x_BD = torch.randn(1, width, generator=rng, dtype=torch.float64)
    activations = len(layers) * 2 * (width + inner) * 8  # half a layer
    with LiveBytes() as live:
        loss = loss_of(model.forward(x_BD), 2)
        forward, kept = live.peak, live.now
        loss.backward()
    at_most(f"bytes alive after the forward pass (a layer has {layer:,})", kept, layer + activations)
    at_most(f"most bytes alive in the forward pass (a layer has {layer:,})", forward, 2 * layer + activations)
    gradients = len(layers) * layer // group.size
    most = 5 * layer + gradients + activations
    at_most(f"most bytes alive in the backward pass (a layer has {layer:,})", live.peak, most)


@target("two all-gathers and a reduce-scatter per layer and micro-batch", ranks=(2, 3))
def the_bytes(mine: Any, group: Group, rng: torch.Generator) -> None:
    """3 M S (n-1)/n, with the padding."""
    micro_batches = 2
    seed, x_RMBD = inputs(group, rng, micro_batches)
    model = mine.Zero3(layers_of(seed), group)
    with counted("all_gather", "reduce_scatter") as ledger:
        for x_BD in x_RMBD[group.rank]:
            loss_of(model.forward(x_BD), 1).backward()
    weights = sum(padded(list(layer.parameters()), group.size).nbytes for layer in layers_of(seed))
    at_most(
        "bytes that it sends by all_gather",
        ledger.bytes("all_gather"),
        share(2 * micro_batches, weights, group),
    )
    most = share(micro_batches, weights, group)
    at_most("bytes that it sends by reduce_scatter", ledger.bytes("reduce_scatter"), most)
