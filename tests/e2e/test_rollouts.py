"""Rollouts of a script of the SDK: what was given, what was sampled, its reward, its advantage, and who reads it."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from browser import Browser
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

import tinsmith_trackers
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.sdk_data import datum

WAIT_S = 300
PROMPT = [1, 2, 3]

Connect = Callable[[str, str], tinker.ServiceClient]


class Script:
    """Three rollouts of one prompt, trained in one step."""

    def __init__(self, server: RunningServer, client: tinker.ServiceClient) -> None:
        self.training = client.create_lora_training_client(base_model="toy", rank=4).result(WAIT_S)
        self.run_id = self.training.get_info().model_id
        self.http = httpx.Client(base_url=f"{server.url}/api/v1/runs/{self.run_id}", timeout=WAIT_S)
        self.url = server.url
        self.answers: list[list[int]] = []
        self.data: list[tinker.Datum] = []
        self.filtered: list[tinker.Datum] = []

    def step(
        self, advantages: list[float], shift: float = 0.0, filtered: int = 0, further: tuple[int, ...] = ()
    ) -> None:
        """Sample and train.

        shift: added to the sampler's logprobs, as if another model had sampled.
        filtered: samples that are not trained.
        further: tokens of later turns, which are trained with the samples.
        """
        sampler = self.training.save_weights_and_get_sampling_client().result(WAIT_S)
        params, number = tinker.SamplingParams(max_tokens=4, seed=1), len(advantages) + filtered
        drawn = sampler.sample(tinker.ModelInput.from_ints(PROMPT), number, params).result(WAIT_S).sequences
        self.answers = [list(each.tokens) for each in drawn]
        self.data = [
            _datum([*each.tokens, *further], _shifted(each.logprobs, shift) + [-1.0] * len(further), advantage)
            for each, advantage in zip(drawn, advantages, strict=False)
        ]
        self.filtered = [_datum(each.tokens, each.logprobs, 0.0) for each in drawn[len(advantages) :]]
        passed = self.training.forward_backward(self.data, "importance_sampling")
        self.training.optim_step(tinker.AdamParams(learning_rate=0.0)).result(WAIT_S)
        passed.result(WAIT_S)

    def get(self, path: str = "", key: str = "tml-ann", **query: Any) -> Any:
        answer = self.http.get(f"/rollouts{path}", params=query, headers={"x-api-key": key})
        return answer.raise_for_status().json()


def _shifted(logprobs: list[float], shift: float) -> list[float]:
    return [logprob + shift for logprob in logprobs]


def _datum(answer: list[int], logprobs: list[float], advantage: float) -> tinker.Datum:
    tokens, given = [*PROMPT, *answer], [0.0] * (len(PROMPT) - 1)
    inputs: Any = {
        "target_tokens": tokens[1:],
        "logprobs": [*given, *logprobs],
        "advantages": [*given, *([advantage] * len(answer))],
    }
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(WordLevel({f"w{number} ": number for number in range(64)}, unk_token="w0 "))
    tokenizer.decoder = Fuse()
    tokenizer.save(str(model / "tokenizer.json"))
    toy = ModelSettings(name="toy", path=model, backend=PluginSection(plugin="toy"))
    with running_server(tmp_path_factory.mktemp("rollouts"), models=(toy,)) as server:
        yield server


@pytest.fixture(scope="module")
def script(server: RunningServer) -> Iterator[Script]:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-ann") as client:
        script = Script(server, client)
        script.step([1.0, -2.0, 0.5], shift=0.25)
        tinsmith_trackers.track(script.training).log_rewards(0, script.data, [0.5, 0.0, 2.5])
        yield script


def test_rollouts_of_a_step_are_listed_by_reward(script: Script) -> None:
    found = script.get()
    assert (found["run_id"], found["steps"], found["step"], found["number"]) == (script.run_id, [0], 0, 3)
    assert [each["reward"] for each in found["rollouts"]] == [2.5, 0.5, 0.0]
    assert [each["advantage"] for each in found["rollouts"]] == [0.5, 1.0, -2.0]
    assert [each["kl"] for each in found["rollouts"]] == pytest.approx([0.25] * 3, abs=1e-5)
    best = found["rollouts"][0]
    assert (best["prompt_tokens"], best["sampled_tokens"]) == (3, len(script.answers[2]))
    assert best["text"] == "".join(f"w{token} " for token in script.answers[2])


def test_one_rollout_shows_what_was_given_and_what_was_sampled(script: Script) -> None:
    name = script.get()["rollouts"][0]["rollout"]
    found = script.get(f"/{name}")
    assert [(each["sampled"], each["tokens"]) for each in found["parts"]] == [
        (False, PROMPT),
        (True, script.answers[2]),
    ]
    assert found["parts"][0]["text"] == "w1 w2 w3 "
    assert (found["reward"], found["step"]) == (2.5, 0)


def test_a_later_step_without_rewards_is_listed_by_advantage(server: RunningServer, connect: Connect) -> None:
    script = Script(server, connect(server.url, "tml-ann"))
    for advantages in ([0.0], [1.0, 3.0, 2.0]):
        script.step(advantages)
    found = script.get()
    assert (found["steps"], found["step"]) == ([0, 1], 1)
    assert [each["advantage"] for each in found["rollouts"]] == [3.0, 2.0, 1.0]
    assert all("reward" not in each for each in found["rollouts"])
    assert script.get(step=0)["number"] == 1
    assert script.get(step=7)["rollouts"] == []


def test_what_was_sampled_and_not_trained_is_listed_with_its_step(server: RunningServer, connect: Connect) -> None:
    """A reward counts as for the others. It can be read in full, by whoever may read the run."""
    script = Script(server, connect(server.url, "tml-ann"))
    script.step([1.0, 2.0], filtered=2)
    tinsmith_trackers.track(script.training).log_rewards(0, [*script.data, script.filtered[1]], [0.5, 0.25, 3.0])
    answers = script.answers
    script.step([1.0])
    found = script.get(step=0)
    assert (found["number"], found["untrained"], found["more_samples"]) == (2, 2, False)
    shown = [(each["trained"], each.get("reward"), each.get("advantage")) for each in found["rollouts"]]
    assert shown == [(False, 3.0, None), (True, 0.5, 1.0), (True, 0.25, 2.0), (False, None, None)]
    best = script.get(f"/{found['rollouts'][0]['rollout']}")
    assert [(each["sampled"], each["tokens"]) for each in best["parts"]] == [(False, PROMPT), (True, answers[3])]
    assert (best["trained"], best["step"], best["prompt_tokens"]) == (False, 0, 3)
    assert (script.get()["step"], script.get()["untrained"]) == (1, 0)
    for name in (best["rollout"], best["rollout"].replace("0-", "1-", 1)):
        key = "tml-bob" if name == best["rollout"] else "tml-ann"
        assert script.http.get(f"/rollouts/{name}", headers={"x-api-key": key}).status_code == 404


def test_a_turn_of_a_conversation_that_was_trained_is_trained(server: RunningServer, connect: Connect) -> None:
    script = Script(server, connect(server.url, "tml-ann"))
    script.step([1.0, 2.0], filtered=1, further=(5, 6))
    found = script.get()
    assert [each["trained"] for each in found["rollouts"]] == [True, True, False]


def test_while_a_step_goes_on_nothing_is_called_untrained(server: RunningServer, connect: Connect) -> None:
    """Its samples may still be trained. Nor is anything if a pass does not show what it trained on."""
    script = Script(server, connect(server.url, "tml-ann"))
    sampler = script.training.save_weights_and_get_sampling_client().result(WAIT_S)
    params = tinker.SamplingParams(max_tokens=4, seed=1)
    drawn = sampler.sample(tinker.ModelInput.from_ints(PROMPT), 2, params).result(WAIT_S).sequences
    first = _datum(drawn[0].tokens, drawn[0].logprobs, 1.0)
    script.training.forward_backward([first], "importance_sampling").result(WAIT_S)
    assert (script.get()["number"], script.get()["untrained"]) == (1, 0)
    script.training.forward_backward([datum()], "cross_entropy").result(WAIT_S)
    script.training.optim_step(tinker.AdamParams(learning_rate=0.0)).result(WAIT_S)
    assert (script.get()["number"], script.get()["untrained"]) == (1, 0)


def test_supervised_training_leaves_no_rollouts(server: RunningServer, connect: Connect) -> None:
    script = Script(server, connect(server.url, "tml-ann"))
    script.training.forward_backward([datum()], "cross_entropy").result(WAIT_S)
    found = script.get()
    assert (found["run_id"], found["steps"], found["number"], found["rollouts"]) == (script.run_id, [], 0, [])


def test_another_tenant_finds_no_rollout_and_adds_no_reward(script: Script) -> None:
    name, bob = script.get()["rollouts"][0]["rollout"], {"x-api-key": "tml-bob"}
    for path in ("/rollouts", f"/rollouts/{name}"):
        assert script.http.get(path, headers=bob).status_code == 404
    body = {"step": 0, "rewards": {"0" * 32: 1.0}}
    assert script.http.post("/rewards", json=body, headers=bob).status_code == 404
    for wrong in ("none", "9-9-9", f"{name}0", "1-2"):
        assert script.http.get(f"/rollouts/{wrong}", headers={"x-api-key": "tml-ann"}).status_code == 404


@pytest.mark.parametrize("rewards", [{"0f": 1.0}, {"g" * 32: 1.0}, {"0" * 32: "nan"}, {}])
def test_what_is_no_reward_is_refused(script: Script, rewards: Any) -> None:
    body = {"step": 0, "rewards": rewards}
    assert script.http.post("/rewards", json=body, headers={"x-api-key": "tml-ann"}).status_code == 422


def test_a_small_budget_keeps_the_newest_and_the_extremes(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, server={"rollout_bytes": 8 * 2 * 100}) as server,  # two of seven tokens for each pass
        tinker.ServiceClient(base_url=server.url, api_key="tml-ann") as client,
    ):
        script = Script(server, client)
        for _ in range(12):
            script.step([1.0, 2.0, 3.0, 4.0])
        found = script.get()
        assert found["number"] == 4
        assert [each["advantage"] for each in found["rollouts"]] == [4.0, 1.0]
        assert found["untrained"] == 0, "the others were trained as well"
        assert [name for each in found["rollouts"] for name in each if name == "text"] == []  # it has no tokenizer
        assert 0 < found["steps"][0] < found["steps"][-1] == 11
        assert script.get(step=0)["rollouts"] == []


def test_a_server_without_a_budget_keeps_none(tmp_path: Path) -> None:
    with (
        running_server(tmp_path, server={"rollout_bytes": 0}) as server,
        tinker.ServiceClient(base_url=server.url, api_key="tml-ann") as client,
    ):
        script = Script(server, client)
        script.step([1.0])
        assert script.get()["steps"] == []
        with pytest.raises(ValueError, match=r"server\.rollout_bytes is 0"):
            tinsmith_trackers.track(script.training).log_rewards(0, script.data, [1.0])
        curves = script.http.get("/metrics", headers={"x-api-key": "tml-ann"}).json()["series"]
        assert any(each["name"] == "sampler_kl:mean" and math.isfinite(each["values"][0]) for each in curves)


def test_the_page_shows_which_rollout_got_the_highest_reward(
    script: Script, browser: Browser, take: Callable[[str], None]
) -> None:
    browser.look(width=1280, height=800, dark=False)
    browser.open(f"{script.url}/#run={script.run_id}&key=tml-ann")
    browser.until("document.querySelector('figure')")
    browser.evaluate("document.querySelector('#run-views a[href*=rollouts]').click()")
    best = "".join(f"w{token} " for token in script.answers[2])
    browser.until(f"document.querySelector('#rollout .sampled')?.textContent === {best!r}")
    rewards = "[...document.querySelectorAll('#rollout-list tbody tr')].map((row) => row.cells[1].textContent)"
    assert browser.evaluate(rewards) == ["2.5", "0.5", "0"]
    assert browser.evaluate("document.querySelector('#rollout .given').textContent") == "w1 w2 w3 "
    browser.evaluate("document.querySelectorAll('#rollout-list a')[2].click()")
    worst = "".join(f"w{token} " for token in script.answers[1])
    browser.until(f"document.querySelector('#rollout .sampled')?.textContent === {worst!r}")
    take("rollouts")
    assert browser.problems == []


def test_the_page_marks_what_was_never_trained(
    server: RunningServer, connect: Connect, browser: Browser, take: Callable[[str], None]
) -> None:
    script = Script(server, connect(server.url, "tml-ann"))
    script.step([1.0, 2.0], filtered=1)
    tinsmith_trackers.track(script.training).log_rewards(0, [*script.data, *script.filtered], [0.5, 0.25, 3.0])
    browser.look(width=1280, height=800, dark=False)
    browser.open(f"{script.url}/#run={script.run_id}&view=rollouts&key=tml-ann")
    browser.until("document.querySelector('#rollout .sampled')")
    tags = (
        "[...document.querySelectorAll('#rollout-list tbody tr')].map((row) => row.querySelector('.tag')?.textContent)"
    )
    assert browser.evaluate(f"{tags}.map((tag) => tag ?? '')") == ["not trained", "", ""]
    told = browser.evaluate("document.querySelector('#kept').textContent")
    assert told == "2 rollouts, and 1 more, sampled and never trained on."
    facts = browser.evaluate("document.querySelector('#rollout dl').textContent")
    assert facts.startswith("trainedno: it was sampled during this step, and no pass had itreward3")
    assert "KL" not in facts
    browser.evaluate("document.querySelectorAll('#rollout-list a')[1].click()")
    browser.until("document.querySelector('#rollout dl')?.textContent.startsWith('reward0.5advantage1')")
    take("untrained")
    assert browser.problems == []
