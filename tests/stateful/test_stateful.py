"""Clients, deaths and retries in any order: every answer and every final state is what the plain protocol says."""

import asyncio
import re
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from example_databases import Databases, PostgresTables, SqliteFiles
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from mortal_engine import MortalEngine, a_backend
from plain_protocol import KILLED, MAX_KILLS, POISON, Entry, PlainModel, refusal_of
from sqlalchemy import Connection, text

from tinsmith import operations as ops
from tinsmith.builtin.toy_backend import ToyBackend
from tinsmith.errors import ConflictError, ResultExpiredError, UserError
from tinsmith.sql_store.subjects import gaps
from tinsmith.store import OperationRecord, OperationState, RunState
from tinsmith.store.codec import decode_result, encode_result
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.postgres import Postgres

NUM_MODELS = 2
LATER = timedelta(hours=1)

MODELS = st.integers(0, NUM_MODELS - 1)
NAMES = st.sampled_from("ab")
TOKENS = st.lists(st.integers(1, POISON - 1), min_size=1, max_size=4)
CONTENTS = st.one_of(
    st.tuples(st.just("pass"), TOKENS),
    st.tuples(st.just("pass"), TOKENS),
    st.tuples(st.just("score"), TOKENS),
    st.tuples(st.just("step"), st.sampled_from([0.1, 0.01])),
    st.tuples(st.just("step"), st.sampled_from([0.1, 0.01])),
    st.tuples(st.just("save"), NAMES),
    st.tuples(st.just("load"), st.tuples(NAMES, st.booleans())),
    st.tuples(st.just("publish"), NAMES),
    st.tuples(st.just("poison"), st.none()),
    st.tuples(st.just("infinite"), TOKENS),
    st.tuples(st.just("refused"), TOKENS),
)


def an_operation(model_id: str, kind: str, value: Any) -> ops.Operation:
    path = f"tinker://{model_id}/weights/"
    match kind:
        case "pass":
            return ops.ForwardBackward(model_id=model_id, data=(a_datum(value),))
        case "score":
            return ops.Forward(model_id=model_id, data=(a_datum(value),))
        case "refused":
            return ops.ForwardBackward(model_id=model_id, data=(a_datum(value),), loss_fn="none")
        case "infinite":  # its ratios of probabilities are
            return ops.ForwardBackward(
                model_id=model_id, data=(an_infinite_datum(value),), loss_fn="importance_sampling"
            )
        case "poison":
            return ops.ForwardBackward(model_id=model_id, data=(a_datum([POISON]),))
        case "step":
            return ops.OptimStep(model_id=model_id, adam=ops.AdamParams(learning_rate=value, grad_clip_norm=1.0))
        case "save":
            return ops.SaveState(model_id=model_id, path=path + value)
        case "load":
            return ops.LoadState(model_id=model_id, path=path + value[0], load_optimizer=value[1])
        case "publish":
            return ops.SaveForSampler(model_id=model_id, sampling_session_id=f"{model_id}:sample:{value}")
    raise AssertionError(kind)


def a_datum(tokens: list[int]) -> ops.Datum:
    targets = np.array(tokens, np.int64)
    inputs = {"target_tokens": targets, "weights": np.ones(len(targets), np.float32)}
    return ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs=inputs)


def an_infinite_datum(tokens: list[int]) -> ops.Datum:
    targets = np.array(tokens, np.int64)
    inputs = {"logprobs": np.full(len(targets), -1e4, np.float32), "advantages": np.ones(len(targets), np.float32)}
    return ops.Datum(tokens_T=targets.astype(np.int32), loss_inputs={"target_tokens": targets, **inputs})


