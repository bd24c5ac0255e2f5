"""Compare the process group on MPI with gloo on 2, 3 and 4 ranks of one mpirun: random calls and groups.

python backend_worker.py RESULT EXAMPLES, under mpirun

Rank 0 lets hypothesis choose and shrink; each choice is broadcast, so that all ranks make the same calls.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from mpi import worker
from torch import Tensor

from common.launch.mpi_backend import register

TYPES = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8"]
OPS = ["SUM", "PRODUCT", "MIN", "MAX"]
# Each group is made once per setting: on one host, or on several; the key gives the ranks per host.
SEVERAL_HOSTS = {
    2: {
        "1 + 1, in pieces, staged": {
            "FIVED_RANKS_PER_HOST": "1", "FIVED_LARGEST_MESSAGE": "1000", "FIVED_STAGED": "1"
        }
    },
    3: {"2 + 1": {"FIVED_RANKS_PER_HOST": "2"}},
    4: {"2 + 2": {"FIVED_RANKS_PER_HOST": "2"}, "3 + 1": {"FIVED_RANKS_PER_HOST": "3"}},
}  # fmt: skip
# The world under test: its communicator, number of ranks, groups, and possible settings.
WORLD, N, SUBSETS, SETTINGS = worker.WORLD, 0, [], {}


def calls() -> st.SearchStrategy[dict[str, Any]]:
    """Return hypothesis' strategy for one call of any kind on any group."""
    return st.fixed_dictionaries(
    {
        "call": st.sampled_from(
            [
                "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "reduce_scatter",
                "reduce_scatter_single", "all_to_all", "all_to_all_single", "all_to_all_views", "gather",
                "scatter", "exchange", "any_source",
            ]
        ),
        "group": st.sampled_from(range(len(SUBSETS))),
        "dtype": st.sampled_from(TYPES),
        "op": st.sampled_from(OPS),
        "elements": st.sampled_from([0, 1, 2, 7, 63, 1000, 16384, 40001]),
        "strided": st.booleans(),
        "later": st.booleans(),
        "root": st.integers(0, N - 1),
        "seed": st.integers(0, 1000),
    }
    )  # fmt: skip


def make(setting: str, ranks: list[int] | None = None, seconds: float = 60) -> Any:
    os.environ.update(SETTINGS[setting])
    group = dist.new_group(ranks, backend="fived", timeout=timedelta(seconds=seconds))
    for name in SETTINGS[setting]:
        del os.environ[name]
    return group


def numbers(c: dict[str, Any], rank: int, piece: int = 0, elements: int | None = None) -> Tensor:
    """Return small whole numbers, which every type adds and multiplies exactly in any order."""
    generator = torch.Generator().manual_seed(1000 * c["seed"] + 10 * rank + piece)
    n = c["elements"] if elements is None else elements
    x = torch.randint(0, 3, (2 * n,), generator=generator).to(getattr(torch, c["dtype"]))
    x = x[::2] if c["strided"] else x[:n]
    return x.contiguous() if "dense" in c else x


