"""Numbers of the docs: worked examples, costs, schedules and exercises are computed here and looked up in the pages."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from common.models import by_hand
from common.models.moe import Routing
from common.models.transformer import Transformer, config

import ep_by_hand
import pp_checker
from ep_load_balance import balance_loss
from ep_training import load
from plan import PlanOptions, make_job, reason, wanted
from plan_layout import AXES
from plan_machine import read_machine
from plan_search import GIB, Choice, Found, search
from plan_show import parts
from pp_schedule import Instruction, Schedule, connect, settled
from pp_schedules import KINDS, make_schedule
from pp_simulator import simulate
from pp_stages import by_cost

ROOT = Path(__file__).resolve().parents[1]


def test_mean_of_means_of_the_worked_example() -> None:
    parts = [
        by_hand.step(by_hand.X_TD[part], by_hand.TARGET_TD[part], n)
        for part, n in ((slice(1), 1), (slice(1, 4), 3))
    ]
    mean = sum(part.dB_FD for part in parts) / 2
    numbers = "; ".join(" ".join(f"{x:.4g}" for x in row) for row in mean.tolist())
    text = " ".join((ROOT / "docs" / "01-data-parallelism.md").read_text().split())
    assert f"({numbers}) instead of (0 1; 0 1)" in text
    assert by_hand.one_device().dB_FD.tolist() == [[0, 1], [0, 1]]


def test_worked_numbers_of_the_introduction() -> None:
    """LLaMA 2 7B on 8 ranks: bytes per rank and sequence, and the bandwidth that keeps up with 4e14 FLOP/s."""
    with torch.device("meta"):
        model = Transformer(config("llama2-7b"))
    alone = model.flops_per_token(4096) * 4096 / 4e14
    shared, activation, gradients = alone / 8, 2 * 4096 * 4096, 2 * model.parameter_count()
    dp, pp = 2 * 7 / 8 * gradients, 2 * activation
    tp, ring = 32 * 4 * 2 * 7 / 8 * activation, 3 * 32 * 7 * 2 * activation / 8
    ulysses, experts = 2 * 32 * 4 * 7 / 8 * activation / 8, 32 * 4 * 2 * 7 / 8 * activation / 8
    text = (ROOT / "docs" / "00-introduction.md").read_text()
    shown = [
        f"{alone:.2f} s for a sequence of 4096 tokens, and {shared:.3f} s",
        f"| {dp / 1e9:.1f} per step | {dp / alone / 1e9:.0f} with one sequence per rank, {dp / alone / 8e9:.1f}",
        f"| {pp / 1e9:.3f} per sequence | {pp / shared / 1e9:.1f} |",
        f"| {tp / 1e9:.1f} per sequence | {tp / shared / 1e9:.0f} |",
        f"| ring {ring / 1e9:.1f}, Ulysses {ulysses / 1e9:.2f} per sequence | {ring / shared / 1e9:.0f}, "
        f"{ulysses / shared / 1e9:.0f} |",
        f"| {experts / 1e9:.2f} per sequence | {experts / shared / 1e9:.0f} |",
    ]
    text = " ".join(text.split())
    assert [number for number in shown if number not in text] == []


def test_worked_numbers_of_chapter_01() -> None:
    parameters, ranks, tokens_of_rank, speed, link, micro = 70.6e9, 64, 512 // 64 * 8192, 4e14, 50e9, 8
    weights, part = 2 * parameters, (ranks - 1) / ranks
    text = (ROOT / "docs" / "01-data-parallelism.md").read_text()
    rows = {
        0: (16 * parameters, 2),
        2: (2 * parameters + 14 * parameters / ranks, micro + 1),
        1: (4 * parameters + 12 * parameters / ranks, 2),
        3: (16 * parameters / ranks, 3 * micro),
    }
    for stage, (held, times) in rows.items():
        sent = times * part * weights
        seconds = sent / link
        gigabytes, digits = round(held / 1e9, -1) if stage == 0 else held / 1e9, 1 if seconds < 10 else 0
        row = rf"\| {stage} \| [\d.+ =]*{gigabytes:.0f} \| {sent / 1e9:.0f} GB \| {seconds:.{digits}f} \|"
        assert re.search(row, text), row
    assert f"| {6 * parameters * tokens_of_rank / speed:.0f} s |" in text
    assert f"{2 * part * weights / 1e9:.0f} GB, {2 * part * weights / link:.1f} s at 50 GB/s" in text
    assert f"= {4 * parameters * 8192 / speed:.1f} s" in text  # backward pass of the last micro-batch
    assert 1 * 2 * speed / (2 * link) == 8000  # tokens that hide the all-reduce of many ranks
    naive, buckets = 36 * 116 / 1e3, 3 * 116 / 1e3  # milliseconds of latency, of 36 messages and of 3
    shown = f"cost {naive:.1f} ms of latency per step with gloo, and three buckets {buckets:.2f} ms"
    assert shown in " ".join(text.split())
    exposed = [max(t, 4 * t - (1 - 1 / 4) * 8) for t in (1, 3)]
    assert exposed == [1, 6]  # milliseconds, of the worked example
    computed, sent = 1 / 3 + 2 / 3, 4 * 2 / 3
    assert f"1/3 + 4 · 2/3 = {(1 / 3 + sent) / computed:.0f} times" in text


def test_worked_numbers_of_chapters_02_to_05() -> None:
    """The costs of Llama 3 70B: 80 layers, width 8192, sequences of 8192 tokens, 16 bits, 8 ranks along the axis."""
    parameters, layers, width, length, n, speed, inside, between = (
        70.6e9,
        80,
        8192,
        8192,
        8,
        4e14,
        450e9,
        50e9,
    )
    activation = 2 * length * width
    compute = 6 * parameters * length / n / speed
    messages = layers * 4 * 2 * (n - 1) / n * activation
    long = 131072
    keys_values = 2 * 2 * long * 1024
    ring = 3 * (n - 1) * keys_values / n * layers
    ulysses = 2 * (n - 1) / n * 2 * long / n * (2 * width + 2 * 1024) * layers
    block = 2 * 2 * length // n * 1024  # keys and values of a rank, of a sequence of 8192 tokens
    experts = 2 * 2 * length * width * (n - 1) / n * 2
    mlp_width = 28672
    mlps = 3 * width * mlp_width * layers
    rest = parameters - mlps
    routed = 6 * (rest + 2 * mlps) * length / speed
    kept = 34 * length * width
    p, m = 8, 512 // 8
    held = p * layers // p
    shown = {
        "02-pipeline-parallelism": [
            f"| {compute:.2f} s |",
            f"| {activation / between * 1e3:.1f} ms each |",
            f"| {(p - 1) / (m + p - 1):.1%} |".replace("%", " %"),
            f"| {(p - 1) / (2 * m + p - 1):.1%}, {(p - 1) / (3 * m + p - 1):.1%} |".replace("%", " %"),
            f"| {4 * parameters / p / 1e9:.1f} + {12 * parameters / p / 8 / 1e9:.1f} GB |",
            f"{kept / 1e9:.2f} GB per sequence",
            f"| {held * kept / 1e9:.0f} GB |",
            f"| {held * activation / 1e9:.1f} GB |",
        ],
        "03-tensor-parallelism": [
            f"= {messages / 1e9:.0f} GB per",
            f"| {messages / inside:.2f} | {messages / inside / compute:.0%} |".replace("%", " %"),
            f"| {messages / between:.1f} | {messages / between / compute:.0%} |".replace("%", " %"),
            f"= {layers * 8 * 15 / 16 * activation / 1e9:.1f} GB, {layers * 8 * 15 / 16 * activation / between:.1f} s",
            f"{compute:.2f} + {messages / inside:.2f} = {compute + messages / inside:.2f} s",
            f"{compute / 2:.2f} + {layers * 8 * 15 / 16 * activation / between:.2f} = 2.15 s",
            f"{parameters / (4 * layers * width):,.0f} for Llama 3 70B",
            f"= {16 * parameters / n / 1e9:.0f} GB per GPU",
            f"= {13 * length * width * layers / 1e9:.1f} GB without",
            f"= {(4 + 30 / 8) * length * width * layers / 1e9:.1f} GB with ours",
            f"= {34 / 8 * length * width * layers / 1e9:.1f} GB if",
        ],
        "04-sequence-parallelism": [
            f"{keys_values / 1e6:.0f} MB in 16 bits, {keys_values / n / 1e6:.0f} MB per rank",
            f"| {ring / 1e9:.0f} GB | {ring / inside:.2f} s | {ring / between:.1f} s |",
            f"| {ulysses / 1e9:.0f} GB | {ulysses / inside:.2f} s | {ulysses / between:.1f} s |",
            f"computes {6 * parameters * long / n / speed:.0f} s",
            f"{3 * 2 * long**2 * width * layers / n / speed:.0f} s for attention",
            f"{34 * long * width * layers / n / 1e9:.0f} GB on each of 8 ranks",
            f"= {2 / 8 * speed / between:.0f} tokens per rank hide",
            f"{2 / 8 * speed / inside:.0f} suffice at 450 GB/s",
            f"takes {block / between * 1e6:.0f} µs and its computation "
            f"{2 * width * (length / n) ** 2 / speed * 1e6:.0f} µs",
            f"{3 * (n - 1) * layers * block / 1e9:.1f} GB per sequence and rank, "
            f"{3 * (n - 1) * layers * block / between:.2f} s beside {compute:.2f} s",
        ],
        "05-expert-parallelism": [
            f"{experts * 2 / 2 / 1e6:.0f} MB in 16 bits, and {experts * 2 * layers / 1e9:.0f} GB for 80 layers",
            f"take {experts * 2 * layers / inside:.2f} s at 450 GB/s in a host, "
            f"{experts * 2 * layers / inside / routed:.1%} of the computation".replace("%", " %"),
            f"{experts * 2 * layers / between:.1f} s at 50 GB/s between hosts, "
            f"{experts * 2 * layers / between / routed:.1%}.".replace("%", " %"),
            f"{mlps / 1e9:.1f}·10⁹ of the 70.6·10⁹",
            f"{(8 * mlps + rest) / 1e9:.0f}·10⁹ parameters, {2 * (8 * mlps + rest) / 1e9:.0f} GB in 16 bits",
            f"a token uses {(2 * mlps + rest) / 1e9:.0f}·10⁹",
            f"= {routed:.1f} s per sequence",
            f"another {6 * 2 * mlps * length / speed:.1f} s",
            f"u = {experts / 1e6:.0f} MB / (50 GB/s) / 2 = {experts / between / 2 * 1e3:.1f} ms",
            f"w = {2 * 2 * mlps / layers * length / speed * 1e3:.0f} ms",
            f"{1.5 * 8 * mlp_width / 2:,.0f} tokens in the Llama example, {1.5 * 8 * 14336 / 2:,.0f} for Mixtral",
        ],
    }
    for page, numbers in shown.items():
        text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
        assert [number for number in numbers if number not in text] == [], page


def test_balance_of_each_rank_is_not_the_balance_of_all() -> None:
    """Two ranks with two tokens and two experts each: even load together, uneven load on each."""
    scores_RBSE = torch.tensor([[[[0.75, 0.25]] * 2], [[[0.25, 0.75]] * 2]], dtype=torch.float64)
    routings = [Routing(s.log(), s, s.topk(1, -1).indices, s.topk(1, -1).values) for s in scores_RBSE]
    counts = [load(r.experts_BSK, 2) for r in routings]
    alone = [balance_loss([r], count_E).item() / 2 for r, count_E in zip(routings, counts, strict=True)]
    together = sum(balance_loss([r], sum(counts)).item() for r in routings) / 4
    assert (alone, together) == ([1.5, 1.5], 1)
    text = (ROOT / "docs" / "05-expert-parallelism.md").read_text()
    assert text.count("= 1.5 |") == 2
    assert "= 1 |" in text


def test_wrong_expert_gradients_of_the_worked_example() -> None:
    """Experts taken for replicas: a sum of different experts' dA; a mean of each rank's own tokens: n times dA."""
    rows = [expert == ep_by_hand.EXPERT for expert in range(2)]
    tokens_of = list(zip(ep_by_hand.EXPERT.tolist(), by_hand.X_TD, strict=True))
    y_TD = torch.stack([ep_by_hand.forward(e, x_D[None])[0] for e, x_D in tokens_of])
    dy_TD = (y_TD - by_hand.TARGET_TD) / 4
    dA = [ep_by_hand.backward(e, by_hand.X_TD[mine], dy_TD[mine])[0] for e, mine in enumerate(rows)]
    shown = ["(" + "; ".join(" ".join(f"{x:g}" for x in row) for row in m.tolist()) + ")" for m in dA]
    total, doubled = (
        "(" + "; ".join(" ".join(f"{x:g}" for x in row) for row in m.tolist()) + ")"
        for m in (dA[0] + dA[1], 2 * dA[0])
    )
    text = " ".join((ROOT / "docs" / "05-expert-parallelism.md").read_text().split())
    assert f"dA = {shown[0]} + {shown[1]} = {total}" in text
    assert f"dA = {doubled} instead of {shown[0]}" in text


def planned(
    model: str = "llama3-70b", gpus: int = 64, fix: str = "", why: str = ""
) -> tuple[Found, str | None]:
    """Return the plans of chapter 06's question, the best one alone; and why there is none, or none with `why`."""
    o = PlanOptions(model=model, gpus=gpus, batch=512, sequence=8192)
    job, asked = make_job(o), wanted(fix or why, "fix")
    found = search(job, gpus, asked, keep=1)
    return found, None if found.best else reason(job, gpus, asked, found)


