"""Makers of samplers, trainers, snapshots and operations for the tests of the vllm sampler."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from fsdp_harness import forking as forking_fsdp
from megatron_harness import forking as forking_megatron

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
    ForwardBackwardOutput,
    HostSnapshot,
    LoraConfig,
    ModelState,
    OptimStep,
    OptimStepOutput,
    Placement,
    Sample,
    SampleOutput,
    SamplerCapabilities,
    SamplingBackend,
    SamplingParams,
    Snapshot,
    TrainerCapabilities,
    TrainingBackend,
)
from tinsmith.plugins.loading import Plugins
from tinsmith.testing import TinyShape
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.sampler import VllmSampler

LOSSES = {spec.name: spec for spec in sorted(BUILTIN_LOSSES, key=lambda spec: spec.name)}
"""In the order in which servers have them: it is compiled into the trainers' programs."""
VOCAB, CONTEXT = 300, 128

_SIZES = {  # heads of 16 are none that vLLM has CPU kernels for
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_context_tokens": 512,
}
HYBRID = TinyShape(family="Qwen3_5ForConditionalGeneration", tied=True, **_SIZES)
"""Its language part is a hybrid of the gated delta rule and attention."""

SHAPES = {
    "qwen3": TinyShape(family="qwen3", tied=True, **_SIZES),
    "llama": TinyShape(family="llama", tied=False, **_SIZES),
    "qwen3_moe": TinyShape(family="qwen3_moe", tied=True, num_experts=6, **_SIZES),
    "qwen2": TinyShape(family="qwen2", tied=True, **{**_SIZES, "num_heads": 2, "num_kv_heads": 1}),
    "mistral": TinyShape(family="mistral", tied=False, **_SIZES),
}
"""By name; between them they have tied and untied heads, experts, and classes of which vLLM adapts no head."""


def settings(**changed: object) -> dict[str, object]:
    small = {
        "max_model_len": CONTEXT,
        "max_num_seqs": 64,
        "kv_cache_bytes": 32 << 20,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "max_lora_rank": 8,
    }
    return {**small, **changed}


def make_sampler(model_path: Path, cache_dir: Path, **changed: object) -> VllmSampler:
    context = BackendContext(model_name="tiny", model_path=model_path, cache_dir=cache_dir, losses=LOSSES)
    return VllmSampler(VllmConfig.model_validate(settings(**changed)), context)


TRAINERS: dict[str, dict[str, object]] = {
    "jax": {"max_context_tokens": CONTEXT, "max_batch_tokens": CONTEXT, "max_lora_rank": 8, "warm_up": False},
    "fsdp": {"max_context_tokens": CONTEXT, "max_batch_tokens": 512, "max_lora_rank": 8, "nproc_per_node": 1},
}
"""Settings of every trainer that is served with vLLM beside it."""
ALSO_TRAINED_BY: dict[str, dict[str, object]] = {  # served with vLLM in megatron's own tests
    "megatron": {
        "device": "cpu",
        "tensor_parallel": 2,
        "max_context_tokens": CONTEXT,
        "max_batch_tokens": 512,
        "max_lora_rank": 8,
    },
}
FORKING = {"fsdp": forking_fsdp, "megatron": forking_megatron}


def make_trainer(name: str, model_path: Path, cache_dir: Path, **changed: object) -> TrainingBackend:
    if find_spec(f"tinsmith_{name}") is None:
        pytest.skip(f"tinsmith-{name} is not installed")
    spec = Plugins.load().backends.get(name)
    alone = Placement(samples=False)
    context = BackendContext(
        model_name="tiny", model_path=model_path, cache_dir=cache_dir, losses=LOSSES, placement=alone
    )
    chosen = {**{**TRAINERS, **ALSO_TRAINED_BY}[name], **changed}
    with FORKING.get(name, nullcontext)():
        return spec.create(spec.config.model_validate(chosen), context)


