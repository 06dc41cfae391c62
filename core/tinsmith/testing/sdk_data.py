"""For tests that train through the SDK: small data in its types, and a safe way to close it."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tinker

TOKENS = [12, 7, 31, 5, 9, 22, 3]


def datum(tokens: Sequence[int] = TOKENS, weights: Sequence[float] | None = None) -> tinker.Datum:
    """One sequence to learn, shifted as Tinker scripts send it."""
    inputs, targets = list(tokens[:-1]), list(tokens[1:])
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(inputs),
        loss_fn_inputs=_inputs(target_tokens=targets, weights=list(weights or [1.0] * len(targets))),
    )


def rl_datum(tokens: Sequence[int], logprobs: Sequence[float], advantage: float) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs=_inputs(
            target_tokens=list(tokens[1:]), logprobs=list(logprobs), advantages=[advantage] * len(logprobs)
        ),
    )


def _inputs(**lists: list[Any]) -> Any:
    return lists


def ragged(count: int, seed: int = 0) -> list[tinker.Datum]:
    random = np.random.default_rng(seed)
    return [datum(random.integers(0, 60, random.integers(2, 20)).tolist()) for _ in range(count)]


def logprobs(output: tinker.ForwardBackwardOutput) -> list[list[float]]:
    return [each["logprobs"].tolist() for each in output.loss_fn_outputs]


def step(model: tinker.TrainingClient, data: list[tinker.Datum], **adam: float) -> tinker.ForwardBackwardOutput:
    """One forward_backward and one optim_step, both sent before either is awaited."""
    passed = model.forward_backward(data, "cross_entropy")
    stepped = model.optim_step(tinker.AdamParams(**{"learning_rate": 0.01, **adam}))
    output = passed.result(timeout=300)
    stepped.result(timeout=300)
    return output


def wait_until_at_rest(sampler: tinker.SamplingClient) -> None:
    """Wait until the SDK's poller has told the server of every result that was fetched, and waits for more to do.

    On Python 3.11 an SDK that is closed while an answer arrives at its poller may hang.
    """
    poller = sampler._futures_poller  # noqa: SLF001 - the SDK does not tell
    if poller is None:  # this client polls for each sample by itself
        return
    work = poller._has_work  # noqa: SLF001
    while work.is_set() or not work._waiters:  # noqa: SLF001
        time.sleep(0.01)
