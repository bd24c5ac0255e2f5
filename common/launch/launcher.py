"""Rank and world size of this process, read from the environment of the launcher that started it.

torchrun, Open MPI, MPICH (and Intel MPI), Slurm, or none. Slurm's variables describe the allocation, so any
other launcher inside it has priority. Two other launchers that disagree, or one whose variables are
incomplete, are an error that names the variables: taking either would let a run train with the wrong ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import UsageError


@dataclass(frozen=True)
class Launch:
    """Rank of this process in the world (rank of world_size) and on its host."""

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


# Each launcher's names for rank, world size, local rank, local world size; of two the first that is set counts.
# The last may be missing: then one host is assumed to hold all ranks.
FAMILIES = {
    "torchrun": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE",
    "openmpi": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpich": "PMI_RANK PMI_SIZE MPI_LOCALRANKID|PMI_LOCAL_RANK MPI_LOCALNRANKS|PMI_LOCAL_SIZE",
    "slurm": "SLURM_PROCID SLURM_STEP_NUM_TASKS|SLURM_NTASKS SLURM_LOCALID "
    "SLURM_STEP_TASKS_PER_NODE|SLURM_TASKS_PER_NODE",
}


def _of_this_node(tasks: str, env: Mapping[str, str]) -> str:
    """Return this node's count from Slurm's list of tasks per node: "2(x3),1" means 2, 2, 2 and 1."""
    nodes: list[str] = []
    for part in tasks.split(","):
        count, _, times = part.partition("(x")
        nodes += [count] * int(times.rstrip(")") or 1)
    return nodes[min(int(env.get("SLURM_NODEID", 0)), len(nodes) - 1)]


def _read(env: Mapping[str, str], launcher: str) -> tuple[Launch, str] | None:
    """Return the launch by one launcher's variables, and these as text; None if it did not start us."""
    names = [alternatives.split("|") for alternatives in FAMILIES[launcher].split()]
    found = [next((n for n in alternatives if n in env), None) for alternatives in names]
    if launcher == "slurm" and (found[0] is None or "SLURM_STEP_ID" not in env):
        return None  # inside an allocation, or its batch script, not started by srun
    if launcher == "mpich" and None in found[:3] and "SLURM_STEP_ID" in env:
        return None  # srun gives its tasks some of MPICH's variables
    if not any(found[:3]):
        return None
    shown = ", ".join(f"{n}={env[n]}" for n in found if n)
    if missing := [" or ".join(names[i]) for i in range(3) if found[i] is None]:
        raise UsageError(
            f"the environment of {launcher} is incomplete: {shown} without {', '.join(missing)}; "
            f"start with the launcher, or unset what is left over"
        )
    try:
        values = [int(_of_this_node(env[n], env) if "TASKS_PER_NODE" in n else env[n]) for n in found if n]
    except ValueError:
        raise UsageError(
            f"the environment of {launcher} holds something that is not a number: {shown}"
        ) from None
    rank, size, local, local_size = (*values, values[1])[:4]
    if not (0 <= rank < size and 0 <= local < local_size <= size):
        raise UsageError(
            f"the environment of {launcher} is contradictory: {shown}; "
            f"a rank lies between 0 and its world size minus 1, and no host holds more ranks than the world"
        )
    return Launch(launcher, rank, size, local, local_size), shown


def resolve(env: Mapping[str, str] | None = None) -> Launch:
    """Return the launch that the environment describes; a single process if no launcher is found.

    Raises UsageError for partial or contradictory variables, naming them.
    """
    env = os.environ if env is None else env
    found = [read for name in ("torchrun", "openmpi", "mpich") if (read := _read(env, name))]
    if not found and "PMIX_RANK" in env and "SLURM_PROCID" not in env:
        raise UsageError(
            f"PMIX_RANK={env['PMIX_RANK']} is set without a world size; start with mpirun, srun or torchrun"
        )
    for (first, a), (other, b) in itertools.pairwise(found):
        if (first.rank, first.world_size) != (other.rank, other.world_size):
            raise UsageError(
                f"{first.launcher} and {other.launcher} contradict each other: {a} against {b}; unset one family"
            )
    if found:
        launch, shown = found[0]
        if launch.launcher != "torchrun" and env.get("PMIX_RANK", str(launch.rank)) != str(launch.rank):
            raise UsageError(f"PMIX_RANK={env['PMIX_RANK']} contradicts {shown}; unset one of them")
        return launch
    slurm = _read(env, "slurm")
    return slurm[0] if slurm else Launch("none")
