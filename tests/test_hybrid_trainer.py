"""Training on any mesh: the same losses, evaluation and text; resumed anywhere; to and from Hugging Face."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import sys
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from small_models import tokens
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_huggingface import in_double, theirs  # noqa: F401
from training_runs import ALONE, Ran, go, options

from common.comm.ledger import Ledger
from common.data.text import load_text
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson import runner as lesson
from common.lesson.runner import write_records
from common.models.configs import CONFIGS
from common.models.huggingface import read_huggingface
from common.models.transformer import Transformer

import hybrid_5d
import hybrid_explain
import hybrid_log
from dp_memory import held
from hybrid_bytes import StepBytes
from hybrid_data import Shuffled, load_tokens, unigram_entropy
from hybrid_evaluate import choose, generate, validation_loss
from hybrid_export import export, weights_on_rank_0
from hybrid_layout import HybridOptions
from hybrid_log import Log, draw
from hybrid_metrics import Meter
from hybrid_optimizer import decays, learning_rate
from hybrid_options import TrainOptions, parse
from hybrid_signals import Signals
from hybrid_trainer import Trainer, make, start


def runs(rt: Runtime, *given: tuple[TrainOptions, int]) -> list[Ran]:
    """Run training several times, each stopped after a given step."""
    return [go(rt, o, stop_after) for o, stop_after in given]


def by_hand(o: TrainOptions) -> dict[str, torch.Tensor]:
    """Train without the trainer's parts: schedule, clipping, AdamW, decay by hand; return the weights."""
    model, held = Transformer(o.model_config(), o.seed, torch.float64), Shuffled(o, ALONE.world, ALONE.device)
    mean = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    square = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for t in range(o.steps):
        tokens_BS, targets_BS = held.take(t, 0, o.batch)
        logits_BSV = model(tokens_BS)
        loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        up, along = (t + 1) / o.warm_up, (t - o.warm_up) / (o.steps - 1 - o.warm_up)
        rate = o.learning_rate * (up if t < o.warm_up else 0.55 + 0.45 * math.cos(math.pi * along))
        with torch.no_grad():
            for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
                g = g * min(1.0, o.clip / (norm + 1e-6))
                mean[name] = 0.9 * mean[name] + 0.1 * g
                square[name] = 0.95 * square[name] + 0.05 * g.square()
                p *= 1 - rate * (0.0 if "norm" in name or name.endswith("bias") else o.weight_decay)
                step = mean[name] / (1 - 0.9 ** (t + 1))
                p -= rate * step / ((square[name] / (1 - 0.95 ** (t + 1))).sqrt() + 1e-5)
    return dict(model.named_parameters())


def test_it_trains_as_the_equations_say() -> None:
    o = options(model="nano-gpt2", clip=0.7, weight_decay=0.3)
    ran, expected = go(ALONE, o), by_hand(o)
    for name, x in ran.weights.items():
        torch.testing.assert_close(x, expected[name].detach(), rtol=1e-10, atol=1e-12)


def test_resumed_on_other_meshes_it_is_the_same_run(tmp_path: Path) -> None:
    o = options(
        model="nano-mixtral",
        evaluate_every=1,
        evaluation=3,
        generate=2,
        checkpoints=tmp_path / "runs",
        balance="bias",
        balance_rate=0.02,
        z_coefficient=0.01,
    )
    alone = go(ALONE, replace(o, checkpoints=None))
    first = replace(o, dp=2, tp=2, zero=1, sequence_parallel=True)
    second = replace(o, pp=2, dp=1, sp=2, asynchronous=True)
    third = replace(o, dp=2, ep=2, zero=2, micro_batches=1)
    ranks = spawn(runs, 4, (first, 2), (second, 4), (third, 0))
    for rank in ranks:
        assert [list(ran.losses) for ran in rank] == [
            [1, 2, 3],
            [4, 5],
            [6],
        ]  # the signal is seen in the next step
        assert all(ran.finished for ran in rank)
    assert [list(ran.validation) for ran in ranks[0]] == [
        [1, 2],
        [3, 4],
        [5, 6],
    ]  # told to stop: the next evaluates
    for kind in ("losses", "validation"):
        parts = [getattr(ran, kind) for ran in ranks[0]]
        found = {step: value for part in parts for step, value in part.items()}
        assert found == pytest.approx(getattr(alone, kind), rel=1e-10)
    assert {step: text for ran in ranks[0] for step, text in ran.texts.items()} == alone.texts
    for name, x in alone.weights.items():
        torch.testing.assert_close(ranks[0][-1].weights[name], x, rtol=1e-10, atol=1e-10)


