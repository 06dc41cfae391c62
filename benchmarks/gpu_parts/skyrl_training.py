"""SkyRL's JAX backend on one GPU: whole steps of eight tenants and of one, with the batches of `jax_training`.

Release 0.4.0 from its wheel, driven through its own backend class in this process, without server or database. Its code
is unchanged. Only its loader of weights is left out: those that its initializers have drawn on the device remain.

What is set, to its advantage, from its documentation and sources:

- As many slots for adapters as there are tenants, and one more, because it keeps the first for the base model; no
  larger rank than the adapters have. A step costs as much as the slots and ranks that are configured, and the moments
  of one tenant cover all slots: with its default of 32 slots, those of eight tenants would not fit on the card.
- Passes run one tenant at a time, as its engine runs them. Tenants together would be padded to the longest sequence.
- Sequences in a micro-batch, and whether activations are computed again: the fastest of SETTINGS counts, as many as
  there is time for. By default it takes whole batches and keeps activations, which no card has room for with one
  tenant's batch, by arithmetic; its examples for Qwen3-8B take one sequence at a time.
- The loss in pieces of 1,024 tokens and cuDNN's attention, its defaults on GPUs. Of its losses, cross entropy.
- Compiled programs are kept in JAX's cache: otherwise it compiles the optimizer's step for each tenant anew.

Batches are made before the time is taken. What it does with its results counts, as it does in `jax_training`.
"""

import gc
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from gpu_parts.common import (
    Notes,
    NotInstalledError,
    Options,
    Report,
    linear_parameters,
    measured_again,
    needs,
    operations,
)
from tinsmith.operations import AdamParams, ForwardBackward, LoraConfig

# Any below: SkyRL's modules and objects, as its package may be missing.
TENANTS: Final[Mapping[int, float]] = {8: 60, 1: 100}
"""With how many seconds after the start no further settings are tried."""
REPEATS: Final = 3


@dataclass(frozen=True, slots=True)
class Settings:
    recompute: bool
    sequences: int  # of a micro-batch; 0: all that a tenant has

    def __str__(self) -> str:
        kept = "recomputed" if self.recompute else "activations kept"
        return f"{kept}, {f'micro-batches of {self.sequences}' if self.sequences else 'whole batches'}"


SETTINGS: Final = (
    Settings(recompute=True, sequences=0),
    Settings(recompute=False, sequences=1),
    Settings(recompute=False, sequences=2),  # the first that may not fit
)


def run(options: Options) -> Report:
    needs("skyrl")
    from gpu_parts import jax_common  # here, so that this module can be read where JAX is missing

    started = time.monotonic()
    jax_common.start(options)
    note = Notes()
    limit = jax_common.matmul_limit(options)
    note("limits", matmul_tflops=limit / 1e12)
    with kept_programs():
        for tenants, others_s in TENANTS.items():
            for settings, figures in settings_measured(options, tenants, limit, until=started + others_s):
                if tenants == max(TENANTS):  # that of the process so far: it says nothing of what comes later
                    figures["peak_gib"] = jax_common.peak_gib()
                note(f"tenants: {tenants}, {settings}", tenants=tenants, **figures)
            forget()
    check(note.report)
    return measured_again(note.report, limit, jax_common.matmul_limit(options))


def settings_measured(
    options: Options, tenants: int, limit: float, *, until: float
) -> Iterator[tuple[Settings, dict[str, Any]]]:
    """Yield the figures of the first settings, and those of others until it is that late or one fails."""
    from tinsmith_jax.tiles import TILE

    models = [f"model-{index}" for index in range(tenants)]
    peer = make_peer(options, models, limit)
    ops = operations(models, peer.vocab_size, options.tokens, seed=0, tile=TILE)
    for settings in SETTINGS:
        figures = peer.measured(settings, ops, min(options.repeats, REPEATS))
        yield settings, figures
        if "failed" in figures or time.monotonic() > until:  # what failed had been given the gradients
            return


