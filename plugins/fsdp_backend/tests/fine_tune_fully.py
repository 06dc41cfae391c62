"""All weights of the base model "full" trained through the SDK: argument 1 is the server. Used by test_fsdp_e2e.py."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tinker
from tinker import types

TOKENS = np.arange(40, 60)


def main(url: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-local-example")
    training = service.create_lora_training_client(base_model="full", rank=0).result()
    first, second = step(training), step(training)
    assert second < first, (first, second)
    saved = training.save_state(name="full").result()
    expected = step(training)
    training.load_state_with_optimizer(saved.path).result()
    assert step(training) == expected, "training goes on bit for bit"
    path = training.save_weights_for_sampler(name="full").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=1)
    expect_refusal("no sampler", lambda: sampler.sample(prompt, 1, params))
    expect_refusal("save with a name instead", training.save_weights_and_get_sampling_client)
    other = tinker.ServiceClient(base_url=url, api_key="tml-local-example")
    with ThreadPoolExecutor(1) as pool:  # there is one place for such a model (max_full_models)
        waiting = pool.submit(other.create_training_client_from_state_with_optimizer, saved.path)
        service.close("success").result()
        waiting.result()
    other.close("success").result()


def step(training: tinker.TrainingClient) -> float:
    inputs = {
        "target_tokens": types.TensorData.from_numpy(TOKENS[1:]),
        "weights": types.TensorData.from_numpy(np.ones(len(TOKENS) - 1, np.float32)),
    }
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1].tolist()), loss_fn_inputs=inputs)
    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return float(passed.result().metrics["loss:sum"])


def expect_refusal(reason: str, call) -> None:  # type: ignore[no-untyped-def]
    try:
        found = call()
        if hasattr(found, "result"):
            found.result()
    except Exception as error:
        if reason not in str(error):
            raise
        return
    raise AssertionError(f"not refused: {reason}")


if __name__ == "__main__":
    main(sys.argv[1])