MESHES: list[dict[str, Any]] = [
    dict(dp=2, ep=2, zero=3, schedule="1f1b"),
    dict(dp=1, pp=2, tp=2, schedule="zb-v"),
    dict(dp=1, pp=2, sp=2, schedule="interleaved", attention="ulysses"),
    dict(dp=1, sp=2, tp=2, sequence_parallel=True, attention="ring", checkpointing=True),
]


def looked_at(rt: Runtime, cases: list[TrainOptions]) -> list[tuple[float, list[list[int]]]]:
    """Return the validation loss of the initial weights, and the tokens that they generate."""
    found = []
    for o in cases:
        trainer = start(rt, o)
        loss = validation_loss(trainer.hybrid, trainer.batches)
        # longer than the window, so that it moves on
        texts = generate(trainer.hybrid, list(range(40, 55)), 2, o.sequence, 3, 7, 1.0, samples=2)
        found.append((loss, texts))
    return found


def test_evaluation_and_text_are_the_same_on_every_mesh() -> None:
    # 9 samples in batches of 8: the last has one, and fills the others' places
    o = options(model="nano-mixtral", batch=8, evaluation=9)
    ((loss, texts),) = looked_at(ALONE, [o])
    model, batches = (
        Transformer(CONFIGS[o.model], o.seed, torch.float64),
        Shuffled(o, ALONE.world, ALONE.device),
    )
    held = (len(batches.text.validation) - 1) // o.sequence
    samples = [batches.text.validation[i * held // 9 * o.sequence :][: o.sequence + 1] for i in range(9)]
    windows = torch.from_numpy(np.stack(samples).astype(np.int64))
    logits = model(windows[:, :-1]).flatten(0, 1)
    assert loss == pytest.approx(
        torch.nn.functional.cross_entropy(logits, windows[:, 1:].flatten()).item(), rel=1e-12
    )
    assert texts[0] != texts[1]
    for rank in spawn(looked_at, 4, [replace(o, **mesh) for mesh in MESHES]):
        for (their_loss, their_texts), mesh in zip(rank, MESHES, strict=True):
            assert their_loss == pytest.approx(loss, rel=1e-12), mesh
            assert their_texts == texts, mesh


def test_a_token_is_drawn_by_its_share() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.3]], dtype=torch.float64).log()
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = choose(logits.expand(1000, 3), uniform, 1.0)
    assert torch.bincount(drawn).tolist() == [500, 200, 300]
    assert choose(logits, uniform[-1:], 0.0).tolist() == [0]
    sharper = torch.bincount(choose(logits.expand(1000, 3), uniform, 0.5)).tolist()
    assert sharper == [round(1000 * p * p / 0.38) for p in (0.5, 0.2, 0.3)]


def there_and_back(rt: Runtime, folder: Path, names: list[str]) -> list[bool]:
    """Train and export on one mesh, start on another; return, per model, True if the weights are equal."""
    same = []
    for name in names:
        moe = {"dp": 1, "ep": 2} if CONFIGS[name].experts else {"dp": 2}
        trainer = start(rt, options(model=name, steps=1, tp=2, zero=1, **moe))
        trainer.run()
        export(trainer.hybrid, folder / name)
        trained = weights_on_rank_0(trainer.hybrid)
        again = start(rt, options(init=folder / name, dp=1, pp=2, tp=2))
        theirs = weights_on_rank_0(again.hybrid)
        same.append(
            all(torch.equal(x, theirs[key]) for key, x in trained.items()) and trained.keys() == theirs.keys()
        )
    return same


