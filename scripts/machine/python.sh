# Sets $python to the interpreter of this repository: of the active environment, or of .venv.
# shellcheck disable=SC2034
python=python
if [[ -z ${VIRTUAL_ENV:-} && -x .venv/bin/python ]]; then
    python=.venv/bin/python
fi
