"""A model that is not ours on meshes of pp x dp x sp x tp equals one device; a wrong module is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mpi.launch import ROOT, refused, torchrun
from torch import nn

from common.comm import Group
from common.comm.mesh import Mesh
from common.comm.placement import placement, sum_gradients  # noqa: F401  # the snippets use it
from common.data.text import PADDING
from common.launch.runtime import Runtime
from common.launch.spawn import spawn
from common.lesson.equality import largest
from common.models.transformer import Transformer, config, cross_entropy_sum

import your_own_model as own
from ep_moe import expert_parallel
from pp_pipeline import Pipeline
from pp_schedules import make_schedule
from sp_sequence_parallel import ORDERS, sequence_parallel  # noqa: F401
from sp_split import split_sequence  # noqa: F401
from tp_megatron import tensor_parallel

# 7 images are uneven over 2 and 4 places along dp
MESHES = [
    (4, {"tp": 2}),
    (4, {"tp": 2, "zero": 1}),
    (4, {"tp": 2, "zero": 2}),
    (4, {"sp": 2, "zero": 3}),
    (4, {"sp": 2, "tp": 2}),
    (4, {"pp": 2, "micro_batches": 3}),
    (8, {"pp": 2, "sp": 2, "tp": 2}),
    (1, {}),
]


def proved(rt: Runtime, given: dict[str, Any]) -> bool:
    return bool(own.main(rt, own.OwnOptions(**{"batch": 7, "steps": 2, **given})))


@pytest.mark.parametrize(("ranks", "given"), MESHES)
def test_equal_to_one_device(ranks: int, given: dict[str, Any]) -> None:
    assert spawn(proved, ranks, given) == [True] * ranks


def unsummed(rt: Runtime, given: dict[str, Any]) -> bool:
    own.sum_gradients = lambda *_: None
    return proved(rt, given)


@pytest.mark.parametrize("given", [{}, {"sp": 2}, {"pp": 2}])
def test_gradients_that_are_not_summed_are_caught(given: dict[str, Any]) -> None:
    assert spawn(unsummed, 4, given) == [False] * 4


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tp": 3}, "4 ranks are no multiple"),
        ({"batch": 1}, "--batch 1 is too small"),
        ({"pp": 2, "zero": 1}, "--zero is for --pp 1"),
        ({"batch": 4, "pp": 2, "micro_batches": 3}, "--batch 4 is too small"),
    ],
)
def test_bad_input_is_one_line(given: dict[str, Any], says: str) -> None:
    assert says in refused(own.main, 4, own.OwnOptions(**given))


def test_a_strategy_says_what_it_takes() -> None:
    model, mesh = own.VisionTransformer(0, torch.float32), Mesh(Group.alone())
    strategies = {
        "tensor_parallel": lambda: tensor_parallel(model, mesh.group("tp")),
        "sequence_parallel": lambda: sequence_parallel(model, mesh.group("sp")),
        "expert_parallel": lambda: expert_parallel(model, mesh.group("ep")),
        "Pipeline": lambda: Pipeline(nn.Linear(2, 2), mesh, make_schedule("1f1b", 1, 1)),  # type: ignore[arg-type]
    }
    for name, strategy in strategies.items():
        with pytest.raises(TypeError) as error:
            strategy()
        line = str(error.value)
        assert line.startswith(f"{name} takes a Transformer of ours"), line
        assert "\n" not in line


def run_snippet(rt: Runtime, chapter: str) -> float:
    """Run the README's snippet for a program of one's own; return its largest difference from one device."""
    draw, c = torch.Generator().manual_seed(0), config("gpt2-tiny")
    tokens_BS, targets_BS = (torch.randint(256, (3, 16), generator=draw) for _ in range(2))
    targets_BS[0, 3] = PADDING
    plain, model = Transformer(c, 0, torch.float64), Transformer(c, 0, torch.float64)
    loss_sum, count = cross_entropy_sum(plain(tokens_BS), targets_BS)
    (loss_sum / count).backward()
    given = {"rt": rt, "model": model, "tokens_BS": tokens_BS, "targets_BS": targets_BS}
    text = (ROOT / chapter / "README.md").read_text()
    code = text.split("## In a program of your own")[1].split("```python\n")[1].split("```")[0]
    exec(code, globals() | given)
    split = [name for name, p in model.named_parameters() if placement(p)]
    found = {name: p.grad for name, p in model.named_parameters() if name not in split}
    wanted = {name: p.grad for name, p in plain.named_parameters() if name not in split}
    return largest(wanted, found).value


@pytest.mark.parametrize("chapter", ["03-tensor-parallelism", "04-sequence-parallelism"])
def test_the_readme_s_snippet_runs_as_it_is(chapter: str) -> None:
    assert max(spawn(run_snippet, 2, chapter)) <= 1e-12


OWN = """
import os, sys
import torch
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])
    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Mine()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
every = [(torch.randn(5, 3), torch.randn(5, 2)) for _ in range(3)]
batches = [(x[rank::size], y[rank::size]) for x, y in every]
loss_sum = lambda found, y: ((found - y) ** 2).sum()
"""
SHOWN = """
    model(every[0][0])  # a forward pass gathers all weights
    if rank == 0:
        torch.save([p.detach().clone() for p in model.parameters()], sys.argv[1])
"""


def test_the_snippet_of_chapter_01_trains_as_one_device(tmp_path: Path) -> None:
    text = (ROOT / "01-data-parallelism" / "README.md").read_text()
    snippet = text.split("## In a program of your own")[1].split("```python\n")[1].split("```")[0]
    script = tmp_path / "own.py"
    script.write_text(OWN + snippet + SHOWN)
    found = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.pt"
        done = torchrun(ranks, script, out, timeout=240)
        assert done.returncode == 0, done.stderr
        found.append(torch.load(out))
    for one, two in zip(*found, strict=True):
        assert (one - two).abs().max() < 1e-12
