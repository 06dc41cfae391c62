"""Whether a pass keeps its activations or recomputes them: by the memory that the models in training leave."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsdp_harness import VOCAB, limited_backend
from limited_rank import LimitedRank

from tinsmith import Demand, Placement
from tinsmith.testing import ModelDriver, ragged_data
from tinsmith_checkpoints.huggingface import adapter_weights, known_config
from tinsmith_fsdp.admission import Budget, budget_of
from tinsmith_fsdp.architecture import architecture_of
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.config import FsdpConfig
from tinsmith_fsdp.costs import Ranks
from tinsmith_fsdp.demand import demand, resolved_ranks

GIB = 1 << 30


def card(memory: int, devices: int = 1) -> Placement:
    return Placement(
        devices=tuple(map(str, range(devices))), memory_bytes=memory * GIB, device_bytes=(memory + 7) * GIB
    )


def asked(placement: Placement, **settings: object) -> Demand:
    return demand(FsdpConfig.model_validate(settings), known_config("Qwen3-8B"), placement)


def budget(memory: int | None, **settings: object) -> Budget:
    """Return that of one GPU."""
    config, model = FsdpConfig.model_validate(settings), known_config("Qwen3-8B")
    assert model is not None
    ranks = resolved_ranks(config, 1, on_cpu=False)
    return budget_of(config, architecture_of(model, Path("config.json")), ranks, memory)


@pytest.mark.parametrize(
    ("keeps", "tokens", "per_weight", "peak"),
    [
        (True, 3787, 4 * (17 + 1 + 1) + 2, 41.21),
        (True, 4096, 4 * (17 + 1 + 16 + 16) + 4 * 2, 53.81),
        (True, 6079, 4 * (17 + 17 + 1) + 2, 57.37),
        (True, 6144, 4 * (17 + 17 + 16) + 6 * 2, 63.69),
        (False, 7185, 4 * (17 + 17 + 1) + 2, 31.40),
        (False, 8192, 4 * (17 + 17 + 16) + 8 * 2, 38.25),
        (False, 16_384, 4 * 3 + 2, 25.38),
    ],
)
def test_what_is_counted_is_what_an_h200_took(keeps: bool, tokens: int, per_weight: int, peak: float) -> None:
    """Compiled layers of Qwen3-8B, rank 32: GiB of peaks that were measured, within 1 %. Eager layers keep 40 % more.

    per_weight: bytes for each of an adapter's weights: of those that were there, their gradients, sums and copies.
    """
    counted = budget(None)
    costs = counted.keeping if keeps else counted.costs
    adapters = adapter_weights(counted.shape, 32) * per_weight
    assert (costs.base + costs.gathered + adapters + costs.micro_batch(tokens)) / GIB == pytest.approx(peak, rel=0.01)


def test_models_are_admitted_as_if_all_passes_recomputed() -> None:
    for memory in (30, 73, 129):
        assert asked(card(memory)).max_models == asked(card(memory), activation_checkpointing=True).max_models


def test_activations_are_kept_as_far_as_models_leave_room() -> None:
    found = budget(73 * GIB)
    tokens = [found.kept_tokens(models * found.adapter) for models in range(found.max_models + 1)]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[1] > 8192 > tokens[8] > 4096 > tokens[-1]
    for models, each in enumerate(tokens):
        taken = found.keeping.fixed + found.keeping.micro_batch(each) + models * found.adapter
        assert taken < 73 * GIB or each == 0
    for settled in ({"activation_checkpointing": True}, {"activation_checkpointing": False}):
        assert budget(73 * GIB, **settled).kept_tokens(0) == 0
    assert budget(None).kept_tokens(0) == 0


def test_the_plan_says_what_passes_do_and_why() -> None:
    kept, beyond = asked(card(73)).remarks
    assert kept == "activations are kept with up to 16 models in training, in micro-batches of 4224 to 10240 tokens"
    assert beyond.endswith("passes of up to 1408 tokens keep theirs; larger ones compute them again, to save memory")
    (kept,) = asked(card(129), max_models=8).remarks
    assert kept.startswith("activations are kept, in micro-batches of at most 16384 tokens with 1 model in training")
    (recomputed,) = asked(card(30)).remarks
    assert recomputed.endswith("micro-batches that keep fewer than 4096 would be slower")
    (gathered,) = asked(card(73, devices=4)).remarks
    assert gathered.endswith("smaller micro-batches would gather the layers more often")
    assert asked(card(73), activation_checkpointing=True).remarks == ("activations are recomputed, as set",)
    assert asked(card(73), activation_checkpointing=False).remarks == ("activations are kept, as set",)
    assert asked(card(73), device="cpu").remarks == ()


# Passes ---------------------------------------------------------------------------------------------------------------

DATA = ragged_data(1, VOCAB, (40, 30, 20, 10))


def open_choice(config: FsdpConfig, world: int, *, on_cpu: bool) -> Ranks:
    """Stand in for a GPU, where the device leaves it open."""
    return replace(resolved_ranks(config, world, on_cpu=on_cpu), checkpointing=True, may_keep=True)


@pytest.fixture(scope="module", params=[1, 2])
def backend(
    request: pytest.FixtureRequest, fsdp_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FsdpBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tinsmith_fsdp.backend.resolved_ranks", open_choice)
        cache, placement = tmp_path_factory.mktemp("cache"), Placement(memory_bytes=GIB)
        backend = limited_backend(fsdp_models["qwen3"], cache, nproc_per_node=request.param, placement=placement)
    yield backend
    backend.close()


@contextmanager
def seen(backend: FsdpBackend) -> Iterator[list[tuple[int, bool]]]:
    """Yield the number of micro-batches of each attempt at a pass, and whether it keeps activations."""
    runs: list[tuple[int, bool]] = []
    asked_before = backend.ranks.call_each

    def call_each(method: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        runs.append((len(arguments[0][0]), arguments[0][3]))
        return asked_before(method, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.ranks, "call_each", call_each)
        yield runs


@pytest.mark.slow
def test_a_pass_that_has_no_room_to_keep_activations_recomputes_them(
    backend: FsdpBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, pids, alone = ModelDriver(backend), backend.ranks.pids, len(backend.ranks) == 1
    model_id = driver.create_trained(rank=3, seed=1)
    with seen(backend) as runs:
        gradient = driver.gradient(model_id, DATA)
        driver.forward(model_id, DATA)
        assert runs == [(1, True), (1, False)]  # without a backward pass there is nothing to keep
    monkeypatch.setattr(backend, "most_kept", 60 if alone else 40)
    with seen(backend) as runs:
        driver.gradient(model_id, DATA)
        assert runs == [(1, False)]  # more micro-batches that are too small
    monkeypatch.setattr("tinsmith_fsdp.admission.WORTH_KEEPING", 30)
    with seen(backend) as runs:
        driver.gradient(model_id, DATA)
        assert runs == [(2, True) if alone else (1, False)]  # two ranks would gather the layers twice
    monkeypatch.undo()
    backend.ranks.call(LimitedRank.limit, None, 3)
    with seen(backend) as runs:
        found = driver.gradient(model_id, DATA)
        assert [keeps for _, keeps in runs] == [True, False]
        backend.ranks.call(LimitedRank.limit)
        runs.clear()
        driver.gradient(model_id, DATA)
        assert runs == [(1, False)]  # nothing fails twice
    assert all((found[name] == gradient[name]).all() for name in gradient)  # strict
    assert backend.ranks.pids == pids
    driver.unload_all()
