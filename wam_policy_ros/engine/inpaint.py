"""Real-time chunking inside the denoiser: the first rows of a chunk agree with what the robot will do anyway.

*Behavioural*: another algorithm than the published one, on request only. At every solver step the prediction of the
clean rows is drawn to the committed rows with their weights (soft inpainting in the space of clean samples, where the
multistep solver keeps its history); the other rows see the result through attention in the next evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Committed:
    """Rows the action may not leave.

    Attributes:
        rows: normalised ``[1, N, action_dim]``, anything where the weight is 0.
        weights: ``[1, N, action_dim]`` in [0, 1]; 1 keeps a value exactly, 0 leaves it free.
    """

    rows: Tensor
    weights: Tensor


def constrained_flow(flow: Tensor, sample: Tensor, sigma: float, committed: Committed | None) -> Tensor:
    """The flow whose clean prediction ``x0 = sample - sigma * flow`` is drawn to the committed rows.

    Args:
        flow, sample: ``[1, N, action_dim]``; sigma: noise level of ``sample``, more than 0.
    """
    if committed is None:
        return flow
    x0 = sample - sigma * flow
    return flow + committed.weights * (x0 - committed.rows) / sigma
