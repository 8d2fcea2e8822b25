"""UniPC solver for flow matching: order 2, ``bh2``, x0 prediction, first order on the last step.

Source of the formulas: DreamZero spec 4.3 and 4.4.

The bracketing of the formulas and the rounding of every tensor operation follow the spec, so that float32 and bf16 runs
reproduce the recorded vectors bit for bit. Scalars are float32, on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

SIGMA_MAX = 0.9990000128746033  # float32 of 0.999, the first entry of the training schedule
NUM_TRAIN_TIMESTEPS = 1000


def flow_sigmas(steps: int, shift: float) -> Tensor:
    """Noise levels of a schedule with ``steps`` steps, float32 ``[steps + 1]``, the last one zero."""
    linear = np.linspace(SIGMA_MAX, 0.0, steps + 1)[:-1]
    shifted = shift * linear / (1 + (shift - 1) * linear)
    return torch.from_numpy(np.append(shifted, 0.0).astype(np.float32))


def decouple(sigmas: Tensor, final_noise: float) -> Tensor:
    """Squeeze a schedule so that it ends at ``final_noise`` instead of zero (DreamZero spec 4.7)."""
    first = float(sigmas[0])
    return sigmas * (first - final_noise) / first + final_noise


def timesteps_of(sigmas: Tensor) -> Tensor:
    """Integer timesteps the network is given: truncated, int64 ``[steps]``."""
    return (sigmas[:-1] * NUM_TRAIN_TIMESTEPS).to(torch.int64)


@dataclass(frozen=True)
class _Correction:
    """Factors of the corrector at one noise level: float32 on the CPU."""

    gain: Tensor
    base: Tensor
    r: Tensor | None = None
    rho: Tensor | None = None  # [2]


@dataclass(frozen=True)
class _Prediction:
    """Factors of the predictor to the next noise level."""

    gain: Tensor
    base: Tensor
    r: Tensor | None


@dataclass(frozen=True)
class UniPCTables:
    """Everything of a trajectory that does not depend on the samples, computed once per schedule.

    Attributes:
        sigmas: float32 ``[steps + 1]``.
        corrections: of the levels 1, 2, ...; predictions: from each level to the next.
    """

    sigmas: Tensor
    corrections: tuple[_Correction, ...]
    predictions: tuple[_Prediction, ...]

    @classmethod
    def of(cls, sigmas: Tensor) -> UniPCTables:
        alphas = 1 - sigmas
        lambdas = torch.log(alphas) - torch.log(sigmas)
        steps = len(sigmas) - 1
        orders = [min(2, steps - i, i + 1) for i in range(steps)]
        corrections = [cls._correction(sigmas, alphas, lambdas, i, orders[i - 1]) for i in range(1, steps)]
        predictions = [cls._prediction(sigmas, alphas, lambdas, i, orders[i]) for i in range(steps)]
        return cls(sigmas, tuple(corrections), tuple(predictions))

    @staticmethod
    def _correction(sigmas: Tensor, alphas: Tensor, lambdas: Tensor, i: int, last_order: int) -> _Correction:
        h = lambdas[i] - lambdas[i - 1]
        z = -h
        b = torch.expm1(z)
        gain, base = alphas[i] * b, sigmas[i] / sigmas[i - 1]
        if last_order == 1:
            return _Correction(gain, base)
        r = (lambdas[i - 2] - lambdas[i - 1]) / h
        phi1 = b / z - 1
        b1 = phi1 / b
        phi2 = phi1 / z - 0.5
        b2 = 2 * phi2 / b
        one = torch.ones_like(r)
        rho = torch.linalg.solve(torch.stack([torch.stack([one, one]), torch.stack([r, one])]), torch.stack([b1, b2]))
        return _Correction(gain, base, r, rho)

    @staticmethod
    def _prediction(sigmas: Tensor, alphas: Tensor, lambdas: Tensor, i: int, order: int) -> _Prediction:
        h = lambdas[i + 1] - lambdas[i]
        r = (lambdas[i - 1] - lambdas[i]) / h if order == 2 else None
        return _Prediction(alphas[i + 1] * torch.expm1(-h), sigmas[i + 1] / sigmas[i], r)


class UniPC:
    """One trajectory. Make a new object per sample; call :meth:`step` once per noise level, in order.

    Args:
        schedule: float32 ``[steps + 1]`` noise levels, or their tables.
    """

    def __init__(self, schedule: Tensor | UniPCTables) -> None:
        self._tables = schedule if isinstance(schedule, UniPCTables) else UniPCTables.of(schedule)
        self.index = 0
        self._x0: list[Tensor] = []  # the last two x0 predictions, oldest first
        self._last_sample: Tensor | None = None

    def step(self, flow: Tensor, sample: Tensor) -> Tensor:
        """Advance ``sample`` from noise level ``index`` to the next, given the network's flow at this level."""
        i = self.index
        x0 = sample - self._as(self._tables.sigmas[i], sample) * flow
        if i > 0:
            sample = self._correct(x0)
        self._x0 = [*self._x0, x0][-2:]
        self._last_sample = sample
        self.index += 1
        return self._predict(sample)

    @staticmethod
    def _as(scalar: Tensor, sample: Tensor) -> Tensor:
        """Round a factor to the dtype of the samples, so that every device computes what the recorded runs did.

        Left to itself, PyTorch rounds a 0-dim factor on the left of a bf16 tensor on a CPU, and does not when the
        factor is on the CPU and the tensor on a GPU. Divisors are not rounded on either.
        """
        return scalar.to(sample.dtype) if sample.dtype in (torch.bfloat16, torch.float16) else scalar

    def _correct(self, x0: Tensor) -> Tensor:
        factors, m1 = self._tables.corrections[self.index - 1], self._x0[-1]
        assert self._last_sample is not None
        gain = self._as(factors.gain, x0)
        base = self._as(factors.base, x0) * self._last_sample - gain * m1
        if factors.rho is None or factors.r is None:
            return base - gain * (0.5 * (x0 - m1))
        d = (self._x0[-2] - m1) / factors.r
        rho = factors.rho.to(x0.dtype)
        return base - gain * (rho[0] * d + rho[1] * (x0 - m1))

    def _predict(self, sample: Tensor) -> Tensor:
        factors, m0 = self._tables.predictions[self.index - 1], self._x0[-1]
        gain = self._as(factors.gain, sample)
        out = self._as(factors.base, sample) * sample - gain * m0
        if factors.r is not None:
            out = out - gain * (0.5 * ((self._x0[-2] - m0) / factors.r))
        return out
