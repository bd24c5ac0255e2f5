"""Plan a training run: which mesh, how fast, how much memory.

    python plan.py --model llama-7b --gpus 16 --machine h100 --batch 1024 --sequence 4096
    python plan.py --model llama2-70b --gpus 1024 --why pp=4,tp=8      # why that is slower, or cannot run
    python plan.py --model gpt3-175b --gpus 512 --fix tp=8 --explain --plot plan.svg

Every plan that the model and the batch allow is ranked by its predicted time: axes, micro-batch, schedule, ZeRO,
checkpointing. docs/planner.md says how times and memory are predicted, and how far they are off.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Literal

from common.errors import UsageError
from common.launch.command_line import Checked, Within, check_folder, parse
from common.launch.program import run_program
from common.launch.terminal import terminal

from plan_job import Job
from plan_layout import AXES, CODES, Plan
from plan_machine import SIZES, read_machine
from plan_models import model
from plan_search import GIB, Choice, Found, refusal, search
from plan_show import command, comparison, explanation, record, table

DAY = 86400
NUMBERS = {f.name for f in fields(Plan) if f.type == "int"}
CHOICES = {
    "schedule": ("1f1b", "interleaved", "zb-h1", "zb-v"),
    "zero": ("0", "1", "2", "3"),
    "kept": ("all", "no-scores", "inputs"),
    "sequence_parallel": ("yes", "no"),
}


@dataclass
class PlanOptions(Checked):
    """Options: what to train, on what, and what to show."""

    model: str = "llama-7b"
    """Name of a model, of this course or a published one, or a config.json of Hugging Face."""
    gpus: Annotated[int, Within(1, 2**17)] = 16
    """Ranks, one for each GPU."""
    machine: str = "h100"
    """Name of a machine, or a .toml file that describes yours."""
    batch: Annotated[int, Within(1, 2**20)] = 1024
    """Samples in the global batch."""
    sequence: Annotated[int, Within(1, 2**24)] = 4096
    """Tokens per sample."""
    code: Literal["ours", "megatron-core"] = "ours"
    """Program that trains: this course's trainer, or Megatron-Core."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type of products and activations; default: bfloat16, or the only one that the machine has a peak for."""
    tokens: Annotated[float, Within(1, 1e18)] | None = None
    """Tokens to train on: shows the days that they take."""
    top: Annotated[int, Within(1, 1000)] = 10
    """Plans to show."""
    fix: str = ""
    """Values that plans must have, such as "tp=8,pp=4,zero=1,schedule=1f1b"."""
    why: str = ""
    """Say why plans with these values are not the best ones, or cannot run; such as "pp=4,tp=8"."""
    explain: bool = False
    """Show where the best plan's time goes, its memory and its bytes."""
    json: Path | None = None
    """File to write the shown plans to."""
    plot: Path | None = None
    """Picture to write: the plans' time and memory, and the best one's schedule."""


def wanted(text: str, option: str) -> dict[str, object]:
    """Return the values that a text such as "tp=8,zero=1" asks for. Raises UsageError where it is none."""
    known = {f.name for f in fields(Plan)} - {"folded"}  # a search lays whole experts along ep alone
    found: dict[str, object] = {}
    for word in text.replace(",", " ").split():
        key, _, value = word.partition("=")
        name = key.replace("-", "_")
        if name not in known or not value:
            raise UsageError(f"--{option} {word}: give name=value with one of {', '.join(sorted(known))}")
        if name in found:
            raise UsageError(f"--{option} {word}: {key} is there twice")
        if name in NUMBERS and not (value.isdecimal() and len(value) < 10 and (int(value) or name == "zero")):
            raise UsageError(f"--{option} {word:.40}: {key} is a whole number, at least 1")
        if name in CHOICES and value not in CHOICES[name]:
            raise UsageError(f"--{option} {word}: {key} is one of {', '.join(CHOICES[name])}")
        if name == "sequence_parallel":
            found[name] = value == "yes"
        else:
            found[name] = int(value) if name in NUMBERS else value.replace("no-scores", "no scores")
    return found


