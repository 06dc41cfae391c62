"""The suite of a family: a tiny random model, trained and sampled here and by transformers.

transformers computes in float64, and each sequence by itself. Differences are L2 norms, relative to the reference's.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar

import jax
import numpy as np
import pytest
import torch

from tinsmith import (
    BUILTIN_LOSSES,
    AdamParams,
    Array,
    BackendContext,
    CreateModel,
    Datum,
    Failed,
    Forward,
    ForwardBackward,
    LoraConfig,
    ModelState,
    OptimStep,
    Sample,
    SampleOutput,
    SamplingParams,
)
from tinsmith_checkpoints.huggingface import (
    StoredTensors,
    adapter_weights,
    decoder_names,
    save_as_published,
    tiny_causal_lm,
    weight_counts,
)
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.costs import Computing, Costs
from tinsmith_jax.families import read_config
from tinsmith_jax.testing.torch_reference import TorchModel
from tinsmith_jax.weights import base_shapes, load_base

_LIMITS: Final = {"max_context_tokens": 192, "max_batch_tokens": 256, "max_lora_rank": 8, "decode_slots": 2}
_LORA: Final = LoraConfig(rank=4, seed=7)
_ADAM: Final = AdamParams(learning_rate=0.3, beta1=0.8, beta2=0.999, eps=1.0)
_TOLERANCE: Final = 1e-5
_LENGTHS: Final = (130, 50)


Output = TypeVar("Output")


class FamilyContract:
    """Subclass it as `Test...`; name the class in transformers, and its settings, as for `tiny_causal_lm`.

    Windows should be of some 40 tokens: the suite's sequences have 130.
    """

    architecture: ClassVar[str]
    settings: ClassVar[Mapping[str, Any]] = {}
    other_parts: ClassVar[Mapping[str, Any]] = {}  # settings of what sees, of a class whose settings have `text_config`
    unread: ClassVar[str] = ""  # a layer's module that the description leaves out: it may not change a number

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        model = tiny_causal_lm(cls.architecture, cls.settings, cls.other_parts)
        directory = tmp_path_factory.mktemp("family")
        save_as_published(model, directory)
        return directory

    @pytest.fixture(scope="class")
    @classmethod
    def backend(cls, model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JaxBackend]:
        context = BackendContext(
            model_name="tiny",
            model_path=model_path,
            cache_dir=cls.cache_dir(tmp_path_factory),
            losses={spec.name: spec for spec in BUILTIN_LOSSES},
        )
        backend = JaxBackend(JaxConfig.model_validate({"warm_up": False, "dtype": "float32", **_LIMITS}), context)
        yield backend
        backend.close()

    @classmethod
    def cache_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return where compiled programs and kernels are kept. Override it to share them."""
        return tmp_path_factory.mktemp("cache")

    @pytest.fixture
    def model_id(self, backend: JaxBackend) -> Iterator[str]:
        """Create a model of which no weight is zero, so that every gradient is tested."""
        _create(backend, "m", _LORA)
        yield "m"
        backend.unload_model("m")

    @pytest.fixture
    def reference(self, model_path: Path, backend: JaxBackend, model_id: str) -> TorchModel:
        return TorchModel(model_path, _LORA, backend.capture_state(model_id).weights, torch.float64)

    def test_plans_count_all_weights(self, backend: JaxBackend, model_path: Path, model_id: str) -> None:
        config, stored = read_config(model_path), StoredTensors.of(model_path, "model").shapes()
        read = [name for name in decoder_names(stored).values() if not self.unread or f".{self.unread}." not in name]
        assert weight_counts(config).total == sum(math.prod(stored[name]) for name in read)
        adapted = backend.capture_state(model_id).weights
        assert adapter_weights(config, _LORA.rank) == sum(array.size for array in adapted.values())
        loaded = load_base(model_path, config, "float32", lambda *_: None)
        planned = base_shapes(config, "float32")
        assert _shapes(planned) == _shapes(loaded)
        computing = Computing(on_cpu=True, dtype="float32", recompute=False)
        distinct = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(loaded)}  # a tied head is the embedding
        costs = Costs(shape=config, computing=computing, max_lora_rank=_LORA.rank)
        assert costs.base == sum(distinct.values())

    def test_logprobs(self, backend: JaxBackend, model_id: str, reference: TorchModel) -> None:
        """The sequences are packed side by side."""
        op = _operation(model_id)
        output = _one(backend.forward([Forward(model_id=model_id, data=op.data, loss_fn="cross_entropy")]))
        for datum, ours in zip(op.data, output.loss_fn_outputs, strict=True):
            with torch.no_grad():
                _assert_near(ours["logprobs"], reference.logprobs(datum).numpy(), "logprobs")

    def test_gradients(self, backend: JaxBackend, model_id: str, reference: TorchModel) -> None:
        op = _operation(model_id)
        backend.forward_backward([op])
        gradients = backend.capture_state(model_id).gradients
        theirs = reference.gradients([op])
        assert gradients.keys() == theirs.keys()
        for name, gradient in theirs.items():
            _assert_near(gradients[name], gradient.numpy(), name)

    def test_an_adam_step(self, backend: JaxBackend, model_id: str, reference: TorchModel) -> None:
        op = _operation(model_id)
        before = backend.capture_state(model_id).weights
        backend.forward_backward([op])
        output = _one(backend.optim_step([OptimStep(model_id=model_id, adam=_ADAM)]))
        assert output.metrics["grad_norm"] == pytest.approx(reference.step(op, _ADAM), rel=_TOLERANCE)
        after = backend.capture_state(model_id).weights
        for name, theirs in reference.host_weights().items():
            _assert_near(after[name].astype(np.float64) - before[name], theirs - before[name], name)

    def test_neighbours_change_no_bit(self, backend: JaxBackend, model_id: str) -> None:
        """A pass holds other sequences of this model and of another one."""
        op = _operation(model_id)
        _create(backend, "other", LoraConfig(rank=4, seed=8))
        together = _one(backend.forward_backward([op, _operation("other", (64,))])[:1])
        gradients = dict(backend.capture_state(model_id).gradients)
        for each in ("other", model_id):
            backend.unload_model(each)
        _create(backend, model_id, _LORA)
        for datum, ours in zip(op.data, together.loss_fn_outputs, strict=True):
            alone = ForwardBackward(model_id=model_id, data=(datum,), loss_fn="cross_entropy")
            output = _one(backend.forward_backward([alone]))
            _assert_same(ours["logprobs"], output.loss_fn_outputs[0]["logprobs"])
        for name, value in backend.capture_state(model_id).gradients.items():
            _assert_same(value, gradients[name])

    def test_samples_have_the_models_logprobs(self, backend: JaxBackend, model_id: str, reference: TorchModel) -> None:
        """Of the tokens of a prompt that fills several pages, and of those that are drawn past a page's end."""
        prompt = np.random.default_rng(1).integers(3, 160, 120).astype(np.int32)
        greedy, drawn = asyncio.run(_sampled(backend, model_id, prompt))
        for output, is_greedy in ((greedy, True), (drawn, False)):
            for sequence in output.sequences:
                whole = np.concatenate([prompt, sequence.tokens])
                with torch.no_grad():
                    logits = reference.model(torch.tensor(whole)[None]).logits[0]
                logp = torch.log_softmax(logits, -1).numpy()[:-1]
                theirs = logp[np.arange(len(logp)), whole[1:]]
                assert output.prompt_logprobs is not None
                _assert_near(np.concatenate([output.prompt_logprobs[1:], sequence.logprobs]), theirs, "logprobs")
                if is_greedy:
                    assert sequence.tokens.tolist() == logp[len(prompt) - 1 :].argmax(-1).tolist()

    def test_a_checkpoint_restores_the_model(self, backend: JaxBackend, model_id: str) -> None:
        op = _operation(model_id)
        backend.forward_backward([op])
        backend.optim_step([OptimStep(model_id=model_id, adam=_ADAM)])
        state = backend.capture_state(model_id)
        saved = ModelState(
            lora=state.lora,
            step=state.step,
            weights={name: np.array(value) for name, value in state.weights.items()},
            adam_m={name: np.array(value) for name, value in state.adam_m.items()},
            adam_v={name: np.array(value) for name, value in state.adam_v.items()},
        )
        outcomes = []
        for _ in range(2):
            backend.forward_backward([op])
            backend.optim_step([OptimStep(model_id=model_id, adam=_ADAM)])
            outcomes.append({name: np.array(x) for name, x in backend.capture_state(model_id).weights.items()})
            backend.unload_model(model_id)
            backend.create_model(CreateModel(model_id=model_id, lora=_LORA))
            backend.restore_state(model_id, saved)
        for name, value in outcomes[0].items():
            _assert_same(value, outcomes[1][name])


