"""Teach a model three Pig Latin translations: an ordinary Tinker script, for any server that speaks the API.

    python examples/pig_latin.py --base-url http://127.0.0.1:8000 --base-model NAME

Shows the loss as it falls, saves the training state, samples from the trained weights, and exits with 1 where the
loss stayed too high or an answer is wrong.
"""

import argparse
import os
import sys

import numpy as np
import tinker
from live_curve import LiveCurve
from tinker import types
from transformers import PreTrainedTokenizerBase

PAIRS = [
    ("banana split", "anana-bay plit-say"),
    ("quantum physics", "uantum-qay ysics-phay"),
    ("coding wizard", "oding-cay izard-way"),
]


def main() -> int:
    options = parse_options()
    service = tinker.ServiceClient(
        base_url=options.base_url, api_key=os.environ.get("TINKER_API_KEY", "tml-local-example")
    )
    training = service.create_lora_training_client(base_model=options.base_model, rank=options.rank).result()
    tokenizer = training.get_tokenizer()
    data = [to_datum(tokenizer, english, latin) for english, latin in PAIRS]

    loss = train(training, data, options)
    state = training.save_state(name="pig-latin").result()
    print(f"training state saved as {state.path}")

    sampler = training.save_weights_and_get_sampling_client(name="pig-latin").result()
    num_right = sum(ask(sampler, tokenizer, english, latin) for english, latin in PAIRS)
    print(f"{num_right} of {len(PAIRS)} right, final loss {loss:.4f}")
    return 0 if num_right == len(PAIRS) and loss < options.max_loss else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach a model three Pig Latin translations.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True, help="a name that the server serves")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument(
        "--learning-rate", type=float, default=1e-2, help="the default suits a tiny random model; else 1e-4 to 1e-3"
    )
    parser.add_argument("--max-loss", type=float, default=0.05, help="a final loss above this is a failure")
    return parser.parse_args()


def prompt_of(english: str) -> str:
    return f"English: {english}\nPig Latin:"


def to_datum(tokenizer: PreTrainedTokenizerBase, english: str, latin: str) -> types.Datum:
    """Make one sequence in which only the answer counts: prompt tokens have weight 0."""
    prompt = tokenizer.encode(prompt_of(english), add_special_tokens=True)
    answer = tokenizer.encode(f" {latin}\n\n", add_special_tokens=False)
    tokens = prompt + answer
    weights = [0.0] * len(prompt) + [1.0] * len(answer)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights[1:]},  # position i predicts token i + 1
    )


def train(training: tinker.TrainingClient, data: list[types.Datum], options: argparse.Namespace) -> float:
    """Return the loss per answer token before the last step."""
    weights = np.concatenate([datum.loss_fn_inputs["weights"].tolist() for datum in data])
    loss = float("inf")
    with LiveCurve("loss per token", num_steps=options.steps) as curve:
        for step in range(options.steps):
            fading = min(1.0, 2 - 2 * step / options.steps)  # the second half settles
            learning_rate = options.learning_rate * fading
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=learning_rate))
            logprobs = np.concatenate([each["logprobs"].tolist() for each in passed.result().loss_fn_outputs])
            stepped.result()
            loss = float(-logprobs @ weights / weights.sum())
            curve.add(loss)
    return loss


def ask(sampler: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase, english: str, expected: str) -> bool:
    prompt = types.ModelInput.from_ints(tokenizer.encode(prompt_of(english), add_special_tokens=True))
    params = types.SamplingParams(max_tokens=30, temperature=0.0, stop=["\n"])
    [sequence] = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences
    answer = str(tokenizer.decode(sequence.tokens)).strip()
    print(f"  {english!r} -> {answer!r} {'(right)' if answer == expected else f'(wrong, expected {expected!r})'}")
    return answer == expected


if __name__ == "__main__":
    sys.exit(main())
