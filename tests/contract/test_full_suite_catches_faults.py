"""The suite of full fine-tuning must be able to fail: faults put into the toy backend one at a time."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinsmith.backend import BackendContext, HostSnapshot, ModelState, Snapshot
from tinsmith.builtin import toy_model
from tinsmith.builtin.toy_backend import ToyBackend, ToyConfig
from tinsmith.builtin.toy_training import TrainedModel
from tinsmith.losses import BUILTIN_LOSSES
from tinsmith.operations import (
    CreateModel,
    Failed,
    Forward,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    OptimStep,
    OptimStepOutput,
)
from tinsmith.testing import FullDriver, FullFineTuningContract
from tinsmith.testing.model_driver import ModelDriver

Patch = pytest.MonkeyPatch
Fault = Callable[[Patch], None]

_create = ToyBackend.create_model
_step = ToyBackend.optim_step
_pass = ToyBackend.forward_backward
BASE = LoraConfig(rank=0, seed=0)


def seed_changes_the_weights(patch: Patch) -> None:
    def create_model(self: ToyBackend, op: CreateModel) -> None:
        _create(self, op)
        model = self.device.models[op.model_id]
        model.weights = {name: w * np.float32(1 + 1e-6 * op.lora.seed) for name, w in model.weights.items()}

    patch.setattr(ToyBackend, "create_model", create_model)


def weights_are_rounded(patch: Patch) -> None:
    def create_model(self: ToyBackend, op: CreateModel) -> None:
        _create(self, op)
        if op.lora.rank == 0:
            model = self.device.models[op.model_id]
            model.weights = {name: w.astype(np.float16).astype(np.float32) for name, w in model.weights.items()}

    patch.setattr(ToyBackend, "create_model", create_model)


def gradients_depend_on_company(patch: Patch) -> None:
    def forward_backward(self: ToyBackend, ops: Sequence[ForwardBackward]) -> list[ForwardBackwardOutput | Failed]:
        results = _pass(self, ops)
        for model in [self.device.models[op.model_id] for op in ops] if len(ops) > 1 else []:
            model.gradients = {name: g * np.float32(1 + 1e-6) for name, g in model.gradients.items()}
        return results

    patch.setattr(ToyBackend, "forward_backward", forward_backward)


def base_learns(patch: Patch) -> None:
    """What is trained is written into the base model, which others use."""

    def optim_step(self: ToyBackend, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        results = _step(self, ops)
        for model in [self.device.models[op.model_id] for op in ops]:
            for module in self.device.model.base if model.lora.rank == 0 else ():
                self.device.model.base[module] = model.weights[toy_model.full_name(module)]
        return results

    patch.setattr(ToyBackend, "optim_step", optim_step)


def models_begin_where_the_last_one_is(patch: Patch) -> None:
    def create_model(self: ToyBackend, op: CreateModel) -> None:
        trained = [model for model in self.device.models.values() if model.lora.rank == op.lora.rank == 0]
        _create(self, op)
        if trained:
            self.device.models[op.model_id].weights = trained[-1].weights

    patch.setattr(ToyBackend, "create_model", create_model)


def forward_keeps_its_weights(patch: Patch) -> None:
    kept: dict[str, TrainedModel] = {}

    def forward(self: ToyBackend, ops: Sequence[Forward]) -> list[ForwardBackwardOutput | Failed]:
        now = dict(self.device.models)
        for op in ops:
            self.device.models[op.model_id] = kept.setdefault(op.model_id, replace(now[op.model_id]))
        results = [self.score(op, backward=False) for op in ops]
        self.device.models.update(now)
        return results

    patch.setattr(ToyBackend, "forward", forward)


def restore_without(part: str) -> Fault:
    def fault(patch: Patch) -> None:
        restore = ToyBackend.restore_state

        def restore_state(self: ToyBackend, model_id: str, state: ModelState) -> None:
            restore(self, model_id, replace(state, **{part: {}}))

        patch.setattr(ToyBackend, "restore_state", restore_state)

    return fault


def the_base_is_published(patch: Patch) -> None:
    def publish(self: ToyBackend, model_id: str, snapshot_id: str) -> Snapshot:
        return HostSnapshot(snapshot_id, self.device.models[model_id].lora, self.device.model.init_lora(BASE))

    patch.setattr(ToyBackend, "publish", publish)


def moments_are_shared(patch: Patch) -> None:
    """A model's second step uses the moments of whoever stepped last."""
    last: list[TrainedModel] = []

    def optim_step(self: ToyBackend, ops: Sequence[OptimStep]) -> list[OptimStepOutput | Failed]:
        for model in [self.device.models[op.model_id] for op in ops]:
            if last and last[-1].adam_m.keys() == model.adam_m.keys():
                model.adam_m = last[-1].adam_m
            last.append(model)
        return _step(self, ops)

    patch.setattr(ToyBackend, "optim_step", optim_step)


FAULTS: list[tuple[Fault, str]] = [
    (seed_changes_the_weights, "test_fresh_model_has_the_base_weights_and_no_history"),
    (weights_are_rounded, "test_fresh_model_computes_what_the_base_computes"),
    (gradients_depend_on_company, "test_company_makes_no_difference"),
    (base_learns, "test_base_stays_as_it_was"),
    (models_begin_where_the_last_one_is, "test_base_stays_as_it_was"),
    (forward_keeps_its_weights, "test_step_is_seen_after_a_forward"),
    *((restore_without(part), "test_training_goes_on_from_the_files") for part in ("gradients", "adam_m", "adam_v")),
    (moments_are_shared, "test_training_goes_on_from_the_files"),
    (the_base_is_published, "test_sampler_checkpoint_is_the_snapshot"),
]


def run(test: str, directory: Path) -> None:
    """Call a test of the suite as pytest would, with the fixtures that it names."""
    losses = {spec.name: spec for spec in BUILTIN_LOSSES}
    backend = ToyBackend(
        ToyConfig(), BackendContext(model_name="toy", model_path=None, cache_dir=directory, losses=losses)
    )
    fixtures: dict[str, Any] = {
        "driver": FullDriver(backend),
        "adapters": ModelDriver(backend),
        "model_path": None,
        "tmp_path": directory,
    }
    function = getattr(FullFineTuningContract(), test)
    function(**{name: fixtures[name] for name in inspect.signature(function).parameters})


@pytest.mark.parametrize(("fault", "test"), FAULTS)
def test_suite_catches(fault: Fault, test: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(test, tmp_path)  # without the fault the test passes
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run(test, tmp_path / "again")
