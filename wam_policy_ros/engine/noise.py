"""Starting noise that has the same bits on every machine: a function of a seed and an index, computed on the host.

Two parts, both exact:

- *Integers*: word ``i`` of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with the
  key ``(seed, stream)`` and the counter ``i // 4``. Integer arithmetic has one result; NumPy keeps this stream for
  ever (NEP 19).
- *Normal values*: the inverse of the normal distribution at ``(top 52 bits + 1/2) * 2**-52``, by Wichura's rational
  functions (algorithm AS 241, PPND16, 1988; relative error 1e-16). Only ``+ - * /`` and the square root are used, in
  float64, one operation at a time: IEEE 754 rounds each of them correctly, so every CPU has the same result. Libraries'
  logarithms, sines and cosines are not rounded correctly and differ between CPUs and devices; the logarithm in the
  tails is therefore a series of the same five operations.

The device does no arithmetic: it is given the finished values, rounded to bfloat16 as upstream's noise is (twice: to
float32, then to bfloat16), whatever the network's dtype.

It is another draw than upstream's at the same seed, from the same distribution.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]

ALGORITHM = "philox4x64-10, AS 241"
VIDEO, ACTION = 0, 1
"""Streams of one seed: upstream gives both the same beginning, here they are independent."""

_CENTRE = 0.425
# Numerators and denominators of AS 241, constant term first: centre, tail up to exp(-25), far tail.
# fmt: off
_A = (
    3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
    4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3,
)
_B = (
    1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3,
    2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3,
)
_C = (
    1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
    1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4,
)
_D = (
    1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1,
    1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9,
)
_E = (
    6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
    2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7,
)
_F = (
    1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2,
    7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15,
)
# fmt: on

_LN2 = 0.6931471805599453
_ROOT_HALF = 0.7071067811865476
# 2 / (2 k + 1): the series of log((1 + s) / (1 - s)) / s in s**2. With s < 0.172 the next term is below 2**-60.
_LOG = tuple(2 / (2 * k + 1) for k in range(12))


def words(seed: int, stream: int, count: int) -> npt.NDArray[np.uint64]:
    """The first words of a stream, ``[count]``. Seeds are taken modulo 2**64."""
    # NumPy counts before it draws: from the last counter to 0.
    generator = np.random.Philox(key=(stream << 64) | (seed & (2**64 - 1)), counter=2**256 - 1)
    return generator.random_raw(count)


def normal_of(bits: npt.NDArray[np.uint64]) -> Floats:
    """Normal values, float64, from 64-bit words of any shape; the largest magnitude is 8.2."""
    # All of these are exact: u and 1 - u are multiples of 2**-53 below 1.
    u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    q = u - 0.5
    r = 0.180625 - q * q
    out = q * _polynomial(_A, r) / _polynomial(_B, r)
    outside = np.abs(q) > _CENTRE
    p = np.minimum(u[outside], 1.0 - u[outside])
    r = np.sqrt(-_log(p))
    tail = _polynomial(_C, r - 1.6) / _polynomial(_D, r - 1.6)
    far = _polynomial(_E, r - 5.0) / _polynomial(_F, r - 5.0)
    out[outside] = np.copysign(np.where(r <= 5.0, tail, far), q[outside])
    return out


def counted_normal(seed: int, stream: int, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Noise of a shape, in its order of indices, rounded to bfloat16 on the host and moved to ``device``."""
    values = normal_of(words(seed, stream, int(np.prod(shape)))).reshape(shape)
    return torch.from_numpy(values).to(torch.float32).to(torch.bfloat16).to(device).to(dtype)


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """Horner's rule; every step is a product and a sum of their own."""
    total = np.full_like(x, coefficients[-1])
    for c in coefficients[-2::-1]:
        total = total * x + c
    return total


def _log(p: Floats) -> Floats:
    """Natural logarithm of values in (0, 1), to 2e-16."""
    mantissa, exponent = np.frexp(p)  # exact
    small = mantissa < _ROOT_HALF
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return (exponent - small).astype(np.float64) * _LN2 + s * _polynomial(_LOG, s * s)
