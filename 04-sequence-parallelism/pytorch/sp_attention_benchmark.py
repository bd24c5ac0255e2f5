"""Benchmark of causal attention, forward and backward: each way to split it beside torch's on one rank.

    speed-up          seconds of one rank's scaled_dot_product_attention / the slowest rank's, median over the rounds
    kernels           seconds inside the attention kernels, the maximum over ranks: no way to send can take less
    blocked           seconds in which a rank waits for messages, the maximum over ranks
    alone             seconds that the same messages take without any computation
    pairs, seconds    query-key pairs, and seconds not blocked: the maximum over ranks / the mean

B batch (1)  S sequence  s = S / n, a rank's tokens  H heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.checked.asked import if_asked
from common.comm.ledger import Ledger
from common.launch.runtime import Runtime
from common.lesson.equality import TOLERANCE, difference
from common.lesson.measure import BenchmarkRecord, Measured, in_turn, peak_memory
from common.lesson.runner import DTYPES, console, write_records
from common.utils.visualizer import figure, share_bars, throughput_bars

from sp_block import Block
from sp_costs import Bytes
from sp_split import ALONE, Order, places
from sp_training import Attend, SequenceOptions

ONE = "one rank, torch's"
MESSAGES = ", messages alone"
COLUMNS = (
    "",
    "ms",
    "spread",
    "speed-up",
    "kernels ms",
    "blocked ms",
    "alone ms",
    "pairs",
    "seconds",
    "difference",
)


class Timed:
    """Attention kernel that notes the seconds in its calls: `rounds`, one number for each `end`."""

    def __init__(self, kernel: Block) -> None:
        self.block = Block(self._timed(kernel.forward), self._timed(kernel.backward))
        self.spent, self.rounds = 0.0, list[float]()

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: object) -> Any:
            start = perf_counter()
            made = call(*given)
            self.spent += perf_counter() - start
            return made

        return timed

    def end(self) -> None:
        """End a round."""
        self.rounds.append(self.spent)
        self.spent = 0.0


@dataclass(frozen=True)
class AttentionCase:
    """A way to split attention: the tokens among the ranks of `column`, and those of a rank among `row`.

    n_bytes: bytes that a rank sends, by formula. row: ranks that swap tokens for heads. messages(qkv): send the
    same messages without computing. kernel: the one that `attend` calls, if it is timed. waits: the ledger has the
    seconds that a rank waits.
    """

    attend: Attend
    n_bytes: Bytes
    column: Group
    order: Order = "contiguous"
    row: Group = ALONE
    messages: Callable[[list[Tensor]], None] | None = None
    kernel: Timed | None = None
    language: str = "pytorch"
    waits: bool = True

    def pairs(self, S: int, H: int) -> int:
        """Return the query-key pairs of this rank in all its heads; a query sees its own token and those before."""
        return H // self.row.size * int((places(S, self.column, self.order) + 1).sum())


def forward_and_backward(
    attend: Attend, qkv: list[Tensor], do: Tensor, busy: list[float], kernel: Timed | None = None
) -> list[Tensor]:
    """Return [o, dq, dk, dv], and append to `busy` the seconds that this rank did not wait. Ends the kernel's round."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in qkv]
    with Ledger() as ledger:
        start = perf_counter()
        o = attend(q, k, v, True)
        o.backward(do)
        if do.device.type != "cpu":
            torch.cuda.synchronize()
        busy.append(perf_counter() - start - ledger.seconds())
    if kernel:
        kernel.end()
    return [o.detach(), *(x.grad for x in leaves if x.grad is not None)]


def compare_and_time(
    rt: Runtime, o: SequenceOptions, cases: Mapping[str, AttentionCase]
) -> tuple[dict[str, float], dict[str, Measured], dict[str, float]]:
    """Return by case the largest difference, the rounds in turn, and this rank's median seconds without waits."""
    (S, H, K), dtype = o.shape, DTYPES[o.dtype]
    draw = torch.Generator().manual_seed(o.seed)
    *whole, d_whole = (torch.randn(1, H, S, K, generator=draw, dtype=dtype).to(rt.device) for _ in range(4))
    plain: Attend = lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    one_rank = partial(forward_and_backward, plain, whole, d_whole, [])
    expected = one_rank()
    calls: dict[str, Callable[[], object]] = {ONE: one_rank if rt.rank == 0 else lambda: None}
    busy: dict[str, list[float]] = {name: [] for name in cases}
    apart: dict[str, float] = {}
    for name, case in cases.items():
        mine = places(S, case.column, case.order, case.row).to(rt.device)
        *qkv, do = (x[:, :, mine] for x in (*whole, d_whole))
        calls[name] = partial(forward_and_backward, case.attend, qkv, do, busy[name], case.kernel)
        with if_asked(rt.world if case.waits else None):
            found = forward_and_backward(case.attend, qkv, do, [])
        of_rank = max(difference(a[:, :, mine], b) for a, b in zip(expected, found, strict=True))
        apart[name] = max(comm.everyones(of_rank, rt.world))
        if case.messages:
            calls[name + MESSAGES] = partial(case.messages, qkv)
    measured = in_turn(calls, o.steps, rt.world, device=rt.device.type)
    return apart, measured, {name: median(seconds[1:]) for name, seconds in busy.items()}  # [0]: the warm-up