def random_adapter(snapshot_id: str, like: Snapshot, *, seed: int, scale: float = 0.1) -> HostSnapshot:
    """An adapter of the names and shapes of another, whose effect is plain to see."""
    rng = np.random.default_rng(seed)
    weights = {
        name: (scale * rng.normal(size=array.shape)).astype(np.float32)
        for name, array in sorted(like.adapter_weights().items())
    }
    return HostSnapshot(snapshot_id, like.lora, weights)


def blank_adapter(rank: int = 4) -> HostSnapshot:
    """Zeros for every layer that can have an adapter, in the shapes of SHAPES."""
    hidden, inner, heads, kv = 64, 96, 128, 64
    shapes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv),
        "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    modules = {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in shapes.items()}
    weights: dict[str, Array] = {}
    for module, (width_in, width_out) in {**modules, "lm_head": (hidden, VOCAB)}.items():
        weights[f"base_model.model.{module}.lora_A.weight"] = np.zeros((rank, width_in), np.float32)
        weights[f"base_model.model.{module}.lora_B.weight"] = np.zeros((width_out, rank), np.float32)
    return HostSnapshot("blank", LoraConfig(rank=rank, seed=0), weights)


def trained_by(
    trainer: TrainingBackend, model_id: str, lora: LoraConfig, *, seed: int, random_start: bool = True
) -> None:
    """Create a model and train it for three steps; from random weights, so that every part of it counts."""
    trainer.create_model(CreateModel(model_id=model_id, lora=lora))
    rng = np.random.default_rng(seed)
    if random_start:
        weights = {
            name: (array if "lora_A" in name else 0.1 * rng.normal(size=array.shape)).astype(np.float32)
            for name, array in trainer.capture_state(model_id).weights.items()
        }
        trainer.restore_state(model_id, ModelState(lora=lora, weights=weights))
    for _ in range(3):
        tokens = rng.integers(0, VOCAB, 24)
        inputs: dict[str, Array] = {
            "target_tokens": tokens[1:].astype(np.int64),
            "weights": np.ones(len(tokens) - 1, np.float32),
        }
        datum = Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
        passed = trainer.forward_backward([ForwardBackward(model_id=model_id, data=(datum,), loss_fn="cross_entropy")])
        assert isinstance(passed[0], ForwardBackwardOutput), passed
        stepped = trainer.optim_step([OptimStep(model_id=model_id, adam=AdamParams(learning_rate=0.01))])
        assert isinstance(stepped[0], OptimStepOutput), stepped


def forward_logprobs(trainer: TrainingBackend, model_id: str, tokens: Sequence[int] | Array) -> Array:
    """Return what the trainer gives every token after the first."""
    tokens = np.asarray(tokens)
    inputs: dict[str, Array] = {
        "target_tokens": tokens[1:].astype(np.int64),
        "weights": np.zeros(len(tokens) - 1, np.float32),
    }
    datum = Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
    (output,) = trainer.forward([Forward(model_id=model_id, data=(datum,), loss_fn="cross_entropy")])
    assert isinstance(output, ForwardBackwardOutput), output
    return output.loss_fn_outputs[0]["logprobs"]


def prompt(seed: int, length: int = 9) -> Array:
    return np.random.default_rng([seed, length]).integers(3, VOCAB, length).astype(np.int32)


def op(tokens: Array, snapshot_id: str | None = None, **fields: object) -> Sample:
    """Fields of Sample and of SamplingParams may be mixed; nothing ends a sequence before max_tokens by default."""
    names = set(SamplingParams.__dataclass_fields__)
    params = {"max_tokens": 8, "seed": 1, "stop_at_eos": False, **{k: v for k, v in fields.items() if k in names}}
    rest = {k: v for k, v in fields.items() if k not in names}
    return Sample(
        sampling_session_id="s",
        snapshot_id=snapshot_id,
        prompt_P=tokens,
        params=SamplingParams(**params),  # type: ignore[arg-type]  # fields vary by test
        **rest,  # type: ignore[arg-type]
    )


