"""Weights in Hugging Face's layout: config.json and model.safetensors, for GPT-2, LLaMA, Mixtral and BERT.

    model = read_huggingface(Path("gpt2"))
    parameters = dict(model.named_parameters())
    write_huggingface(model.config, parameters, Path("out"))      # from_pretrained(out) gives the same logits

The tables below hold all differences. LLaMA's weights only have other names. GPT-2 keeps query, key and value
in one matrix and stores its four matrices [in, out] (`Conv1D`); here all are [out, in]. Mixtral's files have a matrix
for each expert; here they are stacked. BERT is BertForMaskedLM: the pooler and the head for the next sentence, which
published files also hold, are not read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import UsageError
from common.models.configs import TransformerConfig
from common.models.transformer import Transformer

Json = dict[str, Any]

# Hugging Face's module: ours; * is the layer's number, # the expert's, which is an index in ours. If several
# of ours correspond to one of theirs, theirs is their stack on `out`.
GPT2 = {
    "transformer.wte": ["embed_tokens"],
    "transformer.wpe": ["embed_positions"],
    "transformer.h.*.ln_1": ["layers.*.attention_norm"],
    "transformer.h.*.attn.c_attn": [f"layers.*.attention.{x}_proj" for x in "qkv"],
    "transformer.h.*.attn.c_proj": ["layers.*.attention.o_proj"],
    "transformer.h.*.ln_2": ["layers.*.mlp_norm"],
    "transformer.h.*.mlp.c_fc": ["layers.*.mlp.up_proj"],
    "transformer.h.*.mlp.c_proj": ["layers.*.mlp.down_proj"],
    "transformer.ln_f": ["norm"],
    "lm_head": ["lm_head"],
}
LLAMA = {
    "model.embed_tokens": ["embed_tokens"],
    "model.layers.*.input_layernorm": ["layers.*.attention_norm"],
    **{f"model.layers.*.self_attn.{x}_proj": [f"layers.*.attention.{x}_proj"] for x in "qkvo"},
    "model.layers.*.post_attention_layernorm": ["layers.*.mlp_norm"],
    **{f"model.layers.*.mlp.{x}_proj": [f"layers.*.mlp.{x}_proj"] for x in ("gate", "up", "down")},
    "model.norm": ["norm"],
    "lm_head": ["lm_head"],
}
_EXPERT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
MIXTRAL = {
    **{theirs: ours for theirs, ours in LLAMA.items() if ".mlp." not in theirs},
    "model.layers.*.block_sparse_moe.gate": ["layers.*.mlp.router"],
    **{
        f"model.layers.*.block_sparse_moe.experts.#.{theirs}": [f"layers.*.mlp.experts.{ours}"]
        for theirs, ours in _EXPERT.items()
    },
}
BERT = {
    "bert.embeddings.word_embeddings": ["embed_tokens"],
    "bert.embeddings.position_embeddings": ["embed_positions"],
    "bert.embeddings.token_type_embeddings": ["embed_types"],
    "bert.embeddings.LayerNorm": ["embed_norm"],
    "bert.encoder.layer.*.attention.self.query": ["layers.*.attention.q_proj"],
    "bert.encoder.layer.*.attention.self.key": ["layers.*.attention.k_proj"],
    "bert.encoder.layer.*.attention.self.value": ["layers.*.attention.v_proj"],
    "bert.encoder.layer.*.attention.output.dense": ["layers.*.attention.o_proj"],
    "bert.encoder.layer.*.attention.output.LayerNorm": ["layers.*.attention_norm"],
    "bert.encoder.layer.*.intermediate.dense": ["layers.*.mlp.up_proj"],
    "bert.encoder.layer.*.output.dense": ["layers.*.mlp.down_proj"],
    "bert.encoder.layer.*.output.LayerNorm": ["layers.*.mlp_norm"],
    "cls.predictions.transform.dense": ["transform"],
    "cls.predictions.transform.LayerNorm": ["norm"],
    "cls.predictions": ["unembed"],
}
TABLES = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "bert": BERT}
WITHOUT_BIAS = ("wte", "wpe", "lm_head", "_embeddings")
WITHOUT_WEIGHT = ("cls.predictions",)
TYPES = ("F64", "F32", "BF16", "F16")  # of weights, as safetensors calls them; not those of quantized models
# config.json: our field and theirs
FIELDS = {
    "gpt2": {
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "mlp_width": "n_inner",
        "sequence": "n_positions",
        "epsilon": "layer_norm_epsilon",
        "vocabulary": "vocab_size",
        "tied": "tie_word_embeddings",
    },
    "llama": {
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "mlp_width": "intermediate_size",
        "sequence": "max_position_embeddings",
        "epsilon": "rms_norm_eps",
        "rotary_base": "rope_theta",
        "vocabulary": "vocab_size",
        "tied": "tie_word_embeddings",
    },
}
_COMMON = ("layers", "width", "heads", "mlp_width", "sequence", "vocabulary")
FIELDS["bert"] = {field: FIELDS["llama"][field] for field in _COMMON} | {
    "epsilon": "layer_norm_eps",
    "token_types": "type_vocab_size",
}
FIELDS["mixtral"] = FIELDS["llama"] | {
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
STYLE: dict[str, Json] = {
    "gpt2": {"norm": "layernorm", "positions": "learned", "mlp": "gelu", "bias": True, "causal": True},
    "llama": {"norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "bias": False, "causal": True},
}
_PLAIN = {"post_norm": False, "masked_head": False}
_BERT = {"causal": False, "gelu": "none", "tied": True, "post_norm": True, "masked_head": True}
STYLE["bert"] = STYLE["gpt2"] | _BERT
STYLE["gpt2"] |= _PLAIN | {"gelu": "tanh"}
STYLE["llama"] |= _PLAIN
STYLE["mixtral"] = STYLE["llama"] | {"router": "renormalised", "shared_experts": 0, "capacity_factor": None}
# Allowed values of fields of config.json that this Transformer implements in part: other values are refused.
ONLY: dict[str, dict[str, tuple[object, ...]]] = {
    "gpt2": {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    "llama": {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_scaling": (None,),
        "rope_type": ("default",),
    },
    "bert": {
        "hidden_act": ("gelu",),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    },
}
ONLY["mixtral"] = ONLY["llama"] | {"sliding_window": (None,), "router_jitter_noise": (0.0,)}
# Not weights: masks and tables that old files carry, and the head of a model whose head is its embedding. And the parts
# of BERT that predict no masked token.
IGNORED = (
    *(".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "lm_head.weight"),
    *("embeddings.position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    *(
        f"{part}.{kind}"
        for part in ("bert.pooler.dense", "cls.seq_relationship")
        for kind in ("weight", "bias")
    ),
)


def model_type(config: TransformerConfig) -> str:
    """Return Hugging Face's name of this architecture. Raises UsageError if there is none."""
    for kind, style in STYLE.items():
        same = all(getattr(config, field) == value for field, value in style.items())
        same &= all(
            (some in FIELDS[kind]) == (getattr(config, some) > 0) for some in ("experts", "token_types")
        )
        if same and ("kv_heads" in FIELDS[kind] or config.kv_heads == config.heads):
            return kind
    raise UsageError(
        f"only GPT-2, LLaMA, Mixtral and BERT have a layout of Hugging Face's here, not {config}"
    )


