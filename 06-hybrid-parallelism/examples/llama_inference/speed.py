"""Compare the time of generated tokens: transformers.generate, one rank, all ranks along tp, and many requests at once.

    torchrun --nproc_per_node=2 speed.py --model llama-100m
    mpirun -np 2 python speed.py --model llama-100m
    python speed.py --nproc 2 --model llama-100m

All versions write the same tokens for the same prompts, each rank with one thread, in turn. The times are those of the
tokens after the first, so without the prompt; with several requests, per token of all of them. While one rank computes,
the others wait.
"""

from __future__ import annotations

import importlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from common import comm
from common.comm import Group
from common.comm.mesh import Mesh
from common.errors import UsageError
from common.launch import spawn
from common.launch.command_line import Count, Within
from common.launch.runtime import Runtime
from common.launch.terminal import make_table
from common.lesson.runner import console, run, write_records
from common.models.huggingface import write_huggingface

from infer_engine import Engine
from infer_options import TYPES, GenerateOptions
from infer_scheduler import Request

Timed = tuple[list[int], float]  # the text of request 0; seconds per token after the first one


@dataclass
class SpeedOptions(
    GenerateOptions,
    without=(
        *("config", "checkpoint", "pp", "tp", "prompts", "file", "temperature", "top_k", "top_p", "stop"),
        *("most", "budget", "blocks", "block"),
    ),
):
    """Options of the comparison."""

    model: str = "llama-100m"
    """Name of a model in common/models/configs.py, with its initial values."""
    tokens: Annotated[int, Within(2, 10**6)] = 32
    """Tokens to write for a prompt."""
    prompt: Count = 16
    """Tokens of a prompt."""
    requests: Count = 16
    """Requests at once."""
    rounds: Annotated[int, Within(1, 1000)] = 5
    """Times that each version is timed."""


def prompt_of(o: SpeedOptions, number: int) -> tuple[int, ...]:
    """Return the prompt of a request: any tokens, other ones for each request."""
    vocabulary = o.shape().vocabulary
    return tuple((31 * i + 7 * number + 1) % vocabulary for i in range(o.prompt))


class Clock:
    """Clock readings of the tokens of a text; also a streamer of transformers, whose first call is the prompt."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, _: object) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """No-op: `generate` calls it."""


def by_us(engine: Engine, o: SpeedOptions, count: int) -> Timed:
    """Write the texts of requests 0 to count - 1 at once."""
    sequences, clock = [engine.add(Request(prompt_of(o, i), o.tokens)) for i in range(count)], Clock()
    while engine.busy:
        engine.step()
        clock.put(None)
    return sequences[0].written, (clock.at[-1] - clock.at[0]) / ((o.tokens - 1) * count)


def by_transformers(rt: Runtime, o: SpeedOptions, engine: Engine) -> Callable[[], Timed]:
    """Return a function that writes the text of request 0 by transformers.generate, with its cache."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError:
        raise UsageError("the comparison needs transformers: pip install transformers") from None
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(engine.config, dict(engine.model.named_parameters()), Path(folder))
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=TYPES[o.dtype])
    model.to(rt.device).eval()
    tokens_1S = torch.tensor([prompt_of(o, 0)], device=rt.device)
    options = {"max_new_tokens": o.tokens, "do_sample": False, "pad_token_id": 0}

    def generate() -> Timed:
        clock = Clock()
        text = model.generate(tokens_1S, attention_mask=torch.ones_like(tokens_1S), streamer=clock, **options)
        return text[0, o.prompt :].tolist(), (clock.at[-1] - clock.at[1]) / (o.tokens - 1)

    return generate


def main(rt: Runtime, o: SpeedOptions) -> bool:
    """Time each version in turn; print milliseconds per token and ratios. False if two texts differ."""
    torch.set_num_threads(1)
    most = max(2, o.requests)
    o = replace(o, most=most, budget=most * o.prompt, blocks=most * -(-(o.prompt + o.tokens) // o.block))
    versions: dict[str, Callable[[], Timed]] = {}
    if rt.rank == 0:
        one = o.engine(rt, Mesh(Group.alone()))
        versions["transformers.generate"] = by_transformers(rt, o, one)
        versions["one rank"] = partial(by_us, one, o, 1)
        versions[f"one rank, {o.requests} at once"] = partial(by_us, one, o, o.requests)
    if rt.world_size > 1:
        ranks = o.engine(rt, o.mesh(rt))
        versions[f"tp={rt.world_size}"] = partial(by_us, ranks, o, 1)
        versions[f"tp={rt.world_size}, {o.requests} at once"] = partial(by_us, ranks, o, o.requests)
    names = comm.everyones(list(versions), rt.world)[0]
    times: dict[str, list[float]] = {name: [] for name in names}
    texts = []
    for turn in range(o.rounds + 1):  # the first one warms up
        for name in names:
            comm.barrier(rt.world)
            if name in versions:
                text, seconds = versions[name]()
                texts.append(text)
                if turn:
                    times[name].append(seconds)
    if rt.rank == 0:
        show(rt, o, times)
        write_records(
            o.json, [{"version": name, "seconds_per_token": found} for name, found in times.items()]
        )
    return all(text == texts[0] for text in texts)


def show(rt: Runtime, o: SpeedOptions, times: dict[str, list[float]]) -> None:
    """Print milliseconds per token, and how many times as fast as one rank each version is, round by round."""
    base = times["one rank"]
    rows = []
    for name, found in times.items():
        middle = statistics.median(found)
        ratios = sorted(b / f for b, f in zip(base, found, strict=True))
        rows.append(
            (
                name,
                f"{1e3 * middle:.2f}",
                f"{(max(found) - min(found)) / middle:.0%}",
                f"{1 / middle:,.1f}",
                f"{statistics.median(ratios):.2f}",
                f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            )
        )
    title = (
        f"{o.model}, {o.dtype}, {o.tokens} tokens after a prompt of {o.prompt}; median of {o.rounds} rounds"
    )
    heads = ["version", ">ms per token", ">spread", ">tokens/s", ">times one rank", ">of all rounds"]
    console(rt).print(make_table(title, heads, rows))


if __name__ == "__main__":
    spawn.PRELOAD.append("infer_engine")
    run(main, SpeedOptions)
