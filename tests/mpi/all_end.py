"""Run a script so that all ranks end when one raises: `python -m mpi4py script arguments`, as a file."""

from mpi4py.run import main

main()
