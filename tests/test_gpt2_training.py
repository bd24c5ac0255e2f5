"""GPT-2's training on tokens of a tokenizer.json: equal on every mesh, to transformers, and from its files and back."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi.launch import ROOT, python
from safetensors.torch import load_file
from test_huggingface import in_double  # noqa: F401
from tokenizers import Tokenizer as WithModel
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from training_runs import ALONE, Ran, go, options
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

from common.comm import Group
from common.data import tokenizer as of_tokens
from common.data.text import Text, load_text
from common.data.tokenizer import HALF, Bytes, FromFile, Stream, Tokenizer, load_tokenizer, train
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.models.configs import CONFIGS, gpt2
from common.models.huggingface import to_huggingface

from hybrid_data import Shuffled, encode
from hybrid_export import export
from hybrid_options import TrainOptions
from hybrid_trainer import Trainer, start

EXAMPLE = ROOT / "06-hybrid-parallelism" / "examples" / "gpt2_training"
ODD = 509  # tokens: no number of ranks divides a prime
CONFIGS["gpt2-of-tokens"] = gpt2(
    layers=5, width=20, heads=4, sequence=19
)  # its vocabulary is the tokenizer's
TEXT = "déjà vu, 中文 and 😀: x = 'ñ'\n" * 2
MESHES: list[dict[str, Any]] = [
    dict(dp=4, zero=3, micro_batches=1),
    dict(dp=2, ep=2, zero=1, micro_batches=1),
    dict(dp=2, tp=2, zero=2, sequence_parallel=True),
    dict(pp=2, dp=2, zero=1, micro_batches=3),
    dict(pp=2, tp=2, micro_batches=4, schedule="zb-h1"),
    dict(pp=4, micro_batches=5, schedule="gpipe"),
    dict(tp=4, checkpointing=True),
    dict(pp=2, dp=2, micro_batches=3, schedule="interleaved"),
    dict(pp=2, sp=2, attention="zigzag", sequence=12),
    dict(sp=2, tp=2, attention="ulysses", sequence=12),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tokenizer.json of ODD tokens."""
    found = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    found.write_text(train(load_text().train.tobytes()[:60_000], ODD))
    return found


@pytest.fixture(scope="module", params=["file", "bytes"])
def tokenizer(request: pytest.FixtureRequest, file: Path) -> Tokenizer:
    return load_tokenizer(file if request.param == "file" else None)


def run_options(file: Path, **given: Any) -> TrainOptions:
    """Return the options of a short run on uneven sizes: 7 samples of 13 tokens, 3 steps."""
    odd: dict[str, Any] = dict(
        model="gpt2-of-tokens", tokenizer=file, steps=3, batch=7, sequence=13, clip=0.7
    )
    odd |= dict(evaluate_every=3, evaluation=5, generate=2, prompt="déf ", weight_decay=0.3)
    return options(**(odd | given))


@settings(deadline=None, max_examples=100)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    found = tokenizer.encode(text)
    assert tokenizer.decode(found) == text
    assert all(0 <= token < tokenizer.vocabulary for token in found)


