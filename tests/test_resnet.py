"""ResNet: torchvision's names, forward and every gradient, where it is installed; and its numbers elsewhere."""

from __future__ import annotations

import importlib
import math
import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from common.models import resnet

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
PARAMETERS = {"resnet50": 25_557_032, "resnet101": 44_549_160, "resnet152": 60_192_808}  # torchvision 0.28.0
KNOWN = 8.80281717852753, 241.23343848660767  # loss and norm of all gradients of its resnet50, by `run`


def torchvision() -> Any:
    """Return torchvision.models. A CPU build of torch may not load torchvision's operators, of which it needs none."""
    pytest.importorskip("PIL")
    while True:
        try:
            return importlib.import_module("torchvision.models")
        except ImportError:
            pytest.skip("torchvision is not installed")
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if not missing:
                raise
            LIBRARY.define(f"{missing[1]}() -> Tensor")
            for name in [name for name in sys.modules if name.startswith("torchvision")]:
                del sys.modules[name]


def fill(model: nn.Module) -> None:
    """Set all parameters and averages to a function of their place in the model."""
    with torch.no_grad():
        for k, (_, p) in enumerate(sorted(model.state_dict().items())):
            if p.dtype.is_floating_point:
                wave = torch.sin(torch.arange(p.numel(), dtype=torch.float64) * 0.7 + k).view(p.shape)
                scale = 1 / math.sqrt(p[0].numel()) if p.ndim > 1 else 0.1
                p.copy_(scale * wave + (1.0 if p.ndim == 1 else 0.0))


def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits, loss and gradients in training mode, float64."""
    model = model.double().train()
    fill(model)
    x = torch.cos(torch.arange(2 * 3 * 64 * 96, dtype=torch.float64)).view(2, 3, 64, 96)
    logits = model(x)
    loss = F.cross_entropy(logits, torch.tensor([3, 700]))
    loss.backward()
    return (
        logits.detach(),
        loss.detach(),
        {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    )


@pytest.mark.parametrize("name", ["resnet50", pytest.param("resnet152", marks=pytest.mark.slow)])
def test_equal_to_torchvision(name: str) -> None:
    theirs = getattr(torchvision(), name)()
    logits, _, gradients = run(resnet.resnet(name))
    expected, _, expected_gradients = run(theirs)
    assert torch.equal(logits, expected) or (logits - expected).abs().max() < 1e-10 * expected.abs().max()
    assert list(gradients) == list(expected_gradients)
    for n, g in gradients.items():
        largest = expected_gradients[n].abs().max()
        assert (g - expected_gradients[n]).abs().max() <= 1e-9 * largest, n


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    with torch.device("meta"):
        model = resnet.resnet(name)
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_the_known_numbers_are_torchvisions() -> None:
    _, loss, gradients = run(resnet.resnet("resnet50"))
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
    assert float(loss) == pytest.approx(KNOWN[0], rel=1e-8)
    assert norm == pytest.approx(KNOWN[1], rel=1e-6)


def test_flops_are_those_of_the_paper() -> None:
    model = resnet.resnet("resnet50").train()
    forward = resnet.flops_per_image(model, 224) / 3 / 2  # multiply-adds
    assert forward == pytest.approx(4.09e9, rel=1e-2)  # torchvision's documentation: 4.09 GFLOPS
    assert model.training