@pytest.mark.parametrize(
    "fix",
    ["", "sp=1", "sp=1,kept=all", "tp=2,pp=8,dp=4", "tp=4,pp=8,dp=2", "tp=8,pp=1,dp=8", "tp=1,pp=8,dp=8"],
)
def test_planned_meshes_of_chapter_06(fix: str) -> None:
    text = (ROOT / "docs" / "06-hybrid-parallelism.md").read_text()
    (row,) = re.findall(rf"^\| {f'`{fix}`' if fix else 'nothing'} \| (.*) \|$", text, re.M)
    found, refused = planned(fix=fix)
    if not fix:  # its neighbour, which leaves more room
        job = make_job(PlanOptions("llama3-70b", 64, batch=512, sequence=8192))
        near = search(job, 64, {}).best[1]
        assert (near.plan.pp, near.plan.sp, near.plan.tp) == (8, 2, 4)
        assert f"{near.time.step:.1f} s and {near.memory.total / GIB:.1f} GiB" in text
    if refused:
        assert row.startswith(f"none: it needs {float(refused.split()[3]):.0f} GiB with checkpointing")
        return
    (best,) = found.best
    assert row.endswith(f" | {best.time.step:.1f} | {best.memory.total / GIB:.1f}")
    plan, said = best.plan, row.split(" | ")[0]
    assert ("checkpointing" in said) == (plan.kept == "inputs")
    assert f"ZeRO-{plan.zero}" in said
    if not fix.startswith("tp"):
        assert said.startswith(" ".join(f"{axis}={n}" for axis in AXES if (n := getattr(plan, axis)) > 1))
    if plan.pp > 1:
        assert {"1f1b": "1F1B"}.get(plan.schedule, plan.schedule) in said
    assert f"GiB of {(read_machine('h100').memory - read_machine('h100').reserved) / GIB:.1f}" in text


