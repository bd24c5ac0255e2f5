"""Add up squares on all ranks, with a breakpoint() after the first half; rank 0 fails before the second half.

Ranks and their parent wait for one another a fraction of a second after a failure, so that a test sees whether a
debugger's prompt outlives it.
"""

from dataclasses import dataclass

import torch

from common import comm
from common.launch import spawn, watchdog
from common.launch.runtime import Runtime
from common.lesson.runner import LessonOptions, console, run

watchdog.GRACE, spawn.END_WITHIN = 0.3, 0.3


@dataclass
class Options(LessonOptions):
    """Options: does rank 0 fail?"""

    bad: bool = False


def main(rt: Runtime, o: Options) -> bool:
    x = torch.tensor([rt.rank**2])
    breakpoint()
    if o.bad and rt.rank == 0:
        raise ArithmeticError("the reason")
    comm.all_reduce(x, rt.world)
    console(rt).print(f"sum {x.item()}")
    assert x.item() != 14, "on every rank"
    return True


if __name__ == "__main__":
    run(main, Options)
