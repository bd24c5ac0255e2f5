"""Benchmark of causal attention, forward and backward: each way to split it beside torch's on one rank.

    speed-up          seconds of one rank's scaled_dot_product_attention / the slowest rank's, median over the rounds
    blocked           seconds in which a rank waits for messages, the maximum over ranks
    alone             seconds that the same messages take without any computation
    pairs, seconds    query-key pairs, and seconds not blocked: the maximum over ranks / the mean

B batch (1)  S sequence  s = S / n, a rank's tokens  H heads  K width of a head
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from statistics import mean, median
from time import perf_counter

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from common import comm
from common.comm import Group
from common.comm.ledger import Ledger
from common.launch.runtime import Runtime
from common.lesson.equality import TOLERANCE, difference
from common.lesson.measure import BenchmarkRecord, Measured, in_turn, peak_memory
from common.lesson.runner import DTYPES, console, write_records
from common.utils.visualizer import figure, share_bars, throughput_bars

from sp_options import SequenceOptions
from sp_training import Attend

ONE = "one rank, torch's"
ALONE = ", messages alone"


@dataclass(frozen=True)
class AttentionCase:
    """A way to split attention.

    places(S): indices of this rank's tokens. pairs: query-key pairs of this rank, all heads. sends: the bytes
    it sends, in units of its own keys' bytes. messages(qkv): send the same messages without computing.
    language: None is PyTorch.
    """

    attend: Attend
    places: Callable[[int], Tensor]
    pairs: int
    sends: Fraction | int
    messages: Callable[[list[Tensor]], None] | None = None
    language: str | None = None


def forward_and_backward(attend: Attend, qkv: list[Tensor], do: Tensor, busy: list[float]) -> list[Tensor]:
    """Return [o, dq, dk, dv], and append to `busy` the seconds that this rank did not wait."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in qkv]
    with Ledger() as ledger:
        start = perf_counter()
        o = attend(q, k, v, True)
        o.backward(do)
        if do.device.type != "cpu":
            torch.cuda.synchronize()
        busy.append(perf_counter() - start - ledger.seconds())
    return [o.detach(), *(x.grad for x in leaves if x.grad is not None)]


def attention_benchmark(rt: Runtime, o: SequenceOptions, cases: dict[str, AttentionCase]) -> bool:
    """Time the cases in turn, show and record them; True if results, gradients and bytes are right."""
    S, H, K = o.shape
    draw = torch.Generator().manual_seed(o.seed)
    shape, dtype = (1, H, S, K), DTYPES[o.dtype]
    *whole, d_whole = (torch.randn(shape, generator=draw, dtype=dtype).to(rt.device) for _ in range(4))
    plain: Attend = lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    busy: dict[str, list[float]] = {name: [] for name in (*cases, ONE)}
    expected = forward_and_backward(plain, whole, d_whole, [])
    calls: dict[str, Callable[[], object]] = {ONE: lambda: None}
    if rt.rank == 0:
        calls[ONE] = partial(forward_and_backward, plain, whole, d_whole, busy[ONE])
    equal: dict[str, float] = {}
    for name, case in cases.items():
        mine = case.places(S).to(rt.device)
        *qkv, do = (x[:, :, mine] for x in (*whole, d_whole))
        calls[name] = partial(forward_and_backward, case.attend, qkv, do, busy[name])
        found = forward_and_backward(case.attend, qkv, do, [])
        apart = max(difference(a[:, :, mine], b) for a, b in zip(expected, found, strict=True))
        equal[name] = max(comm.everyones(apart, rt.world))
        if case.messages:
            calls[name + ALONE] = partial(case.messages, qkv)
    measured = in_turn(calls, o.steps, rt.world, warm_up=1, device=rt.device.type)
    work = {name: balance(rt, case.pairs, busy[name][1:]) for name, case in cases.items()}
    own_keys = S // rt.world_size * H * K * dtype.itemsize
    agree = all(measured[name].sent[0] == case.sends * own_keys for name, case in cases.items())
    shares = {name: pairs_of_ranks(rt, case.pairs) for name, case in cases.items()}
    show_times(rt, o, measured, work, equal, shares)
    if rt.rank == 0:
        memory = peak_memory(Group.alone())
        for name, case in cases.items():
            sent = float(case.sends * own_keys)
            write_records(
                o.json, [record(rt, o, name, case, measured[name], sent, memory, equal[name]).as_json()]
            )
    limit = TOLERANCE[dtype]
    right = max(equal.values()) <= limit
    sentence = f"o, dq, dk and dv {'equal' if right else 'do NOT equal'} one device's within {limit:.0e}"
    console(rt).print(sentence + f", bytes counted {'=' if agree else 'are NOT those of the'} formula")
    return right and agree


