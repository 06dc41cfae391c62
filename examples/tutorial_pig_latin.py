"""The public Tinker tutorial's first training loop: seven examples, six steps at 1e-4, tokens and weights as lists.

    python examples/tutorial_pig_latin.py --base-url http://127.0.0.1:8000 --base-model NAME

Only the URL and the model's name differ from what one writes against the hosted service. Exits with 1 where the loss
does not fall at every step.
"""

import argparse
import itertools
import os
import sys

import numpy as np
import tinker
from tinker import types

EXAMPLES = [
    {"input": "banana split", "output": "anana-bay plit-say"},
    {"input": "quantum physics", "output": "uantum-qay ysics-phay"},
    {"input": "donut shop", "output": "onut-day op-shay"},
    {"input": "pickle jar", "output": "ickle-pay ar-jay"},
    {"input": "space exploration", "output": "ace-spay exploration-way"},
    {"input": "rubber duck", "output": "ubber-ray uck-day"},
    {"input": "coding wizard", "output": "oding-cay izard-way"},
]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True)
    options = parser.parse_args()

    service_client = tinker.ServiceClient(
        base_url=options.base_url, api_key=os.environ.get("TINKER_API_KEY", "tml-local-example")
    )
    training_client = service_client.create_lora_training_client(base_model=options.base_model).result()
    tokenizer = training_client.get_tokenizer()

    def process_example(example: dict[str, str]) -> types.Datum:
        prompt_tokens = tokenizer.encode(f"English: {example['input']}\nPig Latin:", add_special_tokens=True)
        completion_tokens = tokenizer.encode(f" {example['output']}\n\n", add_special_tokens=False)
        tokens = prompt_tokens + completion_tokens
        weights = [0] * len(prompt_tokens) + [1] * len(completion_tokens)
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
            loss_fn_inputs={"weights": weights[1:], "target_tokens": tokens[1:]},
        )

    data = [process_example(example) for example in EXAMPLES]
    losses = []
    for _ in range(6):
        fwdbwd_future = training_client.forward_backward(data, "cross_entropy")
        optim_future = training_client.optim_step(types.AdamParams(learning_rate=1e-4))
        fwdbwd_result = fwdbwd_future.result()
        optim_future.result()
        logprobs = np.concatenate([output["logprobs"].tolist() for output in fwdbwd_result.loss_fn_outputs])
        weights = np.concatenate([datum.loss_fn_inputs["weights"].tolist() for datum in data])
        losses.append(float(-np.dot(logprobs, weights) / weights.sum()))
        print(f"Loss per token: {losses[-1]:.4f}", flush=True)
    return 0 if all(later < earlier for earlier, later in itertools.pairwise(losses)) else 1


if __name__ == "__main__":
    sys.exit(main())
