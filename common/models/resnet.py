"""ResNet-50, -101 and -152, with torchvision's names of parameters, so that its weights can be loaded.

    x_BCHW -> conv 7 x 7 / 2, pool / 2 -> 4 stages of bottlenecks -> mean over H, W -> fc

    bottleneck    1 x 1 to W channels, 3 x 3 (with the stage's stride), 1 x 1 to 4 W channels, plus the input

The stride stands at the 3 x 3 convolution, as in torchvision and Goyal et al. ("Accurate, large minibatch SGD", 2017);
He et al. ("Deep residual learning", 2015, arXiv:1512.03385) have it at the first 1 x 1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}
EXPANSION = 4


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection, which is projected where the shape changes."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = EXPANSION * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        out: Tensor = self.relu(y + (x if self.downsample is None else self.downsample(x)))
        return out


class ResNet(nn.Module):
    """Images [B, 3, H, W] to logits [B, classes]. blocks: bottlenecks of each stage. width: of the first stage."""

    def __init__(self, blocks: tuple[int, ...], classes: int = 1000, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = width
        for stage, count in enumerate(blocks):
            layers = []
            for i in range(count):
                layers.append(Bottleneck(channels, width * 2**stage, 2 if i == 0 and stage else 1))
                channels = EXPANSION * width * 2**stage
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.stages = len(blocks)
        self.fc = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def resnet(name: str, classes: int = 1000) -> ResNet:
    """Return the network of that name in BLOCKS."""
    return ResNet(BLOCKS[name], classes)


def flops_per_image(model: ResNet, side: int) -> int:
    """Return the FLOP of a training step per image: 6 per weight and position of its output.

    A multiply-add counts as two, the backward as twice the forward. side: height and width of the image.
    """
    total = 0

    def count(module: nn.Module, _: object, output: Tensor) -> None:
        nonlocal total
        places = output.shape[2] * output.shape[3] if output.ndim == 4 else 1
        weight = module.get_parameter("weight")
        total += 6 * weight.numel() * places

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    training = model.training
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, side, side, device=next(model.parameters()).device))
    model.train(training)
    for hook in hooks:
        hook.remove()
    return total
