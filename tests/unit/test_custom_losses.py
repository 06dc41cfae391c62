"""Custom losses: every operation against torch, whole losses against torch, and what is refused.

The SDK traces and encodes each function, as a client does. torch computes it in float64.
"""

# ruff: noqa: ARG005, E741 - the operations share one signature, of one letter for each argument

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from tinsmith.custom_losses.evaluation import check_inputs, evaluate
from tinsmith.custom_losses.functions import FUNCTIONS, METHODS
from tinsmith.custom_losses.graph import MAX_ARGUMENTS, MAX_NODES, read_graph
from tinsmith.errors import UserError
from tinsmith.operations import CustomLoss, Datum, ForwardBackward
from tinsmith.protocol import translate
from tinsmith.store.codec import decode_custom_loss, decode_operation, encode_custom_loss, encode_operation

LARGEST = 3.4e38
T = 7
RANKS: dict[str, types.CustomLossInputRank] = {"logprobs": 1, "a": 1, "b": 1, "m": 1, "s": 0, "k": 2}
Tensor = torch.Tensor
Function = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def encoded(function: Function, ranks: dict[str, types.CustomLossInputRank] | None = None) -> CustomLoss:
    handle = trace_loss(function, RANKS if ranks is None else ranks, "s")
    nodes = json.dumps(encode_graph(handle).model_dump()["nodes"]).encode()
    return CustomLoss(name=handle.name, inputs=tuple((each.name, each.rank) for each in handle.inputs), nodes=nodes)


def a_pass(loss: CustomLoss, data: Sequence[dict[str, Any]]) -> ForwardBackward:
    return ForwardBackward(
        model_id="m",
        loss_fn="s:loss:0",
        custom_loss=loss,
        data=tuple(Datum(tokens_T=np.zeros(len(each["target_tokens"]), np.int32), loss_inputs=each) for each in data),
    )


def inputs_of(seed: int, *, ties: bool = False) -> dict[str, Any]:
    """Float32 inputs of one sequence; with `ties`, few different values."""
    rng = np.random.default_rng(seed)
    draw = (lambda *shape: rng.integers(-2, 3, shape) / 2.0) if ties else (lambda *shape: rng.normal(size=shape))
    return {
        "target_tokens": np.zeros(T, np.int64),
        "a": draw(T).astype(np.float32),
        "b": (np.abs(draw(T)) + 0.5).astype(np.float32),
        "m": (rng.random(T) > 0.4).astype(np.float32),
        "s": np.float32([0.25]),
        "k": draw(T, 3).astype(np.float32),
    }


def logprobs_of(seed: int, *, ties: bool = False) -> Any:
    rng = np.random.default_rng(1000 + seed)
    return (-rng.integers(0, 3, T) / 2.0 if ties else -rng.exponential(size=T)).astype(np.float32)


def by_torch(function: Function, inputs: dict[str, Any], logprobs: Any) -> tuple[float, dict[str, float], Any]:
    variable = torch.tensor(logprobs.astype(np.float64), requires_grad=True)
    others = {name: torch.tensor(inputs[name].astype(np.float64)) for name in RANKS if name != "logprobs"}
    loss, metrics = function(variable, *(value.reshape(()) if name == "s" else value for name, value in others.items()))
    loss.backward()
    return loss.item(), {key: value.item() for key, value in metrics.items()}, variable.grad


def expect_agreement(function: Function) -> CustomLoss:
    """Compare on ordinary inputs, and on such with many ties. Return the encoded loss."""
    loss = encoded(function)
    for seed, ties in ((0, False), (1, False), (0, True), (1, True)):
        inputs, logprobs = inputs_of(seed, ties=ties), logprobs_of(seed, ties=ties)
        wanted, metrics, derivative = by_torch(function, inputs, logprobs)
        found = evaluate(a_pass(loss, [inputs]), [logprobs], largest=LARGEST)
        np.testing.assert_allclose(found.loss, wanted, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.derivatives[0], derivative, rtol=1e-6, atol=1e-6)
        assert found.metrics == pytest.approx(metrics, rel=1e-9, abs=1e-9)
    return loss


def targets(loss: CustomLoss) -> set[str]:
    return {node["target"] for node in json.loads(loss.nodes)}


# Every operation ------------------------------------------------------------------------------------------------------

Op = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Any]
"""Of logprobs l [T], a [T], b > 0 [T], a mask m [T], a scalar s and k [T, 3]; returns a tensor."""

