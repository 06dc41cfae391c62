"""What the jax backend computes with the devices that JAX finds: `jax_run.py MODEL OUT SETTINGS`.

Trains one and four tenants together, and samples from a snapshot; writes what was seen to OUT (.npz).
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from gpu_harness import VOCAB, add_models, gradient, made_backend, passes, scored, step

from tinsmith.backend import SamplingBackend, TrainingBackend
from tinsmith.operations import Array, Datum, Forward, ForwardBackwardOutput, Sample, SampleOutput, SamplingParams


def main(model: Path, out: Path, settings: dict[str, object]) -> None:
    seen: dict[str, Array] = {}
    sizes = {"max_context_tokens": 512, "max_batch_tokens": 2048, "max_lora_rank": 32, "warm_up": False}
    with tempfile.TemporaryDirectory() as cache, made_backend("jax", model, Path(cache), {**sizes, **settings}) as jax_:
        for tenants in (1, 4):
            models = [f"{tenants}-{number}" for number in range(tenants)]
            add_models(jax_, models)
            seen |= trained(jax_, models)
        assert isinstance(jax_, SamplingBackend)
        seen |= asyncio.run(sampled(jax_, jax_, models[0]))
    seen["platform"] = np.asarray(jax.default_backend())
    np.savez(out, **seen)


def trained(backend: TrainingBackend, models: list[str]) -> dict[str, Array]:
    """Return the logprobs before and after a step, and the gradients of the first pass."""
    work, name = passes(models, seed=len(models)), str(len(models))
    before = np.concatenate(scored(backend, work))
    gradients = np.concatenate([gradient(backend, model_id) for model_id in models])
    step(backend, models)
    after = np.concatenate(scored(backend, work))
    return {f"before {name}": before, f"gradients {name}": gradients, f"after {name}": after}


async def sampled(trainer: TrainingBackend, sampler: SamplingBackend, model_id: str) -> dict[str, Array]:
    """Return what the sampler says of the tokens that it drew, and what the trainer says of them."""
    await sampler.load_snapshot(trainer.publish(model_id, "snapshot"))
    rng, drawn = np.random.default_rng(5), list[Array]()
    asked = [
        Sample(
            sampling_session_id="gpu",
            snapshot_id="snapshot",
            prompt_P=rng.integers(3, VOCAB, length).astype(np.int32),
            params=SamplingParams(max_tokens=24, seed=length, stop_at_eos=False),
        )
        for length in (5, 64, 200)
    ]
    theirs = []
    for operation, output in zip(asked, await asyncio.gather(*map(sampler.sample, asked)), strict=True):
        assert isinstance(output, SampleOutput), output
        tokens = np.concatenate([operation.prompt_P, output.sequences[0].tokens])
        drawn.append(output.sequences[0].logprobs)
        theirs.append(scores(trainer, model_id, tokens)[-len(drawn[-1]) :])
    return {"sampler": np.concatenate(drawn), "trainer": np.concatenate(theirs)}


def scores(trainer: TrainingBackend, model_id: str, tokens: Array) -> Array:
    inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(len(tokens) - 1, np.float32)}
    datum = Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
    (result,) = trainer.forward([Forward(model_id=model_id, data=(datum,))])
    assert isinstance(result, ForwardBackwardOutput), result
    return result.loss_fn_outputs[0]["logprobs"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
