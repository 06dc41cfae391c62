"""Products of tiles of rows with the matrices of their adapters: the form for accelerators, without a gather or a loop.

The k adapters lie side by side in one matrix with k * r columns. One dense product computes all of them for all rows,
and what belongs to other adapters is selected away. Matrix units work on 128 or 256 columns at a time, so ranks that
are smaller cost about the same alone. Gradients are one product each, whose columns are already the adapters' sums.

The functions are documented in tile_products.py. As there, an adapter or a row that is not finite
makes its own tenant's results NaN and leaves other tenants alone. A product with zero would pass on a NaN, so such
values are replaced by zero, and the tenant's own columns by NaN.

Legend: n = tiles, t = rows of a tile, k = adapters, I and O = inputs and outputs of the module, r = padded rank,
j = k * r columns.
"""

import jax.numpy as jnp

from tinsmith_jax.jax_types import Jax


def down(x_ntI: Jax, A_kIr: Jax, which_n: Jax) -> Jax:
    k, I, _ = A_kIr.shape  # noqa: E741  (the module's inputs)
    return _own(_matmul("nti,ij->ntj", x_ntI, A_kIr.transpose(1, 0, 2).reshape(I, -1)), which_n, k)


def up(z_ntr: Jax, B_krO: Jax, which_n: Jax) -> Jax:
    B, z = _finite(B_krO, z_ntr, which_n)
    k, _, O = B.shape  # noqa: E741  (the module's outputs)
    return _matmul("ntj,jo->nto", _spread(z, which_n, k), B.reshape(-1, O))


def up_backward(d_ntO: Jax, B_krO: Jax, which_n: Jax) -> Jax:
    k, _, O = B_krO.shape  # noqa: E741
    return _own(_matmul("nto,jo->ntj", d_ntO, B_krO.reshape(-1, O)), which_n, k)


def down_backward(d_ntr: Jax, A_kIr: Jax, which_n: Jax) -> Jax:
    A, d = _finite(A_kIr, d_ntr, which_n)
    k, I, _ = A.shape  # noqa: E741
    return _matmul("ntj,ij->nti", _spread(d, which_n, k), A.transpose(1, 0, 2).reshape(I, -1))


def outer_A(x_ntI: Jax, d_ntr: Jax, which_n: Jax, num_adapters: int) -> Jax:
    """If a row of `x` is not finite, so is its `d`, and with it the gradient of the row's adapter."""
    wide = _matmul("nti,ntj->ij", _quiet(x_ntI), _spread(d_ntr, which_n, num_adapters))
    return wide.reshape(-1, num_adapters, d_ntr.shape[-1]).transpose(1, 0, 2)


def outer_B(z_ntr: Jax, d_ntO: Jax, which_n: Jax, num_adapters: int) -> Jax:
    """If a row of `d` is not finite, the gradient of the adapter's A, though not of its B, is NaN."""
    wide = _matmul("ntj,nto->jo", _spread(z_ntr, which_n, num_adapters), _quiet(d_ntO))
    return wide.reshape(num_adapters, z_ntr.shape[-1], -1)


def add(sums_kXY: Jax, outer_kXY: Jax, which_n: Jax) -> Jax:
    del which_n
    return sums_kXY + outer_kXY


def _own(wide_ntj: Jax, which_n: Jax, k: int) -> Jax:
    """Select each row's own adapter: [n, t, r]."""
    n, t, _ = wide_ntj.shape
    own = which_n[:, None, None, None] == jnp.arange(k)[:, None]
    return jnp.where(own, wide_ntj.reshape(n, t, k, -1), 0).sum(axis=2)


def _spread(z_ntr: Jax, which_n: Jax, k: int) -> Jax:
    """Put each row's values into the columns of its adapter: [n, t, j], zero elsewhere."""
    r = z_ntr.shape[-1]
    own = which_n[:, None, None] == jnp.arange(k * r) // r
    return jnp.where(own, jnp.tile(z_ntr, (1, 1, k)), 0)


def _finite(matrix_kXY: Jax, z_ntr: Jax, which_n: Jax) -> tuple[Jax, Jax]:
    """Move what is not finite from the matrices, which all rows share, to the rows that use them."""
    broken_k = ~jnp.isfinite(matrix_kXY).all(axis=(1, 2))
    z = jnp.where(broken_k[which_n][:, None, None], jnp.nan, z_ntr)
    return jnp.where(broken_k[:, None, None], 0, matrix_kXY), z


def _quiet(x: Jax) -> Jax:
    return jnp.where(jnp.isfinite(x), x, 0)


def _matmul(form: str, a: Jax, b: Jax) -> Jax:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)
