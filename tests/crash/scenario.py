"""What a campaign's client does: a training script on the unmodified SDK, and all that it saw."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tinker

from tinsmith.testing.saved_files import read_saved
from tinsmith.testing.sdk_data import TOKENS, logprobs, ragged

STEPS = 50
WAIT_S = 600


def run(service: tinker.ServiceClient, base_model: str, at_step: Callable[[int], None]) -> tuple[list[Any], list[str]]:
    """Fine-tune for STEPS steps; return what the client saw of every operation, and the paths of what it saved.

    Clipped optimizer steps, scores between them, training checkpoints (one of them overwritten, one deleted, one
    loaded again), sampling from an ephemeral and from a persisted snapshot while training goes on.
    """
    seen: list[Any] = []
    saved: list[str] = []
    training = service.create_lora_training_client(base_model=base_model, rank=4, seed=1).result(timeout=WAIT_S)
    samplers: list[tinker.SamplingClient] = []
    for number in range(STEPS):
        at_step(number)
        passed = training.forward_backward(ragged(3, number), "cross_entropy")
        scored = training.forward(ragged(2, number), "cross_entropy") if number % 3 == 0 else None
        adam = tinker.AdamParams(learning_rate=0.01, grad_clip_norm=1.0)
        stepped = training.optim_step(adam)
        seen.append(logprobs(passed.result(timeout=WAIT_S)))
        if scored is not None:
            seen.append(logprobs(scored.result(timeout=WAIT_S)))
        seen.append(stepped.result(timeout=WAIT_S).metrics)
        if number % 10 == 2:
            saved.append(training.save_state(f"step-{number}").result(timeout=WAIT_S).path)
        if number == 14:
            training.save_state("step-2", overwrite=True).result(timeout=WAIT_S)
        if number in {7, 31}:
            samplers.append(training.save_weights_and_get_sampling_client().result())
        if number == 17:
            path = training.save_weights_for_sampler("for-sampling").result(timeout=WAIT_S).path
            samplers.append(service.create_sampling_client(model_path=path).result())
        if number == 25:
            training.load_state_with_optimizer(saved[-1]).result(timeout=WAIT_S)
        if number == 35:
            service.create_rest_client().delete_checkpoint_from_tinker_path(saved.pop(0)).result(timeout=WAIT_S)
        if number % 4 == 0:
            seen += [_drawn(sampler, number) for sampler in samplers]
    saved.append(training.save_state("end").result(timeout=WAIT_S).path)
    return seen, saved


def _drawn(sampler: tinker.SamplingClient, seed: int) -> Any:
    params = tinker.SamplingParams(max_tokens=5, seed=seed, temperature=1.0)
    prompt = tinker.ModelInput.from_ints(TOKENS)
    answer = sampler.sample(prompt, num_samples=2, sampling_params=params).result(timeout=WAIT_S)
    return [(each.tokens, each.logprobs) for each in answer.sequences]


def state_at(data_dir: Path, path: str) -> dict[str, bytes | int]:
    """Return weights, moments, pending gradients and step of a checkpoint, as bytes."""
    state = read_saved(data_dir, path).state
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v, "gradients": state.gradients}
    arrays = {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}
    return {**arrays, "step": state.step}
