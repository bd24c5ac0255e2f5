"""Expert parallelism: whole experts on ranks; each token travels to its experts and back.

    y_t = sum over the k chosen experts e of  w_te expert_e(x_t),     expert_e on rank r(e)

    rank 0 has tokens a b and experts 0 1, rank 1 tokens c d and experts 2 3; k = 2

              rows by expert   all-to-all, by sender   transposed, by expert   experts, then the way back
    rank 0    a0 b1 | a2 b3    a0 b1 | d0 c1           a0 d0 | b1 c1           ... weighted and summed: y_a y_b
    rank 1    d0 c1 | c2 d3    a2 b3 | c2 d3           a2 c2 | b3 d3           ... weighted and summed: y_c y_d

For all but the experts "ep" is one more axis along which tokens are split: dense gradients are summed over it. An
expert meets the tokens of all ranks, so its gradient is complete where it is, and must be neither summed nor averaged.
common/placement.py derives both from one fact, that experts are Shard(0) along "ep".

    dropless    the ranks first exchange how many rows come for each expert (E integers), then as many rows as there are
    capacity    an expert takes C = ceil(c k S / E) tokens of a sequence: each piece has C rows a sequence, some empty;
                tokens that find their expert full are dropped, and empty rows are computed for nothing

Cost: a rank sends s rows to others and sends the r back that others sent to it, of D numbers; forward 2, backward 2:
2 (s + r) D numbers a layer; with even load s = r = k t (n-1)/n for a rank's t tokens. And 8 bytes for each expert that
is not its own. Memory: experts, their gradients and states 1/n. The slowest rank sets the pace: ep_load_balance.py.
Lepikhin et al., "GShard", arXiv:2006.16668, section 3; dropless: Gale et al., "MegaBlocks", arXiv:2211.15841.

    python ep_moe.py --nproc 4      torchrun --nproc_per_node=4 ep_moe.py      mpirun -np 4 python ep_moe.py
    python ep_moe.py --nproc 3 --model switch-tiny     # 8 experts on 3 ranks: 3, 3 and 2

B batch  S sequence  R rows  D width  E experts, e of this rank  C capacity  k experts a token  n ranks
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Annotated

import torch
from ep_training import ExpertOptions, check_micro_batches, mixtures
from rich.table import Table
from torch import Tensor, nn

from common import collectives, comm
from common.comm import Group, sizes_of
from common.comparison import benchmark, check, prove, report
from common.data.text import rank_slice
from common.errors import UsageError
from common.ledger import show_bytes
from common.lesson import DTYPES, console, run
from common.mesh import Mesh
from common.models.moe import Experts
from common.models.transformer import Transformer
from common.options import Within
from common.placement import shard, sum_gradients
from common.runtime import Runtime
from common.training import Version

VERSIONS = ("dropless", "capacity")


@dataclass
class MoEOptions(ExpertOptions):
    """Which versions, and the capacity."""

    versions: tuple[str, ...] = VERSIONS
    """Which versions to run."""
    capacity_factor: Annotated[float, Within(1e-6, 1000)] = 1.25
    """c, with the version `capacity`: the multiple of an even share that an expert takes of a sequence."""


def transposed(x_RD: Tensor, rows_ab: Tensor) -> Tensor:
    """Blocks of rows, rows_ab[i, j] of them in block (i, j), from order (a, b) to (b, a).

    The way back is transposed(y_RD, rows_ab.T).
    """
    a, b = rows_ab.shape
    blocks = x_RD.split(rows_ab.flatten().tolist())
    return torch.cat([blocks[i * b + j] for j in range(b) for i in range(a)])


class ExpertExchange:
    """Rows to the ranks of their experts, through them, and back: stands for the experts in a mixture.

    rows_sent, rows_received: to and from other ranks, in each call since the last `forget`.
    """

    def __init__(self, experts: Experts, group: Group, E: int) -> None:
        self.experts, self.group, self.sizes = experts, group, sizes_of(E, group.size)
        self.rows_sent: list[int] = []
        self.rows_received: list[int] = []
        self.send: list[int] = []  # of the last call, to each rank

    def __call__(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """rows_RD sorted by expert, counts_E of them for each; their results in the same order."""
        group, e = self.group, self.sizes[self.group.rank]
        # row i: what rank i has for each expert of this rank
        counts_ne = comm.all_to_all(counts_E, group, self.sizes, [e] * group.size).view(group.size, e)
        send = [int(counts.sum()) for counts in counts_E.split(self.sizes)]
        receive = counts_ne.sum(1).tolist()
        self.note(send, receive)
        x_RD = collectives.all_to_all(rows_RD, group, send, receive)
        y_RD = self.experts(transposed(x_RD, counts_ne), counts_ne.sum(0))
        return collectives.all_to_all(transposed(y_RD, counts_ne.T), group, receive, send)

    def note(self, send: list[int], receive: list[int]) -> None:
        """Keep what the bytes by formula need."""
        self.send = send
        self.rows_sent.append(sum(send) - send[self.group.rank])
        self.rows_received.append(sum(receive) - receive[self.group.rank])

    def forget(self) -> None:
        """Begin to note anew; a long run would fill the memory."""
        self.rows_sent.clear()
        self.rows_received.clear()


def share_experts(experts: Experts, group: Group) -> None:
    """Keep this rank's experts, in place; numbers of experts differ by one at the most."""
    for part in experts.children():
        for name, parameter in list(part.named_parameters()):
            setattr(part, name, shard(parameter, group, 0))