DIFFERENTIABLE: dict[str, Op] = {
    "torch.exp": lambda l, a, b, m, s, k: torch.exp(l),
    "exp": lambda l, a, b, m, s, k: l.exp(),
    "torch.expm1": lambda l, a, b, m, s, k: torch.expm1(l),
    "expm1": lambda l, a, b, m, s, k: l.expm1(),
    "torch.log": lambda l, a, b, m, s, k: torch.log(b - l),
    "log": lambda l, a, b, m, s, k: (b - l).log(),
    "torch.log1p": lambda l, a, b, m, s, k: torch.log1p(-l),
    "log1p": lambda l, a, b, m, s, k: (-l).log1p(),
    "torch.log2": lambda l, a, b, m, s, k: torch.log2(b - l),
    "log2": lambda l, a, b, m, s, k: (b - l).log2(),
    "torch.sqrt": lambda l, a, b, m, s, k: torch.sqrt(b - l),
    "sqrt": lambda l, a, b, m, s, k: (b - l).sqrt(),
    "torch.rsqrt": lambda l, a, b, m, s, k: torch.rsqrt(b - l),
    "rsqrt": lambda l, a, b, m, s, k: (b - l).rsqrt(),
    "torch.square": lambda l, a, b, m, s, k: torch.square(l),
    "square": lambda l, a, b, m, s, k: l.square(),
    "torch.reciprocal": lambda l, a, b, m, s, k: torch.reciprocal(b - l),
    "reciprocal": lambda l, a, b, m, s, k: (b - l).reciprocal(),
    "torch.sigmoid": lambda l, a, b, m, s, k: torch.sigmoid(l),
    "sigmoid": lambda l, a, b, m, s, k: (l * 30).sigmoid(),
    "torch.tanh": lambda l, a, b, m, s, k: torch.tanh(l),
    "tanh": lambda l, a, b, m, s, k: l.tanh(),
    "torch.abs": lambda l, a, b, m, s, k: torch.abs(l - a),
    "abs": lambda l, a, b, m, s, k: (l - a).abs(),
    "torch.absolute": lambda l, a, b, m, s, k: torch.absolute(l - a),
    "absolute": lambda l, a, b, m, s, k: (l - a).absolute(),
    "operator.abs": lambda l, a, b, m, s, k: abs(l - a),
    "torch.neg": lambda l, a, b, m, s, k: torch.neg(l),
    "neg": lambda l, a, b, m, s, k: l.neg(),
    "torch.negative": lambda l, a, b, m, s, k: torch.negative(l),
    "negative": lambda l, a, b, m, s, k: l.negative(),
    "operator.neg": lambda l, a, b, m, s, k: -l,
    "torch.relu": lambda l, a, b, m, s, k: torch.relu(l - a),
    "relu": lambda l, a, b, m, s, k: (l - a).relu(),
    "torch.nn.functional.relu": lambda l, a, b, m, s, k: F.relu(l - a),
    "torch.sign": lambda l, a, b, m, s, k: torch.sign(l - a) * l,
    "sign": lambda l, a, b, m, s, k: (l - a).sign() * l,
    "torch._C._nn.log_sigmoid": lambda l, a, b, m, s, k: F.logsigmoid(l * 9 - a),
    "torch._C._nn.softplus": lambda l, a, b, m, s, k: F.softplus((l - a) * 9, beta=2, threshold=5),
    "torch.add": lambda l, a, b, m, s, k: torch.add(l, k.T, alpha=2),
    "add": lambda l, a, b, m, s, k: a.add(l, alpha=3),
    "operator.add": lambda l, a, b, m, s, k: 1 + (l[:, None] + k),
    "torch.sub": lambda l, a, b, m, s, k: torch.sub(a, l, alpha=2),
    "sub": lambda l, a, b, m, s, k: l.sub(k.T),
    "torch.subtract": lambda l, a, b, m, s, k: torch.subtract(s, l),
    "subtract": lambda l, a, b, m, s, k: l.subtract(s),
    "operator.sub": lambda l, a, b, m, s, k: 1 - l,
    "torch.mul": lambda l, a, b, m, s, k: torch.mul(l, k.T),
    "mul": lambda l, a, b, m, s, k: l.mul(2.5),
    "torch.multiply": lambda l, a, b, m, s, k: torch.multiply(l, l),
    "multiply": lambda l, a, b, m, s, k: l.multiply(a),
    "operator.mul": lambda l, a, b, m, s, k: s * l * a,
    "torch.div": lambda l, a, b, m, s, k: torch.div(l, b),
    "div": lambda l, a, b, m, s, k: a.div(b - l),
    "torch.divide": lambda l, a, b, m, s, k: torch.divide(l, 3),
    "divide": lambda l, a, b, m, s, k: l.divide(b),
    "torch.true_divide": lambda l, a, b, m, s, k: torch.true_divide(l, b),
    "true_divide": lambda l, a, b, m, s, k: l.true_divide(b),
    "operator.truediv": lambda l, a, b, m, s, k: 2 / (b - l)[:, None],
    "torch.pow": lambda l, a, b, m, s, k: torch.pow(b - l, a),
    "pow": lambda l, a, b, m, s, k: l.pow(3),
    "operator.pow": lambda l, a, b, m, s, k: 2 ** l + b ** l + l ** 0 + (b - l) ** s,
    "torch.maximum": lambda l, a, b, m, s, k: torch.maximum(l, a),
    "maximum": lambda l, a, b, m, s, k: a.maximum(l),
    "torch.minimum": lambda l, a, b, m, s, k: torch.minimum(l, k.T),
    "minimum": lambda l, a, b, m, s, k: l.minimum(a),
    "torch.logaddexp": lambda l, a, b, m, s, k: torch.logaddexp(l, a),
    "logaddexp": lambda l, a, b, m, s, k: l.logaddexp(l * 2),
    "torch.where": lambda l, a, b, m, s, k: torch.where(l > a, l * 2, l.square()) + torch.where(a > 0, l, 0.5),
    "where": lambda l, a, b, m, s, k: l.where(k.T > 0, a),
    "torch.masked_fill": lambda l, a, b, m, s, k: torch.masked_fill(l, a > 0, 2.0),
    "masked_fill": lambda l, a, b, m, s, k: l.masked_fill(a > 0, s),
    "torch.clamp": lambda l, a, b, m, s, k: torch.clamp(l, -1, -0.5) + torch.clamp(l, min=a, max=l * 2),
    "clamp": lambda l, a, b, m, s, k: l.clamp(min=-1) + a.clamp(l, l + 1),
    "torch.clip": lambda l, a, b, m, s, k: torch.clip(l, max=-0.5),
    "clip": lambda l, a, b, m, s, k: l.clip(-1.5, -2.5),
    "torch.clamp_min": lambda l, a, b, m, s, k: torch.clamp_min(l, -0.5),
    "clamp_min": lambda l, a, b, m, s, k: l.clamp_min(a),
    "torch.clamp_max": lambda l, a, b, m, s, k: torch.clamp_max(l, -0.5),
    "clamp_max": lambda l, a, b, m, s, k: l.clamp_max(a),
    "torch.sum": lambda l, a, b, m, s, k: torch.sum(l[:, None] * k, dim=0) * torch.sum(l),
    "sum": lambda l, a, b, m, s, k: (l[:, None] * k).sum((0, 1), keepdim=True) + l.sum(-1),
    "torch.mean": lambda l, a, b, m, s, k: torch.mean(l[:, None] * k, 1),
    "mean": lambda l, a, b, m, s, k: l.square().mean() * (l[:, None] * k).mean(dim=0, keepdim=True),
    "torch.var": lambda l, a, b, m, s, k: torch.var(l, correction=0),
    "var": lambda l, a, b, m, s, k: (l[:, None] * k).var(0) + l.var(unbiased=False),
    "torch.std": lambda l, a, b, m, s, k: torch.std(l * 2),
    "std": lambda l, a, b, m, s, k: (l[:, None] * k).std(dim=1, keepdim=True),
    "torch.amax": lambda l, a, b, m, s, k: torch.amax(l),
    "amax": lambda l, a, b, m, s, k: (l[:, None] * k).amax(dim=0),
    "torch.amin": lambda l, a, b, m, s, k: torch.amin(l[:, None] * k, dim=(0, 1)),
    "amin": lambda l, a, b, m, s, k: l.amin(0, keepdim=True),
    "torch.max": lambda l, a, b, m, s, k: torch.max(l) + torch.max(l, a),
    "max": lambda l, a, b, m, s, k: (l[:, None] * k).max(dim=0).values * (l[:, None] + k).max(1, keepdim=True)[0],
    "torch.min": lambda l, a, b, m, s, k: torch.min(l, dim=0)[0] * torch.min(l, a),
    "min": lambda l, a, b, m, s, k: l.min() * l,
    "torch.logsumexp": lambda l, a, b, m, s, k: torch.logsumexp(l[:, None] * k, dim=(0, 1)),
    "logsumexp": lambda l, a, b, m, s, k: (l[:, None] * k).logsumexp(1, keepdim=True),
    "torch.softmax": lambda l, a, b, m, s, k: torch.softmax(l[:, None] * k, dim=0) * k,
    "softmax": lambda l, a, b, m, s, k: l.softmax(-1) * a,
    "torch.nn.functional.softmax": lambda l, a, b, m, s, k: F.softmax(l, dim=0) * a,
    "torch.log_softmax": lambda l, a, b, m, s, k: torch.log_softmax(l[:, None] * k, 1) * k,
    "log_softmax": lambda l, a, b, m, s, k: l.log_softmax(0) * a,
    "torch.nn.functional.log_softmax": lambda l, a, b, m, s, k: F.log_softmax(l, dim=0, dtype=torch.float64) * a,
    "torch.cumsum": lambda l, a, b, m, s, k: torch.cumsum(l[:, None] * k, dim=1) * k,
    "cumsum": lambda l, a, b, m, s, k: l.cumsum(0) * a,
    "torch.dot": lambda l, a, b, m, s, k: torch.dot(l, a) * l,
    "dot": lambda l, a, b, m, s, k: l.dot(l),
    "torch.gather": lambda l, a, b, m, s, k: torch.gather(l[:, None] * k, 1, (k > 0).long()[:, :2]),
    "gather": lambda l, a, b, m, s, k: l.gather(0, (a > 0).long()) * a,
    "torch.sort": lambda l, a, b, m, s, k: torch.sort(l)[0] * a + torch.sort(a, descending=True, stable=True)[0] * l,
    "sort": lambda l, a, b, m, s, k: (l[:, None] * k).sort(dim=0, descending=True).values * k,
    "torch.flip": lambda l, a, b, m, s, k: torch.flip(l, (0,)) * a,
    "flip": lambda l, a, b, m, s, k: (l[:, None] * k).flip(0, 1) * k,
    "torch.tril": lambda l, a, b, m, s, k: torch.tril(l[:, None] - l[None, :]) * a,
    "tril": lambda l, a, b, m, s, k: (l[:, None] * k).tril(-1),
    "torch.triu": lambda l, a, b, m, s, k: torch.triu(l[:, None] * l, diagonal=1),
    "triu": lambda l, a, b, m, s, k: (l[:, None] * k).triu(1),
    "torch.reshape": lambda l, a, b, m, s, k: torch.reshape(l, (-1, 1)) * k,
    "reshape": lambda l, a, b, m, s, k: l.reshape(-1, 1) * k,
    "view": lambda l, a, b, m, s, k: (l[:, None] * k).view(3, -1) * k.T,
    "torch.flatten": lambda l, a, b, m, s, k: torch.flatten(l[:, None] * k)[1:5],
    "flatten": lambda l, a, b, m, s, k: l.flatten() * a,
    "torch.ravel": lambda l, a, b, m, s, k: torch.ravel(l[:, None] * k)[::2],
    "ravel": lambda l, a, b, m, s, k: l.ravel() * a,
    "torch.unsqueeze": lambda l, a, b, m, s, k: torch.unsqueeze(l, 1) * k,
    "unsqueeze": lambda l, a, b, m, s, k: l.unsqueeze(-1) * k,
    "torch.squeeze": lambda l, a, b, m, s, k: torch.squeeze(l[None, :, None]) * a,
    "squeeze": lambda l, a, b, m, s, k: l[None, :, None].squeeze(0)[:, 0] * a,
    "torch.permute": lambda l, a, b, m, s, k: torch.permute(l[:, None] * k, (1, 0)) * a,
    "permute": lambda l, a, b, m, s, k: (l[:, None, None] * k).permute(2, 0, 1) * k[:, 0],
    "torch.transpose": lambda l, a, b, m, s, k: torch.transpose(l[:, None] * k, 0, 1) * a,
    "transpose": lambda l, a, b, m, s, k: (l[:, None] * k).transpose(0, -1) * a,
    "torch.t": lambda l, a, b, m, s, k: torch.t(l[:, None] * k) * a,
    "t": lambda l, a, b, m, s, k: (l[:, None] * k).t() * a,
    "expand": lambda l, a, b, m, s, k: l[:, None].expand(-1, 3) * k,
    "expand_as": lambda l, a, b, m, s, k: l[:, None].expand_as(k) * k,
    "torch.broadcast_to": lambda l, a, b, m, s, k: torch.broadcast_to(l, (3, l.shape[0])) * k.T,
    "broadcast_to": lambda l, a, b, m, s, k: l.broadcast_to((2, l.size(0))),
    "torch.cat": lambda l, a, b, m, s, k: torch.cat([l * 2, a, l]),
    "torch.concat": lambda l, a, b, m, s, k: torch.concat((l[:, None] * k, k), dim=1),
    "torch.concatenate": lambda l, a, b, m, s, k: torch.concatenate([l, l.square()], dim=-1),
    "torch.stack": lambda l, a, b, m, s, k: torch.stack([l, a, l * a], dim=1) * k,
    "operator.getitem": lambda l, a, b, m, s, k: (
        l[2] * l[-3:].sum() + l[a > 0].sum() + (l[:, None] * k)[..., 1:3].sum() + l[(a > 0).long()].sum()
    ),
    "getattr": lambda l, a, b, m, s, k: (l[:, None] * k).T * a + (l[:, None] * k).mT * l.ndim / l.shape[0],
    "size": lambda l, a, b, m, s, k: l * l.size(0) + l / k.size()[1],
    "torch.numel": lambda l, a, b, m, s, k: l / torch.numel(k),
    "numel": lambda l, a, b, m, s, k: l * (k.numel() - 1),
    "dim": lambda l, a, b, m, s, k: l * k.dim(),
    "ndimension": lambda l, a, b, m, s, k: l * k.ndimension(),
    "torch.detach": lambda l, a, b, m, s, k: torch.detach(l.exp()) * l,
    "detach": lambda l, a, b, m, s, k: l.detach() * l,
    "torch.clone": lambda l, a, b, m, s, k: torch.clone(l) * a,
    "clone": lambda l, a, b, m, s, k: l.clone() * a,
    "contiguous": lambda l, a, b, m, s, k: (l[:, None] * k).T.contiguous() * a,
    "double": lambda l, a, b, m, s, k: l.double() * (a > 0).double(),
    "to": lambda l, a, b, m, s, k: l * (a > 0).to(l.dtype) + l * (a > 0).to(dtype=torch.float64, device=l.device) + l.to("cpu") * (a > 0).to(a),  # noqa: E501
    "type": lambda l, a, b, m, s, k: l * (a > 0).type(torch.float64),
    "type_as": lambda l, a, b, m, s, k: l * (a > 0).type_as(l),
    "long": lambda l, a, b, m, s, k: l * (a * 3).long(),
    "int": lambda l, a, b, m, s, k: l * (a * 3).int(),
    "bool": lambda l, a, b, m, s, k: l * m.bool(),
    "torch.zeros_like": lambda l, a, b, m, s, k: torch.where(a > 0, l, torch.zeros_like(l)),
    "torch.ones_like": lambda l, a, b, m, s, k: torch.ones_like(k, dtype=torch.float64).T * l,
    "torch.full_like": lambda l, a, b, m, s, k: torch.full_like(l, 2.5, device=l.device) * l,
}  # fmt: skip
MASKS: dict[str, Op] = {
    "torch.eq": lambda l, a, b, m, s, k: torch.eq(m, 1.0),
    "eq": lambda l, a, b, m, s, k: m.eq(k.T),
    "operator.eq": lambda l, a, b, m, s, k: m == 0,
    "torch.ne": lambda l, a, b, m, s, k: torch.ne(m, 1),
    "ne": lambda l, a, b, m, s, k: m.ne(a),
    "torch.not_equal": lambda l, a, b, m, s, k: torch.not_equal(m, 0),
    "not_equal": lambda l, a, b, m, s, k: m.not_equal(1),
    "operator.ne": lambda l, a, b, m, s, k: m != 0,
    "torch.lt": lambda l, a, b, m, s, k: torch.lt(l, a),
    "lt": lambda l, a, b, m, s, k: l.lt(-0.5),
    "torch.less": lambda l, a, b, m, s, k: torch.less(a, s),
    "less": lambda l, a, b, m, s, k: a.less(b),
    "operator.lt": lambda l, a, b, m, s, k: a < 0.5,
    "torch.le": lambda l, a, b, m, s, k: torch.le(a, b),
    "le": lambda l, a, b, m, s, k: a.le(0.5),
    "torch.less_equal": lambda l, a, b, m, s, k: torch.less_equal(a, b),
    "less_equal": lambda l, a, b, m, s, k: a.less_equal(s),
    "operator.le": lambda l, a, b, m, s, k: a <= 0,
    "torch.gt": lambda l, a, b, m, s, k: torch.gt(a, b),
    "gt": lambda l, a, b, m, s, k: a.gt(0),
    "torch.greater": lambda l, a, b, m, s, k: torch.greater(a, l),
    "greater": lambda l, a, b, m, s, k: a.greater(l),
    "operator.gt": lambda l, a, b, m, s, k: a > -0.5,
    "torch.ge": lambda l, a, b, m, s, k: torch.ge(a, l),
    "ge": lambda l, a, b, m, s, k: a.ge(-0.5),
    "torch.greater_equal": lambda l, a, b, m, s, k: torch.greater_equal(a, l),
    "greater_equal": lambda l, a, b, m, s, k: a.greater_equal(b),
    "operator.ge": lambda l, a, b, m, s, k: a >= b,
    "torch.logical_and": lambda l, a, b, m, s, k: torch.logical_and(m, a > 0),
    "logical_and": lambda l, a, b, m, s, k: m.logical_and(k.T > 0),
    "torch.logical_or": lambda l, a, b, m, s, k: torch.logical_or(m, a > 0),
    "logical_or": lambda l, a, b, m, s, k: m.logical_or(a < 0),
    "torch.logical_xor": lambda l, a, b, m, s, k: torch.logical_xor(m, a > 0),
    "logical_xor": lambda l, a, b, m, s, k: m.logical_xor(a > 0),
    "torch.logical_not": lambda l, a, b, m, s, k: torch.logical_not(m),
    "logical_not": lambda l, a, b, m, s, k: m.logical_not(),
    "torch.bitwise_and": lambda l, a, b, m, s, k: torch.bitwise_and(m > 0, a > 0),
    "bitwise_and": lambda l, a, b, m, s, k: (m > 0).bitwise_and(a > 0),
    "operator.and_": lambda l, a, b, m, s, k: (m > 0) & (k.T > 0),
    "torch.bitwise_or": lambda l, a, b, m, s, k: torch.bitwise_or(m > 0, a > 0),
    "bitwise_or": lambda l, a, b, m, s, k: (m > 0).bitwise_or(a > 0),
    "operator.or_": lambda l, a, b, m, s, k: (m > 0) | (a > 0),
    "torch.bitwise_xor": lambda l, a, b, m, s, k: torch.bitwise_xor(m > 0, a > 0),
    "bitwise_xor": lambda l, a, b, m, s, k: (m > 0).bitwise_xor(a > 0),
    "operator.xor": lambda l, a, b, m, s, k: (m > 0) ^ (a > 0),
    "torch.bitwise_not": lambda l, a, b, m, s, k: torch.bitwise_not(m > 0),
    "bitwise_not": lambda l, a, b, m, s, k: (m > 0).bitwise_not(),
    "operator.invert": lambda l, a, b, m, s, k: ~(m > 0),
    "torch.isnan": lambda l, a, b, m, s, k: torch.isnan(a.sqrt()),
    "isnan": lambda l, a, b, m, s, k: a.log().isnan(),
    "torch.isinf": lambda l, a, b, m, s, k: torch.isinf(1 / m),
    "isinf": lambda l, a, b, m, s, k: m.log().isinf(),
    "torch.isfinite": lambda l, a, b, m, s, k: torch.isfinite(1 / m),
    "isfinite": lambda l, a, b, m, s, k: (a / m).isfinite(),
    "torch.any": lambda l, a, b, m, s, k: torch.any(k > 1, dim=1),
    "any": lambda l, a, b, m, s, k: (a > 1).any(),
    "torch.all": lambda l, a, b, m, s, k: torch.all(k > -1, dim=1, keepdim=True)[:, 0],
    "all": lambda l, a, b, m, s, k: (a > -3).all(),
}  # fmt: skip
ELSEWHERE = {  # their other names call the same function
    "torch.nn.functional.logsigmoid",
    "torch.nn.functional.softplus",
    "float",  # to float32, which torch's own derivative then has
}


