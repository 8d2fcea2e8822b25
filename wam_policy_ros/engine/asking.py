"""The question between network evaluations: may this step go on? Whoever is asked may run another session's step first.

So nothing of the step that asks may show in the other one, and the other one's time is not the asking step's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from wam_policy_ros.contract.errors import Cancelled

from .timing import StageTimer

AskCancelled = Callable[[], bool]


def ask(cancelled: AskCancelled | None, device: torch.device, what: str, got: str | None = None) -> None:
    """Launches run ahead of the GPU, so the question waits for it. Without a callback nothing is done.

    Args:
        what, got: of the error.

    Raises:
        Cancelled: ``cancelled()`` was true.
    """
    if cancelled is None:
        return
    _wait(device)
    if cancelled():
        raise Cancelled(what, got=got)


class Asking:
    """A step's ``cancelled`` as the engine calls it: what runs in it finds PyTorch as if no step were under way, and
    its time is left out of the step's.

    Args:
        cancelled: the caller's.
        device: of the step.
        timer: of the step.
        outside: makes a context without what the step has around it.
    """

    def __init__(
        self,
        cancelled: AskCancelled,
        device: torch.device,
        timer: StageTimer,
        outside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._cancelled, self._device, self._timer, self._outside = cancelled, device, timer, outside

    def __call__(self) -> bool:
        begin = time.perf_counter()
        # Buffers that another step makes, and keeps, are no tensors of inference mode unless it makes them so.
        with torch.inference_mode(False), self._outside():
            answer = self._cancelled()
        _wait(self._device)  # for what was launched there and nobody waited for
        self._timer.away(time.perf_counter() - begin)
        return answer


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
