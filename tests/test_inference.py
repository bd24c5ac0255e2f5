"""Generated text: that of transformers and of one device on every mesh; requests that join, leave and are cancelled."""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from mpi.launch import ROOT, mpirun, python, refusal, torchrun
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from common.comm import Group
from common.comm.ledger import Ledger
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.models.configs import TransformerConfig, llama
from common.models.huggingface import read_config, read_huggingface, read_weights
from common.models.transformer import Transformer

from hybrid_options import parse
from infer_engine import Engine, cache_bytes
from infer_options import Choice, GenerateOptions, read_file
from infer_run import main
from infer_sampling import choose, shares
from infer_scheduler import Request, Sequence

FOLDER = ROOT / "06-hybrid-parallelism" / "examples" / "llama_inference"
VOCABULARY = 101
SHAPE = llama(layers=5, width=48, heads=6, kv_heads=2, mlp_width=57, sequence=96, vocabulary=VOCABULARY)
SHARED = replace(SHAPE, experts=4, experts_per_token=2, shared_experts=1, capacity_factor=None)
MESHES = [(1, 1), (2, 1), (3, 1), (5, 1), (1, 2), (1, 3), (1, 6), (2, 2), (2, 3), (3, 2)]  # pp, tp
AMPLE: dict[str, Any] = {"blocks": 256, "block": 5}
SCARCE: dict[str, Any] = {"blocks": 20, "block": 4, "most": 5, "budget": 7}


