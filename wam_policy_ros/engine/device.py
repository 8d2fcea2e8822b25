"""Around everything that runs on a device: which one is current, what it means when its memory is full, and whether it
does anything at all after an error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from wam_policy_ros.contract.errors import Cancelled, ObservationError, Overloaded, PolicyLost, SessionError

_FULL = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "HIPBLAS_STATUS_ALLOC_FAILED")
"""How libraries that take memory without PyTorch say that there is none."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one: Triton and CUDA graphs use that, whichever GPU the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def no_memory_is_overload(what: str) -> Iterator[None]:
    """
    Raises:
        Overloaded: the device has no memory for ``what``.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in _FULL):
            raise
        raise Overloaded(
            f"the device has no memory for {what}; nothing was changed",
            got=str(error).splitlines()[0],
            remedy="close a session, or choose the preset fp8, whose weights and windows take half the memory",
        ) from error


class DeviceWatch:
    """Tells an error of one call from a device that answers no call again.

    A kernel that reads where it must not ends the process's context on that GPU: whatever is asked of it from then on
    fails, with the same text. Other errors end one call and no more. Texts do not tell the two apart, so after an error
    the device is made to do something.

    Args:
        device: of the network.
        ask: makes the device do something, waits for it, and raises when it does not; None: one addition on a GPU, and
            nothing on a CPU, which cannot be lost without this process.
    """

    def __init__(self, device: torch.device, ask: Callable[[], None] | None = None) -> None:
        self._ask = ask or (_one_addition(device) if device.type == "cuda" else lambda: None)
        self._lock = threading.Lock()
        self._why = ""

    @property
    def lost(self) -> PolicyLost | None:
        """Why no call can succeed again. Any thread."""
        if not self._why:
            return None
        return PolicyLost(
            "the device answers no call any more; the policy and all its sessions are lost",
            got=self._why,
            remedy="restart the process: nothing in this one can use that device again",
        )

    @contextmanager
    def around(self) -> Iterator[None]:
        """
        Raises:
            PolicyLost: see ``lost``; before anything is asked of a device that is known to be lost.
        """
        if (lost := self.lost) is not None:
            raise lost
        try:
            yield
        except (ObservationError, SessionError, Cancelled):
            raise
        except Exception as error:
            self._look(error)
            if (lost := self.lost) is None:
                raise
            raise lost from error

    def _look(self, error: Exception) -> None:
        with self._lock:
            try:
                self._ask()
            except torch.OutOfMemoryError:
                pass  # a device that says so is alive
            except Exception as again:
                first = f"{type(error).__name__}: {error}".splitlines()[0]
                self._why = f"{first}; and when asked again: {str(again).splitlines()[0]}"


def _one_addition(device: torch.device) -> Callable[[], None]:
    cell = torch.zeros(1, device=device)  # now: later there may be no memory for it

    def ask() -> None:
        with torch.cuda.device(device), torch.inference_mode():
            cell.add_(1)
            torch.cuda.synchronize(device)

    return ask
