"""A Transformer layer in three languages behind one interface: forward, backward, a step of the optimizer.

make("pytorch", rt, o, "sgd")        split_layer of tp_megatron.py under autograd
make("tp_libtorch", rt, o, "sgd")    C++ on LibTorch's autograd and a c10d process group
make("tp_mpi", rt, o, "sgd")         C++ on MPI and BLAS, its own backward pass, numpy arrays
make("one device", rt, o, "sgd")     the plain layer
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor
from tp_megatron import Region, split_layer
from tp_training import TensorOptions, tp_group

from common.equality import OPTIMIZERS
from common.ledger import Ledger
from common.lesson import DTYPES
from common.models.transformer import Layer, Transformer
from common.runtime import Runtime

LANGUAGES = {"pytorch": "pytorch", "tp_libtorch": "libtorch", "tp_mpi": "cpp-mpi"}
RATES = {"sgd": 0.1, "adamw": 1e-3}


@dataclass
class LanguageOptions(TensorOptions):
    """Shape of the layer and of x."""

    versions: tuple[str, ...] = tuple(LANGUAGES)
    """Which versions to run."""


class Split(Protocol):
    """A layer of some language. Its pieces have the names of the plain layer's parameters."""

    def forward(self, x_BSD: Tensor) -> Tensor:
        """y_BSD."""

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """dx_BSD; leaves new gradients."""

    def update(self) -> None:
        """A step of the optimizer."""

    def pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Parameter and gradient by name, as they lie on this rank."""

    def sent(self) -> Fraction:
        """Bytes this rank sent since it was asked last."""


class InTorch:
    """A layer that autograd goes through: the plain one, tp_megatron.py's, or tp_libtorch's."""

    def __init__(self, call: Callable[[Tensor], Tensor], named: dict[str, Tensor], optimizer: str) -> None:
        self.call, self.named, self.bytes = call, named, Fraction(0)
        self.optimizer = OPTIMIZERS[optimizer](list(named.values()))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """y_BSD."""
        self.x = x_BSD.clone().requires_grad_()
        with Ledger() as ledger:
            self.y = self.call(self.x)
        self.bytes += ledger.bytes()
        return self.y.detach()

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """dx_BSD."""
        self.optimizer.zero_grad()
        with Ledger() as ledger:
            self.y.backward(dy_BSD)
        self.bytes += ledger.bytes()
        return cast(Tensor, self.x.grad)

    def update(self) -> None:
        """A step."""
        self.optimizer.step()

    def pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name."""
        return {name: (p.detach(), cast(Tensor, p.grad)) for name, p in self.named.items()}

    def sent(self) -> Fraction:
        """Bytes."""
        counted, self.bytes = self.bytes, Fraction(0)
        return counted


class InLibTorch(InTorch):
    """tp_libtorch's layer on a process group."""

    def __init__(self, layer: Layer, rt: Runtime, heads: int, optimizer: str) -> None:
        import tp_libtorch

        self.ranks = tp_libtorch.Ranks(rt.world.pg)
        mine = tp_libtorch.split(dict(layer.named_parameters()), self.ranks)
        super().__init__(lambda x: tp_libtorch.layer(x, mine, heads, self.ranks), mine, optimizer)

    def sent(self) -> Fraction:
        """Bytes; the module counts them times the ranks."""
        return Fraction(sum(n_bytes for _, n_bytes, _ in self.ranks.take_messages()), self.ranks.size)


class InMPI:
    """tp_mpi's layer on mpi4py's communicator, on numpy arrays."""

    def __init__(self, layer: Layer, rt: Runtime, o: LanguageOptions, optimizer: str) -> None:
        import tp_mpi
        from mpi4py import MPI

        c, comm = o.model_config(), MPI.COMM_WORLD if rt.world_size > 1 else None
        self.layer = tp_mpi.Layer(c.width, c.heads, c.mlp_width, comm, o.seed, o.dtype)
        self.layer.set_weights({name: p.detach().numpy() for name, p in layer.named_parameters()})
        self.optimizer, self.bytes = optimizer, 0

    def forward(self, x_BSD: Tensor) -> Tensor:
        """y_BSD."""
        return torch.from_numpy(self.layer.forward(x_BSD.numpy()))

    def backward(self, dy_BSD: Tensor) -> Tensor:
        """dx_BSD."""
        dx = torch.from_numpy(self.layer.backward(dy_BSD.numpy()))
        self.bytes += self.layer.bytes_sent
        return dx

    def update(self) -> None:
        """A step, with the numbers of OPTIMIZERS."""
        if self.optimizer == "sgd":
            self.layer.sgd(RATES["sgd"])
        else:
            self.layer.adamw(RATES["adamw"], epsilon=1e-5)

    def pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """By name."""
        gradients = self.layer.gradients()
        return {
            name: (torch.from_numpy(np.asarray(value)), torch.from_numpy(np.asarray(gradients[name])))
            for name, value in self.layer.weights().items()
        }

    def sent(self) -> Fraction:
        """Bytes."""
        counted, self.bytes = self.bytes, 0
        return Fraction(counted)


def plain_layer(o: LanguageOptions) -> Layer:
    """The first layer of the model, on the CPU."""
    return cast(Layer, Transformer(replace(o.model_config(), layers=1), o.seed, DTYPES[o.dtype]).layers[0])


def make(name: str, rt: Runtime, o: LanguageOptions, optimizer: str) -> Split:
    """The layer in a language; "one device" is the plain one."""
    layer, c = plain_layer(o), o.model_config()
    positions_S = torch.arange(o.sequence)
    if name == "tp_mpi":
        return InMPI(layer, rt, o, optimizer)
    if name == "tp_libtorch":
        return InLibTorch(layer, rt, c.heads, optimizer)
    if name == "pytorch":
        split_layer(layer, c, Region(tp_group(rt), sequence_parallel=False))
    return InTorch(lambda x: layer(x, positions_S), dict(layer.named_parameters()), optimizer)
