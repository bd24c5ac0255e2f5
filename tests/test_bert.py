"""BERT: equal to one device on every mesh, masks by sample, resumed anywhere, transformers' files, bad input."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from beside_one_device import here
from safetensors.torch import load_file, save_file
from small_models import SHAPES, ours, tokens
from test_huggingface import load, theirs
from training_runs import ALONE, Ran, go

from common.comm import Group
from common.data.text import PADDING
from common.data.tokenizer import train as train_tokenizer
from common.errors import UsageError
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import OPTIMIZERS, Followed, compare, unequal_replicas, watch, worst_of_world
from common.lesson.job import one_device
from common.lesson.training import make_model
from common.models.configs import CONFIGS, bert
from common.models.huggingface import read_huggingface, write_huggingface
from common.models.transformer import Transformer, cross_entropy_sum

import hybrid_model
from hybrid_masked import Masked, MaskedOptions, hide
from hybrid_options import TrainOptions, parse
from hybrid_pretraining import Pretraining, validation_scores
from hybrid_trainer import start
from hybrid_training import alone, make_job, train
from tp_megatron import Region, tensor_parallel

# sizes that divide by next to nothing
CONFIGS["odd-bert"] = replace(bert(layers=3, width=24, heads=6, sequence=48), mlp_width=35)
CONFIGS["odd-bert-dropped"] = replace(CONFIGS["odd-bert"], dropout=0.2)
CONFIGS["nano-bert"] = bert(layers=2, width=16, heads=2, sequence=16)
BYTES = 256  # the mask token among bytes


def options(**given: Any) -> MaskedOptions:
    short = dict(
        model="odd-bert", batch=9, sequence=48, steps=2, dtype="float64", evaluation=5, peak_tflops=1.0
    )
    return MaskedOptions(**(short | {"evaluate_every": 0, "log_every": 100, "clip": 0.0} | given))


MESHES: dict[int, list[dict[str, Any]]] = {
    2: [
        dict(pp=2),
        dict(dp=2),
        dict(dp=2, zero=3),
        dict(tp=2),
        dict(tp=2, sequence_parallel=True, sequence=47, model="odd-bert-dropped"),
        dict(sp=2, attention="ring"),
        dict(sp=2, attention="zigzag", checkpointing=True),
        dict(sp=2, attention="ulysses"),
    ],
    4: [
        dict(pp=2, tp=2, sequence_parallel=True, sequence=31, schedule="zb-h1", clip=0.3),
        dict(dp=2, sp=2, attention="ring", zero=1, clip=0.3),
        dict(dp=2, tp=2, zero=2, model="odd-bert-dropped"),
        dict(sp=2, tp=2, attention="allgather", sequence_parallel=True, zero=3),
    ],
    8: [dict(pp=2, dp=2, tp=2, zero=1, schedule="gpipe")],
}


def reference(o: MaskedOptions, optimizer: str) -> Followed:
    """Train the plain model on one device."""
    job = alone(here(), o, make_model(o, torch.device("cpu")), OPTIMIZERS[optimizer])
    job.make_batches = Masked
    return watch(one_device(job), job)


def on_mesh(
    rt: Runtime, cases: list[tuple[MaskedOptions, str, Followed]]
) -> list[tuple[dict[str, float], bool, list[str]]]:
    """Return, per case: the largest differences, True if the bytes agree, and the replicas that differ."""
    found = []
    for o, optimizer, expected in cases:
        mesh = o.mesh(rt)
        job = make_job(rt, o, mesh, OPTIMIZERS[optimizer], o.steps)
        job.make_batches = Masked
        followed = watch(job.count(train(job)), job, mesh)
        worst = worst_of_world(compare(expected, followed), mesh)
        assert job.owner
        apart = unequal_replicas(job.owner.named_parameters(), mesh)
        found.append(({kind: d.value for kind, d in worst.items()}, job.agree, apart))
        mesh.close()
    return found


@pytest.mark.parametrize("world", MESHES)
def test_equal_to_one_device(world: int) -> None:
    """Each mesh has both optimizers on two ranks, and on more ranks one in turn: gradients are compared with both."""
    turns = itertools.cycle(OPTIMIZERS)
    cases = [
        (options(**mesh), optimizer)
        for mesh in MESHES[world]
        for optimizer in (OPTIMIZERS if world == 2 else [next(turns)])
    ]
    keys = [(o.model, o.sequence, o.clip, optimizer) for o, optimizer in cases]
    alone = {key: reference(*case) for key, case in dict(zip(keys, cases, strict=True)).items()}
    given = [(*case, alone[key]) for key, case in zip(keys, cases, strict=True)]
    for rank in spawn(on_mesh, world, given):
        for (o, optimizer), (worst, agree, apart) in zip(cases, rank, strict=True):
            assert set(worst) >= {"loss", "gradients", "gradient norm", "weights"}
            assert max(worst.values()) <= 1e-12, (o, optimizer, worst)
            assert (agree, apart) == (True, []), (o, optimizer)


def forgets_the_head(model: Transformer, *rest: Any) -> Region:
    """Broken: each rank has a slice of the tokens, but the gradient of the head's dense layer is not summed over tp."""
    region = tensor_parallel(model, *rest)
    assert model.transform is not None
    del model.transform.weight.token_axes
    return region


