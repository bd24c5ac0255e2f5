"""End with code 3 while the watchdog's look-ups in the store are slow.

python slow_store.py 0.06 4    # seconds of a look, seconds that the end waits for it
"""

import sys
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from common.launch import watchdog
from common.launch.program import leave


class SlowStore(dist.HashStore):
    """Store whose look-ups by the watchdog take `seconds`, in C++ without the interpreter's lock."""

    seconds = 0.0

    def clone(self) -> dist.Store:
        """Return this store."""
        return self

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys exist."""
        if threading.current_thread() is not threading.main_thread():
            with suppress(RuntimeError):
                self.wait(["never"], timedelta(seconds=self.seconds))
        return super().check(keys)


def main(seconds: float, grace: float) -> None:
    """End as a lesson does, by the real end of the interpreter."""
    store = SlowStore()
    store.seconds, watchdog.GRACE, watchdog.LOOK_EVERY = seconds, grace, 1e-4
    for key in ("here/1", "done/1", "left/1"):
        store.set(key, "")
    dog = watchdog.Watchdog(store, 0, 2, print)
    dog.meet(5)
    dog.finish(5)
    print("proved")
    if grace > 1:
        sys.exit(3)  # the thread has been joined
    leave(3)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
