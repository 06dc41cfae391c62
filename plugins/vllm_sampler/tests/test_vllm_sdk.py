"""A server with vLLM beside a JAX and beside an FSDP trainer, used as everybody does: through the SDK."""

import asyncio
import json
import os
import sqlite3
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tinker
from typer.testing import CliRunner
from vllm_harness import CONTEXT, TRAINERS, VOCAB, plain_vllm, prompt, settings

from tinsmith import (
    BackendConfig,
    Failed,
    Sample,
    SampleOutput,
    SamplerCapabilities,
    SamplerSpec,
    SamplingBackend,
    Snapshot,
    hookimpl,
)
from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import running_server
from tinsmith.testing.sdk_data import datum, logprobs
from tinsmith.testing.served_process import served_process
from tinsmith_vllm.sampler import VllmSampler

pytestmark = [
    pytest.mark.slow,  # it starts vLLM
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # connections that the SDK leaves to the collector
]

AGREE = 1e-3  # what is promised between two engines in float32
WAIT_S = 600  # the first request waits for all that is being started
RESIDENT = 2
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    data_dir: Path
    model_path: Path
    pid: int


@pytest.fixture(scope="module")
def is_thorough(request: pytest.FixtureRequest) -> bool:
    chosen = [item for item in request.session.items if item.path == request.path]
    return any(item.get_closest_marker("thorough") for item in chosen)


@pytest.fixture(scope="module")
def trainers(is_thorough: bool) -> list[str]:
    return [*TRAINERS] if is_thorough else ["jax"]


@pytest.fixture(scope="module")
def served(is_thorough: bool, request: pytest.FixtureRequest) -> Served:
    """If any thorough test was chosen, `tinsmith serve`; otherwise a server in this process, with the tests' vLLM."""
    found: Served = request.getfixturevalue("served_by_processes" if is_thorough else "served_here")
    return found


