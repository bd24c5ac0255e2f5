"""The course's parts on a model that is not ours: a small vision transformer, on a mesh of pp x dp x sp x tp.

    tp    each block's matrices and heads          ColumnParallelLinear, RowParallelLinear    as they come
    sp    the patches of each image                ring_attention in place of attention       one sum after the mean
    dp    the images                               Zero, any nn.Module; or sum_gradients      as it comes
    pp    the blocks                               Executor, with a module for each stage     one small module

The model is plain PyTorch and knows nothing of ranks. Each function below changes it for one axis, in place; on an
axis of one rank it changes nothing that one could measure. Gradients are summed by the placement that the layers
give their parameters, so the loop needs one call for any mesh. The run is compared with the plain model's.

    python your_own_model.py --nproc 4 --tp 2             torchrun --nproc_per_node=4 your_own_model.py --tp 2 --zero 2
    mpirun -np 4 python your_own_model.py --sp 2            python your_own_model.py --nproc 8 --pp 2 --tp 2

B images of a batch  S patches  s a rank's patches  P numbers of a patch  D width  H heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from common.comm import collectives
from common.comm.mesh import Mesh
from common.comm.placement import sum_gradients
from common.data.text import rank_slice
from common.errors import UsageError
from common.launch.command_line import Ranks, Size
from common.launch.runtime import Runtime
from common.lesson.equality import (
    KINDS,
    OPTIMIZERS,
    TOLERANCE,
    MakeOptimizer,
    Named,
    compare,
    watch,
    worst_of_world,
)
from common.lesson.job import total
from common.lesson.runner import DTYPES, LessonOptions, console, run

from dp_zero import Zero
from pp_deferred import Deferred
from pp_executor import Executor
from pp_schedules import make_schedule
from sp_ring_attention import ring_attention
from tp_column_parallel import ColumnParallelLinear
from tp_row_parallel import RowParallelLinear

PATCH, PATCHES, WIDTH, HEADS, BLOCKS, CLASSES = 4, 16, 24, 4, 4, 10


class Block(nn.Module):
    """Attention and MLP, each after a norm. The number of heads follows from the width of q."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = F.scaled_dot_product_attention

    def forward(self, x_BSD: Tensor) -> Tensor:
        y_BSD = self.norm1(x_BSD)
        q_BHSK, k_BHSK, v_BHSK = (
            part(y_BSD).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        x_BSD = x_BSD + self.o(self.attend(q_BHSK, k_BHSK, v_BHSK).transpose(1, 2).flatten(2))
        z_BSD: Tensor = x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD))))
        return z_BSD


class VisionTransformer(nn.Module):
    """Classifier of images cut into patches_BSP: the mean over the patches of the last block's output."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.positions = nn.Parameter(torch.randn(PATCHES, WIDTH) / 10)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.to(dtype)

    def enter(self, patches_BSP: Tensor) -> Tensor:
        x_BSD: Tensor = self.embed(patches_BSP) + self.positions
        return x_BSD

    def leave(self, x_BSD: Tensor) -> Tensor:
        logits_BC: Tensor = self.head(self.norm(x_BSD).mean(1))
        return logits_BC

    def forward(self, patches_BSP: Tensor) -> Tensor:
        x_BSD = self.enter(patches_BSP)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.leave(x_BSD)


def tensor_parallel(model: VisionTransformer, mesh: Mesh) -> None:
    """Split each block's matrices over tp: by columns where heads or hidden features come out, then by rows."""
    group = mesh.group("tp")
    for block in model.blocks:
        for name in ("q", "k", "v", "up"):
            setattr(block, name, ColumnParallelLinear(getattr(block, name), group))
        for name in ("o", "down"):
            setattr(block, name, RowParallelLinear(getattr(block, name), group))


def sequence_parallel(model: VisionTransformer, mesh: Mesh) -> None:
    """Give each rank along sp a run of each image's patches; keys and values pass around the ring."""
    group = mesh.group("sp")
    mine = slice(*rank_slice(PATCHES, group.rank, group.size))
    for block in model.blocks:
        block.attend = partial(ring_attention, causal=False, group=group)  # type: ignore[assignment]

    def enter(patches_BSP: Tensor) -> Tensor:
        x_BsD: Tensor = model.embed(patches_BSP[:, mine]) + model.positions[mine]
        return x_BsD

    def leave(x_BsD: Tensor) -> Tensor:
        mean_BD = collectives.reduce(model.norm(x_BsD).sum(1) / PATCHES, group)
        # from here on each rank counts 1/n of the loss: `copy` sums what comes back
        logits_BC: Tensor = model.head(collectives.copy(mean_BD, group))
        return logits_BC

    model.enter, model.leave = enter, leave  # type: ignore[method-assign, assignment]


