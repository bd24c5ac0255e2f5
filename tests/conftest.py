"""Ranks fork from a server that has already imported what test modules and torch's lazy corners import."""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; ranks and their baseline alike

from common import spawn

FOLDERS = os.environ.get("PYTHONPATH", "").split(os.pathsep)
if (here := str(Path(__file__).parent)) not in FOLDERS:  # the server has another sys.path than pytest
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, *FOLDERS]))
spawn.PRELOAD += ["preloaded"]