def test_other_meshes_of_chapter_06() -> None:
    """The answers to why another mesh is slower, or cannot run."""
    text = (ROOT / "docs" / "06-hybrid-parallelism.md").read_text()

    def answer(why: str) -> str:
        (found,) = re.findall(rf"\| `--why {re.escape(why)}` \| (.*) \|$", text, re.M)
        return str(found)

    def best(**asked: Any) -> Choice:
        found, refused = planned(**asked)
        assert refused is None
        return found.best[0]

    _, refused = planned(why="pp=4,zero=3")
    assert refused
    assert "each of 32 micro-batches gathers all weights again, 18 s of messages" in refused
    assert refused.endswith("0.376 s")
    assert "each of 32 micro-batches would gather all weights again, 18 s" in answer("pp=4,zero=3")
    one, other = best(), best(why="tp=16")
    assert answer("tp=16") == (
        f"{other.time.step:.1f} s in place of {one.time.step:.1f} s: ranks wait {other.time.axes['tp']:.1f} s for tp, "
        f"not {one.time.axes['tp']:.1f} s."
    )
    assert (
        f"takes {other.time.step:.0f} s per step by the planner, {other.time.axes['tp']:.0f} s of them"
        in " ".join(text.split())
    )
    one, other = best(gpus=1024), best(gpus=1024, why=(why := "pp=8,dp=8,tp=8,sp=2"))
    assert str(one.plan) == "pp=8 dp=16 sp=4 tp=2 schedule=zb-v zero=1 sequence-parallel"
    assert answer(why) == (
        f"{other.time.step:.2f} s in place of {one.time.step:.2f} s (pp=8 dp=16 sp=4 tp=2, zb-v): "
        f"{other.time.axes['tp']:.2f} s for tp = 8, not {one.time.axes['tp']:.2f} s. "
        f"It fits with {other.memory.total / GIB:.0f} GiB."
    )
    other = best(gpus=1024, why=(why := "pp=8,dp=32,tp=4,schedule=1f1b"))
    bubbles = [parts(choice)["bubble"] for choice in (other, one)]
    more = parts(other)["computation"] - parts(one)["computation"]
    assert answer(why) == (
        f"{other.time.step:.2f} s: ranks idle for {bubbles[0]:.2f} s with 16 micro-batches on 8 stages, "
        f"for {bubbles[1]:.2f} s with zb-v in the best plan; checkpointing costs {more:.2f} s."
    )
    one, other = (best(model="mixtral-8x7b", why=why) for why in ("", "ep=1,tp=8"))
    assert answer("ep=1,tp=8").startswith(
        f"{other.time.step:.1f} s in place of {one.time.step:.1f} s: {other.time.axes['tp']:.1f} s of tp; "
        f"with ep = {one.plan.ep} ranks wait {one.time.axes['ep']:.2f} s for ep"
    )


