"""When a server looks for cyclic garbage: among young objects as they come, among all of them every few minutes.

A look at all objects stops every thread: for 300 ms with 6,000 connections. Python would look again whenever a quarter
more have become old, which is every few seconds while thousands of clients send heartbeats.
"""

import asyncio
import gc
from typing import Final

YOUNG: Final = 20_000  # new objects between two looks at them; each takes 2 ms
OLD_EVERY_S: Final = 300.0
_LOOKS: Final = 20  # at young objects, before those that survived them are looked at
_NEVER: Final = 1 << 30


def collect_rarely() -> None:
    """Exclude all objects loaded so far from collections, and leave old objects to `collect_old`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, _LOOKS, _NEVER)


async def collect_old() -> None:
    """Look at all objects now and then, until cancelled."""
    while True:
        await asyncio.sleep(OLD_EVERY_S)
        gc.collect()
