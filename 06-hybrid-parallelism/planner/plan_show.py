"""What plan.py prints: the best plans, one plan's time, memory and bytes, why a plan is not among the best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from rich.markup import escape
from rich.table import Table

from common.launch.terminal import make_table
from common.models.configs import CONFIGS

from plan_bytes import step_bytes
from plan_job import Job
from plan_layout import AXES, Plan
from plan_memory import Memory
from plan_search import GIB, Choice, divisors
from plan_size import total


def title(job: Job, ranks: int) -> str:
    """Return a line that says what is planned."""
    c = job.config
    return escape(
        f"{total(c) / 1e9:.3g} B parameters on {ranks} x {job.machine.name}, "
        f"{job.batch:,} samples of {job.sequence:,} tokens per step, in {job.code.dtype}"
    )


def parts(choice: Choice) -> dict[str, float]:
    """Return the seconds of a step by what takes them; their sum is the step."""
    t = choice.time
    inside = {f"waiting for {axis}": seconds for axis, seconds in t.axes.items() if seconds}
    computing = t.busy - sum(inside.values())
    rest = max(0.0, t.step - t.pipeline - t.gradients - t.optimizer)  # 0 may be a rounding error
    bubble = {"bubble": max(0.0, t.pipeline - t.busy)} if choice.plan.pp > 1 else {}
    return {
        "computation": computing,
        **inside,
        **bubble,
        "gradient sums": t.gradients,
        "optimizer": t.optimizer,
        "fixed": rest,
    }


def table(job: Job, ranks: int, best: Sequence[Choice]) -> Table:
    """Return the table of the best plans."""
    shown = [name for name in AXES if any(choice.time.axes.get(name) for choice in best)]
    heads = ["plan", ">s per step", ">tokens/s", ">MFU", ">GiB a rank", ">bubble", ">gradient sums"]
    made = make_table(title(job, ranks), heads + [f">{axis}" for axis in shown])
    for choice in best:
        t = choice.time
        made.add_row(
            str(choice.plan),
            f"{t.step:.3g}",
            f"{job.batch * job.sequence / t.step:,.0f}",
            f"{t.mfu:.1%}",
            f"{choice.memory.total / GIB:.1f}",
            f"{t.bubble:.1%}" if choice.plan.pp > 1 else "",
            f"{t.gradients / t.step:.1%}",
            *(f"{t.axes[axis] / t.step:.1%}" if t.axes[axis] else "" for axis in shown),
        )
    return made


def explanation(job: Job, choice: Choice) -> Iterator[Table]:
    """Yield tables of a plan's time, its memory on the fullest rank, and its bytes."""
    step = choice.time.step
    rows = [(name, f"{seconds:.4g}", f"{seconds / step:.1%}") for name, seconds in parts(choice).items()]
    rows.append(("step", f"{step:.4g}", f"MFU {choice.time.mfu:.1%}"))
    yield make_table(f"{choice.plan}: time of a step", ["part", ">seconds", ">share"], rows)
    held = [(f.name, f"{getattr(choice.memory, f.name) / GIB:.2f}") for f in fields(Memory)]
    room = (job.machine.memory - job.machine.reserved) / GIB
    held.append(("all", f"{choice.memory.total / GIB:.2f} of {room:.1f}"))
    yield make_table("memory of the fullest rank", ["part", ">GiB"], held)
    sent = [(axis, f"{nbytes / 1e9:.4g}") for axis, nbytes in step_bytes(job, choice.plan).items()]
    if sent:
        yield make_table("bytes that a rank sends per step", ["axis", ">GB"], sent)


def comparison(best: Choice, other: Choice) -> Table:
    """Return a table of two plans' parts, and of the difference."""
    one, two = parts(best), parts(other)
    rows = []
    for name in dict.fromkeys([*one, *two]):
        a, b = one.get(name, 0.0), two.get(name, 0.0)
        rows.append((name, f"{a:.3g}", f"{b:.3g}", f"{b - a:+.3g}" if abs(b - a) > 1e-9 else "0"))
    rows.append(
        (
            "step",
            f"{best.time.step:.3g}",
            f"{other.time.step:.3g}",
            f"{other.time.step - best.time.step:+.3g}",
        )
    )
    a, b = (choice.memory.total / GIB for choice in (best, other))
    rows.append(("GiB of the fullest rank", f"{a:.1f}", f"{b:.1f}", f"{b - a:+.1f}"))
    heads = ["seconds of", f">{best.plan}", f">{other.plan}", ">difference"]
    return make_table(f"{other.time.step / best.time.step:.2f} times the best plan's step", heads, rows)


def record(job: Job, choice: Choice) -> dict[str, object]:
    """Return a plan as a record for programs: seconds, bytes."""
    return {
        "plan": asdict(choice.plan),
        "seconds": choice.time.step,
        "tokens_per_second": job.batch * job.sequence / choice.time.step,
        "mfu": choice.time.mfu,
        "bubble": choice.time.bubble,
        "parts": parts(choice),
        "memory": asdict(choice.memory),
        "bytes": step_bytes(job, choice.plan),
    }


def command(job: Job, plan: Plan, name: str) -> str | None:
    """Return the command that trains by this plan with this course's trainer, if the model is one of its own."""
    if name not in CONFIGS or plan.folded > 1 or job.code.dtype == "float16":
        return None
    axes = {axis: getattr(plan, axis) for axis in AXES if getattr(plan, axis) > 1}
    said: dict[str, object] = axes | {
        "batch": job.batch,
        "sequence": job.sequence,
        "micro-batches": plan.micro_batches(job.batch),
        "zero": plan.zero,
        "schedule": plan.schedule,
    }
    words = [f"--{key} {value}" for key, value in said.items()]
    words += ["--chunks", str(plan.chunks)] * (plan.schedule == "interleaved")
    words += ["--sequence-parallel"] * plan.sequence_parallel + ["--checkpointing"] * (plan.kept == "inputs")
    words += ["--precision bfloat16"] * (job.code.dtype == "bfloat16")
    ranks = max(n for n in divisors(plan.ranks) if n <= job.machine.links.ranks_per_host)
    hosts = plan.ranks // ranks
    meeting = f"--nnodes={hosts} --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 " if hosts > 1 else ""
    script = "bert_pretraining/pretrain_bert.py" if job.config.masked_head else "train_llama.py"
    return f"torchrun {meeting}--nproc_per_node={ranks} ../examples/{script} --model {name} {' '.join(words)}"
