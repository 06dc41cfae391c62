"""Products with frozen matrices of 8-bit integers.

Legend: G = groups of columns, each with a scale of its own in each row.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (its name everywhere)


def int8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Map [..., in] to [..., out] in the dtype of x. `weight`: int8 [out, in]. `scale`: float32 [out, G].

    The integers are exact in bfloat16 as in float32. As in vLLM's kernels, the scale of a whole row multiplies the
    sums, and groups' scales multiply the weights.
    """
    y: torch.Tensor = _Int8Linear.apply(x, weight, scale)  # type: ignore[no-untyped-call]
    return y


class _Int8Linear(torch.autograd.Function):
    """Keeps the integers for the backward pass, and converts them again: a converted matrix is never kept."""

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (_opaque_product if torch.compiler.is_compiling() else _product)(x, weight, scale)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del output
        _, weight, scale = inputs
        ctx.save_for_backward(weight, scale)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        back = _opaque_product_back if torch.compiler.is_compiling() else _product_back
        return back(d_y, weight, scale), None, None


def _product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    matrix, of_rows = _converted(weight, scale, x.dtype)
    y = F.linear(x, matrix)
    return y if of_rows is None else y * of_rows


def _product_back(d_y: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    matrix, of_rows = _converted(weight, scale, d_y.dtype)
    return (d_y if of_rows is None else d_y * of_rows) @ matrix


# Compiled code does not look into these. It would keep converted matrices from the forward to the backward pass.
_opaque_product = torch.library.custom_op("tinsmith_fsdp::int8_product", _product, mutates_args=())
_opaque_product_back = torch.library.custom_op("tinsmith_fsdp::int8_product_back", _product_back, mutates_args=())


@_opaque_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    del scale
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_opaque_product_back.register_fake
def _(d_y: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    del scale
    return d_y.new_empty(*d_y.shape[:-1], weight.shape[1])


def _converted(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the matrix in this dtype, and the scales [out] of its rows if they are not in it."""
    if scale.shape[1] == 1:
        return weight.to(dtype), scale[:, 0].to(dtype)
    grouped = weight.to(dtype).view(*scale.shape, -1) * scale.to(dtype)[..., None]
    return grouped.view(weight.shape), None
