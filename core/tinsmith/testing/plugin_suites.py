"""All suites that test a plugin, generated from its offers alone. `tinsmith check-plugin` runs them."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from tinsmith.backend import AnyBackendSpec, AnySamplerSpec, Capabilities, SamplingBackend, TrainingBackend
from tinsmith.losses import LossSpec
from tinsmith.plugins.loading import Plugins
from tinsmith.plugins.registry import Offer
from tinsmith.scheduler import Scheduler, SchedulerSpec
from tinsmith.store import StoreContext, StoreSpec
from tinsmith.testing.backend_context import backend_context
from tinsmith.testing.checkpoint_contract import CheckpointContract
from tinsmith.testing.consistency_contract import ConsistencyContract
from tinsmith.testing.full_fine_tuning_contract import FullFineTuningContract
from tinsmith.testing.loss_contract import LossContract
from tinsmith.testing.model_driver import ModelDriver
from tinsmith.testing.sampling_contract import SamplingBackendContract
from tinsmith.testing.sampling_suite import Detokenize, Shapes
from tinsmith.testing.scheduler_contract import SchedulerContract
from tinsmith.testing.store_contract import RequestStoreContract
from tinsmith.testing.store_records import MakeStore
from tinsmith.testing.training_contract import TrainingBackendContract
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

_SHAPE: Final = TinyShape(  # heads of 32: vLLM's attention on CPUs takes no smaller ones
    vocab_size=300, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32
)

CAPABILITIES: Final = "capabilities"
"""The test property that holds the capabilities of the backend under test, by its roles."""

Suites = dict[str, Any]
Options = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """The parameters of the suites for one offer."""

    number: int  # of the offer: distinguishes its fixtures from others'
    offer: Offer
    options: Options  # the user's options that this offer knows
    trainer: AnyBackendSpec | None


def suites_of(plugin: str, *, options: Options, trainer: str | None) -> Suites:
    """Return the contents of a test module for all offers of `plugin`: call it as `globals().update(...)`.

    `trainer` names the backend whose adapters the plugin's sampler samples from; by default the plugin's own, if any.
    """
    plugins = Plugins.load()
    offers = plugins.offers_of(plugin)
    own = next((offer.spec for offer in offers if offer.kind == "backend"), None)
    suites: Suites = {"tiny_model": _tiny_model}
    for number, offer in enumerate(offers):
        wanted = _Wanted(
            number=number,
            offer=offer,
            options=options_for(offer, options),
            trainer=plugins.backends.get(trainer) if trainer else own,
        )
        suites |= _MAKERS[offer.kind](wanted)
    return suites


def options_for(offer: Offer, options: Options) -> Options:
    """Return the options that the offer's configuration has."""
    known = () if isinstance(offer.spec, LossSpec) else offer.spec.config.model_fields
    return {key: value for key, value in options.items() if key in known}


@pytest.fixture(scope="module")
def _tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("check-plugin") / "tiny"
    write_tiny_model(directory, _SHAPE)
    return directory


def _backend_suites(wanted: _Wanted) -> Suites:
    spec: AnyBackendSpec = wanted.offer.spec
    shared = f"offer_{wanted.number}"

    class TestTraining(TrainingBackendContract, CheckpointContract):
        @pytest.fixture
        def backend(self, request: pytest.FixtureRequest) -> TrainingBackend:
            backend: TrainingBackend = _asked(request, shared, TrainingBackend)
            return backend

        @pytest.fixture
        def model_path(self, tiny_model: Path) -> Path | None:
            return tiny_model if spec.needs_model_path else None

    class TestFullFineTuning(FullFineTuningContract):
        area = "full fine-tuning"

        @pytest.fixture
        def backend(self, request: pytest.FixtureRequest) -> TrainingBackend:
            backend: TrainingBackend = _asked(request, shared, TrainingBackend)
            return backend

        @pytest.fixture
        def model_path(self, tiny_model: Path) -> Path | None:
            return tiny_model if spec.needs_model_path else None

    class TestSampling(_OfTinyModel, SamplingBackendContract):
        has_tokenizer = spec.needs_model_path

        @pytest.fixture
        def backend(self, request: pytest.FixtureRequest) -> SamplingBackend:
            backend: TrainingBackend = _asked(request, shared, TrainingBackend)
            if not isinstance(backend, SamplingBackend):
                pytest.skip("it trains, and does not sample")
            return backend

    class TestConsistency(ConsistencyContract):
        @pytest.fixture
        def backend(self, request: pytest.FixtureRequest) -> TrainingBackend:
            backend: TrainingBackend = _asked(request, shared, TrainingBackend)
            if not isinstance(backend, SamplingBackend):
                pytest.skip("it trains, and does not sample")
            return backend

    return {
        shared: _made(spec, wanted.options, needs_model_path=spec.needs_model_path),
        **_named(wanted, TestTraining, TestFullFineTuning, TestSampling, TestConsistency),
    }