@pytest.fixture(scope="module")
def served_here(
    qwen3: VllmSampler, tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    class Lending:
        @hookimpl
        def tinsmith_register_samplers(self) -> SamplerSpec[BackendConfig]:
            return SamplerSpec(
                name="borrowed-vllm",
                config=BackendConfig,
                create=lambda _config, _context: BorrowedSampler(qwen3),
                description="the vLLM of all tests",
            )

    data_dir, path = tmp_path_factory.mktemp("served"), tiny_models["qwen3"]
    model = {
        "name": "tiny/jax",
        "path": path,
        "backend": {"plugin": "jax", **TRAINERS["jax"]},
        "sampler": {"plugin": "borrowed-vllm"},
        "resident_snapshots": RESIDENT,
    }
    with running_server(data_dir, models=[ModelSettings.model_validate(model)], extra_plugins=[Lending()]) as server:
        yield Served(server.url, data_dir, path, os.getpid())
    assert not qwen3.adapters, "the server has left snapshots in vLLM"


class BorrowedSampler(SamplingBackend):
    """A sampler that outlives the server: closing it drops what the server has loaded."""

    def __init__(self, sampler: VllmSampler) -> None:
        self._sampler = sampler
        self._loaded: set[str] = set()

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self._sampler.sampler_capabilities

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        self._loaded.add(snapshot.snapshot_id)
        await self._sampler.load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self._sampler.drop_snapshot(snapshot_id)
        self._loaded.discard(snapshot_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self._sampler.sample(op)

    def close(self) -> None:
        async def drop_all() -> None:
            for snapshot_id in list(self._loaded):
                await self.drop_snapshot(snapshot_id)

        asyncio.run(drop_all())


@pytest.fixture(scope="module")
def served_by_processes(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One base model per trainer, each with a vLLM of its own; two snapshots stay in it, others go to disk."""
    root = tmp_path_factory.mktemp("served")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else root) as shared:
        models = [
            {
                "name": f"tiny/{trainer}",
                "path": str(tiny_models["qwen3"]),
                "backend": {"plugin": trainer, **TRAINERS[trainer]},
                "sampler": {"plugin": "vllm", "shared_memory_dir": shared, **settings()},
                "resident_snapshots": RESIDENT,
            }
            for trainer in TRAINERS
        ]
        with served_process(root, {"models": models}) as server:
            wait_until_ready(server.process, server.url, root)
            yield Served(server.url, server.data_dir, tiny_models["qwen3"], server.process.pid)
        assert list(Path(shared).iterdir()) == [], "adapters stay in shared memory after the server"


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str, root: Path) -> None:
    """An engine that is stopped while it loads has no time to tidy up: the next one does."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=300).close()
        except urllib.error.HTTPError as error:
            error.close()
            time.sleep(0.1)
        else:
            return
    raise AssertionError((root / "log").read_text())


@pytest.fixture
def new_service(served: Served) -> Iterator[Callable[[], tinker.ServiceClient]]:
    """Make clients, each of a tenant of its own."""
    made: list[tinker.ServiceClient] = []

    def make() -> tinker.ServiceClient:
        made.append(tinker.ServiceClient(base_url=served.url, api_key=f"tml-vllm-{time.monotonic_ns()}"))
        return made[-1]

    yield make
    for service in made:
        service.close("success").result(timeout=WAIT_S)


@pytest.fixture
def service(new_service: Callable[[], tinker.ServiceClient]) -> tinker.ServiceClient:
    return new_service()


@pytest.fixture(params=["jax", pytest.param("fsdp", marks=pytest.mark.thorough)])
def base_model(request: pytest.FixtureRequest) -> str:
    return f"tiny/{request.param}"


def new_model(service: tinker.ServiceClient, base_model: str, rank: int = 4) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=base_model, rank=rank, seed=rank).result(timeout=WAIT_S)


def train(model: tinker.TrainingClient, *seeds: int) -> None:
    """Step once per seed; the first step of a model compiles, on a machine that may be starting vLLM."""
    for seed in seeds:
        tokens = np.random.default_rng(seed).integers(3, VOCAB, 24)
        passed = model.forward_backward([datum(tokens.tolist())], "cross_entropy")
        stepped = model.optim_step(tinker.AdamParams(learning_rate=0.05))
        for future in (passed, stepped):
            future.result(timeout=WAIT_S)


def publish(model: tinker.TrainingClient) -> tinker.SamplingClient:
    return model.save_weights_and_get_sampling_client().result(timeout=WAIT_S)


def ask(sampler: tinker.SamplingClient, tokens: Any, count: int = 1, **fields: Any) -> Any:
    """Send the request; its future."""
    params = tinker.SamplingParams(**{"max_tokens": 16, "seed": 3, "stop": [], **fields})
    return sampler.sample(tinker.ModelInput.from_ints(list(map(int, tokens))), count, params)


def drawn(future: Any) -> list[tuple[list[int], list[float]]]:
    """Return tokens and logprobs of each sequence; whatever comes is whole."""
    sequences = future.result(timeout=WAIT_S).sequences
    assert all(each.stop_reason == "length" and len(each.logprobs) == len(each.tokens) for each in sequences)
    return [(list(each.tokens), list(each.logprobs)) for each in sequences]


def scored(model: tinker.TrainingClient, tokens: list[int]) -> list[float]:
    """Return what the trainer gives every token after the first."""
    (found,) = logprobs(model.forward([datum(tokens)], "cross_entropy").result(timeout=WAIT_S))
    return found


def assert_agree(sampled: Any, trained: Any) -> None:
    np.testing.assert_allclose(sampled, trained, atol=AGREE, rtol=0)


def assert_same(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    for (tokens, scores), (right, right_scores) in zip(found, expected, strict=True):
        assert tokens == right
        np.testing.assert_allclose(scores, right_scores, atol=1e-4, rtol=0)


def test_what_was_trained_is_what_is_sampled(served: Served, service: tinker.ServiceClient, base_model: str) -> None:
    """The base model, an ephemeral snapshot and a checkpoint, each as the trainer scores it."""
    start = prompt(1).tolist()
    base = service.create_sampling_client(base_model=base_model).result(timeout=WAIT_S)
    model = new_model(service, base_model)
    for tokens, sampled in drawn(ask(base, start, 2)):
        assert_agree(sampled, scored(model, [*start, *tokens])[-len(tokens) :])  # a fresh adapter changes nothing
    train(model, 1, 2, 3)
    path = model.save_weights_for_sampler("kept").result(timeout=WAIT_S).path
    kept = service.create_sampling_client(model_path=path).result(timeout=WAIT_S)
    ephemeral = publish(model)
    found = drawn(ask(kept, start, 2))
    assert_same(drawn(ask(ephemeral, start, 2)), found)
    for tokens, sampled in found:
        whole = [*start, *tokens]
        trained = scored(model, whole)
        assert_agree(sampled, trained[-len(tokens) :])
        text = tinker.ModelInput.from_ints(whole)
        own, without = (each.compute_logprobs(text).result(timeout=WAIT_S) for each in (kept, base))
        assert own[0] is None
        assert_agree(own[1:], trained)
        assert np.abs(np.subtract(without[1:], trained)).max() > 10 * AGREE, "the adapter must make a difference"
    (save,) = (each for each in report_of(served, model)["operations"] if "max_difference" in each["metrics"])
    assert save["notes"][-1] == "consistent"
    assert save["metrics"]["max_difference"] < AGREE


def report_of(served: Served, model: tinker.TrainingClient) -> dict[str, Any]:
    """What `tinsmith runs show` says, with the findings of the consistency gate."""
    run = model.get_info().model_id
    printed = tinsmith("runs", "show", str(run), "--json", "--data-dir", str(served.data_dir))
    found: dict[str, Any] = json.loads(printed)
    return found


def tinsmith(*arguments: str) -> str:
    """Run the command in this process; what it prints."""
    plugins = Plugins.load()
    done = CliRunner().invoke(build_group(plugins), arguments, obj=plugins, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.thorough  # contract/test_peft_loads_exports.py reads exports in `make test`
def test_exports_are_what_any_vllm_serves(served: Served, service: tinker.ServiceClient, tmp_path: Path) -> None:
    """`tinsmith checkpoint export-peft`, and then a vLLM that has nothing of ours: one adapter of each trainer."""
    models = {trainer: new_model(service, f"tiny/{trainer}", rank=3) for trainer in TRAINERS}
    for seed, (trainer, model) in enumerate(models.items()):
        train(model, 10 + seed, 20 + seed)
        path = model.save_weights_for_sampler("exported").result(timeout=WAIT_S).path
        tinsmith("checkpoint", "export-peft", path, str(tmp_path / trainer), "--data-dir", str(served.data_dir))
    prompts = [prompt(n, 3 + 5 * n).tolist() for n in range(4)]
    sampled = plain_vllm(served.model_path, [tmp_path / trainer for trainer in TRAINERS], prompts, tmp_path)
    for model, sequences in zip(models.values(), sampled, strict=True):
        for start, (tokens, found) in zip(prompts, sequences, strict=True):
            assert_agree(found, scored(model, [*start, *tokens])[-len(tokens) :])


def test_snapshots_come_back_without_anybody_noticing(service: tinker.ServiceClient, base_model: str) -> None:
    """Five are published where two stay resident: the others are on disk by then, and nobody is told."""
    model = new_model(service, base_model)
    start = prompt(2)
    samplers, first = [], []
    for number in range(5):
        train(model, number)
        samplers.append(publish(model))
        first.append(drawn(ask(samplers[-1], start)))
    assert len({tuple(scores) for ((_, scores),) in first}) == 5
    for sampler, expected in zip(samplers, first, strict=True):
        assert_same(drawn(ask(sampler, start)), expected)
    futures = [ask(sampler, start) for sampler in samplers]
    for future, expected in zip(futures, first, strict=True):
        assert_same(drawn(future), expected)


@pytest.mark.parametrize("num_publishes", [3, pytest.param(50, marks=pytest.mark.thorough)])
def test_publishes_beside_samples(new_service: Callable[[], tinker.ServiceClient], num_publishes: int) -> None:
    """One tenant trains and publishes, another samples: nothing of the other's fails, is cut, or changes."""
    publisher, neighbour = (new_model(new_service(), "tiny/jax", rank) for rank in (2, 4))
    train(neighbour, 5)
    sampler = publish(neighbour)
    requests = [partial(ask, sampler, prompt(n), 2, max_tokens=40, seed=n) for n in range(4)]
    expected = [drawn(request()) for request in requests]
    published, rounds, enough = threading.Event(), 0, threading.Event()
    failures: list[BaseException] = []

    def keep_sampling() -> None:
        nonlocal rounds
        try:
            while not published.is_set():
                for future, right in zip([request() for request in requests], expected, strict=True):
                    assert_same(drawn(future), right)
                rounds += 1
                if rounds == 3:
                    enough.set()
        except BaseException as failure:  # noqa: BLE001 - raised again by the test
            failures.append(failure)
        enough.set()

    sampling = threading.Thread(target=keep_sampling)
    sampling.start()
    try:
        for number in range(num_publishes):
            if number == num_publishes * 4 // 5:
                enough.wait()  # there were samples under way, however slow this machine is
            train(publisher, number)
            last = publish(publisher)
        assert drawn(ask(last, prompt(1)))
    finally:
        published.set()
        sampling.join()
    assert not failures, failures
    assert rounds >= 3


def test_wrong_input_fails_by_itself(service: tinker.ServiceClient, base_model: str) -> None:
    """Each with a message that names what is wrong; the sampler goes on."""
    sampler = service.create_sampling_client(base_model=base_model).result(timeout=WAIT_S)
    good = drawn(ask(sampler, prompt(3)))
    for words, tokens, fields in (
        ("context window: 9 . 128 > 128", prompt(3), {"max_tokens": CONTEXT}),
        (str(VOCAB), [VOCAB], {}),
        ("temperature is 0.005", prompt(3), {"temperature": 0.005}),
        ("top_p", prompt(3), {"top_p": 2.0}),
    ):
        with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=words):
            ask(sampler, tokens, **fields).result(timeout=WAIT_S)
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        service.create_sampling_client(model_path="tinker://nobody/sampler_weights/x").result(timeout=WAIT_S)
    assert_same(drawn(ask(sampler, prompt(3))), good)


def test_a_cancelled_sample_is_given_up(served: Served, trainers: list[str], service: tinker.ServiceClient) -> None:
    """While vLLM stands still, so that nothing ends by itself; then it goes on with what is wanted."""
    sampler = service.create_sampling_client(base_model="tiny/jax").result(timeout=WAIT_S)
    before = drawn(ask(sampler, prompt(4)))
    (newest,) = look(served, "SELECT MAX(id) FROM operations")[0]

    def wait_until(state: str) -> None:
        while look(served, "SELECT state FROM operations WHERE id > ?", newest) != [(state,)]:
            time.sleep(0.05)

    with standing_still(served, len(trainers)):
        doomed = ask(sampler, prompt(4, 5), 8, max_tokens=CONTEXT - 5)
        wait_until("running")
        for _ in range(3):  # once the client has read these answers, it has read what to cancel
            service.create_sampling_client(base_model="tiny/jax").result(timeout=WAIT_S)
        doomed.future().cancel()
        wait_until("cancelled")
    assert_same(drawn(ask(sampler, prompt(4))), before)


def vllm_processes(served: Served) -> list[psutil.Process]:
    found = []
    for each in psutil.Process(served.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # an engine runs small programs when it starts
            if "tinsmith_vllm.child" in each.cmdline():
                found.append(each)
    return found


@contextmanager
def standing_still(served: Served, num_processes: int) -> Iterator[None]:
    """Stop all vLLM processes of the server until the block ends."""
    while len(found := vllm_processes(served)) < num_processes:
        time.sleep(0.05)  # nothing tells when the last one is there
    for each in found:
        each.suspend()
    try:
        yield
    finally:
        for each in found:
            each.resume()


def look(served: Served, query: str, *values: object) -> list[Any]:
    """Read the server's database: the API has nothing that tells of samples that were given up."""
    with closing(sqlite3.connect(f"file:{served.data_dir / 'tinsmith.db'}?mode=ro", uri=True)) as database:
        return database.execute(query, values).fetchall()