def test_worked_example_of_chapter_06() -> None:
    """The MLP of chapter 01 with a bias, on a mesh dp 2 x tp 2: forward, backward and the norm."""

    def lines(*every: torch.Tensor) -> str:
        return " | ".join("; ".join(" ".join(f"{x:g}" for x in row) for row in m.tolist()) for m in every)

    text = " ".join((ROOT / "docs" / "06-hybrid-parallelism.md").read_text().split())
    right, mesh = by_hand.one_device(), [(d, t) for d in range(2) for t in range(2)]
    terms = {}
    for d, t in mesh:
        tokens, f = slice(2 * d, 2 * d + 2), slice(t, t + 1)
        x_tD, A_Df, B_fD = by_hand.X_TD[tokens], by_hand.A_DF[:, f], by_hand.B_FD[f]
        h_tf, dy_tD = x_tD @ A_Df, right.dy_tD[tokens]
        dh_tf = (dy_tD @ B_fD.T).where(h_tf > 0, 0)
        terms[d, t] = x_tD.T @ dh_tf, h_tf.relu().T @ dy_tD, dy_tD.sum(0, keepdim=True)
        forward = lines(x_tD, A_Df, h_tf, B_fD, h_tf.relu() @ B_fD, right.y_tD[tokens], dy_tD)
        assert f"| {2 * d + t} | {d}, {t} | {forward} |" in text
    squares = []  # of each rank: of its shards, of the bias
    for d, t in mesh:
        summed = [a + b for a, b in zip(terms[0, t], terms[1, t], strict=True)]
        assert f"| {2 * d + t} | {d}, {t} | {lines(*terms[d, t])} | {lines(*summed)} |" in text
        assert torch.equal(summed[0], right.dA_DF[:, t : t + 1])
        assert torch.equal(summed[1], right.dB_FD[t : t + 1])
        squares.append((sum(x.square().sum().item() for x in summed[:2]), summed[2].square().sum().item()))
    assert squares == [(1, 1), (3, 1)] * 2
    assert "1/2 + 1/4 on rank 0, 3/2 + 1/4 on rank 1" in text
    assert sum(a / 2 + b / 4 for a, b in squares) == 5
    assert f"√12 = {sum(map(sum, squares)) ** 0.5:.2f} instead of √5 = {5**0.5:.2f}" in text
    over_all = [sum(terms[place][i] for place in mesh) for i in range(3)]
    assert [lines(torch.as_tensor(x)) for x in over_all] == ["1; 1", "0 2", "2 0"]
    wrong = ("dA = (1; 1)", "dB = (0 2)", "dc = (2 0)")
    assert all(numbers in text for numbers in wrong)


