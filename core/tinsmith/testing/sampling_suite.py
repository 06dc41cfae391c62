"""The fixtures and short calls that all sampling suites share.

Array suffixes: P = prompt tokens, V = vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tinsmith.backend import HostSnapshot, SamplingBackend, Snapshot, TrainingBackend
from tinsmith.operations import LoraConfig, Sample, SampledSequence, SampleOutput, SamplingParams, TokenArray
from tinsmith.result_checks import check_sample
from tinsmith.testing.contract import Contract, assert_same_numbers, need
from tinsmith.testing.model_driver import ModelDriver

Shapes = Mapping[str, tuple[int, ...]]
Detokenize = Callable[[list[int]], str]

SUITE_LORA = LoraConfig(rank=4, seed=0)

in_one_loop = pytest.mark.asyncio(loop_scope="session")  # a sampler belongs to one event loop

_TARGETS = 1024  # per position of a prompt, in one request

_snapshot_ids = count()  # a backend may be shared by many tests: no snapshot id occurs twice


class SamplingSuite(Contract):
    @pytest.fixture
    def backend(self) -> SamplingBackend:
        """Override: the backend under test. One may serve all tests: the suites drop what they load."""
        msg = f"{type(self).__name__} must override the fixture 'backend' and return a SamplingBackend"
        raise NotImplementedError(msg)

    @pytest.fixture
    def detokenize(self) -> Detokenize | None:
        """Override to have stop strings tested: tokens to text."""
        return None

    @pytest.fixture
    def eos_token(self) -> int | None:
        """Override to have the end of sequence tested: the token that ends one."""
        return None

    @pytest.fixture
    def adapter_shapes(self, backend: SamplingBackend) -> Shapes:
        """Canonical names and shapes of a rank-4 adapter of the model. Override this if the backend does not train."""
        if not isinstance(backend, TrainingBackend):
            pytest.skip("override the fixture 'adapter_shapes' to have snapshots tested")
        driver = ModelDriver(backend)
        shapes = {name: array.shape for name, array in driver.state(driver.create(rank=4)).weights.items()}
        driver.unload_all()
        return shapes

    @pytest.fixture
    def driver(self, backend: SamplingBackend) -> Iterator[ModelDriver]:
        if not isinstance(backend, TrainingBackend):
            pytest.skip("the backend does not train")
        need(backend.trainer_capabilities.max_lora_rank, "LoRA")
        driver = ModelDriver(backend)
        yield driver
        driver.unload_all()


def new_snapshot_id() -> str:
    return f"contract-sampling-{next(_snapshot_ids)}"


def random_snapshot(shapes: Shapes, *, seed: int) -> Snapshot:
    """Make an adapter with a clearly visible effect."""
    rng = np.random.default_rng([seed, 17])
    weights = {name: (0.2 * rng.normal(size=shape)).astype(np.float32) for name, shape in sorted(shapes.items())}
    return HostSnapshot(new_snapshot_id(), SUITE_LORA, weights)


def random_prompt(seed: int, length: int, vocab_size: int) -> TokenArray:
    return np.random.default_rng([seed, length]).integers(0, vocab_size, length).astype(np.int32)


def params(**fields: Any) -> SamplingParams:
    """Return parameters: by default, eight tokens without any stop condition."""
    return SamplingParams(**{"max_tokens": 8, "seed": 1, "stop_at_eos": False, **fields})


async def ask(
    backend: SamplingBackend,
    prompt_P: TokenArray,
    wanted: SamplingParams,
    *,
    snapshot_id: str | None = None,
    **options: Any,  # the other fields of Sample
) -> SampleOutput:
    """Sample. Fail the test if the backend returns Failed, or what the engine would not record."""
    op = Sample(
        sampling_session_id="contract:sample:0", snapshot_id=snapshot_id, prompt_P=prompt_P, params=wanted, **options
    )
    output = await backend.sample(op)
    check_sample(op, output, backend.sampler_capabilities.vocab_size)
    assert isinstance(output, SampleOutput), output
    return output


async def ask_one(
    backend: SamplingBackend, prompt_P: TokenArray, wanted: SamplingParams, **options: Any
) -> SampledSequence:
    (sequence,) = (await ask(backend, prompt_P, wanted, **options)).sequences
    return sequence


async def all_logprobs(
    backend: SamplingBackend, tokens_P: TokenArray, snapshot_id: str | None = None
) -> npt.NDArray[np.float64]:
    """Return [P - 1, V]: at temperature 1, what every token of the vocabulary would get at positions 1 and on."""
    need(backend.sampler_capabilities.target_prompt_logprobs, "target_prompt_logprobs")
    vocab_size = backend.sampler_capabilities.vocab_size
    width = min(_TARGETS, vocab_size)
    columns = []
    for start in range(0, vocab_size, width):
        targets = np.full((len(tokens_P) - 1, width), -1)  # one width for all calls: nothing to compile twice
        chunk = np.arange(start, min(start + width, vocab_size))
        targets[:, : len(chunk)] = chunk
        output = await ask(
            backend, tokens_P, params(max_tokens=1), snapshot_id=snapshot_id, target_prompt_logprobs=targets
        )
        assert output.target_prompt_logprobs is not None
        columns.append(output.target_prompt_logprobs[:, : len(chunk)])
    return np.concatenate(columns, axis=-1).astype(np.float64)


def with_tokens(prompt_P: TokenArray, tokens: Sequence[int] | TokenArray) -> TokenArray:
    return np.concatenate([prompt_P, np.asarray(tokens, np.int32)])


def assert_same_sequence(actual: SampledSequence, expected: SampledSequence, what: str) -> None:
    """Compare bit for bit."""
    assert actual.tokens.tolist() == expected.tokens.tolist(), what
    np.testing.assert_array_equal(actual.logprobs, expected.logprobs, err_msg=what)
    assert actual.stop_reason == expected.stop_reason, what


def assert_same_draw(backend: SamplingBackend, actual: SampledSequence, expected: SampledSequence, what: str) -> None:
    """Compare as strictly as `isolation` promises; if that is not bitwise, draws may diverge at a near tie."""
    if backend.sampler_capabilities.isolation == "bitwise":
        assert_same_sequence(actual, expected, what)
        return
    common = int(np.cumprod(actual.tokens == expected.tokens).sum())
    assert_same_numbers(backend.sampler_capabilities, actual.logprobs[:common], expected.logprobs[:common], what)
