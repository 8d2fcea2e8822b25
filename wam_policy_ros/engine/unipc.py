"""UniPC solver for flow matching: order 2, ``bh2``, x0 prediction, first order on the last step.

Source of the formulas: DreamZero spec 4.3 and 4.4.

The bracketing of the formulas and the rounding of every tensor operation follow the spec, so that float32 and bf16 runs
reproduce the recorded vectors bit for bit. Scalars are float32, on the CPU.
"""

from __future__ import annotations

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


class UniPC:
    """One trajectory. Make a new object per sample; call :meth:`step` once per noise level, in order.

    Args:
        sigmas: float32 ``[steps + 1]``.
    """

    def __init__(self, sigmas: Tensor) -> None:
        self.sigmas = sigmas
        self.alphas = 1 - sigmas
        self.lambdas = torch.log(self.alphas) - torch.log(sigmas)
        self.steps = len(sigmas) - 1
        self.index = 0
        self._x0: list[Tensor] = []  # the last two x0 predictions, oldest first
        self._last_sample: Tensor | None = None
        self._last_order = 0

    def step(self, flow: Tensor, sample: Tensor) -> Tensor:
        """Advance ``sample`` from noise level ``index`` to the next, given the network's flow at this level."""
        i = self.index
        x0 = sample - self._as(self.sigmas[i], sample) * flow
        if i > 0:
            sample = self._correct(x0)
        self._x0 = [*self._x0, x0][-2:]
        order = min(2, self.steps - i, i + 1)
        self._last_sample, self._last_order = sample, order
        self.index += 1
        return self._predict(sample, order)

    @staticmethod
    def _as(scalar: Tensor, sample: Tensor) -> Tensor:
        """Round a factor to the dtype of the samples, so that every device computes what the recorded runs did.

        Left to itself, PyTorch rounds a 0-dim factor on the left of a bf16 tensor on a CPU, and does not when the
        factor is on the CPU and the tensor on a GPU. Divisors are not rounded on either.
        """
        return scalar.to(sample.dtype) if sample.dtype in (torch.bfloat16, torch.float16) else scalar

    def _correct(self, x0: Tensor) -> Tensor:
        i, m1 = self.index, self._x0[-1]
        assert self._last_sample is not None
        h = self.lambdas[i] - self.lambdas[i - 1]
        z = -h
        b = torch.expm1(z)
        gain = self._as(self.alphas[i] * b, x0)
        base = self._as(self.sigmas[i] / self.sigmas[i - 1], x0) * self._last_sample - gain * m1
        if self._last_order == 1:
            return base - gain * (0.5 * (x0 - m1))
        r = (self.lambdas[i - 2] - self.lambdas[i - 1]) / h
        d = (self._x0[-2] - m1) / r
        phi1 = b / z - 1
        b1 = phi1 / b
        phi2 = phi1 / z - 0.5
        b2 = 2 * phi2 / b
        one = torch.ones_like(r)
        rho = torch.linalg.solve(torch.stack([torch.stack([one, one]), torch.stack([r, one])]), torch.stack([b1, b2]))
        rho = rho.to(x0.dtype)
        return base - gain * (rho[0] * d + rho[1] * (x0 - m1))

    def _predict(self, sample: Tensor, order: int) -> Tensor:
        i, m0 = self.index - 1, self._x0[-1]
        h = self.lambdas[i + 1] - self.lambdas[i]
        gain = self._as(self.alphas[i + 1] * torch.expm1(-h), sample)
        out = self._as(self.sigmas[i + 1] / self.sigmas[i], sample) * sample - gain * m0
        if order == 2:
            r = (self.lambdas[i - 1] - self.lambdas[i]) / h
            out = out - gain * (0.5 * ((self._x0[-2] - m0) / r))
        return out
