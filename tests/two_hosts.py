"""Two hosts on one machine: each has its own network, name, address and processes; a cable joins them.

    node0  10.77.0.1  === veth ===  10.77.0.2  node1

    python tests/two_hosts.py scripts/launch/torchrun.sh 2 10.77.0.1:29500 tests/scripts/small_lesson.py

runs a command on both at once; each line of its output begins with its host. Host names do not resolve, as on
many clusters: only the addresses work. Both hosts share memory, cores and files but temporary ones, which programs name
by process numbers: those of the hosts overlap. Speed is not representative.

A host lives as long as its first process, which only reads a pipe. When this program ends, however it ends,
the pipe closes and the first process ends; the host's other processes and its network end with it. Needs
Linux, and root or the right to make user namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import psutil

ADDRESSES = ("10.77.0.1", "10.77.0.2")
FIRST_PROCESS = "hostname {name} && ip link set lo up && ip addr add 127.0.0.1/8 dev lo; echo up && exec cat"
USER = () if os.geteuid() == 0 else ("--user",)
ENTER = ("nsenter", *USER, *(("--preserve-credentials",) if USER else ()))


class NotAllowed(Exception):
    """Raised if this machine forbids making networks; the message is the system's."""


@dataclass(frozen=True)
class Host:
    """A host; `pid` is its first process, `holder` our process that waits for `pid`, `temporary` its TMPDIR."""

    name: str
    address: str
    holder: subprocess.Popen[str]
    pid: int
    temporary: str

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start `words` on the host, in the caller's folder and environment, with all output in one pipe."""
        command = (
            *ENTER,
            f"--target={self.pid}",
            "--net",
            "--uts",
            "--pid",
            "--mount",
            f"--wdns={os.getcwd()}",
        )
        env = {**os.environ, "TMPDIR": self.temporary}
        return subprocess.Popen([*command, *words], env=env, stdout=-1, stderr=subprocess.STDOUT, text=True)

    def network(self, words: str) -> None:
        """Run `ip` with `words` on this host's network. Raises NotAllowed."""
        command = [*ENTER, f"--target={self.pid}", "--net", "ip", *words.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NotAllowed(f"ip {words}: {done.stderr.strip()}")

    def down(self) -> None:
        """End the host as a power cut does: its processes are killed without a message."""
        assert self.holder.stdin is not None
        self.holder.stdin.close()
        self.holder.wait()


def own_network() -> tuple[str, ...]:
    """Return words that run a command in a network of its own, with a loopback. Raises NotAllowed."""
    user = ("--user", "--map-root-user") if USER else ()
    words = ("unshare", *user, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    done = subprocess.run([*words, "true"], capture_output=True, text=True)
    if done.returncode:
        raise NotAllowed(done.stderr.strip())
    return words


def _host(name: str, address: str, other: Host | None, temporary: str) -> Host:
    """Start a host without a cable. Without root, both hosts are in one user namespace, made by the first."""
    spaces = ("--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    start = f"hostname {name} && ip link set lo up && echo up && exec cat"
    first = (*ENTER, f"--target={other.pid}") if USER and other else ()
    user = ("--user", "--map-root-user") if USER and not other else ()
    holder = subprocess.Popen(
        [*first, "unshare", *user, *spaces, "sh", "-c", start], stdin=-1, stdout=-1, stderr=-1, text=True
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != "up\n":
        raise NotAllowed(holder.stderr.read().strip().replace("\n", "; "))
    process = psutil.Process(holder.pid)
    while children := process.children():
        process = children[0]
    return Host(name, address, holder, process.pid, temporary)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts that reach each other by their addresses. Raises NotAllowed."""
    with ExitStack() as stack:
        hosts: list[Host] = []
        for place, address in enumerate(ADDRESSES):
            name = f"node{place}"
            temporary = TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True)
            hosts.append(_host(name, address, hosts[0] if hosts else None, stack.enter_context(temporary)))
            stack.callback(hosts[-1].down)
        hosts[0].network(f"link add veth0 type veth peer name veth0 netns {hosts[1].pid}")
        for host in hosts:
            host.network(f"addr add {host.address}/24 dev veth0")
            host.network("link set veth0 up")
        yield hosts[0], hosts[1]


def main(words: list[str]) -> int:
    """Run `words` on both hosts; return the first exit code that is not 0, else 0."""

    def show(host: Host, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{host.name}  {line}", end="", flush=True)

    with two_hosts() as hosts:
        running = [(host, host.start(*words)) for host in hosts]
        threads = [threading.Thread(target=show, args=one) for one in running]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return next((code for _, process in running if (code := process.wait())), 0)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except NotAllowed as error:
        sys.exit(f"error: no networks can be made here: {error}")