@settings(deadline=None, max_examples=100)
@given(tokens=st.lists(st.integers(0, ODD + 3), max_size=20))
def test_a_stream_is_the_text(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Also of bytes that are no text, and of numbers that the tokenizer does not have."""
    if isinstance(tokenizer, Bytes):
        tokens = [token % tokenizer.vocabulary for token in tokens]
    stream = Stream(tokenizer)
    assert "".join([*map(stream.add, tokens), stream.rest()]) == tokenizer.decode(tokens)


def test_a_stream_shows_no_half_of_a_character(tokenizer: Tokenizer) -> None:
    stream, tokens = Stream(tokenizer), tokenizer.encode(TEXT)
    shown = [stream.add(token) for token in tokens]
    assert "".join(shown) == TEXT
    assert HALF not in "".join(shown)
    assert shown.count("") >= 6  # a 3-byte and a 4-byte character, each twice and more
    assert stream.rest() == ""


def test_a_cut_stream_shows_what_is_left(tokenizer: Tokenizer) -> None:
    stream = Stream(tokenizer)
    tokens = tokenizer.encode("a😀")[:-1]
    assert "".join(map(stream.add, tokens)) == "a"
    assert stream.rest() == tokenizer.decode(tokens)[1:] != ""


def test_a_stream_keeps_the_spaces_of_a_decoder_that_drops_the_first(tmp_path: Path) -> None:
    """LLaMA 2's decoder drops the space before the first word of what it decodes, which is not every token's."""
    words = WithModel(BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words.train_from_iterator([TEXT, "a b c"], BpeTrainer(vocab_size=60, show_progress=False))
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    stream = Stream(tokenizer)
    assert "".join(map(stream.add, tokenizer.encode("a b c and vu"))) == "a b c and vu"


def test_training_a_tokenizer_is_deterministic(file: Path) -> None:
    content = load_text().train.tobytes()[:60_000]
    assert train(content, ODD) == file.read_text()
    assert FromFile(file).vocabulary == ODD
    assert FromFile(file).decode([FromFile(file).end or 0]) == "<|endoftext|>"
    with pytest.raises(UsageError, match=r"--vocabulary 5000: this text has only \d+ tokens; give at most"):
        train(content[:2000], 5000)


@pytest.mark.parametrize("bad", ["", "{}", "[]", "\x00", '{"model": {}}', "cut", "empty"])
def test_what_is_no_tokenizer_gets_one_line(file: Path, tmp_path: Path, bad: str) -> None:
    empty = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'
    other = tmp_path / "tokenizer.json"
    other.write_text({"cut": file.read_text()[:5000], "empty": empty}.get(bad, bad))
    with pytest.raises(UsageError, match=r"is not a tokenizer.json of|has no tokens") as error:
        load_tokenizer(other)
    assert "\n" not in str(error.value)


def test_chunks_are_the_text(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """Chunks end with lines, so their tokens are nearly those of the whole text; their text is exactly that."""
    monkeypatch.setattr(of_tokens, "CHUNK", 100)
    content = load_text().train.tobytes()[:20_000]
    chunks = [*of_tokens.chunks_of(content)]
    assert len(chunks) > 50
    assert "".join(chunks) == content.decode(errors="replace")
    assert all(chunk.endswith("\n") for chunk in chunks[:-1])
    text = Text(np.frombuffer(content, np.uint8), np.frombuffer(content[:500], np.uint8), "a text")
    found = encode(text, FromFile(file), Group.alone())
    assert FromFile(file).decode(found.train.tolist()) == content.decode(errors="replace")
    assert FromFile(file).decode(found.validation.tolist()) == content[:500].decode(errors="replace")
    assert found.bytes_per_token == (20_000 + 500) / (len(found.train) + len(found.validation))


def noted(norms: list[float]) -> Any:
    """Return a change of a trainer that notes the gradient norm of each step."""

    def change(trainer: Trainer) -> None:
        step = trainer.train

        def stepped() -> dict[str, float]:
            found = step()
            norms.append(found["gradient_norm"])
            return found

        trainer.train = stepped  # type: ignore[method-assign]

    return change


def trained(rt: Runtime, cases: list[TrainOptions]) -> list[tuple[Ran, list[float], str]]:
    """Run each training; return its results, its gradient norms, and the hash of its tokens."""
    found = []
    for o in cases:
        norms: list[float] = []
        ran = go(rt, o, change=noted(norms))
        found.append((ran, norms, Shuffled(o, rt.world, rt.device).sha256))
    return found


def test_every_mesh_trains_as_one_device(file: Path, tmp_path: Path) -> None:
    """Losses, norms, evaluations, text and exported weights."""
    o = run_options(file)
    alone = {S: trained(ALONE, [replace(o, sequence=S, export=tmp_path / f"alone {S}")])[0] for S in (12, 13)}
    cases = [replace(o, export=tmp_path / str(i), **({"dp": 1} | mesh)) for i, mesh in enumerate(MESHES)]
    for rank in spawn(trained, 4, cases):
        for (ran, norms, tokens), mesh in zip(rank, MESHES, strict=True):
            expected, their_norms, their_tokens = alone[mesh.get("sequence", 13)]
            assert tokens == their_tokens, mesh
            assert ran.losses == pytest.approx(expected.losses, rel=1e-11), mesh
            assert norms == pytest.approx(their_norms, rel=1e-10), mesh
            assert ran.validation == pytest.approx(expected.validation, rel=1e-11), mesh
            assert ran.texts == expected.texts, mesh
    for i, mesh in enumerate(MESHES):
        weights = load_file(tmp_path / str(i) / "model.safetensors")
        expected_weights = load_file(tmp_path / f"alone {mesh.get('sequence', 13)}" / "model.safetensors")
        assert weights.keys() == expected_weights.keys()
        for name, x in weights.items():
            torch.testing.assert_close(
                x,
                expected_weights[name],
                rtol=1e-9,
                atol=1e-10,
                msg=lambda m, n=name, at=mesh: f"{at} {n}: {m}",
            )


def here_and_there(rt: Runtime, cases: list[tuple[TrainOptions, int]]) -> list[Ran]:
    """Run each training, stopped after the given step, if any."""
    return [go(rt, o, stop_after) for o, stop_after in cases]


@pytest.mark.usefixtures("in_double")
def test_transformers_takes_the_same_step_and_writes_the_same_text(file: Path, tmp_path: Path) -> None:
    """From a folder, on a mesh, into a folder: loss, gradients, a step of AdamW, tokens and greedy text."""
    begin, end = tmp_path / "begin", tmp_path / "end"
    o = run_options(file, steps=1, warm_up=1, evaluate_every=0, temperature=0.0, generate=5)
    trainer = start(ALONE, o)
    export(trainer.hybrid, begin, o.coder)
    theirs = GPT2LMHeadModel.from_pretrained(begin, dtype=torch.float64, attn_implementation="eager")
    tokens_BS, targets_BS = trainer.batches.take(0, 0, o.batch)
    text_BT = torch.cat([tokens_BS, targets_BS[:, -1:]], 1)
    loss = theirs(text_BT, labels=text_BT).loss
    loss.backward()
    assert trainer.hybrid.step(tokens_BS, targets_BS).item() == pytest.approx(loss.item(), rel=1e-12)
    gradients = {name: p.grad for name, p in trainer.hybrid.named_parameters() if p.grad is not None}
    for name, gradient in to_huggingface(trainer.hybrid.config, gradients).items():
        torch.testing.assert_close(gradient, theirs.get_parameter(name).grad, rtol=1e-9, atol=1e-12)
    mesh = replace(
        o, tokenizer=None, init=begin, export=end, dp=1, pp=2, tp=2
    )  # the tokenizer is in the folder
    ran = spawn(here_and_there, 4, [(mesh, 0)])[0][0]
    assert ran.losses[1] == pytest.approx(loss.item(), rel=1e-12)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), o.clip)
    decayed = [p for p in theirs.parameters() if p.ndim > 1]
    groups = [
        dict(params=decayed, weight_decay=o.weight_decay),
        dict(params=[p for p in theirs.parameters() if p.ndim == 1]),
    ]
    torch.optim.AdamW(groups, lr=o.learning_rate, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0).step()
    for name, x in load_file(end / "model.safetensors").items():
        torch.testing.assert_close(x, theirs.get_parameter(name).detach(), rtol=1e-9, atol=1e-10)
    words, again = (
        AutoTokenizer.from_pretrained(end),
        AutoModelForCausalLM.from_pretrained(end, dtype=torch.float64),
    )
    assert words(TEXT).input_ids == FromFile(file).encode(TEXT)
    assert words.eos_token_id == FromFile(file).end == 0
    written = again.generate(
        **words(o.prompt, return_tensors="pt"), max_new_tokens=o.generate, do_sample=False
    )
    assert words.decode(written[0]) == ran.texts[1]


def test_a_folder_comes_back_as_it_was(file: Path, tmp_path: Path) -> None:
    """Without a step that changes a weight, a mesh exports the folder from which it began, tokenizer and all."""
    o = run_options(file)
    export(start(ALONE, o).hybrid, tmp_path / "a", o.coder)
    still = replace(
        o, tokenizer=None, init=tmp_path / "a", export=tmp_path / "b", steps=1, learning_rate=0.0, generate=0
    )
    spawn(here_and_there, 4, [(replace(still, dp=1, pp=2, tp=2), 0)])
    for name in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["vocab_size"] == ODD


def test_a_run_resumes_on_another_mesh_with_its_tokenizer_alone(file: Path, tmp_path: Path) -> None:
    o = run_options(file, steps=4)
    alone = go(ALONE, o)
    kept = replace(o, checkpoints=tmp_path / "run")
    first, second = replace(kept, dp=2, tp=2, zero=1), replace(kept, dp=1, pp=4, micro_batches=3)
    parts = spawn(here_and_there, 4, [(first, 1), (second, 0)])[0]
    assert [list(ran.losses) for ran in parts] == [[1, 2], [3, 4]]  # the signal is seen in the next step
    assert parts[0].losses | parts[1].losses == pytest.approx(alone.losses, rel=1e-11)
    assert parts[1].texts[4] == alone.texts[4]
    for name, x in alone.weights.items():
        torch.testing.assert_close(parts[1].weights[name], x, rtol=1e-9, atol=1e-10)
    other = tmp_path / "tokenizer.json"
    other.write_text(train(load_text().train.tobytes()[60_000:120_000], ODD))
    CONFIGS["odd-bytes"] = replace(CONFIGS["gpt2-of-tokens"], vocabulary=ODD)
    for change in (dict(tokenizer=other), dict(tokenizer=None, model="odd-bytes")):
        with pytest.raises(UsageError, match=f"a run with tokenizer '{FromFile(file).name}', this one has"):
            start(ALONE, replace(kept, **change))


def test_tokens_of_a_file_are_those_of_the_text(file: Path, tmp_path: Path) -> None:
    """train_tokenizer.py writes them once; --tokenizer is then of the prompt and of the written text."""
    data, out, tokens = (tmp_path / name for name in ("text", "new.json", "text.npy"))
    data.write_bytes(load_text().train.tobytes()[:30_000])
    options_given = ["--data", data, "--vocabulary", 300, "--out", out, "--tokens", tokens]
    said = run("train_tokenizer.py", *options_given)
    assert said.startswith(f"{out}: 300 tokens, ")
    text = encode(load_text(data), FromFile(out), Group.alone())
    numbers = np.load(tokens)
    assert numbers.dtype == np.uint16
    assert numbers.tolist() == [*text.train, *text.validation]
    ran = go(ALONE, run_options(out, data=tokens, steps=1))
    assert ran.texts[1].startswith("déf ")


def run(script: str, *given: object) -> str:
    """Run a script of the example; return its output."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(python()), str(EXAMPLE / script), *map(str, given)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def test_the_example_trains(file: Path) -> None:
    small = [
        "--model",
        "gpt2-tiny",
        "--steps",
        2,
        "--batch",
        8,
        "--sequence",
        16,
        "--evaluation",
        2,
        "--generate",
        4,
    ]
    shape = ["--config", EXAMPLE / "gpt2-10m.toml", "--tokenizer", file, "--nproc", 4, "--dropout", 0.2]
    said = run("train_gpt2.py", *shape, *small, "--peak-tflops", 1)
    assert "on pp 2 x dp 2 (gloo, cpu)" in said
    assert "bytes each; unigram entropy" in said
    assert "validation loss" in said
    assert "nats per byte" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(tokenizer=Path("none.json")), "cannot read the tokenizer none.json: No such file or directory"),
        (dict(tokenizer=Path("/dev/zero")), "cannot read the tokenizer /dev/zero: Not a regular file"),
        (dict(tokenizer=Path(__file__)), "training.py is not a tokenizer.json of Hugging Face's tokenizers"),
        (dict(prompt=""), r"--prompt '' is taken as tokens of .*tokenizer.json; --generate needs at least one"),
        (dict(init="small"), "has 509 tokens, the model of --init .* a vocabulary of 256; give the tokenizer of"),
        (dict(tokenizer=None, model="nano-gpt2", export="taken"), "there is a tokenizer.json, but this model reads"),
        (dict(tokenizer=None, model="nano-gpt2", prompt=""), "--prompt '' is taken as bytes; --generate needs"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_line(file: Path, tmp_path: Path, given: dict[str, Any], message: str) -> None:
    if "init" in given:
        export(start(ALONE, options(model="nano-gpt2")).hybrid, tmp_path)
        given = given | {"init": tmp_path}
    if "export" in given:
        (tmp_path / "tokenizer.json").touch()
        given = given | {"export": tmp_path}
    with pytest.raises(UsageError, match=message) as error:
        start(ALONE, run_options(file, **given))
    assert "\n" not in str(error.value)