def _sampler_suites(wanted: _Wanted) -> Suites:
    spec: AnySamplerSpec = wanted.offer.spec
    sampler_name, trainer_name = f"offer_{wanted.number}", f"trainer_{wanted.number}"
    trainer = wanted.trainer

    class TestSampling(_OfTinyModel, SamplingBackendContract):
        has_tokenizer = trainer is not None and trainer.needs_model_path

        @pytest.fixture
        def backend(self, request: pytest.FixtureRequest) -> SamplingBackend:
            sampler: SamplingBackend = _asked(request, sampler_name, SamplingBackend)
            return sampler

        @pytest.fixture
        def adapter_shapes(self, request: pytest.FixtureRequest) -> Shapes:
            if trainer is None:
                pytest.skip("needs a trainer to make adapters; name its backend with --trainer")
            driver = ModelDriver(_asked(request, trainer_name, TrainingBackend))
            shapes = {name: array.shape for name, array in driver.state(driver.create(rank=4)).weights.items()}
            driver.unload_all()
            return shapes

    suites: Suites = {
        sampler_name: _made(spec, wanted.options, needs_model_path=True),
        **_named(wanted, TestSampling),
    }
    if trainer is None:
        return suites

    class TestConsistency(ConsistencyContract):
        @pytest.fixture
        def backend(self, request: pytest.FixtureRequest) -> TrainingBackend:
            backend: TrainingBackend = _asked(request, trainer_name, TrainingBackend)
            return backend

        @pytest.fixture
        def sampler(self, request: pytest.FixtureRequest) -> SamplingBackend:
            sampler: SamplingBackend = _asked(request, sampler_name, SamplingBackend)
            return sampler

    made = _made(trainer, {}, needs_model_path=trainer.needs_model_path)
    return {**suites, trainer_name: made, **_named(wanted, TestConsistency)}


def _store_suites(wanted: _Wanted) -> Suites:
    spec: StoreSpec[Any] = wanted.offer.spec
    config = spec.config.model_validate(wanted.options)

    class TestStore(RequestStoreContract):
        @pytest.fixture
        def make_store(self, tmp_path: Path) -> MakeStore:
            return lambda: spec.create(config, StoreContext(data_dir=tmp_path))

    return _named(wanted, TestStore)


def _scheduler_suites(wanted: _Wanted) -> Suites:
    spec: SchedulerSpec[Any] = wanted.offer.spec
    config = spec.config.model_validate(wanted.options)

    class TestScheduler(SchedulerContract):
        def make_scheduler(self) -> Scheduler:
            return spec.create(config)

    return _named(wanted, TestScheduler)


def _loss_suites(wanted: _Wanted) -> Suites:
    spec: LossSpec = wanted.offer.spec

    class TestLoss(LossContract):
        @pytest.fixture
        def loss(self) -> LossSpec:
            return spec

    return _named(wanted, TestLoss)


class _OfTinyModel:
    """Stop strings and end-of-sequence tests need the tokenizer of the sampled model."""

    has_tokenizer = False

    @pytest.fixture
    def eos_token(self, tiny_model: Path) -> int | None:
        if not self.has_tokenizer:
            return None
        eos = json.loads((tiny_model / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
        return eos if isinstance(eos, int) else int(eos[0])

    @pytest.fixture
    def detokenize(self, tiny_model: Path) -> Detokenize | None:
        if not self.has_tokenizer:
            return None
        tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
        return lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=False))


def _made(
    spec: AnyBackendSpec | AnySamplerSpec, options: Options, *, needs_model_path: bool
) -> Callable[..., Iterator[TrainingBackend | SamplingBackend]]:
    """Return a fixture that makes the offer once, and closes it at the end."""
    config = spec.config.model_validate(options)

    @pytest.fixture(scope="module")
    def made(
        tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
    ) -> Iterator[TrainingBackend | SamplingBackend]:
        model_path = request.getfixturevalue("tiny_model") if needs_model_path else None
        backend = spec.create(config, backend_context(tmp_path_factory.mktemp("cache"), model_path=model_path))
        yield backend
        backend.close()

    return made


def _asked(request: pytest.FixtureRequest, name: str, kind: type[Any]) -> Any:
    backend = request.getfixturevalue(name)
    assert isinstance(backend, kind), f"create returned a {type(backend).__name__}, which is no {kind.__name__}"
    roles: dict[str, Capabilities] = {}
    if isinstance(backend, TrainingBackend):
        roles["trainer"] = backend.trainer_capabilities
    if isinstance(backend, SamplingBackend):
        roles["sampler"] = backend.sampler_capabilities
    request.node.user_properties.append((CAPABILITIES, roles))
    return backend


def _named(wanted: _Wanted, *suites: type) -> Suites:
    for suite in suites:
        suite.offer = (wanted.offer.kind, wanted.offer.spec.name)  # type: ignore[attr-defined]  # for the report
    return {f"{suite.__name__}_{wanted.number}": suite for suite in suites}


_MAKERS: Final[Mapping[str, Callable[[_Wanted], Suites]]] = {
    "backend": _backend_suites,
    "sampler": _sampler_suites,
    "store": _store_suites,
    "scheduler": _scheduler_suites,
    "loss": _loss_suites,
}
