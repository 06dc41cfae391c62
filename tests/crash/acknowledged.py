"""Runs on the disk of `disk_shim.py`: `acknowledged.py DIRECTORY`. Writes, prints what was acknowledged, and dies."""

import asyncio
import json
import os
import sys
from pathlib import Path

from test_disk_faults import a_state, write

from tinsmith.operations import AdamParams, OptimStep
from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import StoreContext
from tinsmith.testing.engine_driver import EngineDriver

SAVES = 4
STEPS = 5


async def main(directory: Path) -> None:
    """One save replaces another each time, and one is new."""
    store = SqlStore(SqlStoreConfig(), StoreContext(data_dir=directory))
    await store.open()
    client = EngineDriver(store, "toy")
    await client.open_session()
    requests = [await client.create_model()]
    for number in range(SAVES):
        write(directory / "checkpoints", a_state(number), "replaced")
        write(directory / "checkpoints", a_state(number), f"new-{number}")
        step = OptimStep(model_id=client.model_id(), adam=AdamParams())
        requests += [await client.submit(step) for _ in range(STEPS)]
    sys.stdout.write(json.dumps(requests))
    sys.stdout.flush()
    os._exit(0)  # nothing is closed in order


asyncio.run(main(Path(sys.argv[1])))
