"""Triton for tests: compiled where there is a GPU, interpreted on a CPU (test/conftest.py asks for that)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'wam_policy_ros[kernels]'")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("no GPU, and TRITON_INTERPRET is not 1", allow_module_level=True)

# Triton's names of the formats that NumPy does not know, with what holds their bits.
_FORMATS = {
    "fp8e4nv": (torch.float8_e4m3fn, np.uint8),
    "fp8e4b8": (torch.float8_e4m3fnuz, np.uint8),
    "bf16": (torch.bfloat16, np.uint16),
    "fp16": (torch.float16, np.float16),
    "fp32": (torch.float32, np.float32),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _convert(data: np.ndarray, source, target, rounding: object) -> np.ndarray:
    """What a GPU does: to the nearest, ties to even, NaN stays NaN. Returns bits, as the interpreter wants them."""
    (from_type, _), (to_type, _) = _FORMATS[source.name], _FORMATS[target.name]
    bits = np.ascontiguousarray(data).view(f"uint{8 * from_type.itemsize}").view(f"int{8 * from_type.itemsize}")
    values = torch.from_numpy(bits.copy()).view(from_type).to(torch.float32).to(to_type)
    return values.view(_BITS[to_type.itemsize]).numpy().view(f"uint{8 * to_type.itemsize}")


@pytest.fixture(autouse=True, scope="module")
def sound_interpreter() -> Iterator[None]:
    """Four repairs of Triton 3.6's interpreter, so that it computes what a GPU computes.

    It cuts off where a GPU rounds to bf16, loses the carry when rounding to 8 bits, and turns NaN into a number there;
    it multiplies bf16 matrices by their bits; it does not know e4m3fnuz; and it makes loop bounds of arrays with one
    element in a way that NumPy 2.4 no longer allows.
    """
    if not INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor, patch_core = interpreter._patch_lang_tensor, interpreter._patch_lang_core
    dot = interpreter.InterpreterBuilder.create_dot

    def tensor(where, scope):
        patch_tensor(where, scope)
        scope.set_attr(where, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    def core(lang, scope):
        patch_core(lang, scope)
        known = tl.core.dtype.to_ir
        scope.set_attr(
            tl.core.dtype,
            "to_ir",
            lambda self, builder: builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else known(self, builder),
        )

    def wide_dot(self, a, b, d, *rest):
        def wide(x):
            if x.dtype.scalar != tl.bfloat16:
                return x
            return interpreter.TensorHandle(
                _convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32
            )

        return dot(self, wide(a), wide(b), d, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", tensor)
        patch.setattr(interpreter, "_patch_lang_core", core)
        patch.setattr(interpreter, "_convert_float", _convert)
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", wide_dot)
        yield
