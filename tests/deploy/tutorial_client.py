"""Runs examples/tutorial_pig_latin.py as it is, through the official SDK. Then saves the model and samples from it.

Only the seed is fixed, which the server draws otherwise, so that two runs can be compared: it is set in the SDK.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import tinker

SCRIPT = Path(__file__).parents[2] / "examples" / "tutorial_pig_latin.py"


def main(checkpoint: str, *arguments: str) -> None:
    made: list[tinker.TrainingClient] = []
    create = tinker.ServiceClient.create_lora_training_client

    def create_with_seed(service: tinker.ServiceClient, **options: Any) -> Any:
        return _Remembering(create(service, **options, seed=7), made)

    tinker.ServiceClient.create_lora_training_client = create_with_seed  # type: ignore[method-assign]
    sys.argv = [str(SCRIPT), *arguments]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    print(made[0].save_state(name=checkpoint).result().path, flush=True)
    print(*sampled(made[0]), flush=True)


def sampled(trained: tinker.TrainingClient) -> list[int]:
    prompt = tinker.ModelInput.from_ints(trained.get_tokenizer().encode("English: banana split\nPig Latin:"))
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0)
    sampler = trained.save_weights_and_get_sampling_client(name="trained").result()
    [sequence] = sampler.sample(prompt=prompt, num_samples=1, sampling_params=params).result().sequences
    return list(sequence.tokens)


class _Remembering:
    """A future that keeps its result."""

    def __init__(self, future: Any, results: list[Any]) -> None:
        self._future = future
        self._results = results

    def result(self) -> Any:
        self._results.append(self._future.result())
        return self._results[-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
