"""Who asks for what: classes of tenants, and the loop that each tenant goes through."""

import math
import random
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from tinsmith.errors import UserError
from tinsmith_workbench.simulation.service_times import FromFile, read_part


class TenantClass(FromFile):
    """Tenants that do the same: again and again, think, draw samples, then train.

    Samples of a step are sent together. When all have arrived, passes, an optimizer step and a save for sampling are
    sent together. Lengths and pauses are random.
    """

    name: str
    tenants: PositiveInt | None = Field(None, description="how many; none: the classes share the others by weight")
    weight: PositiveFloat = 1.0
    samples: NonNegativeInt = Field(0, description="requests of a step")
    sequences: PositiveInt = Field(1, description="of a request")
    prompt_tokens: PositiveInt = 128
    sampled_tokens: PositiveInt = Field(128, description="of a sequence, on average")
    passes: NonNegativeInt = Field(0, description="forward_backwards of a step; if any, an optimizer step follows")
    pass_tokens: PositiveInt = Field(2048, description="of a pass, on average")
    saves: bool = Field(default=False, description="each step ends with a save for sampling")
    think_s: NonNegativeFloat = Field(1.0, description="pause before a step, on average")
    spread: float = Field(0.5, ge=0, le=2, description="of lengths: the sigma of their logarithms")


class Workload(FromFile):
    classes: tuple[TenantClass, ...] = Field(min_length=1)

    def tenants(self, number: int) -> list[TenantClass]:
        """Return the class of each of `number` tenants, class by class. Raise UserError if shares do not work out."""
        shared = [each for each in self.classes if each.tenants is None]
        rest = number - sum(each.tenants or 0 for each in self.classes)
        if rest < len(shared) or (rest > 0 and not shared):
            msg = f"{number} tenants do not divide into these classes: {', '.join(each.name for each in self.classes)}"
            raise UserError(msg)
        given = _divided(shared, rest)
        return [each for each in self.classes for _ in range(each.tenants or given[each.name])]


def _divided(classes: Sequence[TenantClass], number: int) -> Counter[str]:
    """Give place after place to the class that is furthest behind its weight."""
    given: Counter[str] = Counter()
    for _ in range(number):
        behind = min(classes, key=lambda each: (given[each.name] + 1) / each.weight)
        given[behind.name] += 1
    return given


_SFT: Final = TenantClass(name="sft", passes=1)
_RL: Final = TenantClass(name="rl", samples=8, sequences=4, passes=4, saves=True, think_s=2.0)
_SAMPLING: Final = TenantClass(name="sampling", samples=1, think_s=2.0)
_HOG: Final = TenantClass(name="hog", tenants=1, passes=64, pass_tokens=4096, think_s=0.0)

WORKLOADS: Final[Mapping[str, Workload]] = {
    "sft": Workload(classes=(_SFT,)),
    "rl": Workload(classes=(_RL,)),
    "sampling": Workload(classes=(_SAMPLING,)),
    "mixed": Workload(classes=(_SFT, _RL, _SAMPLING)),
    "hog": Workload(classes=(_HOG, _SFT)),
}


def workload_of(name: str) -> Workload:
    """Return a built-in workload by name, or one from a JSON file. Raise UserError or ConfigError."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if not name.endswith(".json"):
        msg = f"no workload {name!r}; there are {', '.join(WORKLOADS)}, or give a file that ends in .json"
        raise UserError(msg)
    return read_part(Workload, Path(name))


@dataclass(frozen=True, slots=True)
class Wanted:
    """One operation that a tenant asks for. `tokens`: of a pass, or of each sequence of a sample."""

    kind: str
    tokens: int = 0
    sequences: int = 0
    prompt_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """The cost that the scheduler counts."""
        return self.prompt_tokens + max(1, self.sequences) * self.tokens


Life = Generator[float | list[Wanted], None, None]


def life(each: TenantClass, rng: random.Random, *, max_tokens: int, max_context_tokens: int) -> Life:
    """Yield seconds to wait, or operations to send together; go on when they have passed, or all results are there.

    What is drawn from `rng` does not depend on when the tenant goes on.
    """
    while True:
        yield rng.expovariate(1 / each.think_s) if each.think_s else 0.0
        if each.samples:
            room = max_context_tokens - each.prompt_tokens
            drawn = [_about(each.sampled_tokens, each.spread, rng, room) for _ in range(each.samples)]
            yield [Wanted("sample", tokens, each.sequences, each.prompt_tokens) for tokens in drawn]
        if each.passes:
            lengths = [_about(each.pass_tokens, each.spread, rng, max_tokens) for _ in range(each.passes)]
            step = [*(Wanted("forward_backward", tokens) for tokens in lengths), Wanted("optim_step")]
            yield [*step, Wanted("save_for_sampler")] if each.saves else step


def _about(mean: int, spread: float, rng: random.Random, most: int) -> int:
    """Draw from a log-normal distribution."""
    drawn = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return max(1, min(most, round(drawn)))
