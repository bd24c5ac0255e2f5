"""A Transformer layer in three languages behind one interface: forward, backward, a step of the optimizer.

make("pytorch", rt, o, "sgd")        split_layer of tp_megatron.py under autograd
make("tp_libtorch", rt, o, "sgd")    C++ on LibTorch's autograd and a c10d process group
make("tp_mpi", rt, o, "sgd")         C++ on MPI and BLAS, its own backward pass, numpy arrays
make("one device", rt, o, "sgd")     the plain layer
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from common.launch.runtime import Runtime
from common.lesson.languages import InLibTorch, InNumpy, InTorch, Part
from common.lesson.runner import DTYPES
from common.models.transformer import Layer, Transformer

from tp_megatron import Region, split_layer
from tp_training import TensorOptions, tp_group

LANGUAGES = {"pytorch": "pytorch", "tp_libtorch": "libtorch", "tp_mpi": "cpp-mpi"}


@dataclass
class LanguageOptions(TensorOptions, without=("micro_batches", "scaling", "data")):
    """Shape of the layer and of x."""

    versions: tuple[str, ...] = tuple(LANGUAGES)
    """Versions to run."""


def plain_layer(o: LanguageOptions) -> Layer:
    """Return the first layer of the model, on the CPU."""
    return cast(Layer, Transformer(replace(o.model_config(), layers=1), o.seed, DTYPES[o.dtype]).layers[0])


def make(name: str, rt: Runtime, o: LanguageOptions, optimizer: str) -> Part:
    """Return the layer in the language `name`; "one device" is the plain layer."""
    layer, c = plain_layer(o), o.model_config()
    positions_S, named = torch.arange(o.sequence), dict(layer.named_parameters())
    if name == "tp_mpi":
        from mpi4py import MPI

        import tp_mpi

        comm = MPI.COMM_WORLD if rt.world_size > 1 else None
        return InNumpy(tp_mpi.Layer(c.width, c.heads, c.mlp_width, comm, o.seed, o.dtype), named, optimizer)
    if name == "tp_libtorch":
        import tp_libtorch

        ranks = tp_libtorch.Ranks(rt.world.pg)
        mine = tp_libtorch.split(named, ranks)
        return InLibTorch(ranks, lambda x: tp_libtorch.layer(x, mine, c.heads, ranks), mine, optimizer)
    if name == "pytorch":
        split_layer(layer, c, Region(tp_group(rt), sequence_parallel=False))
    return InTorch(lambda x: layer(x, positions_S), dict(layer.named_parameters()), optimizer)