@pytest.mark.usefixtures("in_double")
def test_transformers_reads_what_a_mesh_exports(tmp_path: Path) -> None:
    names = ["nano-llama", "nano-gpt2", "nano-mixtral"]
    assert spawn(there_and_back, 4, tmp_path, names)[0] == [True] * 3
    for name in names:
        ours = read_huggingface(tmp_path / name, torch.float64)
        hf = type(theirs(ours.config)).from_pretrained(
            tmp_path / name,
            dtype=torch.float64,
            attn_implementation="eager",
            **({"experts_implementation": "eager"} if ours.config.experts else {}),
        )
        tokens_BS = tokens(ours.config)
        torch.testing.assert_close(hf(tokens_BS).logits, ours(tokens_BS), rtol=0, atol=1e-10)
        assert (
            ours.embed_tokens.weight - Transformer(ours.config, 0, torch.float64).embed_tokens.weight
        ).any()


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    o = TrainOptions(steps=101, warm_up=20, learning_rate=2.0, final=0.1)
    rates = [learning_rate(t, o) for t in range(101)]
    assert rates[:20] == pytest.approx([0.1 * (t + 1) for t in range(20)])
    assert rates[20] == 2.0
    assert rates[60] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2))
    assert rates[100] == pytest.approx(0.2)


def test_norms_and_biases_do_not_decay() -> None:
    names = [name for name, _ in Transformer(CONFIGS["gpt2-tiny"]).named_parameters()]
    free = {name.split(".", 2)[-1] for name in names if not decays(name)}
    assert "attention.q_proj.bias" in free
    assert "attention_norm.weight" in free
    assert not any(name.endswith("proj.weight") or "embed" in name for name in free)


def test_token_files_hold_what_was_written(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 200, 1000)
    np.save(tmp_path / "a.npy", numbers.astype(np.uint16))
    numbers.astype("<u4").tofile(tmp_path / "a.bin")
    for file, kind in (("a.npy", "bytes"), ("a.bin", "uint32")):
        text = load_tokens(tmp_path / file, kind)
        assert np.array_equal(text.train, numbers[:900])
        assert np.array_equal(text.validation, numbers[900:])
        batches = Shuffled(options(data=tmp_path / file, tokens=kind), ALONE.world, ALONE.device)
        ((tokens_BS, _), *_) = batches.parts(0)
        assert tokens_BS[0].tolist() in [numbers[i * 16 : i * 16 + 16].tolist() for i in range(60)]
    np.full(100, 256, "<u2").tofile(tmp_path / "large.bin")
    with pytest.raises(
        UsageError, match="tokens 0 to 256, but the model has a vocabulary of 256; is --tokens uint16"
    ):
        Shuffled(options(data=tmp_path / "large.bin", tokens="uint16"), ALONE.world, ALONE.device)
    np.full(11, 25, "<u2").tofile(tmp_path / "short.bin")
    with pytest.raises(
        UsageError, match="9 tokens to train on and 2 for validation, no sample of 16; --sequence 1 or"
    ):
        Shuffled(options(data=tmp_path / "short.bin", tokens="uint16"), ALONE.world, ALONE.device)
    np.full(9, 25, "<u2").tofile(tmp_path / "shorter.bin")
    with pytest.raises(
        UsageError, match="8 tokens to train on and 1 for validation, no sample of 16; give a longer"
    ):
        Shuffled(options(data=tmp_path / "shorter.bin", tokens="uint16"), ALONE.world, ALONE.device)
    assert unigram_entropy(load_tokens(tmp_path / "a.bin", "uint32")) <= math.log(200)
    assert unigram_entropy(load_text()) == pytest.approx(3.2, abs=0.3)