def broken(rt: Runtime, o: MaskedOptions, expected: Followed) -> dict[str, float]:
    with patch.object(hybrid_model, "tensor_parallel", forgets_the_head):
        return on_mesh(rt, [(o, "sgd", expected)])[0][0]


def test_a_gradient_of_the_head_that_is_not_summed_is_caught() -> None:
    o = options(tp=2, sequence_parallel=True, steps=1)
    for worst in spawn(broken, 2, o, reference(o, "sgd")):
        assert worst["gradients"] > 1e-3


def test_the_masks_are_a_function_of_the_sample() -> None:
    """On every split of the batch, and of the ranks, the same tokens are hidden."""
    o = options(model="nano-bert", batch=7, sequence=16, micro_batches=2, seed=5)
    whole = Masked(o, Group.alone(), torch.device("cpu"))
    tokens_BS, targets_BS = whole.take(3, 0, 7)
    for ranks in (1, 2, 3):
        batches = [
            Masked(o, Group("dp", r, ranks, tuple(range(ranks))), torch.device("cpu")) for r in range(ranks)
        ]
        parts = [part for one in batches for part in one.parts(3)]
        assert torch.equal(torch.cat([tokens for tokens, _ in parts]), tokens_BS)
        assert torch.equal(torch.cat([targets for _, targets in parts]), targets_BS)
        mine = [one.mine(3) for one in batches]
        assert torch.equal(torch.cat([targets for _, targets, _ in mine]), targets_BS)
    others = [whole.take(4, 0, 7), Masked(replace(o, seed=6), whole.group, whole.device).take(3, 0, 7)]
    hidden = [targets != PADDING for targets in (targets_BS, *(targets for _, targets in others))]
    assert not any(torch.equal(hidden[0], other) for other in hidden[1:])
    assert not torch.equal(hidden[0][0], hidden[0][1])


@pytest.mark.parametrize(("mask", "vocabulary"), [(256, 257), (103, 200), (0, 3)])
def test_a_share_of_the_places_is_hidden_in_three_ways(mask: int, vocabulary: int) -> None:
    B, S = 600, 61
    generator = torch.Generator().manual_seed(0)
    before_BS = torch.randint(vocabulary - 1, (B, S), generator=generator)
    before_BS += before_BS >= mask
    tokens_BS, targets_BS = hide(before_BS, np.arange(B), 1, "masks", mask, vocabulary)
    chosen_BS = targets_BS != PADDING
    assert set(chosen_BS.sum(1).tolist()) == {9}  # 0.15 * 61 = 9.15
    assert torch.equal(targets_BS[chosen_BS], before_BS[chosen_BS])
    assert torch.equal(tokens_BS[~chosen_BS], before_BS[~chosen_BS])
    by_place = chosen_BS.double().mean(0)
    assert (by_place - 9 / S).abs().max() < 5 * (9 / S / B) ** 0.5, "some places are preferred"
    found, n = tokens_BS[chosen_BS], B * 9
    masked, kept = found == mask, found == before_BS[chosen_BS]
    once_more = 0.1 / (vocabulary - 1)  # random tokens that are the one before
    for share, expected in ((masked, 0.8), (kept, 0.1 + once_more), (~masked & ~kept, 0.1 - once_more)):
        assert abs(share.double().mean() - expected) < 5 * (expected / n) ** 0.5
    drawn = torch.bincount(found[~masked & ~kept], minlength=vocabulary)
    assert drawn[mask] == 0
    assert (drawn > 0).sum() > 0.8 * (vocabulary - 1), "some tokens are never drawn"
    one = torch.zeros(1, 1, dtype=torch.long)
    assert (hide(one, np.arange(1), 1, "masks", 2, 3)[1] == 0).all(), "a sample has no target"


def write(model: Transformer, folder: Path) -> None:
    write_huggingface(model.config, dict(model.named_parameters()), folder)


