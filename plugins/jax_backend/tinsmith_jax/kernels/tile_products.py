"""Products of tiles of rows with the matrices of their adapters: the reference, which gathers a matrix for each tile.

A tile's product does not depend on the rest of the stream, and gradients are added tile by tile in order: a left fold
over a tenant's tiles. Per tile this holds one A and one B and, in the backward pass, one gradient of each.

Legend: n = tiles, t = rows of a tile, k = adapters, I and O = inputs and outputs of the module, r = padded rank.
"""

import jax
import jax.numpy as jnp

from tinsmith_jax.jax_types import Jax


def down(x_ntI: Jax, A_kIr: Jax, which_n: Jax) -> Jax:
    """Compute x @ A in float32, [n, t, r]. `which_n` is each tile's adapter."""
    return _matmul("nti,nir->ntr", x_ntI, A_kIr[which_n])


def up(z_ntr: Jax, B_krO: Jax, which_n: Jax) -> Jax:
    """Compute z @ B in float32, [n, t, O]."""
    return _matmul("ntr,nro->nto", z_ntr, B_krO[which_n])


def up_backward(d_ntO: Jax, B_krO: Jax, which_n: Jax) -> Jax:
    """Differentiate `up` by z, [n, t, r]."""
    return _matmul("nto,nro->ntr", d_ntO, B_krO[which_n])


def down_backward(d_ntr: Jax, A_kIr: Jax, which_n: Jax) -> Jax:
    """Differentiate `down` by x, [n, t, I]."""
    return _matmul("ntr,nir->nti", d_ntr, A_kIr[which_n])


def outer_A(x_ntI: Jax, d_ntr: Jax, which_n: Jax, num_adapters: int) -> Jax:
    """Differentiate `down` by A, in float32; `add` takes the result. It may be split along its last axis first."""
    del which_n, num_adapters
    # XLA:CPU computes this product, [n, r, I], several times as fast as its transpose. The barrier keeps it from
    # joining the two.
    return jax.lax.optimization_barrier(_matmul("ntr,nti->nri", d_ntr, x_ntI)).swapaxes(1, 2)


def outer_B(z_ntr: Jax, d_ntO: Jax, which_n: Jax, num_adapters: int) -> Jax:
    """Differentiate `up` by B, likewise."""
    del which_n, num_adapters
    return _matmul("ntr,nto->nro", z_ntr, d_ntO)


def add(sums_kXY: Jax, outer_nXY: Jax, which_n: Jax) -> Jax:
    """Add each tile's values to its adapter's row, in tile order."""

    def step(i: Jax, sums: Jax) -> Jax:
        row = jax.lax.dynamic_index_in_dim(sums, which_n[i], 0, keepdims=False)
        value = jax.lax.dynamic_index_in_dim(outer_nXY, i, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(sums, row + value, which_n[i], 0)

    return jax.lax.fori_loop(0, outer_nXY.shape[0], step, sums_kXY)


def _matmul(form: str, a: Jax, b: Jax) -> Jax:
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)
