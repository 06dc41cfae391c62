"""Runs on the disk of `disk_shim.py`: `each_call.py WHAT ERRNO STRIDE DIRECTORY`. Prints how many calls failed."""

import asyncio
import json
import logging
import os
import shutil
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from disk_shim import Control

from tinsmith.errors import TinsmithError
from tinsmith.operations import AdamParams, OptimStep
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import EngineDriver

PATIENCE = 3  # rounds without a failure, after which every call has failed once


def checkpoints(control: Control, error: int, root: Path) -> Counter[str]:
    """Overwrite a checkpoint while one call fails. It is the old one or the new one, and nothing else is to be seen."""
    from test_disk_faults import a_state, read_checkpoint, same, write

    states = a_state(1), a_state(2)
    current = 0
    write(root, states[current])
    failed: Counter[str] = Counter()
    nth = 1
    while True:
        control.fail(error, nth=nth)
        try:
            write(root, states[1 - current])
            raised = False
        except TinsmithError:
            raised = True
        now = control.heal()
        found = read_checkpoint(root, "m/x").state
        assert same(found, states[0]) or same(found, states[1]), f"call {nth} left another checkpoint"
        if not raised:
            assert same(found, states[1 - current]), f"call {nth} failed in silence"
        current = 0 if same(found, states[0]) else 1
        if not any(now.values()):
            break
        failed.update(now)
        nth += 1
    write(root, states[1 - current])
    assert {path.name for path in (root / "m").iterdir() if not path.name.startswith(".")} == {"x"}
    return failed


async def stores(control: Control, error: int, root: Path, *, fresh: bool, stride: int) -> Counter[str]:
    """Open a store and submit operations while one call fails. What was acknowledged is there after a new start.

    With `fresh`, there is no database yet. One in `stride` calls is tried.
    """
    template = root / "template"
    template.mkdir()
    if not fresh:
        store = a_store(template)
        await store.open()
        await store.close()
    failed: Counter[str] = Counter()
    nth, quiet = 1, 0
    while quiet < PATIENCE:
        directory = root / str(nth)
        shutil.copytree(template, directory)
        control.fail(error, nth=nth)
        acknowledged = await submitted(directory)
        now = control.heal()
        again = a_store(directory)
        await again.open()
        for request_id in acknowledged:
            await again.get_operation(request_id)
        await again.close()
        shutil.rmtree(directory)
        failed.update(now)
        quiet = 0 if any(now.values()) else quiet + 1
        nth += stride
    return failed


async def submitted(directory: Path) -> list[str]:
    """Return the operations that were acknowledged before something failed."""
    acknowledged: list[str] = []
    store = a_store(directory)
    try:
        await store.open()
    except TinsmithError:
        return acknowledged
    with suppress(TinsmithError):
        client = EngineDriver(store, "toy")
        await client.open_session()
        acknowledged.append(await client.create_model())
        step = OptimStep(model_id=client.model_id(), adam=AdamParams())
        for seq_id in range(1, 4):
            acknowledged.append(await client.submit(step, seq_id=seq_id))  # noqa: PERF401 - those before a failure count
    await store.close()
    return acknowledged


def a_store(directory: Path) -> SqlStore:
    return SqlStore(SqlStoreConfig(), StoreContext(data_dir=directory))


def main() -> Counter[str]:
    what, number, stride, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    control = Control(Path(os.environ["DISK_CONTROL"]))
    if what == "checkpoint":
        return checkpoints(control, number, directory)
    return asyncio.run(stores(control, number, directory, fresh=what == "fresh store", stride=stride))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    print(json.dumps(main()))
