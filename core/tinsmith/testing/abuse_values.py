"""The values that the abuse suites try of every number: extremes inside its range, values outside, and random ones."""

import math

import numpy as np

from tinsmith.ranges import FLOAT32_LEAST, FLOAT32_MAX, INT32_MAX, INT64_MAX, Range

_INTEGERS = (0, 1, 2, 7, 63, 64, 255, 2**15, 2**16, 2**24 + 1, INT32_MAX, 2**31, 2**32, 2**53 + 1, INT64_MAX)
_FLOATS: tuple[float, ...] = (
    0.0,
    5e-324,
    1e-45,
    1e-40,
    FLOAT32_LEAST,
    1e-20,
    1e-8,
    1e-3,
    0.5,
    1 - 2**-24,
    1.0,
    10.0,
    1e9,
    1e18,
)
_FLOATS += (2.0**64, 1e30, FLOAT32_MAX)
_OUTSIDE = (math.nan, math.inf, -math.inf, 3.4028236e38, 1e39, 1.7e308, 2.0**31, 2.0**63, 2.0**64)


def extremes(allowed: Range) -> list[float]:
    """Return values that the range holds: its ends, their neighbours, and where number formats have theirs."""
    if allowed.integer:
        ends: list[float] = [*allowed.also, allowed.low, allowed.low + 1, allowed.high - 1, allowed.high]
        found = [int(value) for value in (*ends, *_INTEGERS)]
        return [value for value in sorted(set(found)) if allowed.holds(value)]
    ends = [*allowed.also, allowed.low, allowed.high, math.nextafter(allowed.low, math.inf)]
    signed = [*ends, math.nextafter(allowed.high, -math.inf), *_FLOATS, *(-value for value in _FLOATS)]
    return [value for value in dict.fromkeys(signed) if allowed.holds(value)]


def outside(allowed: Range) -> list[float]:
    """Return values that the range does not hold."""
    if allowed.integer:
        found: list[float] = [int(allowed.low) - 1, int(allowed.high) + 1, -(2**63), 2**63, 2**64, 10**30]
    else:
        found = [math.nextafter(allowed.low, -math.inf), math.nextafter(allowed.high, math.inf), *_OUTSIDE]
    return [value for value in found if not allowed.holds(value)]


def drawn(rng: np.random.Generator, allowed: Range) -> float:
    """Draw an extreme, or a value of any magnitude."""
    tried = extremes(allowed)
    if rng.random() < 0.4:
        return tried[rng.integers(len(tried))]
    if allowed.integer:
        span = int(allowed.high) - int(allowed.low)
        return int(allowed.low) + int(min(span, 2.0 ** rng.uniform(0, max(1, span.bit_length())) - 1))
    sign = -1.0 if allowed.low < 0 and rng.random() < 0.5 else 1.0
    value = sign * 10.0 ** rng.uniform(-40, 38)
    return value if allowed.holds(value) else tried[rng.integers(len(tried))]