def by_hand(o: MaskedOptions, model: Transformer) -> tuple[float, float]:
    """Return loss and accuracy of the model over the validation samples, one after the other."""
    text = Masked(o, Group.alone(), ALONE.device).text.validation
    held, sums = (len(text) - 1) // o.sequence, torch.zeros(3, dtype=torch.float64)
    for i in range(o.evaluation):
        at = i * held // o.evaluation * o.sequence
        sample_1S = torch.from_numpy(text[at : at + o.sequence].astype(np.int64))[None]
        hidden = hide(sample_1S, np.array([i]), o.seed, "masks of validation", BYTES, BYTES + 1)
        logits_1SV, targets_1S = model(hidden[0]).detach(), hidden[1]
        total, count = cross_entropy_sum(logits_1SV, targets_1S)
        sums += torch.stack([total, (logits_1SV.argmax(-1) == targets_1S).sum(), count])
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def scores(rt: Runtime, cases: list[MaskedOptions]) -> list[tuple[float, float]]:
    """Return the validation loss and the masked accuracy of each case, and once more those of the first."""
    trainers = [start(rt, o, Pretraining) for o in cases]
    return [validation_scores(t.hybrid, t.batches) for t in [*trainers, trainers[0]]]  # type: ignore[arg-type]


def test_evaluation_is_the_same_on_every_mesh_and_every_time(tmp_path: Path) -> None:
    model = ours(CONFIGS["nano-bert"])
    with torch.no_grad():
        assert model.unembed.bias is not None
        model.unembed.bias[[32, 101]] += 3  # the model often says a blank or an e, which the text has
    write(model, tmp_path)
    # 9 samples in batches of 8: the last has one, and fills the others' places
    o = options(init=tmp_path, batch=8, evaluation=9, sequence=16)
    meshes: list[dict[str, Any]] = [
        dict(dp=2, tp=2, zero=3),
        dict(pp=2, sp=2, attention="ulysses"),
        dict(sp=2, tp=2, sequence_parallel=True, attention="ring"),
    ]
    loss, accuracy = by_hand(o, model)
    assert 0 < accuracy < 1
    assert scores(ALONE, [o])[0] == pytest.approx((loss, accuracy), rel=1e-12)
    for rank in spawn(scores, 4, [replace(o, **mesh) for mesh in meshes]):
        for found in rank:
            assert found == pytest.approx((loss, accuracy), rel=1e-12)


def runs(rt: Runtime, *given: tuple[MaskedOptions, int]) -> list[Ran]:
    """Run training several times, each stopped after a given step."""
    return [go(rt, o, stop_after, kind=Pretraining) for o, stop_after in given]


def test_resumed_on_other_meshes_it_is_the_same_run(tmp_path: Path) -> None:
    o = options(
        model="nano-bert", batch=6, sequence=16, steps=5, evaluate_every=1, learning_rate=1e-2, warm_up=2, clip=0.5,
        checkpoints=tmp_path / "runs",
    )  # fmt: skip
    alone = go(ALONE, replace(o, checkpoints=None), kind=Pretraining)
    first = replace(o, dp=2, tp=2, zero=1, sequence_parallel=True)
    second = replace(o, pp=2, dp=1, sp=2, attention="ring", asynchronous=True)
    ranks = spawn(runs, 4, (first, 2), (second, 0))
    for rank in ranks:
        assert [list(ran.losses) for ran in rank] == [[1, 2, 3], [4, 5]]
        assert all(ran.finished for ran in rank)
    for kind in ("losses", "validation"):
        found = {step: value for ran in ranks[0] for step, value in getattr(ran, kind).items()}
        assert found == pytest.approx(getattr(alone, kind), rel=1e-10)
    for name, x in alone.weights.items():
        torch.testing.assert_close(ranks[0][-1].weights[name], x, rtol=1e-10, atol=1e-10)
    with pytest.raises(UsageError, match="is of a run with mask_token 256, this one has 255"):
        start(ALONE, replace(o, mask_token=255), Pretraining)


def test_token_types_are_those_of_transformers() -> None:
    model = ours(SHAPES["bert"])
    hf, tokens_BS = theirs(model.config), tokens(model.config)
    load(hf, model)
    types_BS = torch.randint(3, tokens_BS.shape, generator=torch.Generator().manual_seed(8))
    logits_BSV = model(tokens_BS, types_BS=types_BS)
    expected = hf(tokens_BS, token_type_ids=types_BS).logits
    torch.testing.assert_close(logits_BSV, expected, rtol=0, atol=1e-10)
    assert (logits_BSV - model(tokens_BS)).abs().max() > 1e-3
    with pytest.raises(UsageError, match="token types are given to a model that has none"):
        ours(SHAPES["gpt2"])(tokens_BS, types_BS=types_BS)


