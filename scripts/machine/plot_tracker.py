"""Draw what a tool logged with --tracker tensorboard: a picture per value, a line per run.

python scripts/machine/plot_tracker.py --folder results/tracker --output results/tracker
"""

from dataclasses import dataclass
from pathlib import Path

from common.launch.command_line import Checked, parse
from common.launch.program import run_program
from common.machine.tracker import FOLDER, read_tensorboard
from common.utils.visualizer import colour, figure


@dataclass
class PlotOptions(Checked):
    """Options of the drawing."""

    folder: Path = FOLDER
    """Folder of the logs."""
    output: Path = FOLDER
    """Folder for the pictures."""


def main(o: PlotOptions) -> int:
    """Draw each value over the steps."""
    runs = read_tensorboard(o.folder)
    for name in sorted({tag for values in runs.values() for tag in values}):
        path = o.output / f"{name.replace('/', '_per_')}.png"
        with figure(path) as (axes,):
            for i, (run, values) in enumerate(runs.items()):
                if name in values:
                    steps, numbers = zip(*values[name], strict=True)
                    axes.plot(steps, numbers, color=colour(i), label=run)
            axes.set(xlabel="step", ylabel=name)
            axes.legend()
        print(path)
    return 0


if __name__ == "__main__":
    run_program(lambda: main(parse(PlotOptions, __doc__)))