def _pairs(config: TransformerConfig) -> Iterator[tuple[str, list[str], bool, int | EllipsisType]]:
    """(their parameter, ours, whether theirs is transposed, the index of theirs in ours) for the whole model."""
    for theirs, ours in TABLES[model_type(config)].items():
        if theirs == "lm_head" and config.tied:
            continue
        layers = range(config.layers) if "*" in theirs else [0]
        experts: Iterable[int | EllipsisType] = range(config.experts) if "#" in theirs else [...]
        absent = {"weight": WITHOUT_WEIGHT, "bias": WITHOUT_BIAS if config.bias else ("",)}
        kinds = [kind for kind, ends in absent.items() if not theirs.endswith(ends)]
        for layer, expert, kind in itertools.product(layers, experts, kinds):
            names = [f"{name}.{kind}".replace("*", str(layer)) for name in ours]
            transposed = kind == "weight" and ".c_" in theirs
            name = f"{theirs}.{kind}".replace("*", str(layer)).replace("#", str(expert))
            yield name, names, transposed, expert


def to_huggingface(config: TransformerConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights, or their gradients, under Hugging Face's names and in its shapes."""
    out = {}
    for theirs, names, transposed, expert in _pairs(config):
        x = torch.cat([ours[name].detach()[expert] for name in names])
        out[theirs] = x.T.contiguous() if transposed else x
    return out


def write_huggingface(shape: TransformerConfig, ours: Mapping[str, Tensor], folder: Path) -> None:
    """Write config.json and model.safetensors, parameters by our names; a failure leaves neither file half-written.

    Raises UsageError if the folder cannot be written or Hugging Face has no such model.
    """
    weights = to_huggingface(shape, ours)
    dtype = str(ours["embed_tokens.weight"].dtype).removeprefix("torch.")
    config = json.dumps({**_write_config(shape), "dtype": dtype}, indent=2) + "\n"
    partial = folder / ".partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, partial, metadata={"format": "pt"})
        partial.replace(folder / "model.safetensors")
        partial.write_text(config)
        partial.replace(folder / "config.json")
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UsageError(f"cannot write the model to {folder}: {error}") from None


@torch.no_grad()
def read_huggingface(folder: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return the model of a folder, on the CPU. Beside it one matrix of the files at a time is in memory.

    Raises UsageError for a missing, truncated or unknown file, and for features that this Transformer lacks.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = Transformer(config, dtype=dtype)
    model.to_empty(device="cpu")
    whole = read_weights(folder, config)
    for name, p in model.named_parameters():
        p.copy_(whole(name, p.shape))
    return model


def read_weights(folder: Path, config: TransformerConfig) -> Callable[[str, torch.Size], Tensor]:
    """Return whole(name, shape), which reads one parameter of ours per call and keeps nothing in memory.

    All names and shapes are compared before. Raises UsageError as `read_huggingface` does.
    """
    with torch.device("meta"):
        ours = dict(Transformer(config).named_parameters())
    stored = _stored(folder, model_type(config))
    # of each parameter of ours: file, name there, first and last row, is it transposed; one for each expert
    places: dict[str, list[tuple[Path, str, int, int, bool]]] = {}
    with contextlib.ExitStack() as files:
        opened: dict[Path, Any] = {}
        for theirs, names, transposed, expert in _pairs(config):
            if theirs not in stored:
                raise UsageError(f"{folder} has no weight {theirs}")
            file, there = stored.pop(theirs)
            if file not in opened:
                opened[file] = files.enter_context(_open(file))
            stored_as = opened[file].get_slice(there)
            if stored_as.get_dtype() not in TYPES:
                raise UsageError(
                    f"{there} in {file} has type {stored_as.get_dtype()}; {', '.join(TYPES)} can be read"
                )
            shape = stored_as.get_shape()
            shape = shape[::-1] if transposed else shape
            parts = [ours[name][expert] for name in names]
            needed = [sum(len(p) for p in parts), *parts[0].shape[1:]]
            if shape != needed:
                raise UsageError(f"{theirs} in {file} has shape {shape}, config.json asks for {needed}")
            ends = list(itertools.accumulate((len(p) for p in parts), initial=0))
            for name, lo, hi in zip(names, ends, ends[1:], strict=False):
                places.setdefault(name, []).append((file, there, lo, hi, transposed))
    if unknown := [name for name in stored if not name.endswith(IGNORED)]:
        raise UsageError(f"{folder} has a weight that this model has no place for: {unknown[0]}")

    def whole(name: str, shape: torch.Size) -> Tensor:
        parts = []
        for file, there, lo, hi, transposed in places[name]:
            with _open(file) as weights:
                x = weights.get_tensor(there)
            parts.append((x.T if transposed else x)[lo:hi])
        return (parts[0] if len(parts) == 1 else torch.stack(parts)).view(shape)

    return whole


@contextlib.contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as weights:
            yield weights
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None


def _stored(folder: Path, kind: str) -> dict[str, tuple[Path, str]]:
    """Return the file of each weight and its name there. Large models are in several files with an index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists() and not single.exists():
        parts = _read_json(index).get("weight_map", {})
        if not isinstance(parts, dict) or not all(isinstance(file, str) for file in parts.values()):
            raise UsageError(f"{index}: weight_map is not an object of names of files")
        files = {name: folder / file for name, file in parts.items()}
    else:
        with _open(single) as weights:
            files = dict.fromkeys(weights.keys(), single)
    bare = kind == "gpt2" and "wte.weight" in files  # saved as a GPT2Model, without its head
    if kind == "bert":  # published files have the old names of LayerNorm's parameters
        old = {".gamma": ".weight", ".beta": ".bias"}
        return {
            re.sub(r"\.(gamma|beta)$", lambda end: old[end[0]], name): (file, name)
            for name, file in files.items()
        }
    return {f"transformer.{name}" if bare else name: (file, name) for name, file in files.items()}


def _read_json(file: Path) -> Json:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"cannot read {file}: it is not a JSON object")
    return content


def read_config(folder: Path) -> TransformerConfig:
    """Return the shape of a folder's model. Raises UsageError if this Transformer cannot represent it."""
    file = folder / "config.json"
    theirs = _read_json(file)
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in TABLES:
        raise UsageError(f"{file}: model_type {kind!r} is unknown; gpt2, llama, mixtral and bert can be read")
    base = 1e6 if kind == "mixtral" else 10000.0
    rope = theirs.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise UsageError(f"{file}: rope_parameters is {rope!r:.60}; give an object")
    defaults = {"rope_theta": base, "tie_word_embeddings": kind in ("gpt2", "bert")}
    defaults["rope_type"] = rope.get("type", "default")  # "type" is an older name
    theirs = {**defaults, **theirs, **rope}
    for key, allowed in ONLY[kind].items():
        if theirs.get(key, allowed[0]) not in allowed:
            raise UsageError(f"{file}: {key} is {theirs[key]!r}; only {allowed[0]!r} can be read")
    sizes: Json = {ours: theirs.get(name) for ours, name in FIELDS[kind].items()}
    sizes["kv_heads"] = sizes.get("kv_heads") or sizes["heads"]
    if kind == "gpt2" and sizes["width"] is not None:
        sizes["mlp_width"] = sizes["mlp_width"] or 4 * sizes["width"]
    if missing := [FIELDS[kind].get(ours, ours) for ours, value in sizes.items() if value is None]:
        raise UsageError(f"{file} does not say {missing[0]}")
    hints = get_type_hints(TransformerConfig)
    for ours, value in sizes.items():
        kinds = (int, float) if hints[ours] is float else (hints[ours],)
        if type(value) not in kinds or (hints[ours] is not bool and not 0 < value < 2**31):
            raise UsageError(f"{file}: {FIELDS[kind].get(ours, ours)} cannot be {value!r:.60}")
    config = TransformerConfig(**sizes, **STYLE[kind])
    if theirs.get("head_dim") not in (None, config.head_width):
        raise UsageError(f"{file}: head_dim is {theirs['head_dim']}; only {config.head_width} can be read")
    return config


def _write_config(config: TransformerConfig) -> Json:
    kind = model_type(config)
    theirs: Json = {"model_type": kind, "bos_token_id": None, "eos_token_id": None}
    theirs |= {name: getattr(config, ours) for ours, name in FIELDS[kind].items()}
    if kind == "gpt2":  # its dropout is not 0 by default
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return theirs | {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new"} | dropout
    if kind == "bert":
        dropout = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        style = {"hidden_act": "gelu", "tie_word_embeddings": True, "pad_token_id": None}
        return theirs | {"architectures": ["BertForMaskedLM"]} | style | dropout
    rope = {"rope_type": "default", "rope_theta": config.rotary_base}
    name = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM"}[kind]
    return theirs | {"architectures": [name], "hidden_act": "silu", "rope_parameters": rope}