def run(c: dict[str, Any], group: dist.ProcessGroup, me: int, members: tuple[int, ...]) -> list[Tensor]:
    """Make the call on one group; return every tensor that it fills."""
    n, x = len(members), numbers(c, me)
    root = members[c["root"] % n]
    op = getattr(dist.ReduceOp, c["op"])
    sizes = [(c["elements"] + r) % 50 for r in range(n)]  # uneven; from rank a to b: sizes[(a + b) % n]
    empty = [torch.zeros_like(x) for _ in range(n)]
    later = {"group": group, "async_op": c["later"]}
    match c["call"]:
        case "all_reduce":
            work, out = dist.all_reduce(x, op, **later), [x]
        case "broadcast":
            work, out = dist.broadcast(x, root, **later), [x]
        case "reduce":
            work, out = dist.reduce(x, root, op, **later), [x] if members[me] == root else []
        case "all_gather":
            work, out = dist.all_gather(empty, x, **later), empty
        case "all_gather_single":
            out = [torch.empty(n * x.numel(), dtype=x.dtype)]
            work = dist.all_gather_single(out[0], x.contiguous(), **later)
        case "reduce_scatter":
            pieces = [numbers(c, me, r) for r in range(n)]
            work, out = dist.reduce_scatter(empty[0], pieces, op, **later), empty[:1]
        case "reduce_scatter_single":
            pieces = torch.cat([numbers(c, me, r) for r in range(n)])
            work, out = dist.reduce_scatter_single(empty[0], pieces, op, **later), empty[:1]
        case "all_to_all":
            pieces = [numbers(c, me, r) for r in range(n)]  # gloo's pieces are equal here
            work, out = dist.all_to_all(empty, pieces, **later), empty
        case "all_to_all_single":
            splits = [sizes[(me + r) % n] for r in range(n)]
            pieces = torch.cat([numbers(c, me, r, s) for r, s in enumerate(splits)])
            out = [torch.zeros(sum(splits), dtype=x.dtype)]
            work = dist.all_to_all_single(out[0], pieces, splits, splits, **later)
        case "all_to_all_views":  # rows of `long` numbers, with gaps between them
            rows, long = 1 + c["elements"] % 500, 5 + c["seed"] % 90
            base = numbers(c, me, 0, n * 3 * (rows + 1) * 100).reshape(n, 3, rows + 1, 100)
            pieces = [base[r, :, 1:, 3 : 3 + long].transpose(0, 1) for r in range(n)]
            whole = torch.zeros(rows, n, 3, long + 7, dtype=x.dtype)
            views = [whole[:, r, :, 2 : 2 + long] for r in range(n)]
            gaps = [whole[..., :2], whole[..., 2 + long :]]
            if "dense" in c:
                views, pieces = ([t.contiguous() for t in given] for given in (views, pieces))
            work, out = dist.all_to_all(views, pieces, **later), [*views, *gaps]
        case "gather":
            here = members[me] == root
            work, out = dist.gather(x, empty if here else None, root, **later), empty if here else []
        case "scatter":
            pieces = [numbers(c, me, r) for r in range(n)] if members[me] == root else None
            work, out = dist.scatter(empty[0], pieces, root, **later), empty[:1]
        case "exchange":
            out, after, before = empty[:1], members[(me + 1) % n], members[(me - 1) % n]
            if n == 1:
                return []
            both = [
                dist.P2POp(dist.isend, x.contiguous(), after, group),
                dist.P2POp(dist.irecv, out[0], before, group),
            ]
            for message in dist.batch_isend_irecv(both):
                message.wait()
            return out
        case "any_source":
            # the root hears all others, in whatever order they come; tags keep calls apart; gloo takes none empty
            x = x if x.numel() else numbers(c, me, elements=1)
            if members[me] != root:
                dist.send(x.contiguous(), root, group=group, tag=c["seed"])
                return []
            out = []
            for _ in range(n - 1):
                y = torch.zeros_like(x)
                source = dist.recv(y, group=group, tag=c["seed"])
                out.append((source, y))
            return [y for _, y in sorted(out, key=lambda pair: pair[0])]
    if work is not None and c["later"]:
        work.wait()
    return out


def same(c: dict[str, Any], groups: dict[str, list[Any]]) -> str:
    """Return the differences between the two backends on this rank; empty if there are none."""
    members = SUBSETS[c["group"]]
    if WORLD.rank not in members:
        return ""
    me = members.index(WORLD.rank)
    # gloo also reduces the memory between the elements of a strided tensor: it gets a dense one
    theirs = run(c | {"dense": True}, groups["gloo"][c["group"]], me, members)
    ours = {setting: run(c, groups[setting][c["group"]], me, members) for setting in SETTINGS}
    return "; ".join(
        f"rank {WORLD.rank}, {setting}: {c} gives {a.flatten()[:8].tolist()}, gloo {b.flatten()[:8].tolist()}"
        for setting, mine in ours.items()
        for a, b in zip(mine, theirs, strict=True)
        if not torch.equal(a, b)
    )


def agree(example: list[dict[str, Any]], groups: dict[str, list[Any]]) -> list[str]:
    """Make the calls; return the differences found on any rank."""
    found = [message for c in example if (message := same(c, groups))]
    return [message for part in WORLD.allgather(found) for message in part]


def property_test(groups: dict[str, list[Any]], examples: int) -> str:
    """Let rank 0 choose the calls; return the first failure, shrunk, or an empty string."""
    if WORLD.rank > 0:
        while (example := WORLD.bcast(None)) is not None:
            agree(example, groups)
        return ""

    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(calls(), min_size=1, max_size=6))
    def check(example: list[dict[str, Any]]) -> None:
        WORLD.bcast(example)
        assert agree(example, groups) == []

    try:
        check()
    except AssertionError as error:
        return str(error)
    finally:
        WORLD.bcast(None)
    return ""