def expert_parallel(model: Transformer, group: Group) -> list[ExpertExchange]:
    """Spread the experts over the ranks of `group`, in place; the same whole model must be on all of them.

    Each rank then runs the model on its own samples, as many passes as all others; call `placement.sum_gradients` after
    the last backward pass. Returns what stands for the experts of each layer. Raises UsageError where a rank would have
    no expert.
    """
    check_split(model.config.experts, group.size)
    exchanges = []
    for moe in mixtures(model):
        share_experts(moe.experts, group)
        exchanges.append(ExpertExchange(moe.experts, group, model.config.experts))
        moe.compute = exchanges[-1]
    return exchanges


def check_split(experts: int, n: int) -> None:
    """Raises UsageError where n ranks cannot each hold an expert."""
    if not experts:
        raise UsageError("expert parallelism needs a model with experts, such as mixtral-tiny")
    if n > experts:
        raise UsageError(
            f"{n} ranks along ep are more than the {experts} experts; at most {experts} would do"
        )


def with_capacity(name: str, model: nn.Module, o: MoEOptions) -> nn.Module:
    """The model with the capacity of this version."""
    for moe in mixtures(model):
        moe.capacity_factor = o.capacity_factor if name == "capacity" else None
    return model


def one_device(name: str, model: nn.Module, o: MoEOptions) -> Version:
    """What a version must be equal to: the plain model, with the same capacity."""
    return Version(with_capacity(name, model, o))


