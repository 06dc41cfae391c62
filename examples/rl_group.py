"""A small on-policy RL loop: groups of samples, centred advantages, importance_sampling, a reward one can check.

    python examples/rl_group.py --base-url http://127.0.0.1:8000 --base-model NAME

The reward is the share of vowels among the characters of an answer. Each step samples a group of answers per prompt
from the weights as they are, centres each group's rewards, and takes one gradient step. Exits with 1 where the mean
reward does not rise.
"""

import argparse
import os
import sys

import numpy as np
import tinker
from live_curve import LiveCurve
from tinker import types

PROMPTS = ["Sing a song:", "Call the wind:", "Name a colour:", "Shout it out:"]


def main() -> int:
    options = parse_options()
    service = tinker.ServiceClient(
        base_url=options.base_url, api_key=os.environ.get("TINKER_API_KEY", "tml-local-example")
    )
    training = service.create_lora_training_client(base_model=options.base_model, rank=options.rank).result()
    tokenizer = training.get_tokenizer()
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]

    rewards = []
    with LiveCurve("mean reward", num_steps=options.steps, every=1) as curve:
        for _ in range(options.steps):
            sampler = training.save_weights_and_get_sampling_client().result()
            futures = [ask(sampler, prompt, options) for prompt in prompts]  # all at once; the server batches them
            groups = [future.result().sequences for future in futures]
            scores = [[reward(tokenizer.decode(each.tokens)) for each in group] for group in groups]
            data = [
                to_datum(prompt, sequence, score - float(np.mean(group_scores)))
                for prompt, group, group_scores in zip(prompts, groups, scores, strict=True)
                for sequence, score in zip(group, group_scores, strict=True)
            ]
            passed = training.forward_backward(data, "importance_sampling")
            stepped = training.optim_step(types.AdamParams(learning_rate=options.learning_rate))
            passed.result()
            stepped.result()
            rewards.append(float(np.mean(scores)))
            curve.add(rewards[-1])
    first, last = float(np.mean(rewards[:3])), float(np.mean(rewards[-3:]))
    print(f"mean reward of the first three steps {first:.3f}, of the last three {last:.3f}")
    return 0 if last > first + options.min_gain else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Reward vowels.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True, help="a name that the server serves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=12)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="the default suits a tiny random model")
    parser.add_argument("--min-gain", type=float, default=0.1, help="a smaller rise of the reward is a failure")
    return parser.parse_args()


def ask(
    sampler: tinker.SamplingClient, prompt: list[int], options: argparse.Namespace
) -> "tinker.APIFuture[types.SampleResponse]":
    params = types.SamplingParams(max_tokens=options.max_tokens, temperature=1.0)
    return sampler.sample(
        prompt=types.ModelInput.from_ints(prompt), num_samples=options.group_size, sampling_params=params
    )


def reward(text: str) -> float:
    """Return the share of vowels among all characters, 0 for an empty text."""
    return sum(character in "aeiouAEIOU" for character in text) / len(text) if text else 0.0


def to_datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Give every sampled token the advantage of its answer, and prompt tokens none."""
    tokens = prompt + list(sequence.tokens)
    num_prompt, num_sampled = len(prompt) - 1, len(sequence.tokens)  # targets are shifted by one
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [0.0] * num_prompt + list(sequence.logprobs or []),
            "advantages": [0.0] * num_prompt + [advantage] * num_sampled,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
