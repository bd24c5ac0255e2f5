"""The most GPU memory that a training run can use: the largest batch that fits, then a run with it.

python scripts/machine/benchmark_resnet50_maxmem.py --model resnet50 --tracker swanlab
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TOOL = [sys.executable, "-m", "common.machine", "throughput"]


def main() -> int:
    """Find the batch, then run with it; both take the options given."""
    options = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "largest.jsonl")
        code = subprocess.run([*TOOL, *options, "--largest", "--json", str(found)]).returncode
        if code or not found.exists():
            return code
        batch = json.loads(found.read_text().splitlines()[-1])["largest"]
    return subprocess.run([*TOOL, "--no-alone", *options, "--batch-size", str(batch)]).returncode


if __name__ == "__main__":
    sys.exit(main())