@dataclass(frozen=True, slots=True)
class Peer:
    backend: Any
    types: Any
    vocab_size: int
    least_s_per_token: float  # forward and the input's gradient; a frozen base has none of its own

    def measured(self, settings: Settings, ops: Sequence[ForwardBackward], repeats: int) -> dict[str, Any]:
        """Return what passes and steps take with these settings, or why they fail."""
        self.configure(settings)
        batches = [batch_of(op, self.types) for op in ops]
        try:
            took = [
                (seconds(lambda: self.passes(batches)), seconds(lambda: self.steps(ops))) for _ in range(repeats + 1)
            ]
        except RuntimeError as error:  # JAX's: no memory, above all
            return {"failed": str(error).partition("\n")[0][:200]}
        tokens = sum(len(datum.tokens_T) for op in ops for datum in op.data)
        pass_s, step_s = (statistics.median(each) for each in zip(*took[1:], strict=True))
        return {
            "tokens": tokens,
            "first_s": sum(took[0]),
            "forward_backward_s": pass_s,
            "optim_step_s": step_s,
            "tokens_per_s": tokens / (pass_s + step_s),
            "share_of_matmul_limit": tokens * self.least_s_per_token / pass_s,
        }

    def configure(self, settings: Settings) -> None:
        """Do what a restart with these settings would do, without drawing the weights again."""
        self.backend.config.train_micro_batch_size = settings.sequences
        self.backend.model_config.gradient_checkpointing = settings.recompute
        self.backend._create_loss_and_grad_fn()  # noqa: SLF001

    def passes(self, batches: Sequence[Any]) -> None:
        for batch in batches:
            for output in self.backend.forward_backward(batch).values():
                losses = [value for each in output.loss_fn_outputs for value in each["elementwise_loss"]["data"]]
                assert np.isfinite(sum(losses)), batch.all_model_ids

    def steps(self, ops: Sequence[ForwardBackward]) -> None:
        adam = AdamParams()
        params = self.types.AdamParams(
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        for op in ops:
            self.backend.optim_step(op.model_id, self.types.OptimStepInput(adam_params=params))


def make_peer(options: Options, models: Sequence[str], limit: float) -> Peer:
    """Make a backend with these models, and with weights of its own."""
    jax_backend, types = _skyrl("skyrl.backends.jax"), _skyrl("skyrl.tinker.types")
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(jax_backend, "load_safetensors"):
        shape = options.write_model(Path(directory))
        _write_dtype(Path(directory) / "config.json", "float32" if options.toy else "bfloat16")
        config = jax_backend.JaxBackendConfig(max_lora_adapters=len(models) + 1, max_lora_rank=options.rank)
        backend = jax_backend.JaxBackend(directory, config)
    for index, model_id in enumerate(models):
        lora = LoraConfig(rank=options.rank, seed=index)
        flags = {"train_unembed": not shape.tied}  # it refuses to train a tied head
        backend.create_model(model_id, types.LoraConfig(rank=lora.rank, alpha=lora.alpha, seed=lora.seed, **flags))
    return Peer(backend, types, shape.vocab_size, 4 * linear_parameters(shape) / limit)


def forget() -> None:
    """Free what nobody holds any more: the next backend needs the room."""
    import jax

    jax.clear_caches()
    gc.collect()


def batch_of(op: ForwardBackward, types: Any) -> Any:
    """Return a request as SkyRL's engine hands it to its backend."""
    count = len(op.data)
    return types.PreparedModelPassBatch(
        all_model_inputs=[
            types.ModelInput(chunks=[types.EncodedTextChunk(tokens=datum.tokens_T.tolist())]) for datum in op.data
        ],
        all_targets=[datum.loss_inputs["target_tokens"].tolist() for datum in op.data],
        all_token_weights=[datum.loss_inputs["weights"].tolist() for datum in op.data],
        **{
            f"all_{name}": [[] for _ in range(count)]
            for name in ("sampling_logprobs", "advantages", "values", "returns")
        },
        all_model_ids=[op.model_id] * count,
        all_loss_fns=["cross_entropy"] * count,
        all_loss_fn_configs=[None] * count,
        request_batch_slices=[("0", op.model_id, 0, count)],
    )


def seconds(work: Callable[[], object]) -> float:
    """Return what it takes. It waits for the device itself, as it returns numbers."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def check(report: Report) -> None:
    """Raise RuntimeError if a number of tenants has no figures."""
    groups: list[Any] = [figures for name, figures in report.items() if name.startswith("tenants: ")]
    for tenants in TENANTS:
        tried = [figures for figures in groups if figures["tenants"] == tenants]
        if tried and all("failed" in figures for figures in tried):
            msg = f"with {tenants} tenants: {tried[0]['failed']}"
            raise RuntimeError(msg)


def _skyrl(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        msg = f"{error.name}, which SkyRL needs,"
        raise NotInstalledError(msg) from error


@contextmanager
def kept_programs() -> Iterator[None]:
    import jax

    with tempfile.TemporaryDirectory() as directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        yield


def _write_dtype(path: Path, dtype: str) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "torch_dtype": dtype, "dtype": dtype}))
