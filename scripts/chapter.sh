# What every chapter's run.sh is made of; it is sourced, and goes to the root of the repository. RANKS=2 for fewer ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ -z "${VIRTUAL_ENV:-}" ]]; then
    activate="${VENV:-.venv}/bin/activate"
    [[ -f "$activate" ]] || { echo "no environment at ${VENV:-.venv}: run make setup first" >&2; exit 1; }
    source "$activate"
fi
ranks="${RANKS:-4}"

run() {
    printf '\n$ %s\n' "$*"
    "$@"
}

three_ways() { # ranks, folder, lessons ...: each lesson in every way that it starts
    local n="$1" folder="$2" lesson
    for lesson in "${@:3}"; do
        run python "$folder/$lesson.py" --nproc "$n"
        run torchrun --standalone --nproc_per_node="$n" "$folder/$lesson.py"
        run mpirun -np "$n" python "$folder/$lesson.py"
    done
}

binaries() { # programs of build/bin, where they are built
    local binary
    for binary in "$@"; do
        if [[ -x "build/bin/$binary" ]]; then
            run mpirun -np "$ranks" "build/bin/$binary"
        else
            printf '\nleft out: build/bin/%s is not built; run make setup\n' "$binary"
        fi
    done
}

with_modules() { # "modules ..." ranks lesson: a lesson that needs compiled Python modules
    if python -c 'import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, sys.argv[1].split())))' "$1"; then
        run mpirun -np "$2" python "$3"
    else
        printf '\nleft out: %s, for %s are not built; run make setup\n' "${3##*/}" "${1// / and }"
    fi
}
