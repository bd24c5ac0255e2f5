"""A lesson that adds up ones, or fails on one rank in the way it is told."""

import os
import signal
import time
from dataclasses import dataclass

import torch

from common import comm
from common.lesson import LessonOptions, console, run
from common.runtime import Runtime


@dataclass
class Options(LessonOptions):
    """Which rank fails, and how: raise, kill, hang or differ."""

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
