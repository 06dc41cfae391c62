"""One pass with gspo against the two of `forward_backward_custom`, on a backend in this process.

    python benchmarks/one_pass.py [--rounds 7] [--hidden 384] [--vocab 2048]

The two passes of the SDK: forward, then forward_backward of cross_entropy with its derivatives as weights. What the
client and the network add is not counted. One pass saves the forward pass of the layers, not that of the head: the
larger the vocabulary is beside the layers, the less. Prints the median seconds of both, taken in turn, and the share
that is saved; and the same of the processor time, which a busy machine changes less.
"""

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from tinsmith import BUILTIN_LOSSES, Array, BackendContext, CreateModel, Datum, Forward, ForwardBackward, LoraConfig
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxConfig

_TOKENS, _SEQUENCES = 256, 4
_CONFIG = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--hidden", type=int, default=384)
    options.add_argument("--vocab", type=int, default=2048)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        shape = TinyShape(
            vocab_size=given.vocab, hidden_size=given.hidden, intermediate_size=3 * given.hidden, num_layers=6
        )
        backend = _backend(Path(directory), shape)
        one, two = [], []  # each time as wall and processor time
        for number in range(given.rounds + 1):  # the first compiles
            one.append(_seconds(backend, _gspo(given.vocab, number), custom=False))
            two.append(_seconds(backend, _gspo(given.vocab, number), custom=True))
        backend.close()
    for kind, clock in enumerate(("wall", "processor")):
        first, second = (statistics.median(pass_[kind] for pass_ in each[1:]) for each in (one, two))
        print(f"{clock} time: one pass {first:.3f} s, two passes {second:.3f} s: {1 - first / second:.0%} saved")


def _backend(directory: Path, shape: TinyShape) -> JaxBackend:
    write_tiny_model(directory / "model", shape)
    config = JaxConfig.model_validate(
        {"max_context_tokens": _TOKENS, "max_batch_tokens": _SEQUENCES * _TOKENS, "max_lora_rank": 16, "warm_up": False}
    )
    context = BackendContext(
        model_name="model",
        model_path=directory / "model",
        cache_dir=directory / "cache",
        losses={spec.name: spec for spec in BUILTIN_LOSSES},
    )
    backend = JaxBackend(config, context)
    backend.create_model(CreateModel(model_id="m", lora=LoraConfig(rank=16, seed=1)))
    return backend


def _gspo(vocab: int, seed: int) -> ForwardBackward:
    rng = np.random.default_rng(seed)
    inputs: list[dict[str, Array]] = [
        {
            "target_tokens": rng.integers(0, vocab, _TOKENS),
            "logprobs": rng.uniform(-10, -8, _TOKENS).astype(np.float32),
            "advantages": rng.normal(size=_TOKENS).astype(np.float32),
            "sequence_ratio_mask": np.ones(_TOKENS, np.float32),
        }
        for _ in range(_SEQUENCES)
    ]
    data = tuple(Datum(tokens_T=rng.integers(0, vocab, _TOKENS).astype(np.int32), loss_inputs=each) for each in inputs)
    return ForwardBackward(model_id="m", data=data, loss_fn="gspo", loss_fn_config=_CONFIG)


def _seconds(backend: JaxBackend, op: ForwardBackward, *, custom: bool) -> tuple[float, float]:
    """Return the wall and the processor time."""
    wall, processor = time.perf_counter(), time.process_time()
    _run(backend, op, custom=custom)
    return time.perf_counter() - wall, time.process_time() - processor


def _run(backend: JaxBackend, op: ForwardBackward, *, custom: bool) -> None:
    if not custom:
        backend.forward_backward([op])
        return
    linear = []
    for datum in op.data:
        targets = datum.loss_inputs["target_tokens"]
        linear.append(
            replace(datum, loss_inputs={"target_tokens": targets, "weights": datum.loss_inputs["advantages"]})
        )
    backend.forward([Forward(model_id="m", data=tuple(linear))])
    backend.forward_backward([ForwardBackward(model_id="m", data=tuple(linear))])


if __name__ == "__main__":
    main()
