"""The Transformer equals transformers' GPT-2, LLaMA, Mixtral and BERT: logits, loss, gradients, checkpoints."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import SHAPES, ours, tokens
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from common import random
from common.errors import UsageError
from common.models import known
from common.models.configs import TransformerConfig
from common.models.huggingface import read_huggingface, to_huggingface, write_huggingface
from common.models.transformer import Transformer, cross_entropy_sum


def write(model, folder):
    """Write the model in Hugging Face's layout."""
    write_huggingface(model.config, dict(model.named_parameters()), folder)


@pytest.fixture
def in_double(monkeypatch):
    """Let transformers compute LLaMA's norms, angles and softmax, and any loss, in float64, not float32."""

    class Torch:
        float = float32 = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(modeling_llama, "torch", Torch())
    monkeypatch.setattr(modeling_mixtral, "torch", Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def theirs(c: TransformerConfig):
    if c.post_norm:
        shape = BertConfig(
            vocab_size=c.vocabulary, hidden_size=c.width, num_hidden_layers=c.layers, num_attention_heads=c.heads,
            intermediate_size=c.mlp_width, max_position_embeddings=c.sequence, type_vocab_size=c.token_types,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=None, attn_implementation="eager",
        )  # fmt: skip
        return BertForMaskedLM(shape).double()
    if c.positions == "learned":
        shape = GPT2Config(
            vocab_size=c.vocabulary, n_positions=c.sequence, n_embd=c.width, n_layer=c.layers, n_head=c.heads,
            n_inner=c.mlp_width, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
            tie_word_embeddings=c.tied, attn_implementation="eager",
        )  # fmt: skip
        return GPT2LMHeadModel(shape).double()
    shape = dict(
        vocab_size=c.vocabulary, hidden_size=c.width, intermediate_size=c.mlp_width, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, max_position_embeddings=c.sequence,
        rms_norm_eps=c.epsilon, rope_parameters={"rope_type": "default", "rope_theta": c.rotary_base},
        tie_word_embeddings=c.tied, attn_implementation="eager",
    )  # fmt: skip
    if not c.experts:
        return LlamaForCausalLM(LlamaConfig(**shape)).double()
    shape |= dict(num_local_experts=c.experts, num_experts_per_tok=c.experts_per_token)
    return MixtralForCausalLM(MixtralConfig(**shape, experts_implementation="eager")).double()


def in_memory(c: TransformerConfig, tensors: dict) -> dict:
    """Convert Mixtral's file format (a matrix per expert) to its modules' (stacked, gates on top of ups)."""
    out = {name: x for name, x in tensors.items() if "block_sparse_moe" not in name}
    for layer in range(c.layers if c.experts else 0):
        file, module = (f"model.layers.{layer}.{name}" for name in ("block_sparse_moe", "mlp"))

        def every(w, file=file):
            return torch.stack([tensors[f"{file}.experts.{e}.{w}.weight"] for e in range(c.experts)])

        out[f"{module}.gate.weight"] = tensors[f"{file}.gate.weight"]
        out[f"{module}.experts.gate_up_proj"] = torch.cat([every("w1"), every("w3")], 1)
        out[f"{module}.experts.down_proj"] = every("w2")
    return out


def load(hf, model: Transformer) -> None:
    weights = in_memory(model.config, to_huggingface(model.config, dict(model.named_parameters())))
    if model.config.masked_head:
        weights["cls.predictions.decoder.weight"] = model.embed_tokens.weight
        weights["cls.predictions.decoder.bias"] = model.unembed.bias
    elif model.config.tied:
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
    predicted = (logits_BSV[:, :-1], labels_BS[:, 1:]) if model.config.causal else (logits_BSV, labels_BS)
    total, count = cross_entropy_sum(*predicted)
    loss = total / count
    torch.testing.assert_close(logits_BSV, expected.logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-10)
    loss.backward()
    expected.loss.backward()
    gradients = to_huggingface(model.config, {name: p.grad for name, p in model.named_parameters()})
    gradients = in_memory(model.config, gradients)
    wanted = {name: p.grad for name, p in hf.named_parameters()}
    assert gradients.keys() == wanted.keys()
    for key, gradient in wanted.items():
        no_effect = key.endswith("key.bias")  # adds the same number to all scores of a query
        assert no_effect or gradient.abs().max() > 1e-6, f"{key} is not tested by this batch"
        torch.testing.assert_close(
            gradients[key], gradient, rtol=0, atol=1e-10, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("family", known.SHAPES)
def test_the_known_numbers_are_those_of_transformers(family, in_double):
    c, text = known.SHAPES[family], known.text().train
    starts = [int(random.bits(0, 0, b)[0]) % (len(text) - known.SEQUENCE) for b in range(known.BATCH)]
    tokens_BS = torch.tensor([text[start : start + known.SEQUENCE + 1].tolist() for start in starts])
    tokens_BS[0] ^= 128  # as the batches have it
    labels_BS = tokens_BS.clone()
    labels_BS[0, -(known.SEQUENCE // 4) :] = -100
    model, hf = known.model_of(c, torch.device("cpu")), theirs(c)
    load(hf, model)
    if not c.causal:  # transformers then predicts the token at the label's own place
        tokens_BS, labels_BS = tokens_BS[:, :-1], labels_BS[:, 1:].contiguous()
    found = hf(input_ids=tokens_BS, labels=labels_BS)
    found.loss.backward()
    ours_named = {name: known.direction(name, p.shape) for name, p in model.named_parameters()}
    directions = in_memory(c, to_huggingface(c, ours_named))
    gradients = sum((p.grad * directions[name]).sum() for name, p in hf.named_parameters())
    numbers = float(found.loss), float(gradients)
    print(f'\n    "{family}": ({numbers[0]:.15g}, {numbers[1]:.15g}),', end="")
    assert numbers == pytest.approx(known.NUMBERS[family], rel=1e-10, abs=1e-10)


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
    write(model, tmp_path / "new" / "folder")
    kind = type(theirs(SHAPES[name]))
    hf, report = kind.from_pretrained(
        tmp_path / "new" / "folder",
        dtype=torch.float64,
        output_loading_info=True,
        attn_implementation="eager",
        **({"experts_implementation": "eager"} if name == "mixtral" else {}),
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
    write(newer, tmp_path / "parts")  # beside the old parts: the whole file counts
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


def damage_type(folder):
    """A quantized weight."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, file)


def damage_json(folder):
    (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "cannot read .*model.safetensors"),
        (damage_truncated, "cannot read .*model.safetensors"),
        (damage_empty, "cannot read .*model.safetensors"),
        (damage_json, "cannot read .*config.json"),
        (damage_config(model_type="t5"), "model_type 't5' is unknown; gpt2, llama, mixtral and bert"),
        (damage_config(hidden_act="relu"), "hidden_act is 'relu'; only 'silu'"),
        (damage_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1.0}), "rope_type is 'yarn'"),
        (damage_config(hidden_size=None), "does not say hidden_size"),
        (damage_config(hidden_size=24.0), "hidden_size cannot be 24.0"),
        (damage_config(num_hidden_layers="3"), "num_hidden_layers cannot be '3'"),
        (damage_config(rms_norm_eps=-1), "rms_norm_eps cannot be -1"),
        (damage_config(rope_parameters=[1]), r"rope_parameters is \[1\]"),
        (damage_config(model_type=["llama"]), "is unknown"),
        (damage_config(rope_parameters={"type": "linear", "factor": 4.0}), "rope_type is 'linear'"),
        (damage_type, "has type I8"),
        (damage_config(head_dim=5), "head_dim is 5; only 4"),
        (damage_config(intermediate_size=36), r"shape \[35, 24\], config.json asks for \[36, 24\]"),
        (damage_config(num_hidden_layers=2), "no place for: model.layers.2"),
        (damage_config(num_hidden_layers=4), "has no weight model.layers.3"),
    ],
)
def test_bad_files_get_one_line(damage, message, tmp_path):
    write(Transformer(SHAPES["llama"]), tmp_path)
    damage(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        read_huggingface(tmp_path)
    assert "\n" not in str(error.value)


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write(Transformer(SHAPES["gpt2"]), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / ".partial").mkdir()  # in the way, as a full disk would be
    with pytest.raises(UsageError, match="cannot write the model"):
        write(Transformer(SHAPES["llama"]), tmp_path)
    (tmp_path / ".partial").rmdir()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(UsageError, match="only GPT-2, LLaMA, Mixtral and BERT"):
        write(Transformer(dataclasses.replace(SHAPES["gpt2"], bias=False)), tmp_path)
