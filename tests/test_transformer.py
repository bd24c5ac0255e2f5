"""The Transformer equals transformers' GPT-2 and LLaMA: logits, loss, every gradient, and the files of both."""

import dataclasses
import json
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from common import random
from common.models.configs import CONFIGS, TransformerConfig, config, gpt2, llama
from common.models.huggingface import read_huggingface, to_huggingface, write_huggingface
from common.models.mlp import MLP, sizes
from common.models.transformer import Transformer, cross_entropy_sum, initialise
from common.runtime import UsageError

SHAPES = {
    "gpt2": gpt2(layers=3, width=24, heads=3, sequence=19, vocabulary=37),
    "gpt2-untied": dataclasses.replace(
        gpt2(layers=2, width=20, heads=2, sequence=13, vocabulary=11), tied=False, mlp_width=33
    ),
    "llama": llama(layers=3, width=24, heads=6, kv_heads=2, mlp_width=35, sequence=32, vocabulary=37),
    "llama-one-kv": llama(layers=2, width=18, heads=3, kv_heads=1, mlp_width=29, sequence=32, vocabulary=23),
    "llama-tied": dataclasses.replace(
        llama(layers=2, width=16, heads=2, kv_heads=2, mlp_width=21, sequence=32, vocabulary=23),
        tied=True,
        rotary_base=500.0,
    ),
}


