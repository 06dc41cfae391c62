"""Attention as on a GPU, on a CPU: the call of torch's kernel on each supported torch, and what comes of it."""

import importlib.util
from functools import partial
from inspect import Parameter, Signature, signature
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import attention_on_cpu
import pytest
import torch
from attention_on_cpu import HEADS, LENGTHS, SIZE, check_on_card
from torch.nn.attention import varlen

from tinsmith_fsdp.attention import packed_attention
from tinsmith_workers.torch import varlen_attention

OLDEST = "query key value cu_seq_q cu_seq_k max_q max_k * return_aux=None scale=None window_size=(-1,-1)"
"""The parameters of torch 2.11's `varlen_attn`, the oldest that the plugins take. `enable_gqa` came with 2.12."""


def signature_of(text: str) -> Signature:
    parameters, kind = [], Parameter.POSITIONAL_OR_KEYWORD
    for word in text.split():
        name, _, default = word.partition("=")
        if name == "*":
            kind = Parameter.KEYWORD_ONLY
        else:
            parameters.append(Parameter(name, kind, default=default or Parameter.empty))
    return Signature(parameters)


def attention_of_torch(monkeypatch: pytest.MonkeyPatch, called: Any) -> ModuleType:
    """Import the module anew, with another function in the place of torch's."""
    monkeypatch.setattr(varlen, "varlen_attn", called)
    spec = importlib.util.find_spec(varlen_attention.__module__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("takes", [signature_of(OLDEST), signature(varlen.varlen_attn)], ids=["oldest", "installed"])
def test_the_call_suits_torch(takes: Signature, monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable_gqa` was passed always: a TypeError in the first forward pass on every GPU with torch 2.11."""
    bound: dict[str, Any] = {}

    def called(*arguments: Any, **named: Any) -> torch.Tensor:
        bound.update(takes.bind(*arguments, **named).arguments)
        query: torch.Tensor = arguments[0]
        return query

    called.__signature__ = takes  # type: ignore[attr-defined]  # what inspect reads
    module = attention_of_torch(monkeypatch, called)
    query, key = torch.zeros(sum(LENGTHS), HEADS, SIZE), torch.zeros(sum(LENGTHS), 2, SIZE)
    module.varlen_attention(query, key, key, attention_on_cpu.starts(), 64, scale=0.5)
    assert (bound["scale"], bound["window_size"], bound["max_q"], bound["max_k"]) == (0.5, (-1, 0), 64, 64)
    module.varlen_attention(query, key, key, attention_on_cpu.starts(), 64, window=16)
    assert bound["window_size"] == (15, 0), "a token sees itself and 15 before it"
    assert bound.get("enable_gqa", "unknown") == (True if "enable_gqa" in takes.parameters else "unknown")


@pytest.mark.parametrize(("scale", "value_size"), [(None, SIZE), (0.3, SIZE), (None, SIZE // 2)])
def test_attention_on_a_gpu_is_that_of_each_sequence(
    scale: float | None, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads share keys and values, values may be narrower than keys, and lengths are no multiple of anything."""
    ends = attention_on_cpu.starts()
    stream: Any = SimpleNamespace(ends=ends, longest=64, bounds=tuple(pairwise(ends.tolist())))

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.transpose(0, 1)[None] for each in tensors)
        module = torch.nn.Identity()
        return packed_attention(module, query, key, value, None, stream=stream, scaling=scale)[0][0]

    monkeypatch.setattr("tinsmith_fsdp.attention.one_by_one", partial(pytest.fail, "it took the CPU's branch"))
    check_on_card(attend, scale, value_size)
