"""Device functions that the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_chunk(pointer, i: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Chunk ``i`` of a row that is read once, in its own dtype; zero past the end.

    It goes past the first level cache, which is left to what every row needs.
    """
    offsets = i * CHUNK + tl.arange(0, CHUNK)
    if (i + 1) * CHUNK <= WIDTH:
        chunk = tl.load(pointer + offsets, cache_modifier=".cg")
    else:
        chunk = tl.load(pointer + offsets, mask=offsets < WIDTH, other=0.0, cache_modifier=".cg")
    return chunk


@triton.jit
def load_shared_chunk(pointer, i: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """The same of a row that all programs read: a bias, a modulation. It is to stay in the first level cache."""
    offsets = i * CHUNK + tl.arange(0, CHUNK)
    if (i + 1) * CHUNK <= WIDTH:
        chunk = tl.load(pointer + offsets, eviction_policy="evict_last")
    else:
        chunk = tl.load(pointer + offsets, mask=offsets < WIDTH, other=0.0, eviction_policy="evict_last")
    return chunk


@triton.jit
def store_chunk(pointer, chunk, i: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Round to the dtype of the target and write; nothing past the end."""
    offsets = i * CHUNK + tl.arange(0, CHUNK)
    chunk = chunk.to(pointer.dtype.element_ty)
    if (i + 1) * CHUNK <= WIDTH:
        tl.store(pointer + offsets, chunk)
    else:
        tl.store(pointer + offsets, chunk, mask=offsets < WIDTH)


@triton.jit
def clear_past_end(chunk, i: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """The chunk with zeros past the end of the row, so that it can be summed."""
    if (i + 1) * CHUNK > WIDTH:
        chunk = tl.where(i * CHUNK + tl.arange(0, CHUNK) < WIDTH, chunk, 0.0)
    return chunk


@triton.jit
def row_factor(row_ptr, row, ROW_STRIDE: tl.constexpr):
    """Scale of one row of a product; stride 0 is one scale for all rows."""
    if row_ptr is None:
        factor = 1.0
    else:
        factor = tl.load(row_ptr + row * ROW_STRIDE)
    return factor


@triton.jit
def finished(
    raw, factor, col_ptr, bias_ptr, i: tl.constexpr, COL_STRIDE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Values of a product from what the matrix multiplication left: ``raw * row * column + bias``, float32."""
    out = raw.to(tl.float32) * factor
    if col_ptr is not None:
        if COL_STRIDE == 0:
            out = out * tl.load(col_ptr)
        else:
            out = out * load_shared_chunk(col_ptr, i, CHUNK, WIDTH)
    if bias_ptr is not None:
        out = out + load_shared_chunk(bias_ptr, i, CHUNK, WIDTH).to(tl.float32)
    return out


@triton.jit
def saturate(x, limit):
    """Clamp to +-limit. Comparisons instead of min and max, which would turn NaN into a number."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
