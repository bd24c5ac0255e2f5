"""Hugging Face's numbers for a step of four small models, with which every lesson compares its own step.

A lesson compares a mesh with one device, and both run the same data, model and training step. Without the causal mask,
say, they would still agree. `make_model` therefore calls `check` first: one step of GPT-2, LLaMA, Mixtral or BERT,
whichever the lesson's model resembles, must have the loss and the gradients that `transformers` gives for the same
weights and tokens, in float64. That takes some 15 ms once a process and family. To compute NUMBERS with `transformers`
and print them: `pytest -s tests/test_huggingface.py -k known`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from common import random
from common.data.text import Text
from common.models.configs import TransformerConfig, bert, gpt2, llama, mixtral
from common.models.transformer import Transformer

SEQUENCE, BATCH = 11, 3
SHAPES = {
    "gpt2": gpt2(layers=2, width=16, heads=2, sequence=SEQUENCE + 1),
    "bert": bert(layers=2, width=16, heads=2, sequence=SEQUENCE + 1),
    "llama": llama(layers=2, width=16, heads=4, kv_heads=2, mlp_width=24, sequence=SEQUENCE + 1),
    "mixtral": mixtral(4, layers=2, width=16, heads=4, kv_heads=2, mlp_width=12, sequence=SEQUENCE + 1),
}
NUMBERS = {  # loss, projection of the gradients
    "gpt2": (5.98630774043361, -0.0344641161577995),
    "bert": (6.13005805699873, 0.297362993477159),
    "llama": (6.00535507071291, -3.45593159009995),
    "mixtral": (5.92996985942275, -3.72304571240756),
}
TOLERANCE = 1e-9
Step = Callable[[Transformer, torch.device], Tensor]
"""Function that runs forward and backward of a model, returns the loss and leaves gradients."""


def text() -> Text:
    """Return a text of bytes by formula."""
    content = (random.bits(0, 0, np.arange(200)) % np.uint64(256)).astype(np.uint8)
    return Text(content, content, "bytes by formula")


def direction(name: str, shape: torch.Size, seed: int = 2) -> Tensor:
    """Return normal numbers of that name, float64; their product with a tensor depends on each of its elements."""
    return torch.from_numpy(random.normals(seed, random.stream_of(name), shape.numel())).view(shape)


def projection(tensors: Mapping[str, Tensor]) -> float:
    """Return the sum over the tensors of each tensor's product with the direction of its name."""
    return sum(float((x.cpu() * direction(name, x.shape)).sum()) for name, x in tensors.items())


def model_of(c: TransformerConfig, device: torch.device) -> Transformer:
    """Return the model whose numbers are known; no weight is 0 or 1, which would hide its effect."""
    with torch.device(device):
        model = Transformer(c, dtype=torch.float64)
    for name, p in model.named_parameters():
        p.data += 0.2 * direction(name, p.shape, seed=1).to(device)
    return model


def check(step: Step, c: TransformerConfig, device: torch.device) -> None:
    """Check `step` on the small model of the family of `c`. Raises RuntimeError if it is not the step of transformers.

    Where the model drops numbers, so does the small one, but with so small a share that nothing is dropped: attention
    then goes the way that keeps its weights, as the model's does.
    """
    of_learned = "bert" if c.post_norm else "gpt2"
    family = "mixtral" if c.experts else of_learned if c.positions == "learned" else "llama"
    check_family(step, family, replace(SHAPES[family], dropout=1e-13 if c.dropout else 0.0), device)


@functools.cache
def check_family(step: Step, family: str, c: TransformerConfig, device: torch.device) -> None:
    """Check `step` on the family's small model. Raises RuntimeError if it is not the step of transformers."""
    model = model_of(c, device)
    loss = step(model, device).item()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for what, expected, found in zip(
        ("loss", "gradients"), NUMBERS[family], (loss, projection(gradients)), strict=True
    ):
        if not abs(found - expected) <= TOLERANCE * max(1, abs(expected)):
            raise RuntimeError(
                f"NOT the step of {family} in transformers, so there is nothing to compare with: {what} "
                f"{found:.12g} against {expected:.12g} there"
            )