def test_worked_bytes_of_chapter_06() -> None:
    """The step of mixtral-tiny on dp 2 x ep 2 x tp 2: 4 samples of 32 tokens per place, 2 experts per token."""
    text, c = (ROOT / "docs" / "06-hybrid-parallelism.md").read_text(), config("mixtral-tiny")
    assert f"{c.layers} layers of width {c.width}, {c.experts} experts of width {c.mlp_width}" in " ".join(
        text.split()
    )
    experts = c.layers * c.experts // 2 * 3 * c.width * c.mlp_width // 2 * 8
    tokens, micro_batches = 4 * 32, 2
    rows = 2 * tokens * 2 // 2  # sent and received: half of each token's two choices
    counts = c.layers * micro_batches * c.experts // 2 * 8
    by_hand_too = {
        "dp+ep+tp": 2 * 7 * c.layers * c.experts * c.width * 8 // 8,
        "dp": 2 * experts // 2,
        "ep": c.layers * 2 * rows * c.width * 8 + counts,
        "tp": (8 * c.layers + 2 * 2) * tokens * c.width * 8 // 2 + 2 * 3 * tokens * 8 // 2,
    }
    for along, sent in by_hand_too.items():
        assert re.search(rf"^│ {re.escape(along)} +│ +{sent:,}$", text, re.M), along
        assert re.search(rf"^\| {re.escape(along)} \|.*\| {sent:,} \|$", text, re.M), along
    assert [(0.1 + 0.2) + 0.3, (0.2 + 0.3) + 0.1] == [0.6000000000000001, 0.6]