class Protocol(RuleBasedStateMachine):
    databases: ClassVar[Databases]

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        data_dir = Path(self.directory.name) / "data"
        self.databases.empty(data_dir)
        self.world = MortalEngine(data_dir, self.databases)
        self.runner.run(self.world.open())
        reference = a_backend(ToyBackend, data_dir)
        self.plain: list[PlainModel] = []
        self.clients: list[EngineDriver] = []
        self.samples: list[tuple[str, ops.Result, bool]] = []  # request_id, answer, cancelled
        self.pruned = False
        self.publications, self.visits = 0, 0
        for number in range(NUM_MODELS):
            client = EngineDriver(self.world.store, "toy", session_id=f"s{number}", tenant=f"t{number}")
            self.clients.append(client)
            self.runner.run(client.open_session())
            request_id = self.runner.run(client.create_model())
            model = PlainModel(client.model_id(), reference)
            created = ops.CreateModel(model_id=client.model_id(), lora=ops.LoraConfig(rank=4, seed=0))
            model.accept(0, created, request_id)
            self.plain.append(model)

    # clients

    @rule(number=MODELS, content=CONTENTS, skip=st.sampled_from([0, 0, 0, 0, 1, 2]))
    def submit(self, number: int, content: tuple[str, Any], skip: int) -> None:
        """The next number, or one that is early."""
        model = self.plain[number]
        free = [
            n for n in range(model.next_seq_id, model.next_seq_id + len(model.entries) + 3) if n not in model.entries
        ]
        self._submit(number, free[skip], content)

    @rule(number=MODELS, contents=st.lists(CONTENTS, min_size=3, max_size=8))
    def submit_several(self, number: int, contents: list[tuple[str, Any]]) -> None:
        """In order, as clients do that do not wait."""
        for content in contents:
            self.submit(number, content, 0)

    @rule(number=MODELS, content=CONTENTS, seq_id=st.integers(0, 12))
    def submit_anything(self, number: int, content: tuple[str, Any], seq_id: int) -> None:
        """A number that may have been used, passed over, or not come up."""
        self._submit(number, seq_id, content)

    @rule(number=MODELS, which=st.integers(0, 99))
    def repeat(self, number: int, which: int) -> None:
        model = self.plain[number]
        seq_id = sorted(model.entries)[which % len(model.entries)]
        if seq_id > 0:  # the creation has a call of its own
            self._send(number, seq_id, model.entries[seq_id].operation)

    def _submit(self, number: int, seq_id: int, content: tuple[str, Any]) -> None:
        if seq_id == 0:
            return
        operation = an_operation(self.plain[number].model_id, *content)
        if isinstance(operation, ops.SaveForSampler):  # the server gives every sampling session an id of its own
            self.publications += 1
            name = f"{operation.sampling_session_id}{self.publications}"
            operation = ops.SaveForSampler(model_id=operation.model_id, sampling_session_id=name)
        self._send(number, seq_id, operation)

    def _send(self, number: int, seq_id: int, operation: ops.Operation) -> None:
        model, client = self.plain[number], self.clients[number]
        expected = model.says(seq_id, operation)
        try:
            refused = refusal_of(operation)
            request_id = self.runner.run(client.submit(operation, seq_id=seq_id, refused=refused))
        except ConflictError:
            assert expected == "conflict"
        except ResultExpiredError:
            assert self.pruned
            assert seq_id < model.next_seq_id or model.ended  # the unloading has a number of its own
        except UserError:
            assert model.ended
            assert expected in {"ended", "conflict"}
        else:
            if expected == "same":
                assert request_id == model.entries[seq_id].request_id
            else:
                assert expected == "new"
                model.accept(seq_id, operation, request_id)

    @rule(number=MODELS, which=st.integers(0, 99))
    def wait(self, number: int, which: int) -> None:
        answered = [entry for entry in self.plain[number].entries.values() if entry.answer is not None]
        self._compare(answered[which % len(answered)])

    @rule(number=MODELS, which=st.none() | st.integers(0, 9), seed=st.integers(0, 3), wait=st.booleans())
    def sample(self, number: int, which: int | None, seed: int, wait: bool) -> None:
        """From the base model, or from what the client was told is published."""
        model, snapshot_id = self.plain[number], None
        if model.ended:
            return
        if which is not None and model.published:
            snapshot_id = model.published[which % len(model.published)]
            for entry in list(model.entries.values()):
                if isinstance(entry.answer, ops.WeightsSaved) and entry.answer.sampling_session_id == snapshot_id:
                    self._compare(entry)
        operation = ops.Sample(
            sampling_session_id=f"{self.clients[number].session_id}:sample:base",
            snapshot_id=snapshot_id,
            prompt_P=np.array([1, 2, 3], np.int32),
            params=ops.SamplingParams(max_tokens=4, seed=seed, stop_at_eos=False),
        )
        request_id = self.runner.run(self.clients[number].submit(operation))
        answer = asyncio.run(model.backend.sample(operation))
        self.samples.append((request_id, answer, False))
        if wait:
            self._compare_sample(len(self.samples) - 1)

    @precondition(lambda self: self.samples)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        number = which % len(self.samples)
        request_id, answer, cancelled = self.samples[number]
        try:
            record = self.runner.run(self.world.store.cancel(request_id))
        except ResultExpiredError:
            assert self.pruned
            return
        assert record.state in {OperationState.CANCELLED, OperationState.SUCCEEDED}
        assert not cancelled or record.state == OperationState.CANCELLED
        self.samples[number] = (request_id, answer, record.state == OperationState.CANCELLED)

    @precondition(lambda self: not any(model.ended for model in self.plain))
    @rule(number=st.sampled_from([1]))
    def end_session(self, number: int) -> None:
        self.runner.run(self.world.store.end_session(self.clients[number].session_id, "success", None))
        self.plain[number].end()

    # deaths

    @rule(dies_in=st.none() | st.integers(0, 25), how=st.sampled_from(["before", "after", "unanswered"]))
    def start(self, dies_in: int | None, how: Any) -> None:
        self.runner.run(self.world.start(dies_in, how))

    @rule(dies_in=st.integers(0, 8), how=st.sampled_from(["before", "after", "unanswered"]))
    def doom(self, dies_in: int, how: Any) -> None:
        """The engine that lives dies soon."""
        if self.world.seen is not None:
            self.world.seen.dies_in, self.world.seen.how = dies_in, how

    @rule(cycles=st.integers(1, 60))
    def go_on(self, cycles: int) -> None:
        async def some_cycles() -> None:
            for _ in range(cycles):
                await asyncio.sleep(0)

        self.runner.run(some_cycles())

    @rule()
    def kill(self) -> None:
        self.runner.run(self.world.kill())
        self._compare_counts()

    @rule()
    def stop(self) -> None:
        self.runner.run(self.world.stop())

    @rule()
    def restart_server(self) -> None:
        self.runner.run(self.world.restart_server())
        for client in self.clients:
            client.store = self.world.store

    # places

    @rule()
    def visit(self) -> None:
        """A stranger's model needs a place, and leaves. One that is idle is parked for it, if all places are taken."""
        self._drain()
        self._come_back()
        if all(any(entry.answer is None for entry in model.entries.values()) for model in self.plain):
            return  # none is idle
        self.visits += 1
        stranger = EngineDriver(self.world.store, "toy", session_id=f"v{self.visits}", tenant=f"v{self.visits}")
        self.runner.run(stranger.open_session())
        created = self._finished(self.runner.run(stranger.create_model()))
        assert created is None or created.state == OperationState.SUCCEEDED
        unload = self.runner.run(self.world.store.unload_run(stranger.model_id()))
        self._finished(unload)

    def _come_back(self) -> None:
        """Models that wait for a place while what they accepted waits behind a gap: they get it without an answer."""

        async def until_back(model_id: str) -> None:
            async with asyncio.timeout(60):
                while (await self.world.store.get_run(model_id)).state == RunState.PARKED:
                    await self.world.start()
                    await asyncio.sleep(0.001)

        for model in self.plain:
            if any(entry.answer is None for entry in model.entries.values()):
                self.runner.run(until_back(model.model_id))

    # time

    @rule()
    def wait_too_long_for_a_gap(self) -> None:
        """Nothing that can run stands before the gap any more."""
        self._drain()
        self._come_back()
        for client in self.clients:
            self.runner.run(self.world.store.hear_session(client.session_id, datetime.now(UTC)))
        failed = self.runner.run(self.world.store.fail_gaps("toy", older_than=datetime.now(UTC) + LATER))
        assert failed == sum(model.give_up_gap() for model in self.plain)

    @rule()
    def look_for_gaps_too_early(self) -> None:
        assert self.runner.run(self.world.store.fail_gaps("toy", older_than=datetime.now(UTC) - LATER)) == 0

    @rule()
    def prune(self) -> None:
        self.runner.run(self.world.store.prune(datetime.now(UTC) + LATER))
        self.pruned = True

    # comparing

    def _compare(self, entry: Entry) -> None:
        assert entry.answer is not None
        record = self._finished(entry.request_id)
        if record is None:
            return
        compare(record, entry.answer)
        if entry.answer is KILLED:
            assert MAX_KILLS <= deaths_of(record) <= MAX_KILLS + self.world.interruptions

    def _compare_sample(self, number: int) -> None:
        request_id, answer, cancelled = self.samples[number]
        record = self._finished(request_id)
        if record is None:
            return
        if cancelled:
            assert record.state == OperationState.CANCELLED
        else:
            compare(record, answer)

    def _finished(self, request_id: str) -> OperationRecord | None:
        try:
            return self.runner.run(self.world.finished(request_id))
        except ResultExpiredError:
            assert self.pruned
            return None

    def _drain(self) -> None:
        for model in self.plain:
            for entry in model.entries.values():
                if entry.answer is not None:
                    self._compare(entry)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self.world.seen is not None:
                self.world.seen.dies_in = None
            self._drain()
            for number in range(len(self.samples)):
                self._compare_sample(number)
            self._score_once_more()
            self._compare_states()
            self.kill()  # and again, from what is stored
            self._score_once_more()
            self._compare_states()
        finally:
            self.runner.run(self.world.close())
            self.runner.close()
            self.directory.cleanup()

    def _score_once_more(self) -> None:
        """Something to wait for, so that an engine lives, has recovered, and holds all models whose session lives."""
        for number, model in enumerate(self.plain):
            if not model.ended:
                self._send(number, model.next_seq_id, an_operation(model.model_id, "score", [1]))
        self._drain()  # its number may have been the one for which others waited

    def _compare_counts(self) -> None:
        """What is counted as it changes is what there is. No engine lives that could change it meanwhile."""
        rows = self.runner.run(self.world.store.connections.reader.read(_count_pending))  # type: ignore[attr-defined]  # the SQL store's
        found = {client.tenant: self.runner.run(self.world.store.pending(client.tenant)) for client in self.clients}
        for tenant, pending in found.items():
            ours = [(kind, number, size) for of, kind, number, size in rows if of == tenant]
            assert pending.by_kind == {kind: number for kind, number, _ in ours}
            assert pending.num_bytes == sum(size for _, _, size in ours)

    def _compare_states(self) -> None:
        for model in self.plain:
            run = self.runner.run(self.world.store.get_run(model.model_id))
            assert run.state_reason is None
            if not model.ended:
                assert run.applied_seq_id <= model.next_seq_id - 1
                assert bits(self.world.backend, model.model_id) == bits(model.backend, model.model_id)


