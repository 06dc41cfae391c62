"""Rollouts as people and programs read them: a step's, by reward, and one in full, with its text."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np

from tinsmith.errors import ConfigError, NotFoundError
from tinsmith.plugins.loading import Plugins
from tinsmith.protocol import wire
from tinsmith.server.run_views import finite
from tinsmith.server.step_rollouts import StepRollouts
from tinsmith.settings import Settings
from tinsmith.store import OF_CLIENT
from tinsmith.store.refusals import no_such
from tinsmith.store.rollouts import Rollout, decode_rewards, decode_rollouts
from tinsmith_checkpoints.huggingface.tokenizer_files import read_tokenizer

_SHOWN: Final = 64  # tokens of a rollout in a list

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    name: str
    rollout: Rollout
    reward: float | None
    trained: bool = True

    @property
    def rank(self) -> tuple[bool, float, bool, float]:
        advantage = self.rollout.advantage if self.trained else 0.0
        return self.reward is None, -(self.reward or 0.0), not self.trained, -advantage


@cache
def decoder_of(directory: Path) -> Decode | None:
    """Return what decodes tokens of a base model; None without a tokenizer that can be read, or the library."""
    try:
        tokenizer = read_tokenizer(directory)
    except (ModuleNotFoundError, ConfigError):
        return None
    if tokenizer is None:
        return None

    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode_batch([tokens], skip_special_tokens=False)[0]  # `decode` holds Python's lock
        return text

    return decode


def directory_of(base_model: str, settings: Settings, plugins: Plugins) -> Path | None:
    """Return where the files of a base model are; None for one that the settings do not name."""
    model = next((each for each in settings.models if each.name == base_model), None)
    if model is None:
        return None
    found = model.path or plugins.resolve_base_model(model.source)
    return None if found is None else found.expanduser().absolute()


def step_of(name: str) -> int:
    """Return the step of a rollout. Raises NotFoundError for what names none."""
    found = re.fullmatch(r"(\d{1,15})-(\d+|req-[0-9a-f]+-[0-9a-f]+)-\d+", name)
    if found is None:
        raise NotFoundError(no_such("rollout", name))
    return int(found[1])


def list_of(
    run_id: str, steps: list[int], step: int | None, found: StepRollouts, directory: Path | None
) -> wire.RolloutList:
    decode = None if directory is None else decoder_of(directory)
    named = [] if step is None else sorted(_named(step, found), key=lambda each: each.rank)
    return wire.RolloutList(
        run_id=run_id,
        steps=steps,
        step=step,
        number=sum(row.number for row in found.rows),
        untrained=sum(not each.trained for each in named),
        more_samples=found.more_samples,
        rollouts=[wire.RolloutSummary(**_summary(each, decode)) for each in named],
    )


def view_of(run_id: str, step: int, name: str, found: StepRollouts, directory: Path | None) -> wire.RolloutView:
    """Raises NotFoundError if the step has no such rollout, or no longer."""
    one = next((each for each in _named(step, found) if each.name == name), None)
    if one is None:
        raise NotFoundError(no_such("rollout", name))
    decode, tokens = None if directory is None else decoder_of(directory), _tokens(one.rollout)
    parts = [
        wire.RolloutPart(sampled=sampled, tokens=tokens[first:after], text=decode and decode(tokens[first:after]))
        for sampled, first, after in _parts(one.rollout, len(tokens))
    ]
    return wire.RolloutView(**_summary(one, decode), run_id=run_id, step=step, parts=parts)


def _named(step: int, found: StepRollouts) -> Iterator[_Named]:
    rewards = {
        digest: reward
        for row in found.rows
        if row.seq_id == OF_CLIENT
        for digest, reward in decode_rewards(row.content).items()
    }
    for row in found.rows:
        if row.seq_id != OF_CLIENT:
            for number, rollout in enumerate(decode_rollouts(row.content).rollouts):
                name = f"{step}-{row.seq_id}-{number}"
                yield _Named(name=name, rollout=rollout, reward=rewards.get(rollout.digest))
    for name, rollout in found.untrained():
        yield _Named(name=f"{step}-{name}", rollout=rollout, reward=rewards.get(rollout.digest), trained=False)


def _tokens(rollout: Rollout) -> list[int]:
    tokens: list[int] = np.frombuffer(rollout.tokens, "<i4").tolist()
    return tokens


def _parts(rollout: Rollout, length: int) -> Iterator[tuple[bool, int, int]]:
    at = 0
    for first, after in rollout.sampled:
        if at < first:
            yield False, at, first
        yield True, first, after
        at = after
    if at < length:
        yield False, at, length


def _summary(named: _Named, decode: Decode | None) -> dict[str, object]:
    rollout, tokens = named.rollout, _tokens(named.rollout)
    first = rollout.sampled[0][0] if rollout.sampled else len(tokens)
    return {
        "rollout": named.name,
        "trained": named.trained,
        "reward": named.reward,
        "advantage": finite(rollout.advantage),
        "kl": finite(rollout.kl),
        "prompt_tokens": first,
        "sampled_tokens": sum(after - first for first, after in rollout.sampled),
        "text": decode and decode(tokens[first : first + _SHOWN]),
    }