def _shapes(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shapes and types of arrays by their paths."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (leaf.shape, str(leaf.dtype)) for path, leaf in leaves}


def _create(backend: JaxBackend, model_id: str, lora: LoraConfig) -> None:
    backend.create_model(CreateModel(model_id=model_id, lora=lora))
    rng = np.random.default_rng(lora.seed)
    weights = {
        name: rng.normal(scale=0.02, size=value.shape).astype(np.float32) if "lora_B" in name else value
        for name, value in backend.capture_state(model_id).weights.items()
    }
    backend.restore_state(model_id, ModelState(lora=lora, weights=weights))


def _operation(model_id: str, lengths: Sequence[int] = _LENGTHS) -> ForwardBackward:
    rng = np.random.default_rng(3)
    data = tuple(
        Datum(
            tokens_T=rng.integers(0, 160, length).astype(np.int32),
            loss_inputs={
                "target_tokens": rng.integers(0, 160, length),
                "weights": rng.uniform(-0.5, 1, length).astype(np.float32),
            },
        )
        for length in lengths
    )
    return ForwardBackward(model_id=model_id, data=data, loss_fn="cross_entropy")


def _one(outputs: Sequence[Output | Failed]) -> Output:
    (output,) = outputs
    assert not isinstance(output, Failed), output
    return output


async def _sampled(backend: JaxBackend, model_id: str, prompt: Array) -> list[SampleOutput]:
    await backend.load_snapshot(backend.publish(model_id, "family"))
    found = []
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=1, stop_at_eos=False)
        op = Sample(sampling_session_id="s", snapshot_id="family", prompt_P=prompt, params=params, prompt_logprobs=True)
        output = await backend.sample(op)
        assert isinstance(output, SampleOutput), output
        found.append(output)
    return found


def _assert_near(ours: Array, theirs: Array, what: str) -> None:
    difference = float(np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs))
    assert difference < _TOLERANCE, f"{what} differ by {difference:.2g} of their norm"


def _assert_same(left: Array, right: Array) -> None:
    np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))
