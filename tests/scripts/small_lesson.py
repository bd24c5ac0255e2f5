"""Add up ones on all ranks, or fail on one rank in the requested way."""

import os
import signal
import time
from dataclasses import dataclass

import torch

from common import comm
from common.launch.runtime import Runtime
from common.lesson.runner import LessonOptions, console, run


@dataclass
class Options(LessonOptions):
    """Options: the rank that fails (-1: none), and its fault (raise, kill, hang or differ)."""

    bad: int = -1
    how: str = "raise"


def main(rt: Runtime, o: Options) -> bool:
    x = torch.ones(1000, device=rt.device)
    for step in range(3):
        if rt.rank == o.bad and step == 1:
            if o.how == "raise":
                raise ArithmeticError("the reason")
            if o.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if o.how == "hang":
                time.sleep(1000)
        comm.all_reduce(x, rt.world, "max")
    comm.all_reduce(x, rt.world)
    console(rt).print(f"{rt.launcher} {rt.backend} {rt.world_size} ranks: {x[0].item():g}")
    return o.how != "differ"


if __name__ == "__main__":
    run(main, Options)