class ProtocolOnPostgres(Protocol):
    databases: ClassVar[PostgresTables]

    @rule()
    def break_connections(self) -> None:
        """Of the server and of the engine, which notice nothing but delay."""
        self.databases.break_connections()


def _count_pending(connection: Connection) -> list[tuple[str, str, int, int]]:
    query = (
        "SELECT tenant, kind, count(*), sum(length(payload)) FROM operations JOIN payloads ON operation_id = id "
        "WHERE state IN ('queued', 'running') GROUP BY tenant, kind"
    )
    return [(tenant, kind, number, int(size)) for tenant, kind, number, size in connection.execute(text(query))]


def compare(record: OperationRecord, answer: ops.Result) -> None:
    assert record.result_kind is not None
    assert record.result is not None
    found = decode_result(record.result_kind, record.result)
    match answer:
        case ops.Failed():
            assert isinstance(found, ops.Failed), (answer, found)
            assert answer.message in found.message
            assert found.gradient_dropped == answer.gradient_dropped
            assert found.category == answer.category or not answer.message or answer.gradient_dropped
        case ops.WeightsSaved():
            assert isinstance(found, ops.WeightsSaved), found
            assert (found.path, found.sampling_session_id) == (answer.path, answer.sampling_session_id)
        case ops.WeightsLoaded():
            assert found == answer  # versions are the store's business
        case ops.SampleOutput():
            told = replace(answer, first_token_s=None)  # which is recorded beside it
            assert encode_result(found) == encode_result(told), (answer, found)
        case _:
            assert encode_result(found) == encode_result(answer), (answer, found)


