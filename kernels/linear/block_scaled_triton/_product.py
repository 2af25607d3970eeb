"""The product of a tile of block-scaled codes in Triton, whichever rows of x and of W it is made of."""

from __future__ import annotations

from gristmill.kernels.lazy_triton import jit, tl


@jit
def block_scaled_product(
    x,
    x_scales,
    weight,
    w_scales,
    rows,
    row_mask,
    w_rows,
    n_mask,
    k,
    X: tl.constexpr,
    W: tl.constexpr,
    X_PACKED: tl.constexpr,
    W_PACKED: tl.constexpr,
    GROUP: tl.constexpr,
    NVFP4: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """float32 [BM, BN] of rows of x and of W, int64, without the factors of NVFP4. X, W: formats of `tl.dot_scaled`."""
    groups = k // GROUP
    z = tl.zeros([BM, BN], tl.float32)
    for k0 in range(0, k, BK):
        x_at = k0 // X_PACKED + tl.arange(0, BK // X_PACKED)
        w_at = k0 // W_PACKED + tl.arange(0, BK // W_PACKED)
        at = k0 // GROUP + tl.arange(0, BK // GROUP)
        inside = (at < groups)[None, :]
        a = tl.load(
            x + rows[:, None] * (k // X_PACKED) + x_at[None, :],
            mask=row_mask[:, None] & (x_at < k // X_PACKED)[None, :],
            other=0,
        )
        b = tl.load(
            weight + w_rows[:, None] * (k // W_PACKED) + w_at[None, :],
            mask=n_mask[:, None] & (w_at < k // W_PACKED)[None, :],
            other=0,
        )
        a_scale = tl.load(
            x_scales + rows[:, None] * groups + at[None, :], mask=row_mask[:, None] & inside, other=0
        )
        b_scale = tl.load(
            w_scales + w_rows[:, None] * groups + at[None, :], mask=n_mask[:, None] & inside, other=0
        )
        if NVFP4:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        z = tl.dot_scaled(a, a_scale, X, tl.trans(b), b_scale, W, z)
    return z
