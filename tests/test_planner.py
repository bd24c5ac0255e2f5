"""The planner: times and memory against closed forms, the search against brute force, errors on published steps."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from mpi.launch import ROOT, python, run

from common.errors import UsageError
from common.launch.command_line import parse
from common.models.configs import CONFIGS
from common.models.transformer import Transformer

import plan_size
from plan import PlanOptions, make_job, wanted
from plan_bytes import step_bytes
from plan_job import Job
from plan_layout import CODES, Plan
from plan_machine import Links, Machine, Ring, names, read_machine
from plan_memory import layer_bytes, memory
from plan_models import MODELS, model
from plan_rows import gpt, read_papers, read_vtrain
from plan_search import plans, refusal, search
from plan_show import command, parts
from plan_stage import Stage, stages
from plan_time import bound, of_ranks, pipeline, predict, timeline
from plan_work import Product, Traffic, layer, seconds
from validate import one_constant, predicted, score, spearman

PLANNER = ROOT / "06-hybrid-parallelism" / "planner"
LINKS = Links(4, {2: (1e-5, 1e11), 4: (2e-5, 2e11)}, host_bandwidth=4e10, efficiency=0.5, latency=1e-6)
MACHINE = Machine(
    *("test", 80e9, 1e12, {"bfloat16": 1e14, "float16": 1e14}, 0.5, 0.5, 1e-5, 0.0, 0.0, 0.0, LINKS),
)
TINY = [name for name in CONFIGS if name.endswith("tiny")]


def job(
    name: str = "llama-7b", batch: int = 64, machine: Machine = MACHINE, code: str = "megatron-core"
) -> Job:
    return Job(model(name), CODES[code], machine, batch, 2048)


@pytest.mark.parametrize("name", TINY)
def test_sizes_are_those_of_the_model(name: str) -> None:
    whole = Transformer(CONFIGS[name])
    assert plan_size.total(CONFIGS[name]) == sum(p.numel() for p in whole.parameters())
    assert plan_size.flops_per_token(CONFIGS[name], 48) == whole.flops_per_token(48)


@pytest.mark.parametrize("name", ["llama-7b", "mixtral-8x22b", "deepseek-v3"])
def test_ranks_hold_the_model_together(name: str) -> None:
    c, plan = model(name), Plan(tp=4, ep=2)
    part, whole = plan_size.layer(c, plan), plan_size.layer(c)
    assert part.experts * 8 == whole.experts
    replicated = part.dense * 4 - whole.dense  # routers and latent projections lie on all ranks
    assert (replicated == 0) == (name == "llama-7b")
    assert replicated <= 0.06 * (whole.dense + whole.experts)


def test_published_models_have_their_published_sizes() -> None:
    for name, billions in {
        "gpt3-175b": 175,
        "llama2-70b": 69,
        "llama3-405b": 405,
        "deepseek-v3": 671,
    }.items():
        assert plan_size.total(MODELS[name]) / 1e9 == pytest.approx(billions, rel=0.01)


def test_collectives_take_latency_and_the_bytes_of_a_ring() -> None:
    S = 1e9
    assert LINKS.all_reduce(S, Ring(1, 1)) == 0
    assert LINKS.all_reduce(S, Ring(4, 4)) == pytest.approx(2e-5 + 2 * 3 / 4 * S / 2e11)
    # two hosts of four: the four ranks of a host have all its cards, half of 40 GB/s
    assert LINKS.all_reduce(S, Ring(8, 4)) == pytest.approx(2 * 3 * 1e-6 + 2 * 7 / 8 * S / 2e10)
    # one rank on each of two hosts: its share is a quarter
    assert LINKS.all_reduce(S, Ring(2, 1)) == pytest.approx(2e-6 + S / 5e9)
    assert LINKS.gather(S, Ring(8, 4)) == LINKS.all_reduce(S, Ring(8, 4)) / 2
    assert LINKS.all_to_all(S, Ring(8, 4)) == pytest.approx(1e-6 + 4 / 8 * S / 5e9)
    assert LINKS.send(S, far=True) == pytest.approx(1e-6 + S / 5e9)


def test_a_product_takes_arithmetic_traffic_and_a_start() -> None:
    m, n, k = 4096, 1024, 2048
    took = 2 * m * n * k / 5e13 + 2 * (m * k + k * n + m * n) / 5e11
    assert MACHINE.product(m, n, k, "bfloat16") == pytest.approx(1e-5 + took)
    assert MACHINE.product(m, n, k, "bfloat16", 3) == pytest.approx(1e-5 + 3 * took)


def test_the_host_sets_the_pace_of_short_operations() -> None:
    work, slow = [Product(8, 8, 8), Traffic(64)], replace(MACHINE, launch=1e-3)
    assert seconds(work, slow, Plan(), CODES["ours"]).total == 2e-3
    assert seconds(work, slow, Plan(), CODES["ours"], backward=True).total == 3e-3
    assert seconds(work, MACHINE, Plan(), CODES["ours"]).total < 2e-5


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_has_the_operations_of_the_formula(recomputed: bool) -> None:
    """Forward and twice backward: 72 B S L D^2 (1 + S / 6 D), as in arXiv:2104.04473, without the logits."""
    c, B, S = gpt(1024, 1, 16, 512, 256), 3, 256
    plan = Plan(micro_batch=B)
    flops = sum(w.flops for w in layer(c, plan, CODES["megatron-2021"], S) if isinstance(w, Product))
    formula = (72 + 24 * recomputed) * B * S * 1024**2 * (1 + S / (6 * 1024))
    assert (3 + recomputed) * flops == pytest.approx(formula, rel=1e-12)
    split_over_tp = layer(c, replace(plan, tp=4), CODES["megatron-2021"], S)
    assert sum(w.flops for w in split_over_tp if isinstance(w, Product)) == flops / 4


KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]


@pytest.mark.parametrize(("kind", "chunks"), KINDS)
def test_a_pipeline_is_simulated_in_part_and_continued(kind: str, chunks: int) -> None:
    """A continued pipeline is the whole one, for unequal stages as well, and never below the bound of its ranks."""
    draw = random.Random(1)
    for p, M, unequal in itertools.product((2, 3, 4), (1, 7, 40), (0.0, 0.4)):
        plan = Plan(pp=p, schedule=kind, chunks=chunks)
        each = tuple(
            Stage(*(1 + unequal * draw.random() for _ in range(2)), 0.6 + unequal * draw.random())
            for _ in range(p * chunks)
        )
        found = pipeline(plan, M, each)
        assert found == pytest.approx(float(timeline(plan, M, each).length), rel=1e-6)
        assert found >= M * max(s.total for s in of_ranks(plan, each))


def test_1f1b_has_the_bubble_of_the_formula() -> None:
    plan, each = Plan(pp=4), (Stage(1.0, 1.0, 1.0),) * 4
    assert pipeline(plan, 100, each) == pytest.approx((100 + 3) * 3)


def test_activations_are_those_of_the_formula() -> None:
    """s b h (34 + 5 a s / h), split by tp and sequence parallelism: arXiv:2205.05198, table 2."""
    h, a, S = 2048, 16, 512
    code = replace(CODES["megatron-2022"], dropout=True)
    for b, tp in itertools.product((1, 3), (1, 4)):
        with_scores = Job(gpt(h, 4, a, 512, S), code, MACHINE, 8, S)
        sliced = Plan(tp=tp, micro_batch=b, sequence_parallel=tp > 1)
        tokens = b * S
        assert layer_bytes(with_scores, sliced, with_scores.config) == tokens * h * (34 + 5 * a * S / h) / tp
        without = replace(sliced, kept="no scores")
        assert layer_bytes(with_scores, without, with_scores.config) == tokens * h * 34 / tp
        assert (
            layer_bytes(with_scores, replace(sliced, kept="inputs"), with_scores.config)
            == tokens * h * 2 / tp
        )
    whole = Job(gpt(h, 4, a, 512, S), code, MACHINE, 8, S)
    assert layer_bytes(whole, Plan(tp=4), whole.config) == S * h * (10 + 24 / 4 + 5 * a * S / (h * 4))


def test_zero_divides_what_it_shards() -> None:
    j = job(code="ours")
    held = [memory(j, Plan(dp=8, zero=zero)) for zero in range(4)]
    assert [m.states / held[0].states for m in held] == [1, 1 / 8, 1 / 8, 1 / 8]
    assert [m.gradients / held[0].gradients for m in held] == [1, 1, 1 / 8, 1 / 8]
    assert [m.weights / held[0].weights for m in held] == [1, 1, 1, 1 / 8]


def test_bytes_are_those_of_the_chapters() -> None:
    c, B, S, n = model("llama-tiny"), 4, 64, 2
    j = Job(c, replace(CODES["ours"], dtype="float32"), MACHINE, B, S)
    x = B * S * c.width * 4  # |x| of all micro-batches
    ends = 4 * (n - 1) / n * x  # the embedding's sum, and that of the gradient behind the head
    assert step_bytes(j, Plan(tp=n)) == {"tp": 8 * (n - 1) / n * x * c.layers + ends}
    keys = 2 * B * S / n * c.kv_heads * c.head_width * 4  # and values
    assert step_bytes(j, Plan(sp=n))["sp"] == 3 * (n - 1) * keys * c.layers
    total = plan_size.total(c) * 4
    assert step_bytes(j, Plan(dp=n)) == {"dp": 2 * (n - 1) / n * total}
    assert step_bytes(j, Plan(dp=n, zero=1)) == {"dp": 2 * (n - 1) / n * total}
    assert step_bytes(j, Plan(pp=n))["pp"] == x
    experts = Job(model("mixtral-tiny"), replace(CODES["ours"], dtype="float32"), MACHINE, B, S)
    rows = 2 * B / n * S * experts.config.width * 4  # two choices a token
    assert step_bytes(experts, Plan(ep=n))["ep"] == 2 * 2 * (n - 1) / n * rows * experts.config.layers


@pytest.mark.parametrize(
    ("name", "ranks", "batch"), [("llama-7b", 16, 32), ("mixtral-8x7b", 8, 16), ("gpt3-175b", 64, 16)]
)
def test_the_search_finds_what_brute_force_finds(name: str, ranks: int, batch: int) -> None:
    """The bound is one for every plan, and the best plans are the best of all."""
    j = job(name, batch, replace(MACHINE, memory=200e9))
    best = search(j, ranks, {}, keep=3)
    all_times = {}
    for plan in plans(j, ranks, {}):
        time = predict(j, plan).step
        assert bound(j, plan) <= time * (1 + 1e-9), plan
        if memory(j, plan).total <= j.machine.memory:
            all_times[plan] = time
            assert refusal(j, plan) is None
        else:
            assert str(refusal(j, plan)).startswith("memory")
    assert len(all_times) > 100
    assert [choice.time.step for choice in best.best] == pytest.approx(sorted(all_times.values())[:3])
    assert best.simulated < len(all_times) / 5
    for choice in best.best:
        assert sum(parts(choice).values()) == pytest.approx(choice.time.step)


LIMITS = {"megatron-sc21-table1": 0.04, "megatron-sc21-table2": 0.04, "korthikanti": 0.06}


@pytest.mark.parametrize("name", read_papers())
def test_published_steps(name: str) -> None:
    rows = read_papers()[name]
    found, null = score(rows, predicted), score(rows, one_constant(rows))
    assert found.n == len(rows)
    if name in LIMITS:
        assert found.mape <= LIMITS[name]
        assert found.mape < 0.5 * null.mape


def test_scores() -> None:
    rows = read_papers()["korthikanti"]
    exact = score(rows, lambda row: row.seconds)
    assert (exact.mape, exact.bias, exact.largest, exact.regret) == (0, 0, 0, 0)
    worse = {row: 1 / row.seconds for row in rows}  # always chooses the slower of two
    regret = sum(a.seconds / b.seconds - 1 for a, b in zip(rows[::2], rows[1::2], strict=True)) / 4
    assert score(rows, worse.__getitem__).regret == pytest.approx(regret)
    assert spearman([(1, 1), (2, 2), (3, 3)]) == pytest.approx(1)
    assert spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert spearman([(1, 3), (1, 2), (1, 1)]) == 0


HEAD = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
)
HEAD += "data parallelism,pipeline parallelism,iteration time (ms)\n"


def test_rows_of_a_checkout(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ground_truth_single.csv").write_text(HEAD + "8,16,2,1024,16,24,1024,2,2,2,300.5\n")
    ((name, (row,)),) = read_vtrain(tmp_path).items()
    assert (name, row.seconds, row.plan) == (
        "vtrain-single",
        0.3005,
        Plan(2, 2, tp=2, micro_batch=2, kept="inputs"),
    )
    with pytest.raises(
        UsageError, match=re.escape(f"{tmp_path / 'nothing'} holds no ground_truth_single.csv")
    ):
        read_vtrain(tmp_path / "nothing")
    (tmp_path / "data" / "ground_truth_single.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="has no column '# GPUs'"):
        read_vtrain(tmp_path)


@pytest.mark.parametrize("name", names())
def test_shipped_machines_are_complete(name: str) -> None:
    machine = read_machine(name)
    assert machine.name == name
    assert len(machine.source) > 20
    assert "draft" not in machine.source
    assert machine.reserved < machine.memory
    small = job("llama-tiny", 16, machine)
    dtype = (
        "bfloat16" if "bfloat16" in machine.peak else "float16" if "float16" in machine.peak else "float32"
    )
    assert search(replace(small, code=replace(small.code, dtype=dtype)), 4, {}).best


def test_newer_machines_are_faster() -> None:
    def fastest(name: str, dtype: str) -> float:
        code = replace(CODES["ours"], dtype=dtype)
        found = search(Job(model("llama-7b"), code, read_machine(name), 256, 2048), 8, {}, keep=1)
        return found.best[0].time.step

    order = ["b200", "h200", "h100", "a100-80gb", "v100"]
    in_float16 = [fastest(name, "float16") for name in order]
    assert in_float16 == sorted(in_float16)
    in_bfloat16 = [fastest(name, "bfloat16") for name in order[:-1]]
    assert in_bfloat16 == in_float16[:-1]
    # its memory is slower than that of an H100
    assert in_bfloat16[2] < fastest("h100-96gb-500w", "bfloat16") < in_bfloat16[3]


@pytest.mark.parametrize(
    "name", ["a100-80gb", "a100-80gb-vtrain", "h100", "h100-96gb-500w", "h200", "b200", "v100"]
)
def test_numbers_of_gpus_have_their_sources(name: str) -> None:
    """A comment beside each number that is not fitted, and beside the first of those that are."""
    text = (PLANNER / "machines" / f"{name}.toml").read_text()
    for key in (
        "memory",
        "reserved",
        "bandwidth",
        "sustained_products",
        "host_bandwidth",
        "efficiency",
        "latency",
    ):
        assert re.search(rf"^{key} = \S+ +# .", text, re.MULTILINE), f"{key} has no source"
    assert re.search(r"^# .*\n+inside = ", text, re.MULTILINE)
    assert ("carried over from the A100" in text) != name.startswith("a100")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (("memory = ", "# memory = "), "lacks memory; machines/a100-80gb.toml shows all numbers"),
        (("memory = ", "memori = 1\nmemory = "), "memori is no number of a machine"),
        (("memory = ", "memory = -"), "memory must be at least"),
        (("memory = ", "memory = true #"), "memory is a number, not True"),
        (("latency = ", "# latency = "), ", [links] lacks latency"),
        (("memory = ", "memory == "), "cannot read"),
        (("inside = {", "inside = 3 #{"), "inside is a table of numbers"),
        (("2 = [", "two = ["), "inside: two"),
        (("[peak]", "[peak]\nfloat8 = 'x'"), "peak.float8 is a number, not 'x'"),
        (("memory = ", "at_once = 0.3\nmemory = "), "at_once must be at least 1, not 0.3"),
        (("\nefficiency = ", "\nefficiency = 5 #"), "efficiency must be at most 1, not 5"),
        (("ranks_per_host = ", "ranks_per_host = 0.5 #"), "ranks_per_host: 0.5 is no number of ranks"),
        (("\nbandwidth = ", "\nbandwidth = 0 #"), "bandwidth must be at least 1000, not 0"),
        (("[peak]", "[peak]\nfloat64 = nan"), "peak.float64 is a number, not nan"),
    ],
)
def test_a_wrong_machine_is_one_line(damage: tuple[str, str], said: str, tmp_path: Path) -> None:
    text = (PLANNER / "machines" / "a100-80gb.toml").read_text()
    assert damage[0] in text
    file = tmp_path / "machine.toml"
    file.write_text(text.replace(*damage, 1))
    with pytest.raises(UsageError, match=re.escape(said)) as error:
        read_machine(str(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--machine", "h1000"], "--machine h1000: choose one of a100-80gb"),
        (["--model", "llama-8b"], "--model llama-8b: choose one of gpt3-175b"),
        (["--model", "nowhere.json"], "cannot read nowhere.json: "),
        (["--dtype", "float16", "--machine", "PLAIN"], "--dtype float16: plain has a peak for bfloat16"),
        (["--machine", "v100"], "--dtype bfloat16: v100 has a peak for float16, float32"),
        (["--model", "gpt2"], "--sequence 4096: gpt2 has 1024 learned positions"),
        (["--gpus", "7", "--fix", "tp=2"], "tp=2: 7 GPUs do not divide into them"),
        (["--fix", "tp=8,pp=4"], "pp=4 x tp=8: 16 GPUs do not divide into them"),
        (["--fix", "tp"], "--fix tp: give name=value with one of chunks, dp"),
        (["--fix", "tp=two"], "--fix tp=two: tp is a whole number, at least 1"),
        (
            ["--fix", "pp=2,zero=3"],
            "zero=3: with pp above 1 each of 128 micro-batches gathers all weights again, 12.4 s of messages",
        ),
        (["--fix", "ep=2"], "ep=2: the model has 0 experts"),
        (["--batch", "6", "--fix", "dp=16"], "a batch of 6 samples does not divide into 16 places"),
        (["--model", "llama2-70b", "--gpus", "8"], "memory: at least 129"),
        (["--fix", "schedule=foo"], "--fix schedule=foo: schedule is one of 1f1b, interleaved, zb-h1, zb-v"),
        (["--fix", "tp=2,tp=4"], "--fix tp=4: tp is there twice"),
        (["--why", "zero=7"], "--why zero=7: zero is one of 0, 1, 2, 3"),
        (["--fix", "folded=2"], "--fix folded=2: give name=value with one of"),
        (["--json", "PLAN/x.json"], "cannot be written: "),
        (["--json", "FOLDER"], " is a folder"),
        (["--plot", "plan.txt"], "--plot plan.txt: give a file that ends in .svg, .png or .pdf"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, tmp_path: Path) -> None:
    text = (PLANNER / "machines" / "h100.toml").read_text().replace('name = "h100"', 'name = "plain"')
    (tmp_path / "plain.toml").write_text(re.sub(r"float16 = .*\n", "", text, count=1))
    places = {"PLAIN": tmp_path / "plain.toml", "PLAN": PLANNER / "plan.py", "FOLDER": tmp_path}
    given = [re.sub("PLAIN|PLAN|FOLDER", lambda found: str(places[found[0]]), word) for word in arguments]
    done = run([str(python()), str(PLANNER / "plan.py"), *given])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr


def test_the_command_shows_plans_and_writes_them(tmp_path: Path) -> None:
    files = [tmp_path / "plans.json", tmp_path / "plans.svg"]
    given = "--model llama-10m --sequence 256 --gpus 4 --batch 16 --explain --why pp=2,tp=2 --tokens 1e9"
    done = run(
        [
            str(python()),
            str(PLANNER / "plan.py"),
            *given.split(),
            "--json",
            str(files[0]),
            "--plot",
            str(files[1]),
        ]
    )
    assert done.returncode == 0, done.stderr
    for shown in (
        "s per step",
        "memory of the fullest rank",
        "times the best plan's step",
        "1e+09 tokens take",
    ):
        assert shown in done.stdout
    (command,) = re.findall(r"torchrun --nproc_per_node=4 \.\./examples/(train_llama.py .*)", done.stdout)
    assert "--model llama-10m" in command
    records = json.loads(files[0].read_text())
    assert sum(records[0]["parts"].values()) == pytest.approx(records[0]["seconds"])
    assert "seconds per step" in files[1].read_text()


def test_options_become_a_job() -> None:
    j = make_job(parse(PlanOptions, args=["--model", "gpt2", "--sequence", "512", "--code", "megatron-core"]))
    assert (j.config, j.sequence, j.code.weight_bytes) == (CONFIGS["gpt2"], 512, 2)
    assert wanted("tp=8, zero=0 schedule=1f1b", "fix") == {"tp": 8, "zero": 0, "schedule": "1f1b"}


def test_hugging_face_configurations(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    llama = dict(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, intermediate_size=11008)
    file.write_text(json.dumps(llama | dict(max_position_embeddings=4096, vocab_size=32000)))
    assert model(str(tmp_path)) == MODELS["llama-7b"]
    for change, said in (
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"model_type": "bert"}, "model_type 'bert' is unknown"),
        ({"head_dim": 256}, "head_dim is 256; the planner knows heads of hidden_size / heads, 128"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; give a whole number from 1 to 10000"),
        ({"hidden_size": 4096.5}, "hidden_size is 4096.5"),
    ):
        file.write_text(json.dumps(llama | dict(max_position_embeddings=4096, vocab_size=32000) | change))
        with pytest.raises(UsageError, match=re.escape(said)):
            model(str(file))
    file.write_text("[" * 10**5)
    with pytest.raises(UsageError, match="cannot read"):
        model(str(file))


def test_the_command_says_all_that_the_plan_is() -> None:
    j = replace(job("llama-10m", 12), machine=read_machine("h100"))
    said = command(j, Plan(dp=6, tp=2, zero=1, sequence_parallel=True, kept="inputs"), "llama-10m")
    assert said
    launcher, script, options = re.match(r"torchrun (.*) (\S+train_llama.py) (.*)", said).groups()  # type: ignore[union-attr]
    assert launcher == "--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 --nproc_per_node=6"
    assert (PLANNER / script).is_file()
    assert set(re.findall(r"--\S+(?: [^-]\S*)?", options)) == {
        *("--model llama-10m", "--dp 6", "--tp 2", "--batch 12", "--sequence 2048", "--micro-batches 2"),
        *("--zero 1", "--schedule 1f1b", "--sequence-parallel", "--checkpointing", "--precision bfloat16"),
    }
    assert command(j, Plan(dp=12), "llama-7b") is None  # not a model of the trainer
    assert command(replace(j, code=replace(j.code, dtype="float16")), Plan(dp=12), "llama-10m") is None


def test_stages_hold_all_layers() -> None:
    j = job("deepseek-v3")
    for number in (1, 4, 7, 61):
        per_stage = j.layers(number)
        assert [sum(counts) for counts in zip(*per_stage, strict=True)] == [3, 58]
        assert max(map(sum, per_stage)) - min(map(sum, per_stage)) <= 1
    total = sum((s for s in stages(j, Plan(pp=4))), Stage())
    assert total.total == pytest.approx(sum(s.total for s in stages(j, Plan())))