def test_reads_published_files(tmp_path: Path) -> None:
    """They have LayerNorm's old names, parts that predict no masked token, and copies of the tied weights."""
    model = ours(SHAPES["bert"])
    write(model, tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    file = tmp_path / "model.safetensors"
    weights = {
        re.sub(r"LayerNorm\.\w+$", lambda end: old[end[0]], name): x for name, x in load_file(file).items()
    }
    others = ["bert.pooler.dense.weight", "bert.pooler.dense.bias", "cls.seq_relationship.bias"]
    others += [
        "bert.embeddings.position_ids",
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    ]
    save_file(weights | {name: torch.zeros(2) for name in others}, file)
    again = read_huggingface(tmp_path, torch.float64)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="relu"), "hidden_act is 'relu'; only 'gelu' can be read"),
        (dict(position_embedding_type="relative_key"), "position_embedding_type is 'relative_key'"),
        (dict(is_decoder=True), "is_decoder is True"),
        (dict(add_cross_attention=True), "add_cross_attention is True"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings is False"),
        (dict(intermediate_size=34), r"shape \[35, 24\], config.json asks for \[34, 24\]"),
        (dict(type_vocab_size=None), "does not say type_vocab_size"),
        (dict(type_vocab_size=0), "type_vocab_size cannot be 0"),
    ],
)
def test_features_that_it_lacks_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(Transformer(SHAPES["bert"]), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UsageError, match=message) as error:
        read_huggingface(tmp_path)
    assert "\n" not in str(error.value)


def test_a_model_that_transformers_lacks_is_not_written(tmp_path: Path) -> None:
    for changes in (dict(token_types=0), dict(tied=False), dict(gelu="tanh"), dict(masked_head=False)):
        with pytest.raises(UsageError, match="only GPT-2, LLaMA, Mixtral and BERT have a layout"):
            write(Transformer(replace(SHAPES["bert"], **changes)), tmp_path)


def test_a_run_exports_what_transformers_reads(tmp_path: Path) -> None:
    o = options(model="nano-bert", batch=6, sequence=16, steps=1, export=tmp_path, checkpoints=None)
    trained = go(ALONE, o, kind=Pretraining).weights
    again = start(ALONE, replace(o, model="bert-tiny", init=tmp_path), Pretraining)
    assert all(torch.equal(p, trained[name]) for name, p in again.hybrid.named_parameters())
    hf = type(theirs(o.model_config())).from_pretrained(tmp_path, dtype=torch.float64)
    tokens_BS = tokens(o.model_config())[:, :16]
    logits_BSV = read_huggingface(tmp_path, torch.float64)(tokens_BS)
    torch.testing.assert_close(hf(tokens_BS).logits, logits_BSV, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            dict(model="gpt2-tiny"),
            "gpt2-tiny does not see later tokens, .*; give bert-small, or train it with",
        ),
        (dict(mask_token=257), "--mask-token 257: the model has tokens 0 to 256; give one of them"),
        (dict(mask_token=32), "holds the token 32, which is to hide others; give another --mask-token"),
        (dict(sequence=49), "49 tokens is too long for a model with 48 learned positions"),
        (dict(batch=1), "too few for 2 micro-batches; give --batch 2"),
    ],
)
def test_bad_input_is_refused_before_anyone_waits(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        start(ALONE, options(**given), Pretraining)
    assert "\n" not in str(error.value)


def test_next_tokens_need_a_causal_model() -> None:
    with pytest.raises(
        UsageError, match=r"bert-tiny sees later tokens, .* bert_pretraining/pretrain_bert.py"
    ):
        start(ALONE, TrainOptions(model="bert-tiny", sequence=16))
    for option in ("--generate=3", "--prompt=a", "--temperature=1"):
        with pytest.raises(UsageError, match=r"(?i)unrecognized"):
            parse(MaskedOptions, args=[option])


def test_the_mask_token_is_that_of_the_tokenizer_or_one_more(tmp_path: Path) -> None:
    text = b"def f(x):\n    return x + 1\n" * 40
    plain = train_tokenizer(text, 270)
    named = plain.replace('"<|endoftext|>"', '"[MASK]"')
    for name, content, mask, vocabulary in (("a", plain, 270, 271), ("b", named, 0, 270)):
        file = tmp_path / f"{name}.json"
        file.write_text(content)
        o = options(model="nano-bert", tokenizer=file)
        assert (o.mask, o.model_config().vocabulary) == (mask, vocabulary)
        assert replace(o, mask_token=7).mask == 7
    assert options(model="bert-base").mask == 30521