def summed(op: Op) -> Function:
    def loss(logprobs: Tensor, a: Tensor, b: Tensor, m: Tensor, s: Tensor, k: Tensor) -> Any:
        result = op(logprobs, a, b, m, s, k)
        return (result * result).sum() + (result * 0.3).sum(), {"custom/all:sum": result.sum()}

    return loss


def masking(op: Op) -> Function:
    def loss(logprobs: Tensor, a: Tensor, b: Tensor, m: Tensor, s: Tensor, k: Tensor) -> Any:
        mask = op(logprobs, a, b, m, s, k)
        return torch.where(mask, logprobs, 2.5 * logprobs).sum(), {
            "custom/marked:mean": mask.double().sum() / logprobs.shape[0]
        }

    return loss


def test_every_operation_is_compared() -> None:
    assert {*FUNCTIONS, *METHODS} == {*DIFFERENTIABLE, *MASKS, *ELSEWHERE}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_an_operation_is_torchs(name: str) -> None:
    assert name in targets(expect_agreement(summed(DIFFERENTIABLE[name])))


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_torchs(name: str) -> None:
    assert name in targets(expect_agreement(masking(MASKS[name])))


# Whole losses ---------------------------------------------------------------------------------------------------------


def test_inputs_have_the_rank_that_was_declared() -> None:
    """A scalar, a vector and a matrix; logprobs of several targets per token."""

    def loss(logprobs: Tensor, s: Tensor, k: Tensor) -> Any:
        return (logprobs * k).sum() * s, {"custom/targets:mean": (logprobs * k)[:, 0].sum()}

    ranks: dict[str, types.CustomLossInputRank] = {"logprobs": 2, "s": 0, "k": 2}
    k = np.arange(6, dtype=np.float32).reshape(3, 2)
    data = [
        {"target_tokens": np.zeros((3, 2), np.int64), "s": np.array(scale, np.float32), "k": k} for scale in (2, [0.5])
    ]
    logprobs = -np.ones((3, 2), np.float32)
    found = evaluate(a_pass(encoded(loss, ranks), data), [logprobs, 2 * logprobs], largest=LARGEST)
    assert found.loss == -15 * 2 - 30 * 0.5
    assert found.metrics == {"custom/targets:mean": (-6 - 12) / 2}
    np.testing.assert_array_equal(found.derivatives, [2 * k, 0.5 * k])


