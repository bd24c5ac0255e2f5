"""The answers of a machine: NVML, files under /proc and /sys, programs, torch; live, or from a recording.

    here = Source()
    here.nvml("DeviceGetName", 0)              "NVIDIA H100 80GB HBM3"; None where the GPU does not support the call
    here.read("/proc/version")                 text; None if there is no such file
    here.write(Path("machine.json"))           all answers that were asked for
    Source.of(Path("machine.json"))            answers the same, on any machine

A question is a key of text, its answer is JSON. The checks see nothing else of a machine, so a recording of a faulty
machine is a test.
"""

from __future__ import annotations

import ctypes
import glob
import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import UsageError

LOST = "GPU is lost"
FIELDS = "DeviceGetFieldValues"  # its arguments are one list, of fields of all links together
ALL_LINKS = 2**32 - 1
TWO_DEVICES = ("DeviceGetTopologyCommonAncestor", "DeviceGetP2PStatus")


class Source:
    """Answers by question. recorded: all answers; None: ask this machine and keep the answers."""

    def __init__(self, recorded: dict[str, Any] | None = None) -> None:
        self.answers: dict[str, Any] = {} if recorded is None else recorded
        self.live = recorded is None
        self._nvml: Any = None

    @classmethod
    def of(cls, path: Path) -> Source:
        """Return the machine of a file that `write` made. Raises UsageError if it cannot be read."""
        try:
            found = json.loads(path.read_text())
            if not isinstance(found, dict) or not found:
                raise ValueError("it holds no object of answers")
        except (OSError, ValueError) as error:
            raise UsageError(f"--answers {path}: {error}") from None
        return cls(found)

    def write(self, path: Path) -> None:
        """Write all answers so far. Raises UsageError if the file cannot be written."""
        try:
            path.write_text(json.dumps(self.answers, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            raise UsageError(f"--record {path} cannot be written: {error.strerror}") from None

    def ask(self, question: str, answer: Callable[[], Any]) -> Any:
        """Return the answer to a question; `answer` gives that of this machine."""
        if self.live and question not in self.answers:
            self.answers[question] = answer()
        return self.answers.get(question)

    def again(self) -> None:
        """Forget all answers of this machine: what changes is asked anew."""
        if self.live:
            self.answers.clear()

    def read(self, path: str) -> str | None:
        """Return the text of a file without white space around it; None if it cannot be read."""

        def text() -> str | None:
            try:
                return Path(path).read_text(errors="replace").strip()
            except OSError:
                return None

        found: str | None = self.ask(f"read {path}", text)
        return found

    def list(self, pattern: str) -> list[str]:
        """Return the paths that match a pattern, in order."""
        return self.ask(f"list {pattern}", lambda: sorted(glob.glob(pattern))) or []

    def run(self, *command: str) -> str | None:
        """Return what a program prints; None if there is none, or it fails, or takes longer than 10 seconds."""

        def output() -> str | None:
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=10)
            except (OSError, subprocess.TimeoutExpired):
                return None
            return done.stdout.strip() if done.returncode == 0 else None

        found: str | None = self.ask(f"run {' '.join(command)}", output)
        return found

    def nvml(self, call: str, *args: int) -> Any:
        """Return the answer of NVML's function nvml`call`; the first arguments of a device's function are its number.

        Structures become dictionaries. None where there is no NVML, and where the device does not support the call.
        The text LOST is the answer of a GPU that does not answer any more.
        """
        return self.ask(" ".join([call, *map(str, args)]), lambda: self._ask_nvml(call, args))

    def _ask_nvml(self, call: str, args: tuple[int, ...]) -> Any:
        if self._nvml is None:
            self._nvml = False
            with suppress(Exception):  # no library, no driver, no permission
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
        if not self._nvml:
            return None
        devices = 2 if call in TWO_DEVICES else int(call.startswith("Device") and call != "DeviceGetCount")
        try:
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in args[:devices]]
            more: list[Any] = list(args[devices:])
            if call == FIELDS:
                more = [[(number, ALL_LINKS) for number in more]]
            return _plain(getattr(self._nvml, "nvml" + call)(*handles, *more))
        except self._nvml.NVMLError as error:
            lost = error.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_RESET_REQUIRED)
            return LOST if lost else None
        except AttributeError:  # an older nvidia-ml-py
            return None


def _plain(x: Any) -> Any:
    """Return an answer of pynvml as JSON; a field's value, which has several types, as a whole number."""
    if isinstance(x, ctypes.Union):
        return getattr(x, "ullVal", None)
    if isinstance(x, ctypes.Structure):
        return {name: _plain(getattr(x, name)) for name, *_ in x._fields_}
    if isinstance(x, (list, tuple, ctypes.Array)):
        return [_plain(y) for y in x]
    if isinstance(x, bytes):
        return x.decode(errors="replace")
    return x if isinstance(x, (int, float, str)) or x is None else str(x)
