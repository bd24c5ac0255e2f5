"""The debugger on one rank: by a pipe, on a terminal, under mpirun, after failures; bad ranks are refused."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pexpect
import pytest
from mpi.launch import mpirun, python, refusal
from test_docs import ROOT, printed_after

from common.launch import debugger
from common.launch.runtime import Runtime
from common.lesson.runner import LessonOptions

LESSON = ROOT / "tests" / "scripts" / "debugged_lesson.py"
SESSION = "python 01-data-parallelism/pytorch/dp_by_hand.py --nproc 2 --debug 1"
PROMPT = "(rank 2)"  # before its space another rank may print a line
WAIT = "import time; time.sleep(1.5)"  # longer than the grace of the lesson's ranks


def piped(commands: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose debugger reads the commands from a pipe."""
    command = [str(python()), *arguments]
    return subprocess.run(
        command, input="".join(f"{c}\n" for c in commands), capture_output=True, text=True, timeout=240
    )


def test_the_session_of_the_docs() -> None:
    """The first line of main is where it stops; q ends all ranks with one line and exit code 1."""
    shown = "\n".join(printed_after(ROOT / "docs" / "setup-guide.md", SESSION)) + "\n"
    prompt = r"^(\(rank 1\) )(.*)\n"
    commands = [command for _, command in re.findall(prompt, shown, re.M)]
    done = piped(commands, *SESSION.split()[1:])
    assert commands[-1] == "q"
    assert done.stdout.replace(f"{ROOT}/", "") + done.stderr == re.sub(prompt, r"\1", shown, flags=re.M)
    assert done.returncode == 1


@pytest.fixture
def terminal() -> Iterator[pexpect.spawn]:
    """Start the lesson on four ranks, with the debugger on rank 2, on a terminal of its own."""
    arguments = [str(LESSON), "--nproc", "4", "--debug", "2", "--timeout", "2"]
    child = pexpect.spawn(
        sys.executable,
        arguments,
        cwd=str(ROOT),
        timeout=200,
        encoding="utf-8",
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's job behind & ignores it
    )
    yield child
    child.close(force=True)


def ask(child: pexpect.spawn, command: str) -> str:
    """Give a command at the prompt; return what is printed until the next prompt."""
    child.sendline(command)
    child.expect_exact(PROMPT)
    return str(child.before)


def test_a_breakpoint_and_a_failure_on_a_terminal(terminal: pexpect.spawn) -> None:
    """Ranks wait longer than their timeout; where all raise, the prompt stays open; Ctrl-D ends all."""
    terminal.expect_exact(PROMPT)
    assert "main()" in terminal.before  # of the lesson, at its breakpoint: no other stop comes before
    assert "tensor([4])" in ask(terminal, "p x")
    time.sleep(3)  # more than --timeout
    assert "AssertionError: on every rank" in ask(terminal, "c")
    time.sleep(1.5)  # more than the grace of the lesson's ranks
    assert "tensor([14])" in ask(terminal, "p x")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    assert terminal.before.count("AssertionError: on every rank") == 1
    terminal.wait()
    assert terminal.exitstatus == 1


def test_ctrl_c_ends_all_ranks_and_restores_the_terminal(terminal: pexpect.spawn) -> None:
    before = termios.tcgetattr(terminal.child_fd)
    terminal.expect_exact(PROMPT)
    assert "tensor([4])" in ask(terminal, "p x")
    assert termios.tcgetattr(terminal.child_fd) != before  # line editing
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.wait()
    assert termios.tcgetattr(terminal.child_fd) == before


def test_a_prompt_outlives_another_ranks_failure() -> None:
    """The others' failure is shown after the debugger has let the rank go."""
    done = piped(["p x", WAIT, "p 'still here'", "c"], str(LESSON), "--nproc", "3", "--debug", "2", "--bad")
    assert "still here" in done.stdout
    assert "rank 0 failed" in done.stderr
    assert "ArithmeticError: the reason" in done.stderr
    assert done.returncode == 1


def test_under_mpirun() -> None:
    """Without standard input a rank refuses in one line; --stdin gives it one, and no other rank ends before it."""
    lesson = [python(), LESSON, "--debug", "2", "--bad"]
    done = mpirun(3, *lesson)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "start with mpirun --stdin 2, or with --nproc and no launcher" in line
    commands = f"p x\n{WAIT}\np 'still here'\nc\n"
    done = mpirun(3, "--stdin", "2", *lesson, before=["sh", "-c", f'printf "{commands}" | "$@"', "sh"])
    assert "tensor([4])" in done.stdout
    assert "still here" in done.stdout
    assert "ArithmeticError: the reason" in done.stderr
    assert done.returncode == 1


def main(rt: Runtime, o: LessonOptions) -> bool:
    return True


@pytest.mark.parametrize(
    ("debug", "line"), [("4", "give a rank from 0 to 3"), ("1", "give a terminal or a pipe")]
)
def test_bad_input_is_one_line(debug: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Pytest's own standard input is /dev/null."""
    assert line in refusal(main, LessonOptions, capsys, "--nproc", "4", "--debug", debug)


@pytest.mark.parametrize(
    ("source", "stops"),
    [
        ("def f():\n    if x: breakpoint()", True),
        ('"""It stops at breakpoint()."""', False),
        ("# breakpoint()\nx.breakpoint()", False),
    ],
)
def test_breakpoints_are_calls(source: str, stops: bool) -> None:
    assert debugger._calls_breakpoint(source) is stops