def deaths_of(record: OperationRecord) -> int:
    """Return how many engines are said to have ended while it ran, those included that were killed at that moment."""
    assert record.result_kind is not None
    assert record.result is not None
    found = decode_result(record.result_kind, record.result)
    assert isinstance(found, ops.Failed)
    times = re.search(r"the engine ended (\d+) times", found.message)
    assert times is not None, found
    return int(times[1])


def bits(backend: ToyBackend, model_id: str) -> dict[str, Any]:
    state = backend.capture_state(model_id)
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v, "gradients": state.gradients}
    arrays = {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}
    return {**arrays, "step": state.step}


@pytest.fixture(scope="module")
def on_sqlite(tmp_path_factory: pytest.TempPathFactory) -> type[Protocol]:
    return type("OnSqlite", (Protocol,), {"databases": SqliteFiles(tmp_path_factory.mktemp("template"))})


@pytest.fixture(scope="module")
def on_postgres(postgres: Postgres) -> Iterator[type[Protocol]]:
    databases = PostgresTables(postgres.new_database())
    yield type("OnPostgres", (ProtocolOnPostgres,), {"databases": databases})
    databases.close()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails together fails in several transactions, and an engine may work between any two of them."""
    monkeypatch.setattr(gaps, "CHUNK", 2)


def check(machine: type[Protocol], **more: Any) -> None:
    profile = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True, **more)
    run_state_machine_as_test(machine, settings=profile)


# The short ones do not shrink: where something hangs, every attempt at it would take a minute. The long ones do.


def test_every_answer_is_what_the_protocol_says(on_sqlite: type[Protocol]) -> None:
    check(on_sqlite, max_examples=7, stateful_step_count=30, derandomize=True, phases=[Phase.generate])


def test_every_answer_on_postgres_is_what_the_protocol_says(on_postgres: type[Protocol]) -> None:
    check(on_postgres, max_examples=4, stateful_step_count=30, derandomize=True, phases=[Phase.generate])


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_every_answer_is_what_the_protocol_says_at_length(on_sqlite: type[Protocol]) -> None:
    check(on_sqlite, max_examples=1000, stateful_step_count=60)


@pytest.mark.crash
@pytest.mark.timeout(3600)
def test_every_answer_on_postgres_is_what_the_protocol_says_at_length(on_postgres: type[Protocol]) -> None:
    check(on_postgres, max_examples=200, stateful_step_count=60)