def test_a_target_is_an_integer() -> None:
    def loss(logprobs: Tensor, target_tokens: Tensor) -> Any:
        return torch.where(target_tokens == 3, logprobs, 0.0).sum(), {}

    ranks: dict[str, types.CustomLossInputRank] = {"logprobs": 1, "target_tokens": 1}
    op = a_pass(encoded(loss, ranks), [{"target_tokens": np.array([3, 4, 3])}])
    found = evaluate(op, [np.float32([-1, -2, -4])], largest=LARGEST)
    assert found.loss == -5
    np.testing.assert_array_equal(found.derivatives[0], [1, 0, 1])


def test_a_number_is_compared_as_the_clients_float32() -> None:
    def loss(logprobs: Tensor, a: Tensor) -> Any:
        return torch.where(a == 0.1, logprobs, 0.0).sum(), {}

    op = a_pass(encoded(loss, {"logprobs": 1, "a": 1}), [{"target_tokens": np.zeros(2), "a": np.float32([0.1, 0.2])}])
    np.testing.assert_array_equal(evaluate(op, [np.float32([-1, -1])], largest=LARGEST).derivatives[0], [1, 0])


# What is refused ------------------------------------------------------------------------------------------------------

L = {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}}


def node(target: str, *args: Any, op: str = "call_function", name: str = "x", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str = "x") -> dict[str, str]:
    return {"ref": name}


