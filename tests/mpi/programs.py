"""Runs of the LibTorch programs for their tests: what they print and record, and the same training in Python."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from mpi.launch import mpirun, need_binary
from torch import Tensor, nn

from common.benchmarks.measures import problem
from common.data.text import lm_batch, load_text
from common.lesson.equality import OPTIMIZERS
from common.models.transformer import Transformer


def losses(model: nn.Module, optimizer: str, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Train the model in Python, a step per batch; return the loss of each."""
    chosen, found = OPTIMIZERS[optimizer](list(model.parameters())), []
    for x, y in batches:
        chosen.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        chosen.step()
        found.append(loss.item())
    return found


def trained(model: Transformer, optimizer: str, steps: int, batch: int, sequence: int) -> list[float]:
    """Train the model in Python on the batches that programs see with seed 0; return the losses."""
    text = load_text(None).train
    batches = (lm_batch(text, 0, step, batch, sequence, 0, batch) for step in range(steps))
    return losses(model, optimizer, batches)


def proved(
    name: str, ranks: int, claim: str, folder: Path, *arguments: str
) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """Run a program that proves `claim`; return the losses by optimizer, and the records, which say the same."""
    record = folder / "record.json"
    done = mpirun(ranks, need_binary(name), *arguments, "--json", record)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"proved: {claim}" in done.stdout
    lines = [line.split()[4:] for line in done.stdout.splitlines() if line.startswith("loss of each step")]
    losses = {o: [float(word) for word in words] for o, words in zip(OPTIMIZERS, lines, strict=bool(lines))}
    records = [json.loads(line) for line in record.read_text().splitlines()]
    for values in records:
        assert not problem(values)
        assert (values["language"], values["ranks"], values["equal"]) == ("libtorch", ranks, True)
        assert 0 < values["largest_difference"] < 1e-12
    return losses, records


def timed(name: str, folder: Path, *arguments: str | Path) -> dict[str, Any]:
    """Time three steps of gpt2-tiny on two ranks; return the record, which claims no equality."""
    record = folder / "record.json"
    size = ["--benchmark", "--model", "gpt2-tiny", "--steps", "3"]
    done = mpirun(2, need_binary(name), *size, *arguments, "--json", record)
    assert done.returncode == 0, done.stderr
    assert "times as fast as one rank alone" in done.stdout
    values: dict[str, Any] = json.loads(record.read_text())
    assert not problem(values)
    assert (len(values["step_seconds"]), values["equal"]) == (3, None)
    return values