async def draw(sampler: SamplingBackend, sample: Sample) -> SampleOutput:
    """Sample; whatever comes back is whole."""
    output = await sampler.sample(sample)
    assert isinstance(output, SampleOutput), output
    for sequence in output.sequences:
        assert sequence.stop_reason in ("stop", "length")
        if sequence.stop_reason == "length":
            assert len(sequence.tokens) == sample.params.max_tokens
        assert len(sequence.logprobs) == len(sequence.tokens)
    return output


_PLAIN = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    exec(work["first"])
    llm = LLM(
        model=work["model"], dtype="float32", max_model_len=work["context"], max_num_seqs=8, enforce_eager=True,
        kv_cache_memory_bytes=32 << 20, language_model_only=True, skip_tokenizer_init=True,
        enable_lora=True, max_loras=len(work["adapters"]), max_lora_rank=8,
    )
    params = SamplingParams(max_tokens=12, seed=5, logprobs=0, ignore_eos=True, detokenize=False)
    answers = []
    for number, path in enumerate(work["adapters"], start=1):
        prompts = [{"prompt_token_ids": tokens} for tokens in work["prompts"]]
        outputs = llm.generate(prompts, params, lora_request=LoRARequest(f"adapter-{number}", number, path))
        (drawn,) = zip(*(output.outputs for output in outputs))
        answers.append(
            [
                (list(each.token_ids), [row[token].logprob for token, row in zip(each.token_ids, each.logprobs)])
                for each in drawn
            ]
        )
    with open(work["answers"], "w") as file:
        json.dump(answers, file)
"""


def plain_vllm(
    model_path: Path, adapters: Sequence[Path], prompts: Sequence[Sequence[int]], directory: Path, first: str = ""
) -> list[list[tuple[list[int], list[float]]]]:
    """Sample with vLLM's own LLM class and LoRARequest, in a process that has nothing of ours.

    `first` is run before. Return the tokens and logprobs of each adapter and prompt.
    """
    script, answers = directory / "plain.py", directory / "answers.json"
    script.write_text(_PLAIN)
    work = {
        "model": str(model_path),
        "context": CONTEXT,
        "adapters": [str(path) for path in adapters],
        "prompts": prompts,
        "first": first,
        "answers": str(answers),
    }
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(work)],
        env={**os.environ, **one_process},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[list[tuple[list[int], list[float]]]] = json.loads(answers.read_text())
    return found


class Pair(TrainingBackend, SamplingBackend):
    """A trainer and the vllm sampler as the engine has them, as one object for the contract's tests of both."""

    def __init__(self, trainer: TrainingBackend, sampler: VllmSampler) -> None:
        self.trainer, self.sampler = trainer, sampler

    @property
    def trainer_capabilities(self) -> TrainerCapabilities:
        return self.trainer.trainer_capabilities

    @property
    def sampler_capabilities(self) -> SamplerCapabilities:
        return self.sampler.sampler_capabilities

    def create_model(self, op: CreateModel) -> None:
        self.trainer.create_model(op)

    def unload_model(self, model_id: str) -> None:
        self.trainer.unload_model(model_id)

    def forward(self, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        return self.trainer.forward(ops)

    def forward_backward(self, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        return self.trainer.forward_backward(ops)

    def optim_step(self, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        return self.trainer.optim_step(ops)

    def capture_state(self, model_id: str) -> ModelState:
        return self.trainer.capture_state(model_id)

    def restore_state(self, model_id: str, state: ModelState) -> None:
        self.trainer.restore_state(model_id, state)

    def publish(self, model_id: str, snapshot_id: str) -> Snapshot:
        return self.trainer.publish(model_id, snapshot_id)

    async def load_snapshot(self, snapshot: Snapshot) -> None:
        await self.sampler.load_snapshot(snapshot)

    async def drop_snapshot(self, snapshot_id: str) -> None:
        await self.sampler.drop_snapshot(snapshot_id)

    async def sample(self, op: Sample) -> SampleOutput | Failed:
        return await self.sampler.sample(op)
