"""Traces of real operations, made by OpenTelemetry's SDK and received as a collector receives them."""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
import tinker
from collector import Collector, ReceivedSpan, collecting

import tinsmith
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.operations import Failed
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import TOKENS, datum, step, wait_until_at_rest
from tinsmith.testing.served_process import served_process
from tinsmith.tracing import BatchFinished, Phase, WorkerTime
from tinsmith_otel.config import OtelConfig
from tinsmith_otel.plugin import create

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # what the SDK leaves open is its business

WAIT_S = 300
KEY = "tml-of-ada"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
EVENT = tinsmith.OperationFinished(
    request_id="req-1",
    base_model="toy",
    kind="forward_backward",
    tenant="ada",
    model_id="s1:train:0",
    num_tokens=7,
    queued_s=1.0,
    run_s=2.0,
    batch_size=2,
    session_id="s1",
    arrived_at=NOW,
    claimed_at=NOW + timedelta(seconds=1),
    ran_at=NOW + timedelta(seconds=3),
    seq_id=1,
    step=0,
    recorded_at=NOW + timedelta(seconds=6),
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def service_of(url: str, traceparent: str | None = None) -> tinker.ServiceClient:
    headers = None if traceparent is None else {"traceparent": traceparent}
    return tinker.ServiceClient(base_url=url, api_key=KEY, default_headers_overrides=headers)


def run_through(url: str, traceparent: str | None = None) -> str:
    """Train a step, save it and sample from it. Return the run's id."""
    service = service_of(url, traceparent)
    model = service.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
    step(model, [datum()])
    sampler = model.save_weights_and_get_sampling_client().result(WAIT_S)
    params = tinker.SamplingParams(max_tokens=4)
    sampler.sample(tinker.ModelInput.from_ints(TOKENS), num_samples=1, sampling_params=params).result(WAIT_S)
    run_id = model.get_info().model_id
    wait_until_at_rest(sampler)
    service.close("success").result(WAIT_S)
    return str(run_id)


def one(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    [found] = [span for span in spans if span.name == name]
    return found


def children(spans: list[ReceivedSpan], parent: ReceivedSpan) -> dict[str, ReceivedSpan]:
    return {span.name: span for span in spans if span.parent_id == parent.span_id}


def tracing(collector: Collector, **more: object) -> dict[str, object]:
    return {"plugin": "otel", "endpoint": collector.url, **more}


def test_a_clients_trace_reaches_the_batch_and_comes_back(collector: Collector, tmp_path: Path) -> None:
    with running_server(tmp_path, tracing=tracing(collector)) as server:
        run_id = run_through(server.url, SAMPLED)
        timed = server.call(server.store.list_times(run_id.partition(":")[0], model_id=run_id, limit=100))
    spans = collector.of(TRACE)
    others = [span for span in collector.spans if span.trace_id != TRACE and not span.parent_id]
    assert {span.name for span in others} <= {"unload_model"}, "which the end of the session asks for"
    request = one(spans, "POST /api/v1/forward_backward")
    assert (request.service, request.parent_id) == ("tinsmith-server", PARENT)
    operation = children(spans, request)["forward_backward"]
    assert operation.service == "tinsmith-engine"
    assert operation.attributes["tinsmith.run"] == run_id
    assert operation.attributes["tinsmith.tokens"] == len(TOKENS) - 1
    phases = children(spans, operation)
    batch = phases["batch forward_backward"]
    assert batch.links == [(TRACE, operation.span_id)]
    assert phases["passes"].links == [(TRACE, batch.span_id)]
    assert "takes them" in phases["wait_queue"].attributes["tinsmith.reason"]
    [(ran_at, run_s)] = [(each.ran_at, each.run_s) for each in timed if each.kind == "forward_backward"]
    assert ran_at is not None
    assert run_s is not None
    began_ns = round(ran_at.timestamp() * 1e6) * 1000
    assert phases["passes"].start_ns == batch.start_ns == began_ns, "the times of the log, not others"
    assert abs(phases["passes"].end_ns - began_ns - run_s * 1e9) < 2000
    assert {"step", "recording"} <= children(spans, one(spans, "optim_step")).keys()
    assert {"weight_sync", "recording"} <= children(spans, one(spans, "save_for_sampler")).keys()
    assert {"prefill", "decode", "recording"} <= children(spans, one(spans, "sample")).keys()
    returns = [span for span in spans if span.name == "POST /api/v1/retrieve_future"]
    assert operation.attributes["tinsmith.request_id"] in {each.attributes["tinsmith.request_id"] for each in returns}
    assert {each.parent_id for each in returns} == {PARENT}
    assert (TRACE, request.span_id) in {link for each in returns for link in each.links}


def test_what_came_without_a_trace_has_one_for_each_operation(collector: Collector, tmp_path: Path) -> None:
    with running_server(tmp_path, tracing=tracing(collector)) as server:
        run_through(server.url)
    request = one(collector.spans, "POST /api/v1/forward_backward")
    own = collector.of(request.trace_id)
    assert request.parent_id == ""
    back = one(own, "POST /api/v1/retrieve_future")
    assert children(own, request).keys() == {"forward_backward", back.name}
    assert one(collector.spans, "optim_step").trace_id != request.trace_id


def test_a_batch_links_to_the_operations_of_all_its_clients(collector: Collector) -> None:
    tracer = create(OtelConfig(endpoint=collector.url), "engine")
    other = f"00-{'5' * 32}-{PARENT}-01"
    sampled_out = f"00-{'6' * 32}-{PARENT}-00"
    events = [
        replace(EVENT, request_id=f"req-{number}", model_id=f"s{number}:train:0", traceparent=each)
        for number, each in enumerate((SAMPLED, other, sampled_out))
    ]
    tracer.batch_finished(BatchFinished(ran_at=NOW + timedelta(seconds=3), run_s=2.0, operations=tuple(events)))
    tracer.close()
    batch = one(collector.spans, "batch forward_backward")
    assert {trace_id for trace_id, _ in batch.links} == {TRACE, "5" * 32}
    assert batch.attributes["tinsmith.batch.operations"] == 3
    assert (batch.end_ns - batch.start_ns) / 1e9 == 2.0
    operation = next(span for span in collector.of("5" * 32) if span.name == "forward_backward")
    lasted = {name: (span.end_ns - span.start_ns) / 1e9 for name, span in children(collector.spans, operation).items()}
    assert lasted == {"wait_queue": 1.0, "wait_batch": 2.0, "passes": 2.0, "recording": 1.0}
    assert collector.of("6" * 32) == []


class WithWorkers(ToyBackend):
    """Computes here, and says what a group of workers says of a call."""

    def __init__(self, config: ToyConfig, context: tinsmith.BackendContext) -> None:
        super().__init__(config, context)
        self._figures = context.figures

    def forward_backward(self, ops: Sequence[tinsmith.ForwardBackward]) -> list[object]:  # type: ignore[override]
        began_at = datetime.now(UTC)
        found = super().forward_backward(ops)
        times = [WorkerTime(rank, f"node-{rank}", 0.5 + rank) for rank in range(10)]
        self._figures.workers_called("forward_backward", began_at, times)
        return list(found)


class Plugin:
    @tinsmith.hookimpl
    def tinsmith_register_backends(self) -> tinsmith.BackendSpec[ToyConfig]:
        return tinsmith.BackendSpec(name="workers", config=ToyConfig, create=WithWorkers, needs_model_path=False)


def test_a_batch_shows_what_its_workers_did(collector: Collector, tmp_path: Path) -> None:
    """Of those of many, the slowest."""
    models = [ModelSettings(name="toy", backend=PluginSection(plugin="workers"))]
    with running_server(tmp_path, models=models, extra_plugins=[Plugin()], tracing=tracing(collector)) as server:
        run_through(server.url, SAMPLED)
    batch = one(collector.spans, "batch forward_backward")
    calls = [span for span in collector.spans if span.parent_id == batch.span_id]
    assert {span.name for span in calls} == {"worker forward_backward"}
    assert [span.attributes["tinsmith.worker.rank"] for span in calls] == [9, 8, 7, 6, 5, 4, 3, 2]
    assert (calls[0].attributes["tinsmith.worker.host"], calls[0].attributes["tinsmith.worker.of"]) == ("node-9", 10)
    assert (calls[0].end_ns - calls[0].start_ns) / 1e9 == 9.5
    assert batch.start_ns <= calls[0].start_ns < batch.end_ns


@pytest.mark.parametrize(("ratio", "traceparent"), [(0.0, None), (1.0, f"00-{TRACE}-{PARENT}-00")])
def test_nothing_is_made_or_sent_of_what_is_sampled_out(
    ratio: float, traceparent: str | None, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its phases are not even computed. A session's end asks for an `unload_model` of its own, without a context."""
    asked: list[str] = []

    def phases(event: tinsmith.OperationFinished) -> list[Phase]:
        asked.append(event.kind)
        return []

    monkeypatch.setattr(tinsmith.OperationFinished, "phases", phases)
    with running_server(tmp_path, tracing=tracing(collector, sample_ratio=ratio)) as server:
        run_through(server.url, traceparent)
    assert {span.name for span in collector.spans} <= {"unload_model", "batch unload_model"}
    assert set(asked) <= {"unload_model"}
    assert ratio or not collector.bodies


def test_a_share_of_the_operations_is_traced(collector: Collector) -> None:
    """Which ones, server and engine decide alike: an operation is the child of a request that is there."""
    tracer = create(OtelConfig(endpoint=collector.url, sample_ratio=0.25), "engine")
    for number in range(400):
        event = replace(EVENT, request_id=f"req-{number}")
        tracer.batch_finished(BatchFinished(ran_at=NOW, run_s=2.0, operations=(event,)))
    tracer.close()
    traced = [span for span in collector.spans if span.name == "forward_backward"]
    assert 60 < len(traced) < 140  # the ids are fixed, and so is the number


def test_a_collector_that_does_not_answer_delays_nothing(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    collector.answering.clear()
    with running_server(tmp_path, tracing=tracing(collector)) as server:
        run_through(server.url)
        assert collector.asked.wait(WAIT_S)
        run_through(server.url)  # while the exporter waits, and more spans come than it keeps
        assert collector.bodies == []
        collector.answering.set()


@pytest.mark.thorough  # each process waits for the collector when it ends
def test_a_collector_that_cannot_be_reached_fails_nothing(tmp_path: Path) -> None:
    with running_server(tmp_path, tracing={"plugin": "otel", "endpoint": "http://127.0.0.1:1"}) as server:
        run_through(server.url)


def test_no_secret_and_no_prompt_is_in_a_trace(collector: Collector, tmp_path: Path) -> None:
    keys = [{"key": KEY, "tenant": "ada"}]
    with running_server(tmp_path, server={"api_keys": keys}, tracing=tracing(collector)) as server:
        run_id = run_through(server.url, SAMPLED)
        headers = {"x-api-key": KEY, "traceparent": SAMPLED}
        link = signed_link(server, run_id, headers)
        assert httpx.get(f"{link}?api_key={KEY}", headers=headers).status_code == 200
    assert "GET /api/v1/traces/{stamp}/{grant}/{signature}/{session_id}" in {span.name for span in collector.spans}
    signature = link.split("/")[-2]
    for body in collector.bodies:
        assert KEY.encode() not in body
        assert signature.encode() not in body
    known = {
        *("http.request.method", "http.route", "http.response.status_code", "error.type", "tinsmith.reason"),
        *(f"tinsmith.{name}" for name in ("request_id", "base_model", "tenant", "session", "run", "seq_id", "step")),
        *("tinsmith.tokens", "tinsmith.batch.operations", "tinsmith.batch.models", "tinsmith.batch.tokens"),
    }
    assert {name for span in collector.spans for name in span.attributes} <= known


def signed_link(server: RunningServer, run_id: str, headers: dict[str, str]) -> str:
    session = run_id.partition(":")[0]
    answer = httpx.get(f"{server.url}/api/v1/sessions/{session}/trace_export", headers=headers)
    return str(answer.json()["url"])


def test_a_failure_is_told_without_its_message(collector: Collector) -> None:
    tracer = create(OtelConfig(endpoint=collector.url), "engine")
    event = replace(EVENT, failed=Failed(message="the prompt 'my secret' is too long", category="user"))
    tracer.batch_finished(BatchFinished(ran_at=NOW, run_s=2.0, operations=(event,)))
    tracer.close()
    assert one(collector.spans, "forward_backward").attributes["error.type"] == "user"
    assert all(b"my secret" not in body for body in collector.bodies)


def test_a_trace_goes_on_after_the_engine_was_killed(collector: Collector, tmp_path: Path) -> None:
    """Server and engine are processes. The second engine finds the client's context in the log."""
    models = [{"name": "toy", "backend": {"plugin": "toy"}}]
    with served_process(tmp_path, {"models": models, "tracing": tracing(collector)}) as served:
        service = service_of(served.url, SAMPLED)
        model = service.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
        step(model, [datum()])
        killed = engine_of(served.data_dir)
        os.kill(killed, signal.SIGSTOP)
        passed = model.forward_backward([datum()], "cross_entropy")
        wait_for_row(served.data_dir, "SELECT count(*) FROM operations WHERE kind = 'forward_backward'", 2)
        os.kill(killed, signal.SIGKILL)
        passed.result(WAIT_S)
        assert engine_of(served.data_dir) != killed
        service.close("success").result(WAIT_S)
    requests = [span for span in collector.of(TRACE) if span.name == "POST /api/v1/forward_backward"]
    last = max(requests, key=lambda span: span.start_ns)
    operation = children(collector.spans, last)["forward_backward"]
    batch = children(collector.spans, operation)["batch forward_backward"]
    assert (batch.service, batch.links) == ("tinsmith-engine", [(TRACE, operation.span_id)])


def engine_of(data_dir: Path) -> int:
    return wait_for_row(data_dir, "SELECT pid FROM engines WHERE state = 'ready'")


def wait_for_row(data_dir: Path, query: str, wanted: int | None = None) -> int:
    """Return the number that a query finds, once it finds one, or the wanted one."""
    with sqlite3.connect(data_dir / "tinsmith.db") as database:
        while (found := database.execute(query).fetchone()) is None or wanted not in {None, found[0]}:
            time.sleep(0.02)
    database.close()
    return int(found[0])


def test_the_readme_describes_every_option() -> None:
    table = (Path(__file__).parents[1] / "README.md").read_text().partition("## Options of `tracing`")[2]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    described = {name.strip(" `"): description.strip() for name, _, description in rows}
    assert described == {name: field.description for name, field in OtelConfig.model_fields.items()}
