"""Mutants: mistakes shared by both sides of a comparison, or hidden by even shards. Lessons must fail.

Each mutant is patched into two ranks, which run the lesson as a reader would, on a small model.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import small_models  # noqa: F401  (its models are known by name)
import torch
from torch import Tensor

from common import comm
from common.comm import Group, Pending, sizes_of
from common.data.text import lm_batch
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.models import known
from common.models.transformer import angles, attend, attend_and_drop

import dp_accumulation
import dp_basic
import hybrid_5d
import hybrid_proof
import tp_megatron
import tp_vocabulary
from dp_accumulation import StepOptions
from dp_training import DataParallelOptions
from hybrid_layout import HybridOptions
from hybrid_rows import of_meshes
from tp_megatron import MegatronOptions
from tp_training import TensorOptions

all_reduce = comm.all_reduce


def no_mask(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Broken: attends to later tokens."""
    return attend(q, k, v, False)


def no_mask_where_dropped(q: Tensor, k: Tensor, v: Tensor, causal: bool, drop: Any) -> Tensor:
    """Broken: attends to later tokens, with dropout of attention weights."""
    return attend_and_drop(q, k, v, False, drop)


def another_base(positions: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Broken: rotary positions with three times the base."""
    return angles(positions, width, 3 * base, dtype)


def not_shifted(*given: Any) -> tuple[Tensor, Tensor]:
    """Broken: every token is its own target."""
    tokens_BS, targets_BS = lm_batch(*given)
    return tokens_BS, tokens_BS.where(targets_BS != -100, targets_BS)


def padding_counts(
    logits_BSv: Tensor, targets_BS: Tensor, group: Group, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Broken: the vocabulary-parallel loss counts ignored targets."""
    begin, targets_N = sum(sizes_of(vocabulary, group.size)[: group.rank]), targets_BS.flatten()
    loss_N = tp_vocabulary._CrossEntropy.apply(logits_BSv.flatten(0, -2), targets_N, begin, group)
    return loss_N.sum(), torch.tensor(targets_N.numel())


class OffByOne(tp_vocabulary.VocabularyParallelEmbedding):
    """Broken: every rank but the first begins one row too late."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.begin += self.begin > 0


def own_targets(x: Tensor, group: Group, *given: Any, **more: Any) -> Pending:
    """Broken: each rank divides by its own number of targets, times the number of ranks."""
    mine = x * group.size
    pending = all_reduce(x, group, *given, **more)
    if x.dtype == torch.int64:
        x.copy_(mine)
    return pending


def in_float32(x: Tensor, group: Group, *given: Any, **more: Any) -> Pending:
    """Broken: rank 1 rounds large gradients to float32 before it sends them."""
    if x.dtype == torch.float64 and x.numel() > 1000 and group.rank == 1:
        x.copy_(x.float())
    return all_reduce(x, group, *given, **more)


def prove_meshes(rt: Runtime, *meshes: str) -> bool:
    """Return True if all rows of the proof table for these meshes hold."""
    ((_, rows),) = of_meshes(meshes).items()
    return all(row.holds for row in hybrid_proof.prove_rows(rt, rows, show=False))


SMALL: dict[str, Any] = dict(model="llama-nano", batch=4, sequence=12, steps=2)
DATA = (dp_basic.main, DataParallelOptions(**SMALL, versions=("naive",)))
STEP = (dp_accumulation.main, StepOptions(**SMALL, versions=("no_sync",), warm_up=1))
DROPOUT = (tp_megatron.main, MegatronOptions(**SMALL, versions=("plain",), dropout=0.1))
VOCABULARY = (tp_vocabulary.main, TensorOptions(**SMALL, versions=("parallel",)))
HYBRID = (hybrid_5d.main, HybridOptions(model="llama-nano", sequence=12))  # the default batch
HYBRID_SP = (hybrid_5d.main, HybridOptions(model="llama-nano", sequence=12, sp=2))
LOSS = {"tp_vocabulary.cross_entropy_sum_parallel": padding_counts}
MEANS = {"common.comm.all_reduce": own_targets}

Lesson = tuple[Callable[..., bool], Any]
MUTANTS: dict[str, tuple[dict[str, Callable[..., Any]], Lesson]] = {
    "right, dp": ({}, DATA),
    "right, accumulation": ({}, STEP),
    "right, dropout": ({}, DROPOUT),
    "right, vocabulary": ({}, VOCABULARY),
    "right, hybrid": ({}, HYBRID),
    "right, hybrid sp": ({}, HYBRID_SP),
    "right, rows": ({}, (prove_meshes, "tp=2")),
    "no causal mask, hybrid": ({"common.models.transformer.attend": no_mask}, HYBRID),
    "no causal mask, rows": ({"common.models.transformer.attend": no_mask}, (prove_meshes, "dp=2")),
    "no causal mask, dropout": ({"common.models.transformer.attend_and_drop": no_mask_where_dropped}, DROPOUT),
    "rotary base x 3, dp": ({"common.models.transformer.angles": another_base}, DATA),
    "targets not shifted, dp": ({"common.lesson.training.lm_batch": not_shifted}, DATA),
    "padding counts, vocabulary": (LOSS, VOCABULARY),
    "padding counts, rows": (LOSS, (prove_meshes, "tp=2")),
    "embedding off by one": ({"tp_vocabulary.VocabularyParallelEmbedding": OffByOne}, VOCABULARY),
    "mean of means, dp": (MEANS, DATA),
    "mean of means, accumulation": (MEANS, STEP),
    "mean of means, hybrid": (MEANS, HYBRID),
    "mean of means, hybrid sp": (MEANS, HYBRID_SP),
    "mean of means, rows": (MEANS, (prove_meshes, "dp=2")),
    "float32 from one rank, dp": ({"common.comm.all_reduce": in_float32}, DATA),
}  # fmt: skip


def verdicts(rt: Runtime) -> dict[str, tuple[bool, str]]:
    """Return, per mutant, the lesson's verdict on this rank and the last line of its output."""
    found = {}
    for name, (patches, (main, options)) in MUTANTS.items():
        known.check_family.cache_clear()
        said = io.StringIO()
        with contextlib.ExitStack() as stack:
            for target, mutant in patches.items():
                stack.enter_context(patch(target, mutant))
            stack.enter_context(contextlib.redirect_stdout(said))
            try:
                found[name] = main(rt, options), said.getvalue().strip().split("\n")[-1]
            except RuntimeError as error:
                found[name] = False, str(error)
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, tuple[bool, str]]]:
    return spawn(verdicts, 2, limit=None)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant(name: str, found: list[dict[str, tuple[bool, str]]]) -> None:
    for held, said in (of_rank[name] for of_rank in found):
        assert held == name.startswith("right"), said
    print(f"\n{name}: {found[0][name][1]}", end="")