def requests(count: int, seed: int = 0) -> list[Request]:
    """Return requests of uneven lengths; a third of them greedy, the others with temperature, top-k and top-p."""
    r = random.Random(seed)
    found = []
    for i in range(count):
        prompt = tuple(r.randrange(VOCABULARY) for _ in range(r.randrange(1, 30)))
        temperature = (0.0, 0.8, 1.2)[i % 3]
        found.append(
            Request(prompt, r.randrange(1, 40), temperature, (0, 20)[i % 2], (1.0, 0.9)[i // 2 % 2], i)
        )
    return found


ASKED = requests(12)


def alone(model: Transformer, request: Request) -> list[int]:
    """Return a request's text by the plain model, without a cache: the whole text passes it for each token."""
    sequence = Sequence(0, request, list(request.prompt))
    with torch.inference_mode():
        while len(sequence.written) < request.tokens and sequence.text[-1] not in request.stop:
            logits_BSV = model(torch.tensor([sequence.text]))
            sequence.text += choose(logits_BSV[0, -1:], [sequence]).tolist()
    return sequence.written


def run(engine: Engine, asked: Iterable[Request]) -> list[list[int]]:
    """Return the texts of requests that are all there from the start."""
    sequences = [engine.add(request) for request in asked]
    while engine.busy:
        engine.step()
    return [s.written for s in sequences]


def on_mesh(rt: Runtime, pp: int, tp: int, folder: Path, asked: list[Request]) -> list[list[list[int]]]:
    """Return the texts with an ample cache, and with one so small that requests return to wait."""
    texts, shape = [], read_config(folder)
    for sizes in (AMPLE, SCARCE):
        mesh = Mesh(rt.world, pp=pp, tp=tp)
        engine = Engine(shape, mesh, rt.device, torch.float64, whole=read_weights(folder, shape), **sizes)
        texts.append(run(engine, asked))
        assert engine.scheduler.preempted > 0 or sizes is AMPLE
        assert len(engine.blocks.free) == engine.blocks.count
        assert engine.cache.nbytes == cache_bytes(
            shape, mesh, torch.float64, engine.blocks.count * engine.blocks.size
        )
        mesh.close()
    return texts


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a LLaMA that transformers has written in float64, with weights that are not small."""
    torch.manual_seed(0)
    c = LlamaConfig(
        hidden_size=48,
        intermediate_size=57,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=96,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        eos_token_id=7,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(c).double().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    """Return texts without ranks: greedy ones by transformers.generate, drawn ones by the plain model."""
    theirs = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    ours = read_huggingface(checkpoint, torch.float64)
    return [alone(ours, q) if q.temperature else greedily(theirs, q) for q in ASKED]


def greedily(model: Any, request: Request) -> list[int]:
    """Return a request's text by transformers.generate, with its cache."""
    tokens_1S = torch.tensor([request.prompt])
    text = model.generate(
        tokens_1S,
        attention_mask=torch.ones_like(tokens_1S),
        max_new_tokens=request.tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    written: list[int] = text[0, len(request.prompt) :].tolist()
    return written


@pytest.mark.parametrize(("pp", "tp"), MESHES)
def test_text_is_that_of_transformers_and_of_one_device(
    pp: int, tp: int, checkpoint: Path, expected: list[list[int]]
) -> None:
    """Greedy and drawn texts are equal on every mesh, from the checkpoint that transformers wrote."""
    for texts in spawn(on_mesh, pp * tp, pp, tp, checkpoint, ASKED):
        assert texts == [expected, expected]


def test_mixtral_is_that_of_transformers(tmp_path: Path) -> None:
    """A mixture of experts, split over tp and pp, writes transformers' text."""
    torch.manual_seed(0)
    c = MixtralConfig(
        hidden_size=32,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=96,
        initializer_range=0.3,
        sliding_window=None,
    )
    c._experts_implementation = "eager"
    model = MixtralForCausalLM(c).double().eval()
    model.save_pretrained(tmp_path)
    asked = [q for q in ASKED if not q.temperature]
    texts = [greedily(model, q) for q in asked]
    for found in spawn(on_mesh, 4, 2, 2, tmp_path, asked):
        assert found == [texts, texts]


def with_shared_expert(rt: Runtime, tp: int, asked: list[Request]) -> list[list[int]]:
    mesh = Mesh(rt.world, pp=rt.world_size // tp, tp=tp)
    return run(Engine(SHARED, mesh, rt.device, torch.float64), asked)


@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (4, 2)])
def test_a_shared_expert_is_summed_once_over_tp(ranks: int, tp: int) -> None:
    """The shared expert's output is summed over tp together with that of the routed ones."""
    model = Transformer(SHARED, dtype=torch.float64)
    asked = [q for q in ASKED if not q.temperature][:3]
    for found in spawn(with_shared_expert, ranks, tp, asked):
        assert found == [alone(model, q) for q in asked]


def joining(rt: Runtime, pp: int, tp: int, asked: list[Request]) -> list[tuple[str, list[int]]]:
    """Let 200 requests join and leave at random, and cancel a tenth. Check blocks and bytes after each step."""
    mesh = Mesh(rt.world, pp=pp, tp=tp)
    engine = Engine(SHAPE, mesh, rt.device, torch.float64, blocks=60, block=4, most=8, budget=24)
    r = random.Random(3)
    cancelled = set(r.sample(range(len(asked)), len(asked) // 10))
    sequences: list[Sequence] = []
    formula, schedule = [0], engine.scheduler.schedule

    def scheduled() -> list[tuple[Sequence, int]]:
        chosen = schedule()
        computed = {s.number: n for s, n in chosen}
        held = [s.cached + computed.get(s.number, 0) for s in engine.scheduler.running]
        formula.append(sum(math.ceil(tokens / 4) for tokens in held))
        return chosen

    engine.scheduler.schedule = scheduled  # type: ignore[method-assign]
    while engine.busy or len(sequences) < len(asked):
        for _ in range(r.randrange(3)):
            if len(sequences) < len(asked):
                sequences.append(engine.add(asked[len(sequences)]))
        for s in sequences:
            if s.number in cancelled and not s.ended and (len(s.written) > s.number % 5 or r.random() < 0.05):
                engine.cancel(s)
        if engine.busy:
            engine.step()
        assert engine.blocks.taken == sum(math.ceil(s.cached / 4) for s in sequences if not s.ended)
    assert sorted(engine.blocks.free) == list(range(60))
    assert engine.scheduler.peak == max(formula) > 50
    assert {s.ended for s in sequences if s.number in cancelled} == {"cancelled"}
    return [(s.ended, s.written) for s in sequences]


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_200_requests_that_join_leave_and_are_cancelled(pp: int, tp: int) -> None:
    """Every other request is complete and as alone; all blocks are free at the end."""
    asked = requests(200, seed=4)
    model = Transformer(SHAPE, dtype=torch.float64)
    results = spawn(joining, pp * tp, pp, tp, asked)
    assert all(result == results[0] for result in results)
    assert sum(ended == "cancelled" for ended, _ in results[0]) == 20
    for (ended, written), request in list(zip(results[0], asked, strict=True))[
        :: 1 if (pp, tp) == (1, 1) else 7
    ]:
        expected = alone(model, request)
        assert written == expected if ended == "length" else written == expected[: len(written)]


def test_kept_tokens_are_those_of_transformers() -> None:
    """Temperature, top-k and top-p keep the tokens that transformers' filters keep, with equal probabilities."""
    logits_RV = 2 * torch.randn(
        40, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    for temperature, top_k, top_p in [
        (0.7, 0, 1.0),
        (1.0, 5, 1.0),
        (1.3, 0, 0.8),
        (0.9, 30, 0.5),
        (2.0, 1, 1.0),
    ]:
        filters = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k:
            filters.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            filters.append(TopPLogitsWarper(top_p))
        expected_RV = filters(torch.zeros(40, 1, dtype=torch.int64), logits_RV).softmax(-1)
        request = Request((1,), 1, temperature, top_k, top_p)
        share_RV, token_RV = shares(logits_RV, [request] * 40)
        found_RV = torch.zeros_like(share_RV).scatter(1, token_RV, share_RV / share_RV.sum(-1, keepdim=True))
        torch.testing.assert_close(found_RV, expected_RV, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0.0}]
)
def test_a_request_out_of_bounds_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="give none below 0"):
        Request((1,), 1, **bad)


def test_logits_that_are_not_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="not numbers"):
        choose(torch.full((1, 3), math.nan), [Sequence(0, Request((1,), 1), [1])])


def test_the_smallest_temperature_takes_the_likeliest_token() -> None:
    logits_V = torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64)
    assert choose(logits_V[None], [Sequence(0, Request((1,), 1, temperature=5e-324), [1])]).tolist() == [1]


