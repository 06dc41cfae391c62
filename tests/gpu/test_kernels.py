"""What the trainers and the vllm sampler compute with torch, in bfloat16 on the GPU beside float32 on the CPU."""

from collections.abc import Callable, Sequence

import attention_on_cpu
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)
from gpu_harness import ON_CPU, relative

from tinsmith_fsdp.grouped import grouped
from tinsmith_fsdp.int8 import int8_linear
from tinsmith_megatron import low_rank
from tinsmith_vllm.draws import draw, quantiles
from tinsmith_workers.torch import varlen_attention

CLOSE = 2e-2  # of bfloat16: it keeps 8 bits, and sums are float32
Work = Callable[..., torch.Tensor]


def differentiated(work: Work, tensors: Sequence[torch.Tensor], d_out: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients, on the host."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = work(*leaves)
    out.backward(d_out.to(out))
    found = [out.detach(), *(leaf.grad for leaf in leaves)]
    return [each.float().cpu() for each in found if each is not None]


def assert_close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    distances = [relative(a, b) for a, b in zip(ours, theirs, strict=True)]
    assert max(distances) < CLOSE, distances


def draws(seed: int, *shapes: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def test_attention_of_many_sequences(device: torch.device) -> None:
    """The heads of Qwen3-8B: 32, and 8 of keys and values."""
    if ON_CPU:
        attention_on_cpu.register_kernels()
    lengths = [1, 63, 64, 65, 700, *(() if ON_CPU else (2000, 5000))]
    ends = np.cumsum([0, *lengths]).tolist()
    q, k, v, d_out = draws(0, *((ends[-1], heads, 128) for heads in (32, 8, 8, 32)))

    def one_by_one(*tensors: torch.Tensor) -> torch.Tensor:
        parts = zip(*(torch.tensor_split(x, ends[1:-1]) for x in tensors), strict=True)
        heads = ([x.transpose(0, 1)[None] for x in part] for part in parts)
        outs = [F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True) for each in heads]
        return torch.cat([out[0].transpose(0, 1) for out in outs])

    starts = torch.tensor(ends, dtype=torch.int32, device=device)
    ours = differentiated(
        lambda *tensors: varlen_attention(*tensors, starts, max(lengths)),
        [x.to(device, torch.bfloat16) for x in (q, k, v)],
        d_out,
    )
    assert_close(ours, differentiated(one_by_one, [q, k, v], d_out))


def by_group(ends: Sequence[int]) -> Work:
    def multiplied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        parts = torch.tensor_split(x, list(ends)[:-1])
        return torch.cat([rows @ matrix.T for rows, matrix in zip(parts, w, strict=True)])

    return multiplied


@pytest.mark.parametrize("counts", [[1001], [3, 500, 0, 77], list(range(1, 17))], ids=["1", "an empty one", "16"])
def test_products_of_adapters(counts: list[int], device: torch.device) -> None:
    ends = np.cumsum(counts).tolist()
    x, w, d_out = draws(ends[-1], (ends[-1], 256), (len(counts), 32, 256), (ends[-1], 32))
    bounds = torch.tensor(ends, dtype=torch.int32, device=device)
    on_device = [each.to(device, torch.bfloat16) for each in (x, w)]
    ours = differentiated(lambda x, w: grouped(x, w, bounds), on_device, d_out)
    assert_close(ours, differentiated(by_group(ends), [x, w], d_out))
    empty = [ours[2][group] for group, count in enumerate(counts) if count == 0]
    assert all(not each.any() for each in empty), "the gradient of an empty group"


@pytest.mark.parametrize("groups", [1023, 1024, 2048])
def test_products_of_many_experts_and_tenants(groups: int, device: torch.device) -> None:
    """One grouped product of CUDA takes 1,023 groups."""
    counts = np.random.default_rng(groups).integers(0, 4, groups)
    ends = np.cumsum(counts).tolist()
    x, w, d_out = draws(groups, (ends[-1], 64), (groups, 32, 64), (ends[-1], 32))
    bounds = torch.tensor(ends, dtype=torch.int32, device=device)
    on_device = [each.to(device, torch.bfloat16) for each in (x, w)]
    ours = differentiated(lambda x, w: low_rank.grouped(x, w, bounds), on_device, d_out)
    assert_close(ours, differentiated(by_group(ends), [x, w], d_out))


@pytest.mark.parametrize("scales", [1, 2])
def test_layers_of_8_bit_weights(scales: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-127, 128, (512, 256), generator=generator, dtype=torch.int8)
    x, scale = torch.randn(1, 99, 256, generator=generator), torch.rand(512, scales, generator=generator) / 127
    ours = int8_linear(x.to(device, torch.bfloat16), weight.to(device), scale.to(device))
    assert_close([ours.float().cpu()], [int8_linear(x, weight, scale)])


def test_the_sampler_draws_the_same_tokens(device: torch.device) -> None:
    rows, vocab = (8, 5000) if ON_CPU else (64, 151_936)
    (logits,) = draws(2, (rows, vocab))
    where = quantiles(np.arange(rows) * 7919, np.arange(rows))
    assert torch.equal(draw(logits.to(device), where).cpu(), draw(logits, where))
