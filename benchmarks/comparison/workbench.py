"""What scenarios share: random data, models of tenants, and the calls of a training loop.

Needs nothing but the Tinker SDK, 0.24 or newer, so that it also runs with the SDK that a peer can serve.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import tinker
from tinker import types

_FIRST_TOKEN: Final = 10  # below are special tokens
LEARNING_RATE: Final = 1e-4


class Workbench:
    """A client of one server. Every tenant's model is made once, because some servers have few places for models."""

    def __init__(self, *, url: str, base_model: str, vocab_size: int, rank: int) -> None:
        self._url = url
        self._base_model = base_model
        self._vocab_size = vocab_size
        self._rank = rank
        self.services: list[Any] = []
        self._tenants: list[Any] = []

    def tenant(self, index: int = 0) -> Any:
        """Return the training client of a tenant."""
        while len(self._tenants) <= index:
            number = len(self._tenants)
            service = tinker.ServiceClient(base_url=self._url, api_key=f"tml-benchmark-{number}")
            self.services.append(service)
            made = service.create_lora_training_client(base_model=self._base_model, rank=self._rank, seed=number)
            self._tenants.append(done(made))
        return self._tenants[index]

    def tenants(self, number: int) -> list[Any]:
        return [self.tenant(index) for index in range(number)]

    def tokens(self, seed: int, number: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(_FIRST_TOKEN, self._vocab_size) for _ in range(number)]

    def batch(self, seed: int, lengths: Sequence[int]) -> list[types.Datum]:
        return [self._datum(1000 * seed + number, length) for number, length in enumerate(lengths)]

    def _datum(self, seed: int, length: int) -> types.Datum:
        tokens = self.tokens(seed, length + 1)
        inputs: Any = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def done(maybe_future: Any) -> Any:
    """Wait for it: newer SDKs return futures where older ones wait."""
    return maybe_future.result() if hasattr(maybe_future, "result") else maybe_future


def adam(learning_rate: float = LEARNING_RATE, **changes: float) -> types.AdamParams:
    return types.AdamParams(learning_rate=learning_rate, **changes)


def step(training: Any, data: list[types.Datum], loss: str = "cross_entropy") -> None:
    """Submit both halves of a training step, then wait for both, as the SDK's documentation does."""
    passed = training.forward_backward(data, loss)
    stepped = training.optim_step(adam())
    passed.result()
    stepped.result()


def published(training: Any) -> Any:
    """Return a client that samples from the weights of now."""
    return done(training.save_weights_and_get_sampling_client())


def sample(sampler: Any, prompt: list[int], max_tokens: int, *, number: int = 1, seed: int = 0) -> Any:
    """Return a future of the sequences. Temperature 1, no stops."""
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed)
    prompt_input = types.ModelInput.from_ints(prompt)
    return sampler.sample(prompt=prompt_input, num_samples=number, sampling_params=params)


def num_tokens(response: Any) -> int:
    return sum(len(sequence.tokens) for sequence in response.sequences)


def at_once(calls: Sequence[Callable[[], float]]) -> float:
    """Make each call in a thread of its own, and return the sum of what they return. Raise what one of them raises."""
    results: list[float] = []
    errors: list[BaseException] = []

    def run(call: Callable[[], float]) -> None:
        try:
            results.append(call())
        except Exception as error:  # noqa: BLE001  # raised below, in the caller's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(results)
