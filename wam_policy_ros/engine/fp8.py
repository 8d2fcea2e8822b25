"""Which 8-bit float format a device multiplies, by what its architecture can do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wam_policy_ros.contract.errors import ConfigError


@dataclass(frozen=True)
class Fp8:
    """An 8-bit float format.

    Attributes:
        dtype: torch dtype of the values.
        max: largest finite value; what is larger is saturated to it, never turned into NaN.
        name: as in messages and in the header of a saved checkpoint.
    """

    dtype: torch.dtype
    max: float
    name: str


E4M3FN = Fp8(torch.float8_e4m3fn, 448.0, "e4m3fn")
# No negative zero, exponent bias 8: the same byte means half of what it means in e4m3fn.
E4M3FNUZ = Fp8(torch.float8_e4m3fnuz, 240.0, "e4m3fnuz")

_HIP_FORMATS = {"gfx942": E4M3FNUZ, "gfx950": E4M3FN}
_FIRST_CUDA_CAPABILITY = (8, 9)


def fp8_for_architecture(backend: str, architecture: str | tuple[int, int]) -> Fp8:
    """Format of an architecture: ``("hip", "gfx942")`` or ``("cuda", (9, 0))``.

    Raises:
        ConfigError: the architecture has no matrix unit for 8-bit floats.
    """
    if backend == "hip":
        # "gfx942:sramecc+:xnack-" carries feature flags behind the name.
        found = _HIP_FORMATS.get(str(architecture).split(":")[0])
        if found is not None:
            return found
    elif backend == "cuda" and isinstance(architecture, tuple) and architecture >= _FIRST_CUDA_CAPABILITY:
        return E4M3FN
    raise ConfigError(
        "this device does not multiply 8-bit floats",
        got=f"{backend} {architecture}",
        expected=f"compute capability 8.9 or later, or one of {sorted(_HIP_FORMATS)}",
        remedy="set linears: native and attention: torch, or choose the preset bf16",
    )


def fp8_for(device: torch.device | str) -> Fp8:
    """Format of a device. A CPU computes the plain twins in e4m3fn: slow, for tests and for comparing with a GPU.

    Raises:
        ConfigError: the device has no matrix unit for 8-bit floats.
    """
    where = torch.device(device)
    if where.type == "cpu":
        return E4M3FN
    if where.type != "cuda":
        return fp8_for_architecture(where.type, where.type)
    if torch.version.hip:
        return fp8_for_architecture("hip", torch.cuda.get_device_properties(where).gcnArchName)
    return fp8_for_architecture("cuda", torch.cuda.get_device_capability(where))
