"""Toy chapters: folders with a benchmark.toml and one small program that imitates a lesson."""

from __future__ import annotations

from pathlib import Path

LESSON = """
import argparse, json, os, signal, subprocess, sys, time
parser = argparse.ArgumentParser()
for name in ("json", "ranks", "scaling", "fail", "sleep", "equal", "times"):
    parser.add_argument("--" + name)
o = parser.parse_args()
print("a table for people")
with open("calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:-2]) + chr(10))
if o.sleep:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({o.sleep})"], check=True)
if os.environ["OMP_NUM_THREADS"] != "1":
    sys.exit("threads")
if o.fail and not os.path.exists("repaired"):
    sys.exit("working" + chr(10) + "error: " + o.fail)
n = int(o.ranks or 1)
record = {"strategy": "dp", "implementation": "ours", "language": "pytorch", "ranks": n, "backend": "gloo",
          "dtype": "float32", "model": "toy", "tokens_per_step": 100 * (n if o.scaling == "weak" else 1),
          "flop_per_step": 2e9, "scaling": o.scaling or "strong", "communication_seconds": 0.1 if n > 1 else 0.0,
          "bytes_counted": 8, "bytes_formula": 8, "peak_memory_bytes": 5e6,
          "step_seconds": [float(t) for t in (o.times or "1").split(",")],
          "equal": {"yes": True, "no": False, None: None}[o.equal],
          "largest_difference": 1e-15 if o.equal else None, "parent": os.getppid()}
with open(o.json, "a") as file:
    file.write(json.dumps(record) + chr(10))
sys.exit(o.equal == "no")
"""

TIMED = """
[[case]]
name = "timed"
launcher = "python"
command = "lesson.py --ranks {ranks} --scaling {scaling} --times 0.5,0.4,0.6"
ranks = [1, 2]
scalings = ["strong", "weak"]
"""
FAILS = """
[[case]]
name = "fails"
launcher = "python"
command = "lesson.py --fail 'no <b>GPU</b> here'"
ranks = [1]
"""
EQUAL = """
[[case]]
name = "equal"
launcher = "python"
command = "lesson.py --equal yes"
ranks = [3]
purpose = "equality"
"""


def chapter(root: Path, *cases: str, name: str = "01-toys", title: str = "Toys") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "lesson.py").write_text(LESSON)
    (folder / "benchmark.toml").write_text(f'title = "{title}"\n' + "".join(cases))
    return folder