@pytest.fixture
def in_double(monkeypatch):
    """transformers computes LLaMA's norms, angles and softmax, and any loss, in float32: here in float64."""

    class Torch:
        float = float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(modeling_llama, "torch", Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def theirs(c: TransformerConfig):
    if c.positions == "learned":
        shape = GPT2Config(
            vocab_size=c.vocabulary, n_positions=c.sequence, n_embd=c.width, n_layer=c.layers, n_head=c.heads,
            n_inner=c.mlp_width, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            tie_word_embeddings=c.tied, attn_implementation="eager",
        )  # fmt: skip
        return GPT2LMHeadModel(shape).double()
    shape = LlamaConfig(
        vocab_size=c.vocabulary, hidden_size=c.width, intermediate_size=c.mlp_width, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, max_position_embeddings=c.sequence,
        rms_norm_eps=c.epsilon, rope_parameters={"rope_type": "default", "rope_theta": c.rotary_base},
        tie_word_embeddings=c.tied, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(shape).double()


def ours(c: TransformerConfig) -> Transformer:
    """Every weight random, so that none can hide by being 0 or 1."""
    model = Transformer(c, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.data += 0.2 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
    return model


def tokens(c: TransformerConfig, batch: int = 3) -> torch.Tensor:
    length = min(c.sequence, 17)
    return torch.randint(c.vocabulary, (batch, length), generator=torch.Generator().manual_seed(6))


def load(hf, model: Transformer) -> None:
    weights = to_huggingface(model.config, dict(model.named_parameters()))
    if model.config.tied:
        weights["lm_head.weight"] = model.embed_tokens.weight
    hf.load_state_dict(weights)  # strict: every name of theirs, and no other


@pytest.mark.parametrize("name", SHAPES)
def test_equals_transformers(name, in_double):
    model = ours(SHAPES[name])
    hf = theirs(model.config)
    load(hf, model)
    tokens_BS = tokens(model.config)
    labels_BS = tokens_BS.masked_fill(
        torch.rand(tokens_BS.shape, generator=torch.Generator().manual_seed(7)) < 0.2, -100
    )
    expected = hf(input_ids=tokens_BS, labels=labels_BS)
    logits_BSV = model(tokens_BS)
    total, count = cross_entropy_sum(logits_BSV[:, :-1], labels_BS[:, 1:])
    loss = total / count
    torch.testing.assert_close(logits_BSV, expected.logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-10)
    loss.backward()
    expected.loss.backward()
    gradients = to_huggingface(model.config, {name: p.grad for name, p in model.named_parameters()})
    wanted = {name: p.grad for name, p in hf.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert gradient.abs().max() > 1e-6, f"{key} is not tested by this batch"
        torch.testing.assert_close(
            gradients[key], gradient, rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("name", SHAPES)
def test_reads_what_transformers_saves(name, in_double, tmp_path):
    hf = theirs(SHAPES[name])
    hf.save_pretrained(tmp_path)
    model = read_huggingface(tmp_path, torch.float64)
    assert model.config == SHAPES[name]
    tokens_BS = tokens(model.config)
    torch.testing.assert_close(model(tokens_BS), hf(tokens_BS).logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_reads_what_we_write(name, in_double, tmp_path):
    model = ours(SHAPES[name])
    write_huggingface(model, tmp_path / "new" / "folder")
    kind = GPT2LMHeadModel if name.startswith("gpt2") else LlamaForCausalLM
    hf, report = kind.from_pretrained(
        tmp_path / "new" / "folder",
        dtype=torch.float64,
        output_loading_info=True,
        attn_implementation="eager",
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens_BS = tokens(model.config)
    torch.testing.assert_close(hf(tokens_BS).logits, model(tokens_BS), rtol=0, atol=1e-10)
    again = read_huggingface(tmp_path / "new" / "folder", torch.float64)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_reads_files_in_parts_and_without_the_head(in_double, tmp_path):
    hf = theirs(SHAPES["llama"])
    hf.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    model = read_huggingface(tmp_path / "parts", torch.float64)
    torch.testing.assert_close(
        model(tokens(model.config)), hf(tokens(model.config)).logits, rtol=0, atol=1e-10
    )
    newer = ours(SHAPES["llama"])
    write_huggingface(newer, tmp_path / "parts")  # beside the old parts: the whole file counts
    assert torch.equal(read_huggingface(tmp_path / "parts", torch.float64).norm.weight, newer.norm.weight)
    hf = theirs(SHAPES["gpt2"])
    hf.transformer.save_pretrained(tmp_path / "bare")  # GPT2Model, as in the file published as "gpt2"
    model = read_huggingface(tmp_path / "bare", torch.float64)
    torch.testing.assert_close(
        model(tokens(model.config)), hf(tokens(model.config)).logits, rtol=0, atol=1e-10
    )


def damage_missing(folder):
    (folder / "model.safetensors").unlink()


def damage_truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_empty(folder):
    (folder / "model.safetensors").write_bytes(b"")


def damage_config(**changes):
    def damage(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return damage


def damage_json(folder):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "cannot read .*model.safetensors"),
        (damage_truncated, "cannot read .*model.safetensors"),
        (damage_empty, "cannot read .*model.safetensors"),
        (damage_json, "cannot read .*config.json"),
        (damage_config(model_type="t5"), "model_type 't5' is unknown; gpt2 and llama"),
        (damage_config(hidden_act="relu"), "hidden_act is 'relu'; only 'silu'"),
        (damage_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1.0}), "rope_type is 'yarn'"),
        (damage_config(hidden_size=None), "does not say hidden_size"),
        (damage_config(head_dim=5), "head_dim is 5; only 4"),
        (damage_config(intermediate_size=36), r"shape \[35, 24\], config.json asks for \[36, 24\]"),
        (damage_config(num_hidden_layers=2), "no place for: model.layers.2"),
        (damage_config(num_hidden_layers=4), "has no weight model.layers.3"),
    ],
)
def test_bad_files_get_one_line(damage, message, tmp_path):
    write_huggingface(Transformer(SHAPES["llama"]), tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        read_huggingface(tmp_path)
    assert "\n" not in str(error.value)


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write_huggingface(Transformer(SHAPES["gpt2"]), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / ".partial").mkdir()  # in the way, as a full disk would be
    with pytest.raises(UsageError, match="cannot write the model"):
        write_huggingface(Transformer(SHAPES["llama"]), tmp_path)
    (tmp_path / ".partial").rmdir()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(UsageError, match="only GPT-2 and LLaMA"):
        write_huggingface(Transformer(dataclasses.replace(SHAPES["gpt2"], bias=False)), tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_part_is_initialised_as_in_the_whole(name):
    c = SHAPES[name]
    whole = Transformer(c, seed=3)
    with torch.device("meta"):
        skeleton = Transformer(c)
    assert all(p.is_meta for p in skeleton.parameters())
    layer = skeleton.layers[1].to_empty(device="cpu")
    initialise(layer, c, seed=3, prefix="layers.1.")
    assert all(
        torch.equal(p, q) for p, q in zip(layer.parameters(), whole.layers[1].parameters(), strict=True)
    )
    assert not torch.equal(whole.layers[0].mlp.up_proj.weight, whole.layers[1].mlp.up_proj.weight)
    assert not torch.equal(whole.embed_tokens.weight, Transformer(c, seed=4).embed_tokens.weight)
    values = random.normal(3, random.stream_of("embed_tokens.weight"), range(5, 50))  # a slice alone
    assert torch.equal(whole.embed_tokens.weight.flatten()[5:50], torch.from_numpy(0.02 * values).float())


def test_initial_values_start_near_the_uniform_loss():
    c = config("gpt2-tiny")
    model = Transformer(c)
    tokens_BS = torch.randint(256, (4, 64), generator=torch.Generator().manual_seed(0))
    total, count = cross_entropy_sum(model(tokens_BS), tokens_BS.roll(-1, 1))
    assert abs(total.item() / count.item() - math.log(256)) < 0.05
    state = torch.get_rng_state()
    Transformer(c)
    assert torch.equal(state, torch.get_rng_state()), "the model drew from torch's own generator"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_and_causality(name):
    c = SHAPES[name]
    model, tokens_BS = ours(c), tokens(SHAPES[name])
    S = tokens_BS.shape[1]
    whole = model(tokens_BS)
    torch.testing.assert_close(model(tokens_BS, torch.arange(S).expand(3, S)), whole, rtol=0, atol=1e-12)
    assert (model(tokens_BS, torch.arange(S).flip(0)) - whole).abs().max() > 1e-3
    changed = tokens_BS.clone()
    changed[:, 9] = (changed[:, 9] + 1) % c.vocabulary
    difference = (model(changed) - whole).abs().amax((0, 2))
    assert difference[:9].max() == 0
    assert difference[9:].min() > 0
    if name == "gpt2":
        both_ways = Transformer(dataclasses.replace(c, causal=False), dtype=torch.float64)
        assert (both_ways(changed) - both_ways(tokens_BS))[:, :9].abs().max() > 0
        with pytest.raises(UsageError, match="20 tokens is too long for a model with 19"):
            model(torch.zeros(1, 20, dtype=torch.long))


def test_counts_and_flops():
    counts = {}
    for name in CONFIGS:
        with torch.device("meta"):
            counts[name] = Transformer(config(name)).parameter_count()
    assert counts["gpt2"] == 124_439_808  # as published
    assert counts["llama2-7b"] == 6_738_415_616  # as published
    assert 9e6 < counts["gpt2-10m"] < 11e6


@pytest.mark.parametrize("name", ["gpt2", "llama-tied"])
def test_flops_are_those_that_torch_counts(name):
    def attend(q_BHSK, k_BHSK, v_BHSK, causal):  # as matrix products, which the counter sees
        return (q_BHSK @ k_BHSK.mT).softmax(-1) @ v_BHSK

    model = Transformer(SHAPES[name])
    for layer in model.layers:
        layer.attention.attend = attend
    tokens_BS = tokens(model.config)
    with FlopCounterMode(display=False) as counter:
        cross_entropy_sum(model(tokens_BS), tokens_BS)[0].backward()
    assert counter.get_total_flops() == model.flops_per_token(tokens_BS.shape[1]) * tokens_BS.numel()


def test_the_loss_is_a_sum_in_float32_at_least():
    logits_BSV = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(1))
    targets_BS = torch.tensor([[1, 2, -100, 3, 4], [0, -100, -100, 6, 5]])
    total, count = cross_entropy_sum(logits_BSV, targets_BS)
    assert count == 7
    parts = [cross_entropy_sum(logits_BSV[i : i + 1], targets_BS[i : i + 1]) for i in range(2)]
    torch.testing.assert_close(sum(p for p, _ in parts), total)
    assert not torch.isclose(sum(p / n for p, n in parts) / 2, total / count, atol=1e-4)  # a mean of means
    assert cross_entropy_sum(logits_BSV.bfloat16(), targets_BS)[0].dtype == torch.float32
    assert cross_entropy_sum(logits_BSV[:1], torch.full((1, 5), -100))[0] == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: config("gpt5"), "model 'gpt5' is unknown; choose one of gpt2-tiny"),
        (lambda: gpt2(1, 20, 3, 8), "width 20 does not divide into 3 heads; 18 or 21 would"),
        (lambda: llama(1, 24, 6, 4, 8, 8), "6 heads cannot share 4 key-value heads; 1, 2, 3, 6 would do"),
        (lambda: llama(1, 9, 3, 3, 8, 8), "rotary positions need an even width per head, not 3"),
        (lambda: gpt2(0, 20, 4, 8), "layers of at least 1, not 0"),
        (lambda: MLP([8]), r"two or more sizes, all at least 1; given \[8\]"),
    ],
)
def test_bad_shapes_get_one_line(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_mlp_equals_its_definition():
    """The initial weights, the layers and the gradient, in numpy's plainest form."""
    assert sizes(context=2, hidden=5, layers=3) == [16, 5, 5, 256]
    model = MLP([16, 5, 3], seed=9, dtype=torch.float64)
    assert [name for name, _ in model.named_parameters()] == [
        f"layers.{i}.{k}" for i in (0, 1) for k in ("weight", "bias")
    ]
    w, b = model.layers[1].weight, model.layers[1].bias
    assert w[2, 4].item() == (2 * random.uniform(9, 2, 2 * 5 + 4)[0] - 1) * math.sqrt(3 / 5)
    assert b[1].item() == (2 * random.uniform(9, 3, 1)[0] - 1) / math.sqrt(5)
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z = x @ model.layers[0].weight.T + model.layers[0].bias
    gelu = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    torch.testing.assert_close(model(x), gelu @ w.T + b, rtol=0, atol=1e-13)
    assert model.flops_per_sample() == 4 * 16 * 5 + 6 * 5 * 3