class Lesson:
    """The versions on all ranks, and their bytes by formula: of the dropless one from the counts exchanged."""

    def __init__(self) -> None:
        self.exchanges: dict[str, list[ExpertExchange]] = {}

    def make_version(self, name: str, model: nn.Module, rt: Runtime, o: MoEOptions) -> Version:
        """The model with its experts over all ranks."""
        assert isinstance(model, Transformer)
        mesh = Mesh(rt.world, ep=rt.world_size)
        self.exchanges[name] = expert_parallel(model, mesh.group("ep"))
        with_capacity(name, model, o)
        return Version(model, finish=partial(sum_gradients, list(model.parameters()), mesh))

    def always(self, model: nn.Module, group: Group, o: MoEOptions) -> Fraction:
        """Bytes a rank sends in a step whatever the experts do: dense gradients, the loss, the number of targets."""
        dense = sum(p.numel() for name, p in model.named_parameters() if ".experts." not in name)
        return Fraction(2 * (group.size - 1) * ((dense + 1) * DTYPES[o.dtype].itemsize + 8), group.size)

    def steps_bytes(self, name: str, model: nn.Module, group: Group, o: MoEOptions) -> list[Fraction]:
        """Bytes this rank sends in each of the steps since the version was made."""
        c, n, size = o.model_config(), group.size, DTYPES[o.dtype].itemsize
        e = sizes_of(c.experts, n)[group.rank]
        always = self.always(model, group, o) + o.micro_batches * c.layers * 8 * (c.experts - e)  # the counts
        if name == "capacity":
            C = math.ceil(o.capacity_factor * c.experts_per_token * o.sequence / c.experts)
            lo, hi = rank_slice(o.batch, group.rank, n)
            rows = C * ((c.experts - e) * (hi - lo) + e * (o.batch - (hi - lo)))
            return [always + c.layers * 2 * rows * c.width * size]
        of_calls = [
            sum(exchange.rows_sent[call] + exchange.rows_received[call] for exchange in self.exchanges[name])
            for call in range(len(self.exchanges[name][0].rows_sent))
        ]
        of_steps = [sum(of_calls[t : t + o.micro_batches]) for t in range(0, len(of_calls), o.micro_batches)]
        return [always + 2 * rows * c.width * size for rows in of_steps]

    def step_bytes(self, name: str, model: nn.Module, group: Group, o: MoEOptions) -> Fraction:
        """Bytes this rank sends in a step: the median of the last `o.steps`."""
        return Fraction(statistics.median(self.steps_bytes(name, model, group, o)[-o.steps :]))

    def run_bytes(self, name: str, model: nn.Module, group: Group, o: MoEOptions) -> Fraction:
        """Bytes this rank sends in `o.steps` steps, each with the 8 bytes of its gradient norm, all-reduced."""
        of_steps = self.steps_bytes(name, model, group, o)
        of_steps = of_steps * o.steps if len(of_steps) == 1 else of_steps
        return sum(of_steps, o.steps * Fraction(2 * (group.size - 1) * 8, group.size))

    def journeys(self, rt: Runtime, o: MoEOptions) -> Table:
        """Rows from rank to rank in the first layer, in the last pass."""
        table = Table(
            title="rows of the last pass, first layer: from rank (down) to rank", title_justify="left"
        )
        for column in ("version", "from", *map(str, range(rt.world_size)), "bytes"):
            table.add_column(column, justify="left" if column == "version" else "right")
        for name, exchanges in self.exchanges.items():
            for rank, send in enumerate(comm.everyones(exchanges[0].send, rt.world)):
                away = sum(send) - send[rank]
                sent = show_bytes(away * o.model_config().width * DTYPES[o.dtype].itemsize)
                table.add_row(name if rank == 0 else "", str(rank), *map(str, send), sent)
        return table


def refuse(rt: Runtime, o: MoEOptions, versions: tuple[str, ...]) -> None:
    """Raises UsageError for what cannot run, before any rank waits for another."""
    check(rt, versions, o)
    check_split(o.model_config().experts, rt.world_size)
    check_micro_batches(rt, o)


def prove_or_time(rt: Runtime, o: MoEOptions, lesson: Lesson) -> bool:
    """Each version against one device; with --benchmark all of them in turn."""
    make, step, run = lesson.make_version, lesson.step_bytes, lesson.run_bytes
    if o.benchmark:
        report(rt, o, benchmark(rt, o, make, step, (), axis="ep"))
        return True
    return prove(rt, o, make, run, step, (), one_device=one_device, axis="ep")


def main(rt: Runtime, o: MoEOptions) -> bool:
    """Prove, or with --benchmark time; and who sent how many rows to whom."""
    refuse(rt, o, VERSIONS)
    lesson = Lesson()
    right = prove_or_time(rt, o, lesson)
    console(rt).print(lesson.journeys(rt, o))
    return right


if __name__ == "__main__":
    run(main, MoEOptions)