def test_a_prompt_may_have_any_character(tmp_path: Path) -> None:
    """Lines end with a line feed alone; the mark that some editors write first is no part of the text."""
    prompt = "a\u2028\x0cb"
    (tmp_path / "a.txt").write_text(f"{prompt}\nc\n", "utf-8-sig")
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": prompt}, ensure_ascii=False), "utf-8-sig")
    for name, expected in (("a.txt", [prompt, "c"]), ("a.jsonl", [prompt])):
        assert [text for text, _ in read_file(tmp_path / name, Choice())] == expected


def test_lists_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "generate.toml"
    file.write_text('stop = [10, 11]\nprompts = ["def ", "a b"]\n')
    o = parse(GenerateOptions, args=["--config", str(file), "--checkpoint", str(tmp_path)])
    assert (o.stop, tuple(o.prompts)) == ((10, 11), ("def ", "a b"))
    file.write_text('stop = ["x"]\n')
    with pytest.raises(UsageError, match="stop = "):
        parse(GenerateOptions, args=["--config", str(file), "--checkpoint", str(tmp_path)])


def test_draws_follow_the_probabilities() -> None:
    """Over many seeds each token comes as often as its probability says, within 5 standard deviations."""
    logits_V = torch.tensor([1.0, 0.0, 2.0, -1.0, 0.5], dtype=torch.float64)
    n = 20000
    asked = [Sequence(i, Request((1,), 1, 0.8, 4, 0.95, seed=i), [1]) for i in range(n)]
    counts_V = choose(logits_V.expand(n, -1), asked).bincount(minlength=5)
    share_1V, token_1V = shares(logits_V[None], [asked[0].request])
    p_V = torch.zeros(5, dtype=torch.float64).scatter(0, token_1V[0], share_1V[0] / share_1V.sum())
    assert (p_V == 0).sum() == 1  # of top-k
    assert ((counts_V - n * p_V).abs() <= 5 * (n * p_V * (1 - p_V)).sqrt()).all()
    at_places = [Sequence(0, asked[0].request, [1] * length) for length in range(1, 40)]
    assert len(choose(logits_V.expand(39, -1), at_places).unique()) > 2  # the place in the text counts, too


def test_stop_tokens_end_a_text() -> None:
    """A text ends with the first stop token; the tokens before are those without it."""
    model = Transformer(SHAPE, dtype=torch.float64)
    (request,) = requests(1, seed=8)
    request = Request(request.prompt, 30, 1.0, seed=1)
    whole = alone(model, request)
    stopping = Request(request.prompt, 30, 1.0, seed=1, stop=frozenset({whole[11]}))
    sequence = (engine := one_rank(block=4)).add(stopping)
    while engine.busy:
        engine.step()
    assert (sequence.ended, sequence.written) == ("stop", whole[: whole.index(whole[11]) + 1])


def one_rank(shape: TransformerConfig = SHAPE, **sizes: int) -> Engine:
    """Return an engine on this process alone."""
    return Engine(shape, Mesh(Group.alone()), torch.device("cpu"), torch.float64, **sizes)


