"""What test_vllm_fused_draws.py has Triton do, in a process of its own: `interpret`, or `compile`. Prints JSON."""

import json
import os
import sys

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of Triton

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tinsmith_vllm import fused_draws
from tinsmith_vllm.draws import draw, quantiles
from tinsmith_vllm.token_weights import weights_of

VOCAB = 2 * fused_draws.BLOCK + 800  # the last block is not full
TYPES = {"logits": "*fp32", "largest": "*fp32", "sums": "*i64", "quantiles": "*fp64", "tokens": "*i64"}


def interpret() -> object:
    """Return the tokens and the weights of torch's operations, and those of the kernels."""
    logits = 3 * torch.randn(24, VOCAB + 16, generator=torch.Generator().manual_seed(3))[:, :VOCAB]
    where = quantiles(range(24), [5] * 24)
    for row, number in enumerate([torch.nan, torch.inf, -torch.inf]):
        logits[row, 4321] = number
    logits[3] = -torch.inf
    logits[4:6, fused_draws.BLOCK - 50 : fused_draws.BLOCK + 50] += 40.0
    logits[6:10, 100:-100] = -torch.inf
    where[4:10] = [0.0, 1 - 2**-52] * 3
    logits[12] = 0.25  # all alike
    fused, (_, sums) = fused_draws.fused_draw(logits, torch.from_numpy(where)), fused_draws.sums(logits)
    return [
        [draw(logits, where).tolist(), weights_of(logits).sum(-1).tolist()],
        [fused.tolist(), sums.sum(-1).tolist()],
    ]


def compile_for_h100() -> object:
    """Return the products that each kernel fuses with additions, and what it keeps in local memory."""
    found = {}
    kernels = fused_draws.largest_of_blocks, fused_draws.sums_of_blocks, fused_draws.tokens_of_rows
    for kernel in kernels:
        signature = {name: TYPES.get(name, "constexpr" if name.isupper() else "i32") for name in kernel.arg_names}
        sizes = {"ALL": 64, "BLOCK": fused_draws.BLOCK}
        source = ASTSource(kernel, signature, constexprs={name: sizes[name] for name in signature if name in sizes})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=fused_draws.OPTIONS)
        ptx = made.asm["ptx"]
        found[kernel.__name__] = {
            "fused": ptx.count("fma."),
            "local": ptx.count(".local"),
            "cubin": len(made.asm["cubin"]),
        }
    return found


with np.errstate(invalid="ignore"):  # NaNs on purpose
    print(json.dumps(interpret() if sys.argv[1] == "interpret" else compile_for_h100()))
