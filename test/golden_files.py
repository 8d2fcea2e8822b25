"""Access to the recorded tensors in ``test/golden`` (layout: one safetensors file per component, see its metadata)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

# A robot computer may have no engine: its tests are skipped, with the reason, the others run.
torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'wam_policy_ros[engine]'")
safe_open = pytest.importorskip("safetensors", reason="safetensors is not installed").safe_open

GOLDEN_DIR = Path(__file__).parent / "golden"


class Golden(dict[str, torch.Tensor]):
    """Tensors of one file; floating ones as float32. ``metadata`` holds the decoded header."""

    metadata: dict[str, Any]

    def sub(self, prefix: str) -> dict[str, torch.Tensor]:
        """The tensors under ``prefix``, with the prefix removed (state dicts)."""
        return {k.removeprefix(prefix): v for k, v in self.items() if k.startswith(prefix)}

    def weights(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """As ``sub``, under the name that the product's recordings use."""
        return self.sub(prefix)


def _decode(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


@functools.cache
def golden(name: str) -> Golden:
    """Load ``test/golden/<name>``; skips the calling test, with the reason shown, if the file is not there."""
    path = GOLDEN_DIR / name
    if not path.is_file():
        pytest.skip(f"fixture {name} is not in this checkout")
    with safe_open(path, "pt") as f:
        out = Golden({k: f.get_tensor(k) for k in f.keys()})  # noqa: SIM118
        out.metadata = {k: _decode(v) for k, v in (f.metadata() or {}).items()}
    for k, v in out.items():
        if v.dtype == torch.bfloat16:
            out[k] = v.float()
    return out


def rel(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / std(b) over the whole tensor, in float64; inf when shapes differ or a is not finite."""
    if a.shape != b.shape or not torch.isfinite(a.float()).all():
        return float("inf")
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.std().clamp_min(1e-30))