def output(loss: Any, metrics: Any = None) -> dict[str, Any]:
    return node("output", {"tuple": [loss, {"dict": metrics or {}}]}, op="output", name="output")


TOTAL = node("torch.sum", ref("logprobs"))


def graph_of(*nodes: dict[str, Any], inputs: Any = (("logprobs", 1),)) -> CustomLoss:
    return CustomLoss(name="mine", inputs=tuple(inputs), nodes=json.dumps(nodes).encode())


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([L, node("torch.load", "x")], r"node 1 'x' \(call_function 'torch.load'\) is not offered"),
        ([L, node("builtins.eval", "x")], "'builtins.eval'.* is not offered"),
        ([L, node("__class__", ref("logprobs"), op="call_method")], "'__class__'.* is not offered"),
        ([L, node("backward", ref("logprobs"), op="call_method")], "'backward'.* is not offered"),
        ([L, node("weight", op="get_attr")], r"node 1 'x' \(get_attr 'weight'\) is not offered"),
        ([L, node("torch.exp", ref("y"))], "'torch.exp'.* refers to 'y', which is no node before it"),
        ([L, node("torch.exp", ref("x"))], "refers to 'x', which is no node before it"),
        ([L, node("torch.exp", ref("logprobs"), name="logprobs")], "has the name of an earlier one"),
        ([L, node("torch.exp", ref("logprobs"), name="a b")], "no identifier"),
        ([L, node("torch.exp")], "missing a required argument: 'input'; it takes .input."),
        ([L, node("torch.exp", ref("logprobs"), dim=0)], "unexpected keyword argument 'dim'"),
        ([L, node("torch.exp", {"ref": "logprobs", "x": 1})], "an argument .* is not offered"),
        ([L, node("torch.exp", {"dtype": "float16"})], "an argument .* is not offered"),
        ([L, node("torch.exp", {"device": "cuda"})], "an argument .* is not offered"),
        ([L, node("torch.exp", [[[[[1]]]]])], "nested deeper than 4 levels"),
        ([L, node("torch.exp", 1 << 70)], "an integer of 71 bits is too large"),
        ([L, node("torch.stack", [ref("logprobs")] * (MAX_ARGUMENTS + 1))], "65 arguments; allowed: 64"),
        ([L, node("getattr", ref("logprobs"), "a'b")], "the text .* is not offered"),
        ([L, L], "has the name of an earlier one"),
        ([node("torch.exp", 1)], "stands where the placeholder of the input 'logprobs' belongs"),
        ([L, *[node("torch.exp", ref("logprobs"), name=f"x{n}") for n in range(MAX_NODES)]], "allowed: 1 to 512"),
    ],
)  # fmt: skip
def test_a_graph_is_refused_by_node_and_operation(nodes: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_graph(graph_of(*nodes, output(ref())))


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([L], "the input 'logprobs' has no placeholder"),
        ([L, TOTAL, node("output", op="output")], "must be the output, with one argument"),
        ([L, TOTAL, node("output", ref(), op="output")], "returns no pair"),
        ([L, TOTAL, output(1.5)], "no logprob has a part in"),
        ([L, TOTAL, output(ref(), {"loss:sum": ref()})], "custom/<name>:sum or custom/<name>:mean"),
        ([L, TOTAL, output(ref(), {"custom/a:max": ref()})], "custom/<name>:sum or custom/<name>:mean"),
        ([L, TOTAL, output(ref(), {"custom/a:sum": 1.0})], "the result of a node"),
        ([L, TOTAL, output(ref(), {f"custom/{n}:sum": ref() for n in range(65)})], "no dict of at most 64"),
        ([], "allowed: 1 to 512"),
    ],
)
def test_an_output_is_refused(nodes: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_graph(graph_of(*nodes))


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ((), "inputs: there are 0"),
        (tuple((f"i{n}", 1) for n in range(17)), "inputs: there are 17"),
        ((("logprobs", 3),), "the rank of 'logprobs' is 3"),
        ((("logprobs", 0),), "must be 'logprobs', of rank 1 or 2"),
        ((("weights", 1),), "must be 'logprobs', of rank 1 or 2"),
        ((("logprobs", 1), ("Weights", 1)), r"inputs\[1\]: 'Weights' is not a name"),
        ((("logprobs", 1), ("logprobs", 1)), "'logprobs' is named twice"),
        ((("logprobs", 1), ("weights", 1)), "the input 'weights' has no placeholder"),
    ],
)
def test_inputs_are_refused(inputs: Any, words: str) -> None:
    nodes = [L, output(ref("logprobs"))] if len(inputs) < 3 else [L]
    with pytest.raises(UserError, match=words):
        read_graph(graph_of(*nodes, inputs=inputs))