def raised(call: Any) -> str:
    """Return the text of the exception that `call` raises, or an empty string."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def what_gloo_lacks(setting: str) -> dict[str, Any]:
    """Check averages, bool, complex, and bfloat16 summed in float32 against the formula: gloo lacks them."""
    rank, total = WORLD.rank, N * (N + 1) / 2
    group = make(setting)
    results: dict[str, Any] = {}
    x = torch.full((5,), float(rank + 1))
    y = torch.empty(1)
    dist.reduce_scatter_single(y, x[:N].contiguous(), dist.ReduceOp.AVG, group)
    dist.all_reduce(x, dist.ReduceOp.AVG, group)
    results["avg"] = x.tolist() == [total / N] * 5 and y.tolist() == [total / N]
    x = torch.full((5,), float(rank + 1))
    dist.reduce(x, N - 1, dist.ReduceOp.AVG, group)
    results["avg on one"] = x.tolist() == [total / N if rank == N - 1 else rank + 1] * 5
    y = torch.tensor([rank == 0, False, True])
    dist.all_reduce(y, group=group)
    results["bool"] = y.tolist() == [True, False, True]
    z = torch.full((3,), complex(1, rank), dtype=torch.complex128)
    dist.all_reduce(z, group=group)
    results["complex"] = z.tolist() == [complex(N, total - N)] * 3
    # 1 + 2^-8 is no bfloat16: summed in bfloat16, each small term is lost; in float32, two make one step. A host's sum
    # is rounded before it leaves.
    terms = [1.0, 2.0**-8, 2.0**-8] + [0.0] * N
    b = torch.full((4,), terms[rank], dtype=torch.bfloat16)
    dist.all_reduce(b, group=group)
    per_host = int(SETTINGS[setting].get("FIVED_RANKS_PER_HOST", N))
    hosts = [torch.tensor(sum(terms[i : min(i + per_host, N)])).bfloat16() for i in range(0, N, per_host)]
    results["bfloat16"] = b.tolist() == [float(sum(h.float() for h in hosts).bfloat16())] * 4
    big = torch.ones(3 * 2**20 + 1)
    works = [dist.all_reduce(big[i::3].contiguous(), group=group, async_op=True) for i in range(3)]
    results["futures"] = [bool(w.get_future().wait() is not None) for w in works] == [True] * 3
    # several under way at once, waited for in the wrong order
    many = [torch.full((50_000,), float(i)) for i in range(8)]
    under_way = [dist.all_reduce(t, group=group, async_op=True) for t in many]
    for w in reversed(under_way):
        w.wait()
    results["many"] = all(t.eq(i * N).all().item() for i, t in enumerate(many))
    return results


WHOLE = ["int64", "int32", "int16", "int8", "uint8", "bool"]
OF_TYPES = {
    "SUM": [*TYPES, "complex64"], "PRODUCT": TYPES, "AVG": [t for t in TYPES if t not in WHOLE],
    "MIN": [*TYPES, "bool"], "MAX": [*TYPES, "bool"], "BAND": WHOLE, "BOR": WHOLE, "BXOR": WHOLE
}  # fmt: skip


def reduced(terms: Tensor, op: str) -> Tensor:
    """Return the reduction of `terms` over its first dimension."""
    bits = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    if op in bits:
        return functools.reduce(bits[op], terms)
    names = {"SUM": "sum", "PRODUCT": "prod", "AVG": "mean", "MIN": "amin", "MAX": "amax"}
    return getattr(terms, names[op])(0).to(terms.dtype)


def all_types(setting: str) -> dict[str, bool]:
    """Compare all-reduces of every operation and type with the formula, for a small tensor and for a large one."""
    group, results = make(setting), {}
    for elements in (5, 5000):
        generator = torch.Generator().manual_seed(elements)
        terms = torch.randint(1, 4, (N, elements), generator=generator)
        for op, dtype in ((op, dtype) for op, types in OF_TYPES.items() for dtype in types):
            given = terms.to(getattr(torch, dtype))
            x = given[WORLD.rank].clone()
            dist.all_reduce(x, getattr(dist.ReduceOp, op), group)
            close = torch.isclose(x, reduced(given, op)) if op == "AVG" else x == reduced(given, op)
            results[f"{op} of {elements} {dtype}"] = bool(close.all())
    return results


def interpreter_is_free() -> bool:
    """Return True if a thread of Python runs while its rank waits in a small all-reduce.

    The last rank comes only after a message of a thread of rank 0.
    """
    last = N - 1
    if WORLD.rank == last:
        WORLD.recv(source=0)
    else:
        turn = threading.Lock()
        turn.acquire()
        thread = threading.Thread(target=lambda: (turn.acquire() and WORLD.rank) or WORLD.send(None, last))
        thread.start()
        turn.release()
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item() == N


def mismatched(setting: str) -> dict[str, str]:
    """Return the errors of calls that do not match; each call breaks its own group."""
    rank = WORLD.rank
    results = {}
    g = make(setting)
    results["sizes"] = raised(lambda: dist.all_reduce(torch.ones(4 + rank), group=g))
    results["after"] = raised(lambda: dist.all_reduce(torch.ones(4), group=g))
    g = make(setting)
    mine = (lambda: dist.all_reduce(torch.ones(4), group=g)) if rank else lambda: dist.barrier(g)
    results["calls"] = raised(mine)
    results["type"] = raised(lambda: dist.all_reduce(torch.ones(1, dtype=torch.complex64), dist.ReduceOp.MAX))
    return results


def timed_out() -> dict[str, dict[str, str]]:
    """Return, per setting, the errors of three timeouts.

    Rank 0 receives from rank 1, which never sends; the last rank never enters a barrier, nor the last of several small
    all-reduces.
    """
    names = ("recv", "late", "late for little")
    groups = {(s, name): make(s, seconds=2) for s in SETTINGS for name in names}
    WORLD.Barrier()  # from here on, a rank has 2 s to be where it should be
    works: dict[tuple[str, str], dist.Work] = {}
    for (setting, name), g in groups.items():
        if name == "recv" and WORLD.rank == 0:
            works[setting, name] = dist.irecv(torch.ones(1), 1, group=g)
        if name == "late" and WORLD.rank != N - 1:
            works[setting, name] = dist.barrier(g, async_op=True)
        if name == "late for little":
            for _ in range(10):
                dist.all_reduce(torch.ones(1), group=g)
            if WORLD.rank != N - 1:
                works[setting, name] = dist.all_reduce(torch.ones(1), group=g, async_op=True)
    found: dict[str, dict[str, str]] = {setting: dict.fromkeys(names, "") for setting in SETTINGS}
    for (setting, name), work in works.items():
        found[setting][name] = raised(work.wait)
    WORLD.Barrier()
    return found


def everything(ranks: int, examples: int) -> dict[str, Any]:
    """Run all checks on a world of `ranks` ranks."""
    global WORLD, N, SUBSETS, SETTINGS
    WORLD, N = worker.WORLD.Create_group(worker.WORLD.group.Incl(range(ranks))), ranks
    SUBSETS = [s for size in range(1, N + 1) for s in itertools.combinations(range(N), size)]
    SETTINGS = {"one host": {}} | SEVERAL_HOSTS[N]
    folder = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
    store = dist.FileStore(str(Path(folder, "store")), N)
    dist.init_process_group(
        "fived", store=store, rank=WORLD.rank, world_size=N, timeout=timedelta(seconds=60)
    )
    groups = {setting: [make(setting, list(s)) for s in SUBSETS] for setting in SETTINGS}
    groups["gloo"] = [dist.new_group(list(s), backend="gloo") for s in SUBSETS]
    found = {
        "property": property_test(groups, examples),
        "beyond": {setting: what_gloo_lacks(setting) | all_types(setting) for setting in SETTINGS},
        "interpreter is free": interpreter_is_free(),
    }
    late = timed_out()
    found["errors"] = {s: WORLD.allgather(mismatched(s) | late[s]) for s in SETTINGS}
    dist.destroy_process_group()
    return found


def main(_: str, examples: str) -> None:
    register()
    torch.set_num_threads(1)
    found = worker.on_first_ranks(SEVERAL_HOSTS, lambda ranks: everything(ranks, int(examples)))
    worker.write({ranks: each[0] for ranks, each in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
