"""How many commits an operation costs, and what is read for it, on a running server: it depends on the code alone.

A submit is durable before it is acknowledged, and a result before anybody sees it. A claim is committed before
anything runs, so that no two engines run it; losing it costs nothing, so it need not be on the disk.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tinker
from sqlalchemy import Connection, Engine, event

from tinsmith import operations as ops
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import RunningServer, running_server

OF_OPERATIONS = {
    "INSERT INTO operations": "submit",
    "WITH RECURSIVE found_true": "claim",
    "INSERT INTO results": "complete",
}
DURABILITY = {1: "relaxed", 2: "durable"}  # what SQLite calls normal and full
OF_ALL_REQUESTS = ("cancel_told", "found(model)")  # engines ask now and then what is cancelled, and what waits at gaps
OF_REQUESTS = {"runs", "sessions", "sampling_sessions", "checkpoints", "operations", "finished_samples"}
FEWEST = [["durable submit"], ["relaxed claim"], ["durable complete"]]


@pytest.fixture(scope="module")
def toy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on which nothing wakes the engine but the test: no gap that another test left, and no poll."""
    with running_server(tmp_path_factory.mktemp("counted"), store_options={"safety_poll_s": 3600.0}) as server:
        yield server


@dataclass
class Executed:
    """What the server's database was asked to do since the last `clear`."""

    commits: list[list[str]] = field(default_factory=list)  # what each did for operations, not for leases and reports
    reads: list[str] = field(default_factory=list)  # the tables that readers looked into for a request
    glances: list[str] = field(default_factory=list)  # the requests that were looked up without a reader

    def clear(self) -> None:
        for each in (self.commits, self.reads, self.glances):
            each.clear()


@pytest.fixture
def executed(toy_server: RunningServer) -> Iterator[Executed]:
    """Told by SQLAlchemy, as a database would log it."""
    data_dir, seen = str(toy_server.settings.server.data_dir), Executed()
    transactions: dict[int, list[str]] = {}  # the statements of each, by connection

    def execute(connection: Connection, _: object, statement: str, values: Any, *__: object) -> None:
        if data_dir not in str(connection.engine.url) or statement.startswith("PRAGMA"):
            return
        if statement == "BEGIN":  # a reader's; writers begin on the driver
            transactions[id(connection)] = [statement]
            return
        statements = transactions.setdefault(id(connection), [])
        statements.append(statement)
        if statements[0] == "BEGIN":
            table = re.search(r"FROM (\w+)", statement)
            if table and table[1] in OF_REQUESTS and not any(each in statement for each in OF_ALL_REQUESTS):
                seen.reads.append(table[1])
        elif statement.startswith("SELECT operations.") and "request_id" in values:
            seen.glances.append(values["request_id"])

    def commit(connection: Connection) -> None:
        statements = transactions.pop(id(connection), [])
        names = [name for each in statements for start, name in OF_OPERATIONS.items() if each.startswith(start)]
        if names:
            level = DURABILITY[connection.exec_driver_sql("PRAGMA synchronous").scalar_one()]
            seen.commits.append([f"{level} {name}" for name in names])

    event.listen(Engine, "before_cursor_execute", execute)
    event.listen(Engine, "commit", commit)
    yield seen
    event.remove(Engine, "before_cursor_execute", execute)
    event.remove(Engine, "commit", commit)


@pytest.fixture
def driver(toy_server: RunningServer, request: pytest.FixtureRequest) -> EngineDriver:
    made = EngineDriver(toy_server.store, "toy", session_id=request.node.name)
    toy_server.call(made.open_session())
    toy_server.call(made.result(toy_server.call(made.create_model())))
    return made


def optim_step(model_id: str) -> ops.Operation:
    return ops.OptimStep(model_id=model_id, adam=ops.AdamParams())


def pass_with_gradients(model_id: str) -> ops.Operation:
    inputs = {"target_tokens": np.arange(4, 12), "weights": np.ones(8, np.float32)}
    datum = ops.Datum(tokens_T=np.arange(3, 11, dtype=np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id=model_id, data=(datum,))


def sample(model_id: str) -> ops.Operation:
    prompt_P = np.arange(3, 11, dtype=np.int32)
    params = ops.SamplingParams(max_tokens=2, seed=1)
    return ops.Sample(sampling_session_id=model_id, snapshot_id=None, prompt_P=prompt_P, params=params)


@pytest.mark.parametrize("make", [optim_step, pass_with_gradients, sample])
def test_an_operation_costs_three_commits(
    toy_server: RunningServer,
    driver: EngineDriver,
    executed: Executed,
    make: Callable[[str], ops.Operation],
) -> None:
    for _ in range(3):
        result = toy_server.call(driver.run(make(driver.model_id())))
        assert not isinstance(result, ops.Failed)
    assert executed.commits == FEWEST * 3


def test_for_an_operation_only_its_result_is_looked_up(client: tinker.ServiceClient, executed: Executed) -> None:
    """Neither whose model it is, which never changes, nor for whom there is work, which the claim finds by itself."""
    training = client.create_lora_training_client("toy", rank=8).result()
    training.optim_step(tinker.AdamParams()).result()
    executed.clear()
    for _ in range(3):
        training.optim_step(tinker.AdamParams()).result()
    assert executed.reads == []
    assert len(set(executed.glances)) == 3
    assert len(executed.glances) <= 2 * 3  # when its client begins to wait, and when it is done


def test_for_a_sample_its_session_and_its_result_are_read(client: tinker.ServiceClient, executed: Executed) -> None:
    """The session may have ended since the last one."""
    sampler = client.create_sampling_client(base_model="toy").result()
    prompt, params = tinker.ModelInput.from_ints([3, 4, 5]), tinker.SamplingParams(max_tokens=2, seed=1)
    sampler.sample(prompt, 1, params).result()
    executed.clear()
    for _ in range(3):
        sampler.sample(prompt, 1, params).result()
    assert set(executed.reads) - {"finished_samples"} == {"sessions"}
    assert Counter(executed.reads)["sessions"] == 3


def test_a_save_for_sampling_needs_no_reader(client: tinker.ServiceClient, executed: Executed) -> None:
    """But for the tenant's tallies, which are read once a second."""
    training = client.create_lora_training_client("toy", rank=4).result()
    training.save_weights_and_get_sampling_client().result()
    executed.clear()
    for _ in range(3):
        training.save_weights_and_get_sampling_client().result()
    assert executed.reads == []
