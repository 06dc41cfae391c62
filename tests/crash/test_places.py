"""An engine is killed in every part of parking a model and of bringing it back: exactly once, and the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinker
from campaign import SETTINGS
from processes import Event, Launcher, Served
from scenario import WAIT_S, state_at

from tinsmith import failpoints
from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import TOY, running_server
from tinsmith.testing.sdk_data import TOKENS, logprobs, ragged

ONE_PLACE = ModelSettings.model_validate({**TOY.model_dump(), "backend": {"plugin": "toy", "max_models": 1}})
MOST_ROUNDS = 40


class Tenant:
    """A client that leaves a gradient behind whenever the other one has its turn."""

    def __init__(self, url: str, number: int) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=f"tml-{number}")
        self.number = number
        self.seen: list[Any] = []
        self.training = self.service.create_lora_training_client(base_model=TOY.name, rank=4, seed=number).result(
            timeout=WAIT_S
        )
        self.sampler = self.training.save_weights_and_get_sampling_client().result(timeout=WAIT_S)

    def take_turn(self, number: int) -> None:
        for data in (ragged(2, number), ragged(3, number + self.number)):
            passed = self.training.forward_backward(data, "cross_entropy")
            self.seen.append(logprobs(passed.result(timeout=WAIT_S)))
            if len(data) == 2:
                adam = tinker.AdamParams(learning_rate=0.01, grad_clip_norm=1.0)
                self.seen.append(self.training.optim_step(adam).result(timeout=WAIT_S).metrics)
        self.seen.append(self.draw(number))

    def draw(self, seed: int) -> Any:
        params = tinker.SamplingParams(max_tokens=5, seed=seed, temperature=1.0)
        prompt = tinker.ModelInput.from_ints(TOKENS)
        answer = self.sampler.sample(prompt, num_samples=1, sampling_params=params).result(timeout=WAIT_S)
        return [(each.tokens, each.logprobs) for each in answer.sequences]

    def end(self) -> str:
        path: str = self.training.save_state("end").result(timeout=WAIT_S).path
        self.service.close("success").result(timeout=WAIT_S)
        return path


def take_turns(url: str, go_on: Callable[[int], bool]) -> tuple[list[Tenant], int]:
    tenants, rounds = [Tenant(url, number) for number in (1, 2)], 0
    while go_on(rounds):
        for tenant in tenants:
            tenant.take_turn(rounds)
        for tenant in tenants:  # although its model is parked
            tenant.seen.append(tenant.draw(rounds))
        rounds += 1
    return tenants, rounds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_in_every_part_of_a_change_of_places(launcher: Launcher, tmp_path: Path) -> None:
    """Two tenants take turns on one place, and each finds its model as it left it."""
    left = failpoints.points(of="places")

    def arm(served: Served) -> None:
        served.arm("engine", "".join(f"{point}=kill@1" for point in left[:1]))

    def on_event(event: Event) -> None:
        if event.killed and event.role == "engine" and left:
            left.pop(0)
            arm(served)

    served = Served(
        launcher,
        tmp_path / "one",
        [ONE_PLACE],
        settings={**SETTINGS, "quotas": {"place_idle_s": 0.0}},
        on_event=on_event,
        prepare=arm,
    )
    try:
        tenants, rounds = take_turns(served.url, lambda number: bool(left) and number < MOST_ROUNDS)
        assert not left, "these were never passed"
        found = [(tenant.seen, state_at(served.data_dir, tenant.end())) for tenant in tenants]
        assert served.stop() == 0
    finally:
        served.close()
    with running_server(tmp_path / "room-for-both", models=[TOY]) as server:
        undisturbed, _ = take_turns(server.url, lambda number: number < rounds)
        assert found == [(tenant.seen, state_at(tmp_path / "room-for-both", tenant.end())) for tenant in undisturbed]
