"""Every lesson and binary with this machine's kernels, the text and the seed of --seed: each must prove.

    pytest tests/portability.py --seed 3 --steps 20

`make test-portability` runs it under several kernels, texts and seeds, and `make test-sample` a part of it; pytest
alone does not collect it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mpi.launch import BINARIES, ROOT, mpirun, need_binary, run_worker

MEASURES = "memory|overlap|imbalance|plain_loop|by_hand"  # files that prove nothing or take no seed
LESSONS = [
    file
    for file in sorted(ROOT.glob("0*/pytorch/*.py"))
    if "    run(main, " in file.read_text() and not re.search(MEASURES, file.name)
]
HOUR = 3600


@pytest.fixture
def given(pytestconfig: pytest.Config) -> list[str]:
    return [f"--{name}={pytestconfig.getoption(name)}" for name in ("seed", "steps")]


@pytest.mark.timeout(HOUR)
@pytest.mark.parametrize("chapter", sorted({lesson.parts[-3] for lesson in LESSONS}))
def test_lessons_prove(given: list[str], chapter: str, tmp_path: Path) -> None:
    lessons = [str(lesson) for lesson in LESSONS if lesson.parts[-3] == chapter]
    commands = json.dumps([[lesson, *given] for lesson in lessons])
    ends = run_worker(2, "lessons_worker.py", tmp_path, commands, timeout=HOUR)
    assert not [printed for code, printed in ends if code]


@pytest.mark.parametrize("binary", sorted(path.name for path in BINARIES.glob("*_*")) or ["*_*"])
def test_binaries_prove(given: list[str], binary: str) -> None:
    ranks = 2 if binary == "tp_libtorch" else 3  # 3 do not divide its heads
    done = mpirun(ranks, need_binary(binary), *given)
    assert done.returncode == 0, done.stdout + done.stderr