def test_worked_losses_of_chapter_06() -> None:
    """Cases in which a mesh loses: tp where the model fits, few micro-batches."""
    text = " ".join((ROOT / "docs" / "06-hybrid-parallelism.md").read_text().split())
    job = make_job(PlanOptions(model="llama2-7b", gpus=8, batch=64))
    one, other = (search(job, 8, asked, keep=1).best[0] for asked in ({}, {"tp": 8}))
    assert str(one.plan) == "dp=8 micro-batch=2 zero=3"
    assert f"best plan is dp = 8 with ZeRO-3, {one.time.step:.2f} s" in text
    assert f"wait {other.time.axes['tp']:.2f} s for tp, and a step takes {other.time.step:.2f} s" in text
    bubbles = [100 * 7 / (512 / dp + 7) for dp in (2, 32)]
    assert f"bubble of 1F1B is {bubbles[0]:.1f} %" in text
    assert f"16 sequences and the bubble is {bubbles[1]:.0f} %" in text


def test_imbalance_of_the_contiguous_order() -> None:
    """Under a causal mask the last of n ranks has 2 - 1/n times the mean work."""
    length, shown = 8192, {2: "1.50", 4: "1.75"}
    for ranks, number in shown.items():
        cuts = [length * rank // ranks for rank in range(ranks + 1)]
        work = [sum(query + 1 for query in range(lo, hi)) for lo, hi in itertools.pairwise(cuts)]
        assert f"{max(work) / statistics.mean(work):.2f}" == number == f"{2 - 1 / ranks:.2f}"
    text = (ROOT / "docs" / "04-sequence-parallelism.md").read_text()
    assert "2 − 1/n" in text
    assert all(f"{number} on {ranks}" in " ".join(text.split()) for ranks, number in shown.items())


def test_merge_of_two_blocks_and_pairs_of_the_orders() -> None:
    o, lse = (4, 128 / 6), (math.log(2), math.log(6))
    weight = 1 / (1 + math.exp(lse[0] - lse[1]))
    assert math.isclose(weight, 3 / 4)
    assert math.isclose(o[0] + weight * (o[1] - o[0]), 17)
    assert math.isclose(sum(map(math.exp, lse)), 8)
    work = [sum(token + 1 for token in tokens) for tokens in zip(*[iter(range(16))] * 4, strict=True)]
    text = " ".join((ROOT / "docs" / "04-sequence-parallelism.md").read_text().split())
    assert "o = 4 + 6/8 · (21⅓ − 4) = 17, as before, and lse = ln 8" in text
    assert "Contiguous: {}, {}, {} and {}, with a mean of {}.".format(*work, sum(work) // 4) in text
    halves = [sum(token + 1 for c in (rank, 7 - rank) for token in (2 * c, 2 * c + 1)) for rank in range(4)]
    assert set(halves) == {34}
    assert "Zigzag: 34 on every rank" in text


def test_bubbles_in_both_conventions() -> None:
    p, m = 4, 8
    text = " ".join((ROOT / "docs" / "02-pipeline-parallelism.md").read_text().split())
    assert f"{(p - 1) / (m + p - 1):.0%} and {(p - 1) / m:.1%}".replace("%", " %") in text
    for ranks in (4, 8):  # few micro-batches
        few, more = (Fraction(ranks - 1, micro + ranks - 1) for micro in (ranks, 4 * ranks))
        assert f"{float(few):.0%}".replace("%", " %") in text
        assert f"{float(more):.0%}".replace("%", " %") in text


def stage_time(schedule: Schedule) -> Callable[[Instruction], Fraction]:
    """Return the time of a computation where a rank's whole forward takes 1 and its backward 2."""
    chunks = schedule.stages // schedule.ranks
    return lambda i: Fraction(2 if i.op == "B" else 1, chunks)


def time_grid(name: str, ranks: int, micro_batches: int) -> list[str]:
    """Return the picture of a schedule in text: digits are forwards, letters backwards, dots bubble."""
    schedule = make_schedule(name, ranks, micro_batches)
    line = simulate(schedule)
    rows = [["."] * int(line.length) for _ in range(ranks)]
    for e in line.events:
        op, stage, micro = e.instruction
        second = stage != schedule.mine(e.rank)[0]
        letters = {"F": "⁰¹²³" if second else "0123", "W": "ABCD"}.get(op, "abcd")
        rows[e.rank][int(e.start) : int(e.end)] = letters[micro] * int(e.end - e.start)
    return [f"    rank {rank}   {' '.join(row)}\n" for rank, row in enumerate(rows)]


def test_schedules_of_chapter_02() -> None:
    """Pictures in text, the table of the five schedules, and the times with slow messages."""
    text = (ROOT / "docs" / "02-pipeline-parallelism.md").read_text()
    for shown in (("gpipe", 4, 4), ("1f1b", 4, 4), ("interleaved", 2, 4), ("zb-h1", 3, 4), ("zb-v", 2, 4)):
        assert "".join(time_grid(*shown)) in text, shown
    every = {name: make_schedule(name, 4, 8) for name in KINDS}
    for name, schedule in every.items():
        line, work = simulate(schedule, stage_time(schedule)), 3 * 8
        idle, chunks = line.length - work, " ".join(str(pp_checker.held(schedule, rank)) for rank in range(4))
        shares = f"{float(line.bubble):.1%} | {float(idle / work):.1%}".replace("%", " %")
        row = rf"\| {name}[^|]* \| {float(idle):g} \| {float(line.length):g} \| {shares} \| {chunks}[ ,]"
        assert re.search(row, text), row
    for message in (0, Fraction(1, 2), 1):
        units = [simulate(s, stage_time(s), message).length for s in every.values()]
        assert f"| {' | '.join(f'{float(x):g}' for x in units)} |\n" in text
    shown = {
        str(k): [str(send) for send in sends] for k, sends in settled(make_schedule("1f1b", 2, 2), 0).items()
    }
    page = (ROOT / "docs" / "02a-running-a-schedule.md").read_text()
    assert str(shown).replace("'", "") in page
    assert str(make_schedule("1f1b", 2, 2)) in page


def test_exercises_of_chapter_02() -> None:
    text = " ".join((ROOT / "docs" / "02-pipeline-parallelism.md").read_text().split())

    def pairs(rank: int) -> list[Instruction]:
        return [
            Instruction(op, rank, m)
            for first in range(0, 8, 2)
            for op in ("F", "B")
            for m in (first, first + 1)
        ]

    schedule = connect("pairs", 8, range(4), [pairs(rank) for rank in range(4)])
    pp_checker.check(schedule)
    line, most = simulate(schedule), pp_checker.held(schedule, 0)
    share = f"{float(line.bubble):.0%}".replace("%", " %")
    assert f"It holds {most} and its bubble is {share}: {line.length} units" in text
    units = {}
    for name in KINDS:
        schedule = make_schedule(name, 4, 8)
        usual = stage_time(schedule)
        head = schedule.stages - 1
        slow = simulate(
            schedule,
            lambda i, usual=usual, head=head: usual(i) + (i.stage == head) * (2 if i.op == "B" else 1),
        )
        units[name] = f"{float(slow.length):g} instead of {float(simulate(schedule, usual).length):g}"
    assert units["gpipe"] == units["1f1b"]
    assert f"GPipe and 1F1B take {units['1f1b']}" in text.replace(" units", "")
    assert all(f"{name} {units[name]}" in text for name in ("interleaved", "zb-h1", "zb-v"))
    assert [len(cut) for cut in by_cost([1.0] * 16, 4, 0, 4.0)] == [5, 5, 5, 1]
    loses = {}
    for ranks in (2, 4, 8):
        for message in (Fraction(1, 2), Fraction(1)):
            plain, ours = (
                [
                    simulate(s, stage_time(s), message).length
                    for s in (make_schedule(name, ranks, micro) for micro in range(1, 33))
                ]
                for name in ("1f1b", "interleaved")
            )
            loses[ranks, message] = [m for m, (a, b) in enumerate(zip(plain, ours, strict=True), 1) if b > a]
    assert [max(loses[ranks, Fraction(1, 2)]) for ranks in (2, 4, 8)] == [2, 2, 4]
    assert [max(loses[ranks, Fraction(1)]) for ranks in (2, 4, 8)] == [8, 3, 6]
