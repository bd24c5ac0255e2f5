"""Client installed as `python` by forked.interpreter(): asks the server for a fork that runs the script.

    fork_client.py <the real Python> <the server's socket> file.py arguments ...

It imports few modules, because each rank of each run starts with it.
"""

import json
import os
import signal
import socket
import sys


def main(real: str, address: str, arguments: list[str]) -> int:
    """Run the script in a fork; run the real Python for anything but a script, or when no server answers."""
    script = arguments[arguments[:1] == ["-u"] :]
    server = socket.socket(socket.AF_UNIX)
    try:
        if not script or not script[0].endswith(".py"):
            raise ConnectionError
        server.connect(address)
    except OSError:
        os.execv(real, [real, *arguments])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # end without a traceback; the server then ends the script
    task = (script, os.getcwd(), dict(os.environ), list(os.sched_getaffinity(0)))
    socket.send_fds(server, [b"\0"], [0, 1, 2])
    server.sendall(json.dumps(task).encode() + b"\n")
    code = int(server.makefile().readline() or 1)
    if code < 0:
        os.kill(os.getpid(), -code)  # as the script ended
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