class Stage(nn.Module):
    """Some blocks of the model, with its beginning before the first and its end after the last."""

    def __init__(self, model: VisionTransformer, number: int, stages: int) -> None:
        super().__init__()
        self.blocks = model.blocks[slice(*rank_slice(BLOCKS, number, stages))]
        self.enter = model.enter if number == 0 else nn.Identity()
        self.leave = model.leave if number == stages - 1 else nn.Identity()

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        x_BSD = self.enter(x)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.leave(x_BSD)


def pipeline(model: VisionTransformer, mesh: Mesh, o: OwnOptions) -> Executor:
    """Return the executor of this rank's stage. The model keeps only its parts, under their names."""
    at, stages, own = mesh.at["pp"], mesh.shape["pp"], mesh.group("sp")
    first, last = at == 0, at == stages - 1
    patches = len(range(*rank_slice(PATCHES, own.rank, own.size)))
    stage = Stage(model, at, stages)
    model.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in range(*rank_slice(BLOCKS, at, stages))})  # type: ignore[assignment]
    if not first:
        del model.embed, model.positions
    if not last:
        del model.norm, model.head
    return Executor(
        make_schedule("1f1b", stages, o.micro_batches),
        {at: stage},
        mesh,
        loss=lambda logits_BC, labels_B: (F.cross_entropy(logits_BC, labels_B, reduction="sum"), labels_B),
        shape=lambda patches_BSP: (len(patches_BSP), patches, WIDTH),
        dtype=DTYPES[o.dtype],
        deferred=Deferred(),
    )


@dataclass
class OwnOptions(LessonOptions, without=("data", "json", "trace", "plot")):
    """Options: the mesh and the batch."""

    batch: Size = 10
    """Images of the global batch."""
    micro_batches: Size = 2
    """With pp: parts into which a rank cuts its images."""
    pp: Ranks = 1
    """Ranks along pp: stages of blocks."""
    sp: Ranks = 1
    """Ranks along sp: runs of patches."""
    tp: Ranks = 1
    """Ranks along tp: parts of each matrix. dp takes the ranks that are left."""
    zero: Literal[0, 1, 2, 3] = 0
    """Stage of ZeRO along dp, without pp."""