def test_a_loss_without_logprobs_is_refused() -> None:
    other = node("weights", op="placeholder", name="weights")
    nodes = [L, other, node("torch.sum", ref("weights")), output(ref())]
    with pytest.raises(UserError, match="no logprob has a part in"):
        read_graph(graph_of(*nodes, inputs=(("logprobs", 1), ("weights", 1))))


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([node("reshape", ref("logprobs"), 3, op="call_method")], r"node 'x' \(reshape\): cannot reshape"),
        ([node("torch.maximum", ref("logprobs"), 1.5)], r"node 'x' \(torch.maximum\): other must be a tensor, not 1.5"),
        ([node("torch.sum", ref("logprobs"), 5)], "dim is 5; the tensor has 1 dimensions"),
        ([node("torch.sum", ref("logprobs"), keepdim=1)], "keepdim must be true or false, not 1"),
        ([node("torch.where", ref("logprobs"), 1.0, 2.0)], "condition must be a tensor of bools"),
        ([node("getattr", ref("logprobs"), "__class__")], "attribute '__class__' is not offered; allowed: shape"),
        ([node("getattr", ref("logprobs"), "grad_fn")], "attribute 'grad_fn' is not offered"),
        ([node("operator.getitem", ref("logprobs"), 99)], "node 'x'.*99 is out of bounds"),
        ([node("expand", ref("logprobs"), 1 << 40, 7, op="call_method")], "the result would have the shape"),
        ([node("torch.exp", ref("logprobs"))], "the loss is of shape .7.; it must be a tensor without dimensions"),
        ([node("torch.numel", ref("logprobs"))], "the loss is 7; it must be a tensor without dimensions"),
        ([node("torch.detach", ref("logprobs"), name="y"), node("torch.sum", ref("y"))], "no derivative by any"),
        ([node("torch.log", ref("logprobs"), name="y"), node("torch.sum", ref("y"))], "is not finite, or beyond"),
        ([node("torch.dot", ref("logprobs"), [1, 2])], "tensor must be a tensor, not .1, 2."),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_data_is_refused_by_node(calls: list[dict[str, Any]], words: str) -> None:
    op = a_pass(graph_of(L, *calls, output(ref())), [{"target_tokens": np.zeros(T, np.int64)}])
    with pytest.raises(UserError, match=r"data\[0\]: .*" + words):
        evaluate(op, [np.zeros(T, np.float32)], largest=LARGEST)


