"""Compare predicted with measured steps, and with predictions that know nothing: the planner's own errors.

    python validate.py                                   # rows of papers, which the repository holds
    python validate.py --vtrain FOLDER --json rows.jsonl # and vTrain's, from a checkout that you have
    python validate.py --simumax FILE --nanotron FILE    # and memory of others' runs

It compares seconds of a step, memory, bubbles of pipelines (plan_bubbles.py) and mixtures of experts (plan_moe.py).

For each set of steps it prints the mean absolute error (MAPE), the mean error (bias) and the largest one; within groups
that ask for the same model, GPUs and batch, how well plans are ranked (Spearman), and the regret: how much longer the
plan takes that would be chosen than the fastest measured one. The null models are one constant share of the peak, and
the same with the bubble of 1F1B; both are fitted to the very rows that they predict, which the planner's constants are
not.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.launch.command_line import Checked, check_folder, parse
from common.launch.program import run_program
from common.launch.terminal import make_table, terminal

from plan_bubbles import bubble_tables, read_bubbles
from plan_moe import moe_tables, read_moe
from plan_rows import VTRAIN_URL, Row, calibrates, read_papers, read_vtrain
from plan_rows_memory import SIMUMAX_URL, memory_error, memory_table, read_nanotron, read_simumax
from plan_time import predict


@dataclass
class ValidateOptions(Checked):
    """Options: where other repositories' files are, and where rows go."""

    vtrain: Path | None = None
    """Checkout of https://github.com/VIA-Research/vTrain, a folder of its files, or one of them."""
    simumax: Path | None = None
    """Checkout of https://github.com/MooreThreads/SimuMax, or its table of B200 runs: measured memory."""
    nanotron: Path | None = None
    """CSV of nanotron's best configurations: measured memory."""
    json: Path | None = None
    """File to write a record per row to: set, gpus, batch, hidden, layers, pp, dp, tp, micro_batch, seconds."""


@dataclass(frozen=True)
class Score:
    """Errors of predictions, and how well they rank plans."""

    n: int
    mape: float
    bias: float
    largest: float
    rank: float | None
    """Median over groups of Spearman's rank correlation."""
    regret: float | None
    """Mean over groups."""


def predicted(row: Row) -> float:
    """Return the planner's seconds."""
    return predict(row.job, row.plan).step


def one_constant(rows: Sequence[Row], bubble: bool = False) -> Callable[[Row], float]:
    """Return the null model: operations at one share of the peak, fitted to these rows; with the bubble of 1F1B."""

    def ideal(row: Row) -> float:
        p, M = row.plan, row.plan.micro_batches(row.job.batch)
        return row.flops / row.job.peak * (1 + (p.pp - 1) / (p.chunks * M) if bubble else 1)

    share = statistics.geometric_mean(ideal(row) / row.seconds for row in rows)
    return lambda row: ideal(row) / share


def score(rows: Sequence[Row], seconds: Callable[[Row], float]) -> Score:
    """Return how good a prediction is."""
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    errors = []
    for row in rows:
        found = seconds(row)
        errors.append(found / row.seconds - 1)
        groups[row.group].append((found, row.seconds))
    sizes = [abs(error) for error in errors]
    ranks = [spearman(pairs) for pairs in groups.values() if len(pairs) > 2]
    regrets = [min(pairs)[1] / min(s for _, s in pairs) - 1 for pairs in groups.values() if len(pairs) > 1]
    return Score(
        len(rows),
        statistics.mean(sizes),
        statistics.mean(errors),
        max(sizes),
        statistics.median(ranks) if ranks else None,
        statistics.mean(regrets) if regrets else None,
    )


def spearman(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the correlation of the two ranks; equal numbers have their mean rank. 0 if one of them is constant."""
    one, two = zip(*pairs, strict=True)
    a, b = _ranks(one), _ranks(two)
    return statistics.correlation(a, b) if len(set(a)) > 1 and len(set(b)) > 1 else 0.0


def _ranks(numbers: Sequence[float]) -> list[float]:
    return [sum(x < y for x in numbers) + (sum(x == y for x in numbers) - 1) / 2 for y in numbers]


def sets(o: ValidateOptions) -> dict[str, list[Row]]:
    """Return the rows by set; those that calibrated the machine stand apart."""
    rows = read_papers()
    for name, found in (read_vtrain(o.vtrain) if o.vtrain else {}).items():
        rows[f"{name}, held out"] = [row for row in found if not calibrates(row)]
        rows[f"{name}, calibration"] = [row for row in found if calibrates(row)]
    return {name: found for name, found in rows.items() if found}


def lines(name: str, rows: Sequence[Row]) -> Iterable[tuple[str, ...]]:
    """Yield the table's lines for one set: the planner, and the null models."""
    models = {
        name: predicted,
        "  one constant": one_constant(rows),
        "  constant x bubble": one_constant(rows, bubble=True),
    }
    for label, model in models.items():
        s = score(rows, model)
        yield (
            label,
            str(s.n),
            f"{s.mape:.1%}",
            f"{s.bias:+.1%}",
            f"{s.largest:.0%}",
            "" if s.rank is None else f"{s.rank:.2f}",
            "" if s.regret is None else f"{s.regret:.1%}",
        )


def memory_sets(o: ValidateOptions, rows: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Return the rows with measured memory, by set."""
    found = {name: [row for row in of_set if row.gib] for name, of_set in rows.items()}
    found["simumax-b200"] = read_simumax(o.simumax) if o.simumax else []
    found["nanotron"] = read_nanotron(o.nanotron) if o.nanotron else []
    return {name: of_set for name, of_set in found.items() if of_set}


def records(rows: dict[str, list[Row]], held: dict[str, list[Row]]) -> Iterable[dict[str, object]]:
    """Yield the records for --json: of steps in seconds, then of memory in GiB."""
    for row in (row for found in rows.values() for row in found):
        yield row.record | {"predicted": predicted(row)}
    for row in (row for found in held.values() for row in found):
        gib = {"measured": row.gib, "predicted": (1 + memory_error(row)) * (row.gib or 0)}
        yield row.record | {"set": f"{row.dataset}, memory"} | gib


def main() -> int:
    """Print the tables of errors."""
    o = parse(ValidateOptions, __doc__)
    if o.json:
        check_folder("json", o.json, o.json.absolute().parent)
    rows = sets(o)
    held = memory_sets(o, rows)
    heads = ["set", ">rows", ">MAPE", ">bias", ">largest", ">rank correlation", ">regret"]
    table = make_table("predicted against measured seconds of a step", heads)
    for name, found in rows.items():
        for line in lines(name, found):
            table.add_row(*line)
    for made in (table, memory_table(held), *bubble_tables(read_bubbles()), *moe_tables(read_moe())):
        terminal().print(made)
    if not o.vtrain:
        terminal().print(f"with --vtrain FOLDER also the rows of {VTRAIN_URL}", soft_wrap=True)
    if not o.simumax:
        terminal().print(f"with --simumax FOLDER also the memory of {SIMUMAX_URL}", soft_wrap=True)
    if o.json:
        o.json.write_text("".join(json.dumps(record) + "\n" for record in records(rows, held)))
    return 0


if __name__ == "__main__":
    run_program(main)