def make_job(o: PlanOptions) -> Job:
    """Return the job that the options describe. Raises UsageError where they do not fit together."""
    machine, c = read_machine(o.machine), model(o.model)
    dtype: str = o.dtype or (next(iter(machine.peak)) if len(machine.peak) == 1 else "bfloat16")
    if dtype not in machine.peak:
        raise UsageError(f"--dtype {dtype}: {machine.name} has a peak for {', '.join(machine.peak)}")
    if c.positions == "learned" and o.sequence > c.sequence:
        raise UsageError(f"--sequence {o.sequence}: {o.model} has {c.sequence} learned positions")
    code = replace(CODES[o.code], dtype=dtype)
    if o.code != "ours":
        code = replace(code, weight_bytes=SIZES[dtype])
    return Job(c, code, machine, o.batch, o.sequence)


def reason(job: Job, ranks: int, asked: dict[str, object], found: Found) -> str:
    """Return why no plan with these values can run, after a search that found none."""
    if found.smallest:
        needs, plan = found.smallest
        room = job.machine.memory - job.machine.reserved
        return f"memory: at least {needs / GIB:.1f} GiB a rank ({plan}), of {room / GIB:.1f} on {job.machine.name}"
    axes = {axis: int(str(asked[axis])) for axis in AXES if axis in asked}
    product = math.prod(axes.values())
    if ranks % product or ("dp" in axes and len(axes) == len(AXES) and product != ranks):
        return (
            f"{' x '.join(f'{axis}={n}' for axis, n in axes.items())}: {ranks} GPUs do not divide into them"
        )
    rest = {} if "dp" in axes else {"dp": ranks // product}
    values = {"micro_batch": 1, **axes, **rest, **asked}
    return refusal(job, Plan(**values)) or "no schedule, micro-batch and stage of ZeRO together allow it"  # type: ignore[arg-type]


def show(o: PlanOptions, job: Job, found: Found, took: float) -> None:
    """Print what the options ask for."""
    out = terminal()
    out.print(table(job, o.gpus, found.best))
    out.print(
        f"{found.plans:,} plans in {took:.1f} s: {found.too_large:,} of the fastest are too large, "
        f"{found.simulated:,} simulated, the others cannot be faster"
    )
    best = found.best[0]
    if o.tokens:
        days = o.tokens / (o.batch * o.sequence) * best.time.step / DAY
        out.print(f"{o.tokens:.3g} tokens take {days:,.1f} days with the first plan")
    if o.explain:
        for part in explanation(job, best):
            out.print(part)
    if (line := command(job, best.plan, o.model)) and o.code == "ours":
        out.print(f"run the first plan:  {line}", soft_wrap=True)


def explain_why(o: PlanOptions, job: Job, best: Choice) -> None:
    """Print why plans with the values of --why cannot run, or what makes them slower."""
    asked = wanted(o.why, "why")
    found = search(job, o.gpus, asked, keep=1)
    if found.best:
        terminal().print(comparison(best, found.best[0]))
    else:
        terminal().print(f"{o.why} cannot run: {reason(job, o.gpus, asked, found)}", soft_wrap=True)


def main() -> int:
    """Print the best plans."""
    o = parse(PlanOptions, __doc__)
    job, fixed, began = make_job(o), wanted(o.fix, "fix"), time.perf_counter()
    wanted(o.why, "why")  # refused now, not after the search
    if o.plot and o.plot.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {o.plot}: give a file that ends in .svg, .png or .pdf")
    for option, path in (("json", o.json), ("plot", o.plot)):
        if path:
            check_folder(option, path, path.absolute().parent)
            if path.is_dir():
                raise UsageError(f"--{option} {path} is a folder")
    found = search(job, o.gpus, fixed, o.top)
    if not found.best:
        said = reason(job, o.gpus, fixed, found)
        raise UsageError(f"no plan for {o.model} on {o.gpus} x {job.machine.name}: {said}")
    show(o, job, found, time.perf_counter() - began)
    if o.why:
        explain_why(o, job, found.best[0])
    if o.json:
        o.json.write_text(json.dumps([record(job, choice) for choice in found.best], indent=1) + "\n")
    if o.plot:
        from plan_picture import draw

        draw(job, found.best, o.plot)
    return 0


if __name__ == "__main__":
    run_program(main)