def test_a_long_prompt_does_not_stop_the_others() -> None:
    """While a long prompt is computed in parts, a sequence that runs gets a token in each step."""
    engine = one_rank(budget=4, most=2)
    first = engine.add(Request((1, 2), 20))
    engine.step()
    long = engine.add(Request(tuple(range(60)), 5))
    for written in range(2, 21):
        assert not long.written
        engine.step()
        assert len(first.written) == written
    while engine.busy:
        engine.step()
    model = Transformer(SHAPE, dtype=torch.float64)
    assert [s.written for s in (first, long)] == [alone(model, s.request) for s in (first, long)]


def messages(rt: Runtime, pp: int, tp: int) -> tuple[dict[str, Fraction], int]:
    """Return the bytes that this rank sends in a decode step of 3 sequences, by call, and its weights' bytes."""
    engine = Engine(SHAPE, Mesh(rt.world, pp=pp, tp=tp), rt.device, torch.float64)
    for i in range(3):
        engine.add(Request((i + 1, 5), 4))
    engine.step()
    with Ledger() as ledger:
        engine.step()
    sent = {f"{row.op} {row.axis}": ledger.bytes(row.op, row.axis) for row in ledger.rows}
    return sent, sum(p.nbytes for p in engine.stage.parameters())


def test_bytes_of_a_step() -> None:
    """A decode step sends two all-reduces per layer along tp, activations along pp, logits and tokens; nothing more."""
    R, D = 3, 48
    (sent, weights), *_ = spawn(messages, 2, 1, 2)
    # the embedding and two regions per layer; the logits padded to 51 per rank; the tokens from rank 0
    assert sent == {
        "all_reduce tp": 11 * R * D * 8,
        "all_gather tp": R * 51 * 8,
        "broadcast world": R * 8 // 2,
    }
    (sent, stage), *_ = spawn(messages, 2, 2, 1)
    assert sent == {"send pp": R * D * 8, "broadcast world": R * 8 // 2}
    whole = sum(p.numel() for p in Transformer(SHAPE, dtype=torch.float64).parameters()) * 8
    assert weights < 0.55 * whole
    assert stage < 0.62 * whole  # three of five layers


def program(*given: str, text: str = "", nproc: int = 1) -> subprocess.CompletedProcess[str]:
    """Run generate.py with a standard input."""
    command = [str(python()), str(FOLDER / "generate.py"), "--nproc", str(nproc), *given]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=240)


def test_prompts_from_the_terminal_a_file_and_the_command_line(tmp_path: Path) -> None:
    """One prompt has one text, wherever it comes from, by whichever launcher, on one rank and on two."""
    options = ["--tokens", "7", "--dtype", "float64", "--seed", "3"]
    printed = program(*options, text="def é(\n\nclass \n").stdout.splitlines()
    assert [line[:6] for line in printed[:2]] == ["def é(", "class "]
    (tmp_path / "lines.txt").write_text("def é(\n\nclass \n")
    asked = [
        {"prompt": "def é(", "tokens": 7, "seed": 3},
        {"prompt": "class ", "temperature": 0.8, "stop": [999]},
        {"prompt": "x", "tokens": 2, "temperature": 0, "top_k": 3, "top_p": 1},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, asked)))
    log = tmp_path / "log.jsonl"
    assert program(*options, "--prompts", "def é(", "class ", nproc=2).stdout.splitlines()[:2] == printed[:2]
    by_torchrun = torchrun(
        2, str(FOLDER / "generate.py"), *options, "--file", str(tmp_path / "lines.txt"), "--pp", "2"
    )
    assert by_torchrun.stdout.splitlines()[:2] == printed[:2]
    by_mpirun = mpirun(
        2, python(), FOLDER / "generate.py", *options, f"--file={tmp_path}/lines.jsonl", f"--json={log}"
    )
    assert by_mpirun.stdout.splitlines()[:2] == printed[:2], by_mpirun.stderr
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(r["text"], r["tokens"], r["ended"]) for r in records[:2]] == [
        (t, 7, "length") for t in printed[:2]
    ]
    assert records[2]["tokens"] == 2
    assert all(0 < r["seconds_to_first"] <= r["seconds"] for r in records)


