"""Measures a scenario on several servers in turn, and throws away the rounds that other processes disturbed."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from comparison.scenarios import SCENARIOS
from comparison.servers import Server

DISTURBED_CORES: Final = 0.1
_DISTURBED_S: Final = 0.03  # the machine's clock counts in hundredths of a second
_SPARE_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often a scenario is measured."""

    rounds: int
    fewest: int  # even if they take longer than `limit_s`
    limit_s: float


@dataclass(slots=True, kw_only=True)
class Result:
    """What one scenario gave. The lists of a server are in the order of the rounds, so they pair with the others'."""

    scenario: str
    figure: str
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)
    server_cpu_s: dict[str, list[float]] = field(default_factory=dict)
    warm_up_s: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    thrown_away: int = 0  # rounds
    most_others: float = 0.0  # cores that others used in the worst of them

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(name: str, servers: Sequence[Server], effort: Effort, *, allow_load: bool) -> Result:
    """Prepare the scenario on all servers, then measure round by round: the last server first, ours last."""
    scenario = SCENARIOS[name]
    result = Result(scenario=name, figure=scenario.figure, unit=scenario.unit)
    able = [server for server in servers if _prepare(name, server, result)]
    rounds = 1 if scenario.unit == "count" or not scenario.warm_ups else effort.rounds
    until, good = time.monotonic() + effort.limit_s, 0
    for _ in range(rounds + _SPARE_ROUNDS):
        answers = _round(name, able, servers)
        errors = {each.name: str(answer["error"]) for each, answer in answers if "error" in answer}
        result.errors.update(errors)
        able = [each for each in able if each.name not in errors]
        if not able:
            break
        if errors:
            continue  # the others are measured without them
        others = max(float(answer["others_cores"]) for _, answer in answers)
        if others > DISTURBED_CORES and not allow_load and scenario.unit != "count":
            result.thrown_away += 1
            result.most_others = max(result.most_others, others)
            continue
        good += 1
        _keep(result, answers)
        if good == rounds or (good >= effort.fewest and time.monotonic() > until):
            break
    return result


def _prepare(name: str, server: Server, result: Result) -> bool:
    answer = server.ask("prepare", name)
    if "error" in answer:
        result.errors[server.name] = str(answer["error"])
        return False
    server.sdk = answer["sdk"]
    result.warm_up_s[server.name] = answer["warm_up_s"]
    return True


Answers = list[tuple[Server, dict[str, Any]]]


def _round(name: str, able: Sequence[Server], servers: Sequence[Server]) -> Answers:
    """Ask one server after another. What those of `servers` do that are not in turn is not others' load."""
    answers = []
    for server in reversed(able):
        idle = [each for each in servers if each is not server]
        before = sum(each.cpu_s() for each in idle)
        answer = server.ask("measure", name)
        if "error" not in answer:
            others_s = answer["others_cpu_s"] - (sum(each.cpu_s() for each in idle) - before)
            answer["others_cores"] = max(0.0, others_s - _DISTURBED_S) / answer["seconds"]
            server.peak_mib = answer["peak_mib"] or 0.0
        answers.append((server, answer))
    return answers


def _keep(result: Result, answers: Answers) -> None:
    for server, answer in answers:
        result.values.setdefault(server.name, []).append(answer["value"])
        result.server_cpu_s.setdefault(server.name, []).append(answer["server_cpu_s"])