def test_the_command_line_goes_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\nlearning-rate = 0.5\ncheckpointing = true\nmodel = "gpt2-tiny"\nzero = 1\n')
    o = parse(TrainOptions, args=["--config", str(file), "--steps", "9", "--no-checkpointing"])
    assert (o.steps, o.learning_rate, o.checkpointing, o.model, o.zero) == (9, 0.5, False, "gpt2-tiny", 1)
    assert parse(TrainOptions, args=[f"--config={file}"]).steps == 7
    file.write_text("steps = 0\nexplain = true\n")
    o = parse(TrainOptions, args=["--config", str(file)])
    assert (o.steps, o.explain) == (0, True)
    file.write_text("steps = 0\n")
    parse(TrainOptions, args=["--config", str(file), "--explain"]).validate()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stepz = 3", "no option 'stepz'; did you mean steps?"),
        ('steps = "many"', "steps = 'many': .*invalid literal for int"),
        ("zero = 7", "zero = 7: invalid choice '7'"),
        ("steps = ", "is not TOML"),
        ("[mesh]\npp = 2", "no option 'mesh'"),
        pytest.param("a = " + 100000 * "[", "is not TOML", id="deep"),
        pytest.param("steps = " + 5000 * "1", "is not TOML: .*digits", id="long"),
    ],
)
def test_a_bad_file_gets_one_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(content)
    with pytest.raises(UsageError, match=message) as error:
        parse(TrainOptions, args=["--config", str(file)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--config", "/none.toml"], "cannot read --config /none.toml: No such file or directory"),
        (["--config", "/dev/zero"], "cannot read --config /dev/zero: Not a regular file"),
        (["--config", "/"], "cannot read --config /: Not a regular file"),
        (["--config"], "--config"),
        (["--config", "--steps", "3"], "--config"),
    ],
)
def test_a_config_that_is_no_file_gets_one_line(args: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        parse(TrainOptions, args=args)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(model="llama-1t"), "model 'llama-1t' is unknown"),
        (dict(batch=1), "too few for 2 micro-batches; give --batch 2"),
        (dict(sequence=10**6), "has no sample of 1000000|no sample of 1000000"),
        (dict(model="nano-gpt2", sequence=32), "32 tokens is too long for a model with 16"),
        (dict(dp=2), "needs 2 ranks, the world has 1"),
        (dict(init=Path("no-such-folder")), "cannot read no-such-folder"),
        (dict(data=Path("no-such-file")), "no such file"),
        (dict(data=Path("no-such-file"), tokens="uint16"), "cannot read --data"),
        (dict(plot=Path("a.png")), "--json"),
        (dict(tokens="uint16"), "give it as --data"),
        (dict(precision="bfloat16"), "bfloat16 leaves float64 as it is"),
        (dict(checkpoints=Path("/dev/null/a")), "--checkpoints /dev/null/a cannot be written: Not a directory"),
        (dict(export=Path(__file__)), "--export .* cannot be written: .*trainer.py is a file"),
        (
            dict(json=Path("/dev/null"), plot=Path("/dev/null/a.png")),
            "--plot .* cannot be written: /dev/null is a file",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anyone_waits(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        start(ALONE, options(**given))
    assert "\n" not in str(error.value)


def test_two_runs_of_one_mesh_are_two_curves(tmp_path: Path) -> None:
    for steps, loss in ((4, 1.0), (2, 9.0)):
        run = dict(kind="run", step=0, mesh="one rank", unigram_entropy=3.0)
        write_records(tmp_path / "log", [run, *(dict(kind="step", step=t, loss=loss) for t in range(steps))])
    with patch.object(hybrid_log, "run_curves") as curves:
        draw(tmp_path / "log", tmp_path / "picture.png")
    assert [list(curve.values()) for curve in curves.call_args.args[1].values()] == [4 * [1.0], 2 * [9.0]]


def test_any_text_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no text, such as this prompt's, are `?` on a terminal with a small character set."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="latin-1"))
    o = options(steps=1, evaluate_every=1, generate=4, prompt=b"\xff\xe9".decode(errors="surrogateescape"))
    ran = start(ALONE, o).run()
    sys.stdout.flush()
    assert ran
    assert b"| ??" in shown.getvalue()


def test_text_is_written_without_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    ran = start(ALONE, options(steps=2, evaluate_every=0, generate=4)).run()
    said = capsys.readouterr().out
    assert ran
    assert "validation" not in said
    assert "        | def " in said


def test_the_head_of_the_table_is_above_the_first_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run evaluates before its first step; the table's head is printed above that evaluation."""
    o = options(steps=2, evaluate_every=2, checkpoints=tmp_path)
    for steps in (2, 4):
        capsys.readouterr()
        assert start(ALONE, replace(o, steps=steps)).run()
    said = capsys.readouterr().out
    assert (
        0
        < said.index("tokens/s    MFU")
        < said.index("2  validation loss")
        < said.index("4  validation loss")
    )


def explained(rt: Runtime, o: TrainOptions, lesson_too: bool) -> str:
    """Return the output of --explain."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        make(rt, o)
        if lesson_too:
            assert hybrid_5d.main(rt, HybridOptions(model=o.model, ep=2, tp=2, steps=0, explain=True))
    return said.getvalue()


def test_explain_trains_nothing() -> None:
    o = options(model="nano-mixtral", dp=1, ep=2, tp=2, steps=0, explain=True)
    said, *others = spawn(explained, 4, o, True)
    assert others == ["", "", ""]
    assert said.count("if balanced") == 2
    for word in ("formula", "proved", "tokens/s"):
        assert word not in said
    with pytest.raises(UsageError, match="--steps 0: give at least 1"):
        start(ALONE, options(steps=0))
    with pytest.raises(UsageError, match="--steps 0: give at least 1"):
        hybrid_5d.main(ALONE, HybridOptions(steps=0))
    assert "formula" in explained(ALONE, options(dp=1, steps=0, explain=True), False)


def memory(rt: Runtime, *given: TrainOptions) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return bytes of weights, gradients and states: as predicted, and as held after a step."""
    found = []
    for o in given:
        trainer = start(rt, o)
        said = hybrid_explain.held(trainer.hybrid)
        assert trainer.run()
        ran = SimpleNamespace(model=trainer.hybrid.model, owner=trainer.hybrid, stepped=trainer.optimizer)
        found.append((said, held(ran)))
    return found


def test_explain_says_what_ranks_hold() -> None:
    """Predicted bytes match, except for padding of ZeRO's units and AdamW's step count per tensor."""
    meshes = [dict(pp=2, tp=2), dict(tp=2, dp=2, zero=1), dict(dp=4, zero=2), dict(dp=4, zero=3)]
    given = [options(steps=1, batch=8, **{"dp": 1, **mesh}) for mesh in meshes]
    for rank in spawn(memory, 4, *given):
        for (said, there), mesh in zip(rank, meshes, strict=True):
            assert all(0 <= b - a <= 300 for a, b in zip(said, there, strict=True)), (mesh, said, there)


def in_messages(rt: Runtime, o: TrainOptions) -> tuple[Any, Any, list[int]]:
    """Return a step's bytes by formula and as sent, and the expert calls on record after two steps."""
    trainer = start(rt, o)
    hybrid = trainer.hybrid
    formula = StepBytes(hybrid.model, hybrid.zero, hybrid.mesh, o, clip=4, balances=o.balances)
    with Log(rt, o, 0) as trainer.log, Signals() as trainer.signals:
        trainer.meter = Meter(rt, o)
        trainer.train()
        with Ledger() as ledger:
            trainer.train()
    sent: dict[str, Fraction] = defaultdict(Fraction)
    for row in ledger.rows:
        sent[row.axis] += row.bytes
    remembered = [len(exchange.rows_sent) for exchange in hybrid.exchanges]
    return formula.all(), {axis: of_axis for axis, of_axis in sent.items() if of_axis}, remembered


def test_bytes_of_a_step_are_what_explain_says() -> None:
    o = options(model="nano-mixtral", dp=1, ep=2, tp=2, balance="switch")
    for formula, sent, remembered in spawn(in_messages, 4, o):
        assert formula == sent
        assert remembered == 4 * [2]  # a layer each; two micro-batches of the last step


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    data, text = tmp_path / "a.txt", 100 * b"words of the same text "
    data.write_bytes(text)
    o = options(steps=2, checkpoints=tmp_path / "runs", data=data)
    go(ALONE, o)
    for other, message in (
        (dict(batch=8), "a run with batch 6, this one has 8"),
        (dict(seed=o.seed + 1), f"a run with seed {o.seed}"),
        (dict(model="nano-gpt2"), "is of another model"),
        (dict(resume="no"), "holds step-00000002; a run with --resume no"),
        (dict(steps=1), "is of step 2, beyond --steps 1; give at least 2, or another folder"),
    ):
        with pytest.raises(UsageError, match=message) as error:
            start(ALONE, replace(o, **other))
        assert "\n" not in str(error.value)
    data.write_bytes(text.replace(b"same", b"some"))
    with pytest.raises(
        UsageError, match=r"of a run with data_sha256 '.*so the order of the samples cannot go on"
    ):
        start(ALONE, o)
    data.write_bytes(text)
    assert start(ALONE, o).run()  # no step is left, which is no error


def crash_in_the_fifth(trainer: Trainer) -> None:
    """Raise an error in the fifth step, and request a trace in the first."""
    step = trainer.hybrid.step

    def crashing(*given: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
        if at[0] == 4:
            raise RuntimeError("in the fifth")
        if at[0] == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(*given, at=at)

    trainer.hybrid.step = crashing  # type: ignore[method-assign]


def test_numbers_go_to_files_tensorboard_traces_and_a_picture(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("json", "tensorboard", "trace", "plot.png", "checkpoints")}
    files["plot"] = files.pop("plot.png")
    o = options(**files, log_every=2, evaluate_every=3, checkpoint_every=4)
    with pytest.raises(RuntimeError, match="in the fifth"):  # a crash after the checkpoint of the fourth
        go(ALONE, o, change=crash_in_the_fifth)
    ran = go(ALONE, o)
    records = [json.loads(line) for line in files["json"].read_text().splitlines()]
    seen = [(r["kind"], r["step"]) for r in records]
    first = [("run", 0), ("step", 2), ("evaluation", 3), ("step", 4), ("checkpoint", 4)]
    assert seen == [*first, ("run", 4), ("step", 6), ("checkpoint", 6), ("evaluation", 6), ("end", 6)]
    assert list(ran.losses) == [5, 6]
    (last,) = (r for r in records if r["kind"] == "step" and r["step"] == 6)
    assert last["loss"] == ran.losses[6]
    model, seconds = Transformer(CONFIGS[o.model]), last["step_seconds"]
    assert last["tokens_per_second"] == pytest.approx(6 * 16 / seconds)
    assert last["mfu"] == pytest.approx(model.flops_per_token(16) * 6 * 16 / seconds / 1e12)
    assert sorted(path.name for path in files["trace"].iterdir()) == ["step-2", "step-3"]
    assert (files["trace"] / "step-2" / "trace.json").stat().st_size > 1000
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    shown = EventAccumulator(str(files["tensorboard"])).Reload()
    assert [(e.step, e.value) for e in shown.Scalars("loss")][-1] == (6, pytest.approx(ran.losses[6]))
    assert [e.step for e in shown.Scalars("validation_loss")] == [3, 6]


def not_of_one_mind(rt: Runtime) -> str:
    """Return the error if the hosts' configuration files differ."""
    with pytest.raises(UsageError) as error:
        lesson._checked(lambda rt, o: True, rt, options(learning_rate=0.1 * (1 + rt.rank)))
    return str(error.value)


def test_ranks_with_other_options_are_refused() -> None:
    expected = "--learning-rate is 0.1 on rank 0 and 0.2 on rank 1; give all ranks the same"
    assert spawn(not_of_one_mind, 2)[0] == expected
