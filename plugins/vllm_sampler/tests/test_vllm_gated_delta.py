"""Layers with the gated delta rule on CPUs: each sequence as if it were alone, whatever the steps. No vLLM."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tinsmith_checkpoints.huggingface import tiny_config
from tinsmith_vllm.gated_delta import mix

pytestmark = pytest.mark.slow  # imports transformers

SLOTS = 5
SLOTS_OF = {"one": 3, "other": 1, "third": 4}
STEPS: Sequence[Sequence[tuple[str, int]]] = [  # who has how many tokens in each step
    [("one", 70), ("other", 5)],
    [("one", 1), ("other", 66)],
    [("one", 1), ("other", 1), ("third", 1)],
    [("third", 1), ("one", 9), ("other", 1)],
]
"""A prompt in one step and in two, one of a single token, and a sequence that goes on with several tokens."""


@pytest.fixture(scope="module")
def layer() -> Any:
    """Made by transformers, with what vLLM's has beside."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(0)
    made = Qwen3_5GatedDeltaNet(tiny_config("Qwen3_5ForCausalLM"), 0).eval()
    made.tp_size = 1
    return made


def hidden(layer: Any, name: str) -> torch.Tensor:
    length = sum(number for step in STEPS for each, number in step if each == name)
    generator = torch.Generator().manual_seed(SLOTS_OF[name])
    return torch.randn(length, layer.hidden_size, generator=generator)


def blank_states(layer: Any, content: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As in vLLM's cache, whose last users may have left anything in it."""
    convolved = torch.full((SLOTS, layer.conv_dim, layer.conv_kernel_size - 1), content)
    return convolved, torch.full((SLOTS, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim), content)


@torch.no_grad()
def mixed(layer: Any, names: Sequence[str], content: float = float("nan")) -> dict[str, torch.Tensor]:
    """Return what the layer's rule yields for these sequences, in the steps that have any of their tokens.

    Projections are computed for each sequence alone: the bits of their products may depend on the number of rows.
    """
    states, done = blank_states(layer, content), dict.fromkeys(names, 0)
    projections = (layer.in_proj_qkv, layer.in_proj_b, layer.in_proj_a)
    projected = {name: [project(hidden(layer, name)) for project in projections] for name in names}
    found = {name: list[torch.Tensor]() for name in names}
    for step in STEPS:
        rows, inputs, at = [], [], 0
        for name, number in step:
            if name in names:
                rows.append((at, at + number, SLOTS_OF[name], done[name] > 0))
                inputs.append([values[done[name] : done[name] + number] for values in projected[name]])
                done[name] += number
                at += number
        if not rows:
            continue
        out = torch.full((at, layer.num_v_heads, layer.head_v_dim), float("nan"))
        mix(layer, states, *(torch.cat(each) for each in zip(*inputs, strict=True)), out, rows)
        for first, last, slot, _ in rows:
            found[next(name for name in names if SLOTS_OF[name] == slot)].append(out[first:last])
    return {name: torch.cat(parts) for name, parts in found.items()}


def test_steps_change_nothing(layer: Any) -> None:
    for name, out in mixed(layer, list(SLOTS_OF)).items():
        given = hidden(layer, name)
        with torch.no_grad():
            expected = layer(given[None])[0]
            gate = layer.in_proj_z(given).unflatten(-1, (-1, layer.head_v_dim))
            normed = layer.norm(out.flatten(0, 1), gate.flatten(0, 1))
            found = layer.out_proj(normed.reshape(len(given), -1))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, msg=name)


def test_no_bit_depends_on_neighbours_nor_on_what_a_slot_had(layer: Any) -> None:
    together = mixed(layer, list(SLOTS_OF))
    for name in SLOTS_OF:
        assert torch.equal(mixed(layer, [name], content=0.5)[name], together[name])
