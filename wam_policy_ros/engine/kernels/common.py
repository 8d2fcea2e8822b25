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
def finished(raw, bias_ptr, i: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Values of a product from what the matrix multiplication left, float32."""
    out = raw.to(tl.float32)
    if bias_ptr is not None:
        out = out + load_shared_chunk(bias_ptr, i, CHUNK, WIDTH).to(tl.float32)
    return out


@triton.jit
def saturate(x, limit):
    """Clamp to +-limit, where there is one (see ``Machine.saturates``). NaN stays NaN, which min and max would hide."""
    if limit is not None:
        x = tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))
    return x
