"""Classes of a rank's time, read from its Kineto trace; and the traces of all ranks merged into one.

    |----- compute -----|-- exposed --|- idle -|     compute + exposed + idle = total
               |--- communication in flight ---|     hidden: the part of it that lies under compute

compute   an operator runs on the main thread (`aten::mm`, a custom one). On a GPU: a kernel or a copy runs that is
          not NCCL's.
exposed   the main thread is inside a c10d call, or runs no operator while communication is in flight. On a GPU: an
          NCCL kernel runs and no other.
hidden    communication is in flight during compute.
idle      none of these: Python between operators, NumPy, files, sleep.

What Kineto records of gloo (torch 2.13). `c10d::allreduce_` on the calling thread only hands the work over;
`gloo:all_reduce` on one of gloo's threads lasts until all ranks are done, late partners included. `Work.wait` leaves
no mark, neither Python's nor the one in DDP's reducer: it is a gap, so a gap during communication counts as waiting,
even if Python was busy in it. `gloo:send` and `gloo:recv` last from the call to the return of its `wait`, however
early the bytes arrived. `autograd::engine::evaluate_function` and the nodes under it cover waits in hooks and
backward functions, so that only the operators inside them are compute.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
Event = dict[str, Any]

WINDOW = "profile"  # the annotation around the profiled block
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
OPERATOR = re.compile(r"(?!autograd|torch|c10d|_c10d)\w+::\w")
IN_FLIGHT = re.compile(r"(?!nccl)\w+:(all|reduce|broadcast|gather|scatter|send|recv|barrier)")


@dataclass(frozen=True)
class Shares:
    """Seconds of one rank by class, as defined above, and its peak memory in bytes since its start."""

    total: float
    compute: float
    exposed: float
    hidden: float
    idle: float
    resident: float
    cuda: float


def sweep(*sets: Iterable[Interval]) -> Iterator[tuple[float, float, tuple[bool, ...]]]:
    """Yield the stretches between neighbouring ends: (start, end, (a, b, ...)), one flag per set.

    A flag is True if its set covers the stretch. Intervals may come in any order and overlap. Their union is where
    any flag is set, their intersection where all are.
    """
    edges = sorted(
        (t, step, k) for k, s in enumerate(sets) for a, b in s for t, step in ((a, 1), (b, -1)) if b > a
    )
    depth = [0] * len(sets)
    for (t, step, k), (after, _, _) in pairwise(edges):
        depth[k] += step
        if after > t:
            yield t, after, tuple(d > 0 for d in depth)


def _span(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _lanes(spans: Sequence[Event], main: int) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """Return the intervals of computing, inside a c10d call, and of communication in flight."""
    flying = [e for e in spans if e["cat"] == "user_annotation" and IN_FLIGHT.match(e["name"])]
    if on_gpu := [e for e in spans if e["cat"] in GPU]:
        nccl = [e for e in on_gpu if e["name"].startswith("nccl")]
        computing, calls = [e for e in on_gpu if not e["name"].startswith("nccl")], []
        flying += nccl
    else:
        mine = [e for e in spans if e["cat"] == "cpu_op" and e["tid"] == main]
        computing = [e for e in mine if OPERATOR.match(e["name"])]
        calls = [e for e in mine if re.match("_?c10d", e["name"])]
    return list(map(_span, computing)), list(map(_span, calls)), list(map(_span, flying))


def read(trace: dict[str, Any], resident: float = 0, cuda: float = 0) -> tuple[Shares, list[Event]]:
    """Return the shares of one rank, and its events with times in microseconds since 1970.

    trace: output of `export_chrome_trace`, with one annotation WINDOW around the part that counts.
    """
    base = trace["baseTimeNanoseconds"] / 1e3
    events = [
        {**e, "ts": e["ts"] + base}
        for e in trace["traceEvents"]
        if isinstance(e["pid"], int) and e["ph"] in "XMsf"
    ]
    spans = [e for e in events if e["ph"] == "X"]
    window = next(e for e in spans if e["name"] == WINDOW and e["cat"] == "user_annotation")
    seconds = dict.fromkeys(("compute", "exposed", "hidden", "idle"), 0.0)
    waits: list[Interval] = []
    for start, end, (inside, operator, call, flying) in sweep([_span(window)], *_lanes(spans, window["tid"])):
        computing = operator and not call
        waiting = call or (flying and not operator)
        for kind, holds in zip(
            seconds, (computing, waiting, computing and flying, not (computing or waiting)), strict=True
        ):
            seconds[kind] += (end - start) / 1e6 * (inside and holds)
        if inside and waiting:
            joined = waits.pop()[0] if waits and waits[-1][1] == start else start
            waits.append((joined, end))
    return Shares(window["dur"] / 1e6, **seconds, resident=resident, cuda=cuda), _named(events, window, waits)


def _named(events: list[Event], window: Event, waits: list[Interval]) -> list[Event]:
    """Return events with named threads, and a lane of exposed communication, which Kineto does not show."""
    events = [
        e for e in events if e["ph"] != "M" or (e["name"] == "thread_name" and e["tid"] != window["tid"])
    ]
    for tid, name in ((1, "communication exposed"), (window["tid"], "main thread")):
        events.append({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": name}})
    events += [
        {"ph": "X", "cat": "exposed", "name": "exposed", "tid": 1, "ts": start, "dur": end - start}
        for start, end in waits
    ]
    return events


def part(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trace before the merge."""
    return folder / f"rank{rank}.part.json"


def write(path: Path, content: object) -> None:
    """Write JSON so that the file exists whole or not at all."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, separators=(",", ":")))
    os.replace(partial, path)


def write_part(folder: Path, rank: int, host: str, shares: Shares, events: list[Event]) -> None:
    """Write this rank's trace into `folder`."""
    write(part(folder, rank), {"host": host, "shares": asdict(shares), "events": events})


def merge(folder: Path, ranks: Iterable[int]) -> dict[int, Shares]:
    """Join the parts of `ranks` into folder/trace.json and remove them; return each rank's shares.

    A process of the trace is a rank. Time 0 is the earliest event. Ranks of one host share its clock; those of
    different hosts are as far apart as the hosts' clocks (with NTP about a millisecond).
    """
    found, shares = list(ranks), {}
    joined: list[Event] = []
    for rank in found:
        content = json.loads(part(folder, rank).read_text())
        shares[rank] = Shares(**content["shares"])
        name = {"name": f"rank {rank} on {content['host']}"}
        joined.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": name})
        joined.append(
            {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        )
        for event in content["events"]:
            if event["ph"] in "sf":  # arrows of different ranks must not share their number
                event["id"] = event["id"] * (max(found) + 1) + rank
            joined.append({**event, "pid": rank})
    zero = min(e["ts"] for e in joined if e["ph"] == "X")
    for event in joined:
        event["ts"] = round(event.get("ts", zero) - zero, 3)
    write(folder / "trace.json", {"displayTimeUnit": "ms", "traceEvents": joined})
    for rank in found:
        part(folder, rank).unlink()
    return shares