def images(o: OwnOptions, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (patches_BSP, labels_B) of a global batch: noise, and a pattern for each class."""
    draw = torch.Generator().manual_seed(o.seed)
    patterns_CSP = torch.randn(CLASSES, PATCHES, PATCH * PATCH, generator=draw)
    draw.manual_seed(o.seed + 1 + step)
    labels_B = torch.randint(CLASSES, (o.batch,), generator=draw)
    noise_BSP = torch.randn(o.batch, *patterns_CSP.shape[1:], generator=draw)
    return (patterns_CSP[labels_B] + noise_BSP).to(device, DTYPES[o.dtype]), labels_B.to(device)


@dataclass
class OwnRun:
    """A training run: the plain model, the optimizer's maker and, once it has begun, what the optimizer steps on."""

    model: VisionTransformer
    make_optimizer: MakeOptimizer
    device: torch.device
    owner: Named | None = None

    def optimizer(self, owner: Named) -> torch.optim.Optimizer:
        """Return the run's optimizer for the parameters of `owner`."""
        self.owner = owner
        return self.make_optimizer([p for _, p in owner.named_parameters()])


def one_device(run: OwnRun, o: OwnOptions) -> Iterator[Tensor]:
    """Train the plain model on whole batches; yield the loss of each."""
    optimizer = run.optimizer(run.model)
    for step in range(o.steps):
        patches_BSP, labels_B = images(o, step, run.device)
        optimizer.zero_grad()
        loss = F.cross_entropy(run.model(patches_BSP), labels_B)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def train(run: OwnRun, mesh: Mesh, o: OwnOptions) -> Iterator[Tensor]:
    """Train on dp x sp x tp; yield the loss of each global batch."""
    model, dp = run.model, mesh.group("dp")
    tensor_parallel(model, mesh)
    sequence_parallel(model, mesh)
    zero = Zero(model, list(model.blocks), dp, o.zero) if o.zero else None
    owner: Named = zero or model
    optimizer = run.optimizer(owner)
    mine = slice(*rank_slice(o.batch, dp.rank, dp.size))
    for step in range(o.steps):
        patches_BSP, labels_B = (x[mine] for x in images(o, step, run.device))
        optimizer.zero_grad()
        loss_sum = F.cross_entropy(model(patches_BSP), labels_B, reduction="sum")
        loss = loss_sum / (o.batch * mesh.shape["sp"])
        loss.backward()
        if zero:
            zero.finish()  # sums over dp; each rank then steps on its pieces
        sum_gradients([p for _, p in owner.named_parameters()], mesh)  # over sp, and without ZeRO over dp
        optimizer.step()
        yield total([loss.detach()], mesh.group("dp", "sp"))


def train_in_stages(run: OwnRun, mesh: Mesh, o: OwnOptions) -> Iterator[Tensor]:
    """Train on pp x dp x sp x tp; yield the loss of each global batch."""
    model, dp = run.model, mesh.group("dp")
    tensor_parallel(model, mesh)
    sequence_parallel(model, mesh)
    pipe = pipeline(model, mesh, o)
    optimizer = run.optimizer(model)
    mine, scale = slice(*rank_slice(o.batch, dp.rank, dp.size)), 1 / (o.batch * mesh.shape["sp"])
    for step in range(o.steps):
        cut = [x[mine].tensor_split(o.micro_batches) for x in images(o, step, run.device)]
        optimizer.zero_grad()
        loss_sum = pipe.run(list(zip(*cut, strict=True)), scale, lambda m: None)  # forward and backward
        sum_gradients(model.parameters(), mesh)
        optimizer.step()
        yield total([loss_sum * scale], mesh.group("dp", "sp"))


def check(rt: Runtime, o: OwnOptions) -> Mesh:
    """Return the mesh. Raises UsageError where ranks, heads, patches, blocks or images do not fit it."""
    dp = rt.world_size // (o.pp * o.sp * o.tp)
    if dp * o.pp * o.sp * o.tp != rt.world_size:
        raise UsageError(f"{rt.world_size} ranks are no multiple of pp {o.pp} x sp {o.sp} x tp {o.tp}")
    if HEADS % o.tp or PATCHES % o.sp or o.pp > BLOCKS:
        raise UsageError(f"--tp must divide {HEADS} heads, --sp {PATCHES} patches; --pp is at most {BLOCKS}")
    if o.zero and o.pp > 1:
        raise UsageError("--zero is for --pp 1 here; chapter 06 combines stage 1 of ZeRO with pp")
    if o.batch // dp < (o.micro_batches if o.pp > 1 else 1):
        raise UsageError(f"--batch {o.batch} is too small for {dp} ranks along dp with their micro-batches")
    return Mesh(rt.world, pp=o.pp, dp=dp, sp=o.sp, tp=o.tp, timeout=rt.timeout)


def main(rt: Runtime, o: OwnOptions) -> bool:
    """Train on the mesh and on one device, with SGD and AdamW; compare."""
    mesh, dtype = check(rt, o), DTYPES[o.dtype]
    shape = " ".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1) or "one rank"
    table = Table(title=f"largest relative difference from one device: {shape}", title_justify="left")
    for column in ("optimizer", *KINDS, "last loss"):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    largest = 0.0
    for name, make in OPTIMIZERS.items():
        alone = OwnRun(VisionTransformer(o.seed, dtype).to(rt.device), make, rt.device)
        reference = watch(one_device(alone, o), alone)
        run = OwnRun(VisionTransformer(o.seed, dtype).to(rt.device), make, rt.device)
        followed = watch((train_in_stages if o.pp > 1 else train)(run, mesh, o), run, mesh)
        found = worst_of_world(compare(reference, followed), mesh)
        table.add_row(name, *(f"{found[kind].value:.1e}" for kind in KINDS), f"{followed.losses[-1]:.6f}")
        largest = max(largest, *(d.value for d in found.values()))
    equal = largest <= TOLERANCE[dtype]
    console(rt).print(table)
    console(rt).print(
        f"{'proved: equal' if equal else 'NOT equal'} to one device within {TOLERANCE[dtype]:g}"
    )
    return equal


if __name__ == "__main__":
    run(main, OwnOptions)
