"""The Triton operations under the names of their twins. Importing this imports Triton."""

from __future__ import annotations

from .activation import gelu_quant, quantize_rows
from .cross import cross_attention
from .norms import residual_norm, rms_rstd
from .rope import qk_norm_rope_store
from .swap import pack_tokens, unpack_heads

__all__ = [
    "cross_attention",
    "gelu_quant",
    "pack_tokens",
    "qk_norm_rope_store",
    "quantize_rows",
    "residual_norm",
    "rms_rstd",
    "unpack_heads",
]