def attention_benchmark(rt: Runtime, o: SequenceOptions, cases: Mapping[str, AttentionCase]) -> bool:
    """Time the cases in turn, show and record them; True if results, gradients and bytes are right."""
    (S, H, K), n, o = o.shape, rt.world_size, replace(o, benchmark=True)
    apart, measured, busy = compare_and_time(rt, o, cases)
    one, limit, memory = measured[ONE], TOLERANCE[DTYPES[o.dtype]], peak_memory(Group.alone())
    title = (
        f"causal attention, {S} tokens, {H} heads of {K}, {o.dtype}, forward and backward, in turn {o.steps} times\n"
        f"{n} rank(s), {rt.backend}; one rank {one.median * 1e3:.0f} ms, spread {one.spread:.0%}"
    )
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "" else "right")
    records, speeds, shares = [], {}, {}
    for name, case in cases.items():
        m, alone = measured[name], measured.get(name + MESSAGES)
        inside = median(case.kernel.rounds[-o.steps :]) if case.kernel else 0.0
        of_ranks = comm.everyones((case.pairs(S, H), busy[name], inside), rt.world)
        pairs, seconds, kernels = zip(*of_ranks, strict=True)
        speeds[name] = {n: S / m.median}
        shares[name] = {f"rank {rank}": float(x) for rank, x in enumerate(pairs)}
        table.add_row(
            name,
            f"{m.median * 1e3:.0f}",
            f"{m.spread:.0%}",
            f"{median(a / b for a, b in zip(one.seconds, m.seconds, strict=True)):.2f}",
            f"{max(kernels) * 1e3:.1f}" if case.kernel else "-",
            f"{median(m.blocked) * 1e3:.1f}" if case.waits else "-",
            f"{alone.median * 1e3:.1f}" if alone else "-",
            f"{max(pairs) / mean(pairs):.2f}",
            f"{max(seconds) / mean(seconds):.2f}" if case.waits else "-",
            f"{apart[name]:.0e}",
        )
        records.append(
            BenchmarkRecord(
                strategy="sp",
                implementation=name,
                language=case.language,
                ranks=n,
                backend=rt.backend,
                dtype=o.dtype,
                model=f"attention 1 x {H} x {S} x {K}, {H} heads of keys, causal",
                parameters=0,
                tokens_per_step=S,
                # two products forward, five backward, 2 K operations per pair and head
                flop_per_step=7 * 2 * K * H * S * (S + 1) // 2,
                step_seconds=m.seconds,
                communication_seconds=median(m.blocked),
                bytes_counted=median(m.sent),
                bytes_formula=float(case.n_bytes(o, n)),
                peak_memory_bytes=memory,
                scaling="strong",
                equal=apart[name] <= limit,
                largest_difference=apart[name],
            )
        )
    out = console(rt)
    out.print(table)
    if rt.rank == 0:
        write_records(o.json, [record.as_json() for record in records])
        if o.plot:
            with figure(o.plot, columns=2, width=10) as (left, right):
                title = f"causal attention, {S} tokens, {o.dtype}"
                throughput_bars(left, speeds, unit="tokens/s", title=title)
                share_bars(right, shares, unit="pairs", title="query-key pairs", of="share of each rank")
    equal = max(apart.values()) <= limit
    agree = all(measured[r.implementation].sent[0] == r.bytes_formula for r in records)
    sentence = f"o, dq, dk and dv {'equal' if equal else 'do NOT equal'} one device's within {limit:.0e}"
    out.print(sentence + f", bytes counted {'=' if agree else 'are NOT those of the'} formula")
    return equal and agree
