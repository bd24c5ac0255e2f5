"""Log of a tool's steps: for TensorBoard, for SwanLab and TensorBoard, or none. `read_tensorboard` reads it again."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.errors import UsageError

FOLDER = Path("results/tracker")


class Tracker:
    """Log of one run. kind: none, tensorboard or swanlab. Raises UsageError if the package is not installed."""

    def __init__(self, kind: str, name: str, folder: Path = FOLDER) -> None:
        self.writer: Any = None
        self.swanlab: Any = None
        if kind == "none":
            return
        try:
            if kind == "swanlab":
                self.swanlab = importlib.import_module("swanlab")
                self.swanlab.init(
                    project="5d-parallel", experiment_name=name, logdir=str(folder), mode="local"
                )
            board = importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            raise UsageError(f"--tracker {kind} needs the package: pip install {kind}") from None
        self.writer = board.SummaryWriter(str(folder / name.replace(" ", "-")))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        if self.swanlab:
            self.swanlab.log(dict(values), step=step)
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def end(self) -> None:
        """Write what is left."""
        if self.swanlab:
            self.swanlab.finish()
        if self.writer:
            self.writer.close()


def read_tensorboard(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return runs, their values by name, each a list of (step, value). Raises UsageError if there is none."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        run = found.setdefault(str(file.parent.relative_to(folder)), {})
        for tag in events.Tags()["scalars"]:
            run.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    if not found:
        raise UsageError(f"{folder} has no log of TensorBoard; run a tool with --tracker tensorboard")
    return found
