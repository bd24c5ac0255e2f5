"""Fit a machine's constants to measured steps: those of vTrain that split.toml sets aside for it, and no others.

    python plan_fit.py --vtrain FOLDER        prints the constants that machines/a100-80gb*.toml hold

Eight constants, by least squares of the logarithm of predicted over measured seconds; rows far off count less (soft
L1), because some of the measured steps take several times as long as their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy.optimize import least_squares

from common.launch.command_line import Checked, parse
from common.launch.program import run_program

from plan_machine import Machine
from plan_rows import VTRAIN_URL, Row, calibrates, read_vtrain
from plan_time import predict

CONSTANTS = ("sustained_products", "sustained_memory", "start", "launch", "launch_collective", "step")
OF_LINKS = ("efficiency", "latency")
FAR = 0.05  # relative difference from which a row counts less


@dataclass
class FitOptions(Checked):
    """Options: where the measured steps are."""

    vtrain: Path
    f"""Checkout of {VTRAIN_URL}, a folder of its files, or one of them."""


def fitted(rows: Sequence[Row]) -> Machine:
    """Return the machine of the rows with constants that fit them best."""
    machine = rows[0].job.machine
    first = [getattr(machine, name) for name in CONSTANTS] + [
        getattr(machine.links, name) for name in OF_LINKS
    ]

    def differences(logarithms: Sequence[float]) -> list[float]:
        numbers = [math.exp(x) for x in logarithms]
        return [_difference(row, numbers) for row in rows]

    found = least_squares(differences, [math.log(x) for x in first], loss="soft_l1", f_scale=FAR)
    return with_constants(machine, [math.exp(x) for x in found.x])


def with_constants(machine: Machine, numbers: Sequence[float]) -> Machine:
    """Return the machine with other constants, in the order of CONSTANTS and OF_LINKS."""
    of_rank: dict[str, Any] = dict(zip(CONSTANTS, numbers, strict=False))
    of_links: dict[str, Any] = dict(zip(OF_LINKS, numbers[len(CONSTANTS) :], strict=True))
    return replace(machine, **of_rank, links=replace(machine.links, **of_links))


def _difference(row: Row, numbers: Sequence[float]) -> float:
    job = replace(row.job, machine=with_constants(row.job.machine, numbers))
    return math.log(predict(job, row.plan).step / row.seconds)


def main() -> int:
    """Print the constants."""
    o = parse(FitOptions, __doc__)
    rows = [row for of_set in read_vtrain(o.vtrain).values() for row in of_set if calibrates(row)]
    machine = fitted(rows)
    print(f"# fitted to {len(rows)} rows")
    for name in CONSTANTS:
        print(f"{name} = {getattr(machine, name):.4g}")
    for name in OF_LINKS:
        print(f"links.{name} = {getattr(machine.links, name):.4g}")
    return 0


if __name__ == "__main__":
    run_program(main)
