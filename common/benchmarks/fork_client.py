"""What `python` means under forked.interpreter(): ask the server for a fork that runs the script.

    fork_client.py <the real Python> <the server's socket> file.py arguments ...

It imports little, because each rank of each run starts with it.
"""

import json
import os
import socket
import sys


def main(real: str, address: str, arguments: list[str]) -> int:
    """Run `python arguments`; the exit code. What is no script, and what no server answers, the real Python runs."""
    script = arguments[arguments[:1] == ["-u"] :]
    server = socket.socket(socket.AF_UNIX)
    try:
        if not script or not script[0].endswith(".py"):
            raise ConnectionError
        server.connect(address)
    except OSError:
        os.execv(real, [real, *arguments])
    task = (script, os.getcwd(), dict(os.environ), list(os.sched_getaffinity(0)))
    socket.send_fds(server, [b"\0"], [0, 1, 2])
    server.sendall(json.dumps(task).encode() + b"\n")
    code = int(server.makefile().readline() or 1)
    if code < 0:
        os.kill(os.getpid(), -code)  # as the script ended
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