def test_the_terminal_may_be_silent_for_longer_than_the_timeout() -> None:
    """A line that cannot be run gets an error, and the next one a text."""
    late = f"sleep 9; printf '%s\\n' {'a' * 300} b"
    options = ["--model", "llama-tiny", "--tokens", "2", "--nproc", "2", "--timeout", "4"]
    shown = subprocess.run(
        ["bash", "-c", f"({late}) | {sys.executable} {FOLDER / 'generate.py'} {' '.join(options)}"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert shown.returncode == 0, shown.stderr
    error, text, *_ = shown.stdout.splitlines()
    assert error.startswith("error: a prompt of 300 tokens")
    assert text.startswith("b")


def test_a_length_that_nobody_gives_ends_with_the_model(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    file = FOLDER / "requests.jsonl"
    program("--model", "llama-tiny", "--file", str(file), f"--json={log}", nproc=2)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    given = [json.loads(line).get("tokens", 64 - len("import ")) for line in file.read_text().splitlines()]
    assert all(r["ended"] == "stop" or r["tokens"] == n for r, n in zip(records, given, strict=True))


@pytest.mark.parametrize(
    ("given", "line", "message"),
    [
        (["--prompts", "a", "--tp", "3"], "", "mesh pp=1 dp=1 ep=1 sp=1 tp=3 needs 3 ranks"),
        (["--prompts", "a" * 60, "--tokens", "9"], "", "exceed the model's longest sequence, 64"),
        (
            ["--prompts", "a", "--blocks", "1", "--block", "8"],
            "",
            "61 tokens need 8 blocks of 8, the cache has 1",
        ),
        (["--prompts", ""], "", "at least one token"),
        (
            ["--prompts", "a", "--most", "9", "--budget", "8"],
            "",
            "a budget of 8 tokens per step is too small for 9",
        ),
        (["--prompts", "a", "--model", "gpt2-tiny"], "", "only models with rotary positions"),
        (["--prompts", "a", "--model", "switch-tiny"], "", "only models with rotary positions"),
        (["--prompts", "a", "--checkpoint", "nowhere"], "", "cannot read nowhere/config.json"),
        (
            ["--prompts", "a", "--blocks", "4000000", "--block", "65536"],
            "",
            "a cache of 4000000 blocks needs",
        ),
        (["--file", "nowhere"], "", "cannot read --file nowhere"),
        (["--file", "FILE"], "[1", "line 1 is not JSON"),
        (["--file", "FILE"], '{"text": "a"}', "line 1: give an object with a prompt"),
        (["--file", "FILE"], '{"prompt": "a", "token": 3}', "line 1: 'token' is unknown"),
        (["--file", "FILE"], '{"prompt": "a", "tokens": 0}', "line 1: tokens cannot be 0"),
        (["--file", "FILE"], '{"prompt": "a", "stop": [-1]}', "line 1: stop cannot be [-1]"),
        (["--file", "FILE"], '{"prompt": 7}', "line 1: prompt cannot be 7"),
        (["--file", "FILE"], "[" * 10**5, "line 1 is not JSON"),
        (["--file", "FILE"], "\n", "has no prompt"),
        (["--file", "/dev/null"], "", "not a regular file"),
        (["--file", "FILE"], '{"prompt": "a", "tokens": 63}\n{"prompt": "ab", "tokens": 63}', "exceed"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    given: list[str], line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line, before anything is generated."""
    (tmp_path / "asked.jsonl").write_text(line)
    given = [str(tmp_path / "asked.jsonl") if word == "FILE" else word for word in given]
    default = [] if "--tokens" in given else ["--tokens", "60" if "--blocks" in given else "5"]
    assert message in refusal(main, GenerateOptions, capsys, *given, *default)


def test_a_killed_rank_ends_the_run_with_a_line(tmp_path: Path) -> None:
    """The other rank does not wait for the killed one; the message names it."""
    command = [
        sys.executable,
        str(FOLDER / "generate.py"),
        "--nproc",
        "2",
        "--model",
        "llama-10m",
        "--tokens",
        "250",
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write("a\n")  # more lines may follow, so the ranks do not end
        started.stdin.flush()
        assert started.stdout.read(2)  # the request is being written
        ranks = [
            p
            for p in psutil.Process(started.pid).children(True)
            if not p.children() and "resource_tracker" not in str(p.cmdline())
        ]
        ranks[-1].kill()
        _, errors = started.communicate(timeout=240)
    assert started.returncode == 1
    assert re.search(r"rank \d.*SIGKILL", errors), errors