def test_a_metric_must_be_a_scalar() -> None:
    op = a_pass(graph_of(L, TOTAL, output(ref(), {"custom/a:sum": ref("logprobs")})), [inputs_of(0)])
    with pytest.raises(UserError, match="the metric 'custom/a:sum' must be a scalar"):
        evaluate(op, [logprobs_of(0)], largest=LARGEST)


@pytest.mark.parametrize("missing", ["a", "rank"])
def test_the_inputs_of_a_datum_are_checked(missing: str) -> None:
    def loss(logprobs: Tensor, a: Tensor) -> Any:
        return (logprobs * a).sum(), {}

    inputs = inputs_of(0)
    given_ = {"target_tokens": inputs["target_tokens"], **({"a": inputs["k"]} if missing == "rank" else {})}
    op = a_pass(encoded(loss, {"logprobs": 1, "a": 1}), [given_])
    words = "'a' is missing" if missing == "a" else "'a' has the shape .7, 3.; .* declared 'a' with rank 1"
    assert op.custom_loss is not None
    with pytest.raises(UserError, match=words):
        check_inputs(op.custom_loss, op.data[0])


# Bounds of work and memory --------------------------------------------------------------------------------------------


def wide(nodes: int) -> list[dict[str, Any]]:
    """Products of every pair of tokens."""
    column = node("unsqueeze", ref("logprobs"), 1, op="call_method", name="column")
    products = [node("operator.mul", ref("column"), ref("logprobs"), name=f"x{n}") for n in range(nodes)]
    return [L, column, *products, node("torch.sum", ref("x0"), name="sum"), output(ref("sum"))]


def test_the_results_of_a_sequence_are_bounded() -> None:
    """A client cannot take more of the engine's memory, or of its time, than this."""
    op = a_pass(graph_of(*wide(400)), [{"target_tokens": np.zeros(512, np.int64)}])
    with pytest.raises(UserError, match=r"node 'x\d+' \(operator.mul\): .*the results for one sequence are too large"):
        evaluate(op, [np.zeros(512, np.float32)], largest=LARGEST)
    fits = a_pass(graph_of(*wide(10)), [{"target_tokens": np.zeros(512, np.int64)}])
    assert evaluate(fits, [np.zeros(512, np.float32)], largest=LARGEST).loss == 0