def balance(rt: Runtime, pairs: int, busy: list[float]) -> tuple[float, float]:
    """Return (pairs, median of the seconds), each as its maximum over the ranks / its mean."""
    mine = torch.tensor([[float(pairs), median(busy)]], dtype=torch.float64, device=rt.device)
    of_ranks = comm.all_gather(mine, rt.world).T.tolist()
    by_pairs, by_seconds = (max(values) / mean(values) for values in of_ranks)
    return by_pairs, by_seconds


def pairs_of_ranks(rt: Runtime, pairs: int) -> dict[str, float]:
    """Return the query-key pairs by rank."""
    mine = torch.tensor([float(pairs)], dtype=torch.float64, device=rt.device)
    return {f"rank {r}": x for r, x in enumerate(comm.all_gather(mine, rt.world).tolist())}


def show_times(
    rt: Runtime,
    o: SequenceOptions,
    measured: dict[str, Measured],
    work: dict[str, tuple[float, float]],
    equal: dict[str, float],
    shares: dict[str, dict[str, float]],
) -> None:
    """Print the table, and draw the figure of --plot.

    work: the two numbers of `balance` per case. shares: the query-key pairs by rank, per case.
    """
    S, H, K = o.shape
    one = measured[ONE]
    title = (
        f"causal attention, {S} tokens, {H} heads of {K}, {o.dtype}, forward and backward, in turn {o.steps} times\n"
        f"{rt.world_size} rank(s), {rt.backend}; one rank {one.median * 1e3:.0f} ms, spread {one.spread:.0%}"
    )
    table = Table(title=title, title_justify="left")
    for column in (
        "",
        "ms",
        "spread",
        "speed-up",
        "blocked ms",
        "alone ms",
        "pairs",
        "seconds",
        "difference",
    ):
        table.add_column(column, justify="left" if column == "" else "right")
    for name, (by_pairs, by_seconds) in work.items():
        m, alone = measured[name], measured.get(name + ALONE)
        speed_ups = [a / b for a, b in zip(one.seconds, m.seconds, strict=True)]
        table.add_row(
            name,
            f"{m.median * 1e3:.0f}",
            f"{m.spread:.0%}",
            f"{median(speed_ups):.2f}",
            f"{median(m.blocked) * 1e3:.1f}",
            f"{alone.median * 1e3:.1f}" if alone else "-",
            f"{by_pairs:.2f}",
            f"{by_seconds:.2f}",
            f"{equal[name]:.0e}",
        )
    console(rt).print(table)
    if o.plot and rt.rank == 0:
        speeds = {name: {rt.world_size: S / measured[name].median} for name in work}
        with figure(o.plot, columns=2, width=10) as (left, right):
            throughput_bars(left, speeds, unit="tokens/s", title=f"causal attention, {S} tokens, {o.dtype}")
            share_bars(right, shares, unit="pairs", title="query-key pairs", of="share of each rank")


def record(
    rt: Runtime,
    o: SequenceOptions,
    name: str,
    case: AttentionCase,
    m: Measured,
    sent: float,
    memory: int,
    difference: float,
) -> BenchmarkRecord:
    """Return one record of --json. Operations: two products forward, five backward, 2 K per pair and head."""
    S, H, K = o.shape
    return BenchmarkRecord(
        strategy="sp",
        implementation=name,
        language=case.language or "pytorch",
        ranks=rt.world_size,
        backend=rt.backend,
        dtype=o.dtype,
        model=f"attention 1 x {H} x {S} x {K}, {H} heads of keys, causal",
        parameters=0,
        tokens_per_step=S,
        flop_per_step=7 * 2 * K * H * S * (S + 1) // 2,
        step_seconds=m.seconds,
        communication_seconds=median(m.blocked),
        bytes_counted=median(m.sent),
        bytes_formula=sent,
        peak_memory_bytes=memory,
        scaling="strong",
        equal=difference <= TOLERANCE[DTYPES[o.dtype]],
        largest_difference=difference,
    )
