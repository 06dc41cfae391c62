"""Write NNNN.sql beside this file: a run of the toy backend, as this version of the schema leaves it.

    python tests/e2e/schemas/make.py

Run it before a migration is added. `test_upgrade.py` continues every such run with the newest version.
"""

import sqlite3
import tempfile
from pathlib import Path

import numpy as np

from tinsmith import operations as ops
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import running_server

DONE, WAITING = 4, 2  # steps; what waits has not been run, and the first of it was running when everything ended


def a_pass(number: int) -> ops.ForwardBackward:
    tokens = np.arange(number + 1, number + 12, dtype=np.int64)
    inputs = {"target_tokens": tokens[1:], "weights": np.full(10, 0.5, np.float32)}
    datum = ops.Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id="s1:train:0", data=(datum,))


def a_step() -> ops.OptimStep:
    return ops.OptimStep(model_id="s1:train:0", adam=ops.AdamParams(learning_rate=0.01))


def make(data_dir: Path) -> str:
    with running_server(data_dir) as server:
        client = EngineDriver(server.store, "toy")
        server.call(client.open_session())
        server.call(client.result(server.call(client.create_model())))
        for number in range(DONE):
            server.call(client.submit(a_pass(number)))
            server.call(client.run(a_step()))
    with running_server(data_dir, engines=False) as server:
        client.store = server.store
        for number in range(DONE, DONE + WAITING):
            server.call(client.submit(a_pass(number)))
            server.call(client.submit(a_step()))
    with sqlite3.connect(data_dir / "tinsmith.db") as database:
        running = "state = 'queued' AND seq_id <= 2 * ?"
        database.execute(
            "UPDATE operations SET state = 'running', attempts = 1, engine_id = 'dead', started_at = created_at "
            f"WHERE {running} + 2",
            (DONE,),
        )
        database.execute("UPDATE runs SET next_seq_id = 2 * ? + 3", (DONE,))
        database.commit()
        dump = "\n".join(database.iterdump()) + "\n"
    database.close()
    return dump


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        dump = make(Path(directory))
    revision = dump.split('INSERT INTO "alembic_version" VALUES(\'')[1][:4]
    path = Path(__file__).parent / f"{revision}.sql"
    path.write_text(dump)
    print(f"wrote {path}")