def test_a_single_result_is_bounded_before_it_is_computed() -> None:
    op = a_pass(graph_of(*wide(1)), [{"target_tokens": np.zeros(1 << 17, np.int64)}])
    with pytest.raises(UserError, match=r"the result would have the shape \[131072, 131072\]"):
        evaluate(op, [np.zeros(1 << 17, np.float32)], largest=LARGEST)


def test_many_short_sequences_are_bounded_too() -> None:
    calls = [node("torch.exp", ref("logprobs"), name=f"x{n}") for n in range(500)]
    loss = graph_of(L, *calls, TOTAL, output(ref()))
    op = a_pass(loss, [{"target_tokens": np.zeros(1, np.int64)}] * 200)
    with pytest.raises(UserError, match=r"data\[\d+\]: .*the pass takes too much work"):
        evaluate(op, [np.zeros(1, np.float32)] * 200, largest=LARGEST)


# Anything that a client may send --------------------------------------------------------------------------------------

NAMES = [f"n{number}" for number in range(8)]
LEAVES = st.one_of(
    st.builds(ref, st.sampled_from(["logprobs", "k", "s", *NAMES])),
    st.builds(ref, st.sampled_from(["logprobs", "k", *NAMES])),
    st.integers(-3, 8),
    st.sampled_from([None, True, False, 0.5, -2.0, 1e300, 1 << 40, -(1 << 62), "values", "shape", "T", "cpu"]),
    st.sampled_from([{"ellipsis": True}, {"float": "nan"}, {"float": "-inf"}, {"dtype": "int64"}, {"dtype": "bool"}]),
)
ARGUMENTS = st.one_of(
    LEAVES,
    LEAVES,
    st.lists(LEAVES, max_size=3),
    st.builds(lambda items: {"tuple": items}, st.lists(LEAVES, max_size=3)),
    st.builds(lambda items: {"slice": items}, st.lists(LEAVES, min_size=3, max_size=3)),
)


@st.composite
def any_graph(draw: st.DrawFn) -> CustomLoss:
    nodes = []
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8)):
        is_method = draw(st.booleans())
        target = draw(st.sampled_from(sorted(METHODS if is_method else FUNCTIONS)))
        keyed = draw(
            st.dictionaries(st.sampled_from(["dim", "keepdim", "other", "min", "dtype"]), ARGUMENTS, max_size=1)
        )
        args = draw(st.lists(ARGUMENTS, min_size=1, max_size=3))
        nodes.append(node(target, *args, op="call_method" if is_method else "call_function", name=name, **keyed))
    others = [node(name, op="placeholder", name=name) for name in ("k", "s")]
    total = node("torch.sum", ref(draw(st.sampled_from(["logprobs", *NAMES]))), name="total")
    last = output(ref("total"), {"custom/a:mean": draw(ARGUMENTS)})
    return graph_of(L, *others, *nodes, total, last, inputs=(("logprobs", 1), ("k", 2), ("s", 0)))


@pytest.mark.parametrize("examples", [60, pytest.param(20_000, marks=pytest.mark.thorough)])
def test_any_graph_is_computed_or_refused(examples: int) -> None:
    """Most pass the reader in part only, so the operations are also tried one by one below."""

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(any_graph())
    def attempt(loss: CustomLoss) -> None:
        with suppress(UserError):
            found = evaluate(a_pass(loss, [inputs_of(0)]), [logprobs_of(0)], largest=LARGEST)
            assert np.isfinite(found.derivatives[0]).all()

    attempt()


@pytest.mark.parametrize("examples", [150, pytest.param(50_000, marks=pytest.mark.thorough)])
def test_any_arguments_are_taken_or_refused(examples: int) -> None:
    leaves = st.sampled_from([ref(name) for name in ("logprobs", "k", "s", "mask", "whole", "pair")])
    arguments = st.one_of(leaves, leaves, leaves, ARGUMENTS.filter(lambda each: "n" not in str(each)))
    prepared = [
        node("operator.gt", ref("logprobs"), -0.5, name="mask"),
        node("long", ref("k"), op="call_method", name="whole"),
        node("torch.sort", ref("logprobs"), name="pair"),
    ]

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(st.sampled_from(sorted(FUNCTIONS)), st.lists(arguments, min_size=1, max_size=3))
    def attempt(target: str, args: list[Any]) -> None:
        others = [node(name, op="placeholder", name=name) for name in ("k", "s")]
        calls = [
            *prepared,
            node(target, *args),
            node("torch.sum", ref(), name="y"),
            node("torch.sum", ref("logprobs"), name="z"),
        ]
        last = [node("operator.add", ref("y"), ref("z"), name="loss"), output(ref("loss"))]
        loss = graph_of(L, *others, *calls, *last, inputs=(("logprobs", 1), ("k", 2), ("s", 0)))
        with suppress(UserError):
            evaluate(a_pass(loss, [inputs_of(0)]), [logprobs_of(0)], largest=LARGEST)

    attempt()


# What is stored -------------------------------------------------------------------------------------------------------


def test_a_pass_takes_its_loss_along() -> None:
    """So that a replay needs nothing else. The loss's id stands for it when a repeat is recognised."""
    op = a_pass(graph_of(L, TOTAL, output(ref())), [{"target_tokens": np.zeros(2, np.int64)}])
    stored = decode_operation("forward_backward", encode_operation(op))
    assert isinstance(stored, ForwardBackward)
    assert stored.custom_loss == op.custom_loss
    assert op.custom_loss is not None
    assert decode_custom_loss(encode_custom_loss(op.custom_loss)) == op.custom_loss
    assert translate.digest(op) == translate.digest(replace(op, custom_loss=None))
    assert translate.digest(op) != translate.digest(replace(op, loss_fn="s:loss:1"))
