"""The trial that decides whether few sequences are decoded in a program of their own.

A sequence moves between the programs as its neighbours come and go, so both must give it the same bits. XLA's library
for CPUs gives a row the same in 4 rows as in 16 for most matrices, but not for all. So each model is tried: both
programs decode the same random sequences, and all bits are compared of what they draw and of what they write.

Suffixes as in sampling_values.py.
"""

import logging
from typing import Final

import jax
import numpy as np

from tinsmith import Array
from tinsmith_jax.adapters import Adapter, shapes
from tinsmith_jax.layers import TILE
from tinsmith_jax.sampling_adapters import BASE_MODEL
from tinsmith_jax.sampling_device import SamplingDevice
from tinsmith_jax.sampling_values import Drawn, PageCopy, PromptTile, SamplingShape, SlotInput

logger = logging.getLogger(__name__)

_STEPS: Final = 4  # half of them plain, half truncated and with alternatives
_ADAPTERS: Final = 3
_PROMPT: Final = 1  # the page with which all sequences begin


def agree(device: SamplingDevice) -> bool:
    """Return whether few rows have the bits of all rows. What the device held is overwritten."""
    few, every = device.shape.few_rows, device.shape.num_slots
    differing = _differing(device, few, every)
    if differing:
        what = ", ".join(differing)
        logger.info("decoding always computes %d rows: %d by themselves get other bits in %s", every, few, what)
    return not differing


def _differing(device: SamplingDevice, few: int, every: int) -> list[str]:
    """Return what differs. The programs write to pages of their own."""
    rng = np.random.default_rng(0)
    for row in range(_ADAPTERS):
        device.write_adapter(row, device.put_adapter(_random_adapter(device, rng)), 1.0)
    tokens_T = rng.integers(0, device.config.vocab_size, TILE).astype(np.int32)
    device.prefill([PromptTile(shard=0, start=0, tokens=tokens_T, pages=(_PROMPT,))])
    first, second, end = (_PROMPT + 1 + n * every for n in range(3))
    expected, found = _decode(device, first, every), _decode(device, second, few)
    expected |= device.read_pages(slice(first, second))
    found |= device.read_pages(slice(second, end))
    return [name for name, array in expected.items() if array.tobytes() != found[name].tobytes()]


def _random_adapter(device: SamplingDevice, rng: np.random.Generator) -> Adapter:
    """Make one of the largest rank, in which the last tokens of the vocabulary are likely or unlikely.

    The last columns of a product may be computed in another way than the others, and would hardly ever be drawn.
    """

    def random(shape: jax.ShapeDtypeStruct) -> Array:
        values: Array = rng.standard_normal(shape.shape, np.float32) / np.float32(shape.shape[-2] ** 0.5)
        return values

    adapter: Adapter = jax.tree.map(random, shapes(device.config, device.shape.max_lora_rank))
    adapter["head"][1][:, -device.shape.max_top :] += 10
    return adapter


def _decode(device: SamplingDevice, first_page: int, num_rows: int) -> dict[str, Array]:
    """Decode a sequence on each page, `num_rows` at a time. Return what is drawn, by name: [X, B] or [X, B, K]."""
    every, steps = device.shape.num_slots, min(_STEPS // 2, device.shape.max_steps)
    device.copy_pages([PageCopy(shard=0, source=_PROMPT, target=first_page + n) for n in range(every)])
    given = _sequences(device.shape, first_page)
    firsts = (*range(0, every - num_rows, num_rows), every - num_rows)  # the last rows may draw some again, alike
    parts = [slice(first, first + num_rows) for first in firsts]
    dispatches = []
    for number in range(_STEPS // steps):
        given.any_top = number % 2 > 0
        given.top_k[:], given.top_p[:] = (20, 0.9) if given.any_top else (-1, 1)
        drawn = _joined([(part, device.decode_rows(given.part(part), steps)) for part in parts], every)
        given.tokens[:] = drawn["tokens"][-1]
        given.positions += steps
        dispatches.append(drawn)
    return {name: np.concatenate([drawn[name] for drawn in dispatches if name in drawn]) for name in dispatches[-1]}


def _sequences(shape: SamplingShape, first_page: int) -> SlotInput:
    """Describe sequences of all temperatures, adapters and lengths. Each goes on in its copy of the prompt's page."""
    rng, number_B = np.random.default_rng(1), np.arange(shape.num_slots)
    given = SlotInput.idle(shape)
    given.tokens[:] = number_B
    given.positions[:] = TILE + number_B % (TILE - _STEPS)
    given.left[:] = 2 * TILE
    given.tables[:, 0], given.tables[:, 1] = _PROMPT, first_page + number_B
    given.adapters[:] = np.array([BASE_MODEL, *range(_ADAPTERS)])[(number_B + number_B // 4) % (1 + _ADAPTERS)]
    given.seed_words[:] = rng.integers(0, 1 << 32, given.seed_words.shape)
    given.temperature[:] = np.array([1, 0, 0.7, 30, 1])[number_B % 5]
    return given


def _joined(parts: list[tuple[slice, Drawn]], num_rows: int) -> dict[str, Array]:
    """Put what several dispatches have drawn side by side."""
    whole: dict[str, Array] = {}
    for part, drawn in parts:
        found = {
            "tokens": drawn.tokens_XB,
            "logprobs": drawn.logprobs_XB,
            "alternatives": drawn.top_ids_XBK,
            "their logprobs": drawn.top_logprobs_XBK,
        }
        for name, array in found.items():
            if array is not None:
                empty = np.zeros((len(array), num_rows, *array.shape[2:]), array.dtype)
                whole.setdefault(name, empty)[:, part] = array
    return whole
