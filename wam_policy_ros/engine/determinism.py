"""The deterministic tier: the same weights, seeds and observations give the same bits, whatever else the process does.

What it adds to an engine that keeps its sessions apart anyway:

- switches of PyTorch that decide which kernel runs are fixed while the engine runs, and put back afterwards
  (:func:`switches`): nobody else's process is changed for good, and nobody else's settings change the bits;
- every operation of a call of a new kind is looked at (:class:`Audit`): one that draws random numbers of its own, or
  sums in an order that the device's scheduler decides, is an error that names it;
- noise is a function of seed and index (:mod:`.noise`);
- what is computed does not depend on who watches: see ``FusedPath``.

What it does not need: Triton kernels here have fixed block sizes and use no atomic operations, the forms of the
convolutions come from ``fixed_plan``, and matrix products run with one workspace per stream, which PyTorch gives them.

Not across GPUs of another kind, other libraries or other numbers of CPU threads: the fingerprint tells those apart.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wam_policy_ros.contract.errors import NotDeterministic

from .conv_plan import convolution_flags

# fmt: off
UNORDERED_ON_GPU = frozenset((
    "bincount", "cross_entropy_loss", "ctc_loss", "_ctc_loss", "cumsum", "embedding_bag", "_embedding_bag",
    "grid_sampler_2d_backward", "histc", "index_add", "index_copy", "index_put", "_index_put_impl",
    "_unsafe_index_put", "index_reduce", "kthvalue", "max_unpool2d", "max_unpool3d", "median", "nanmedian",
    "nll_loss2d_forward", "nll_loss_nd", "put", "scatter", "scatter_add", "scatter_reduce", "segment_reduce",
))
# fmt: on
"""Forward operations that PyTorch's page on ``use_deterministic_algorithms`` lists for GPUs: either they have no
deterministic form, or have one only while that switch is on. The step needs none of them."""


# PyTorch's defaults; cuDNN's attention is taken only where it is asked for around the call.
_PRODUCTS = {"allow_tf32": False, "allow_bf16_reduced_precision_reduction": True}
_ATTENTIONS = {"flash": True, "mem_efficient": True, "math": True, "cudnn": False}


class Audit(TorchDispatchMode):
    """While it is active in a thread, operations without a deterministic form raise. Results are those without it.

    Args:
        device_type: ``cpu`` or ``cuda``.

    Raises:
        NotDeterministic: at the first such operation.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._gpu = device_type == "cuda"
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = str(func._schema.name).rpartition("::")[2]
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise NotDeterministic(func._schema.name, "draws random numbers without a generator of its own")
        if self._gpu and name.rstrip("_") in UNORDERED_ON_GPU:
            raise NotDeterministic(func._schema.name, "sums or writes in no fixed order on a GPU")
        return func(*args, **kwargs)


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call uses the random numbers it could use."""
    for i, a in enumerate(func._schema.arguments):
        value = kwargs.get(a.name, args[i] if i < len(args) else a.default_value)
        if a.name == "generator":
            return value is None
        if a.name == "dropout_p":  # attention
            return bool(value)
        if a.name == "train":  # dropout
            return bool(value)
    return True


class _Switches:
    """PyTorch's switches belong to the process. The first of several engines sets them, the last puts them back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """PyTorch's switches as the deterministic tier has them; those of before come back.

        Another thread that uses PyTorch meanwhile sees them, too.
        """
        with self._lock:
            if not self._users:
                self._before = _set_switches()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._before.close()


switches = _Switches()


def _set_switches() -> ExitStack:
    """Set them; closing what is returned puts them back."""
    cuda, matmul, deterministic = torch.backends.cuda, torch.backends.cuda.matmul, torch.utils.deterministic
    with ExitStack() as stack:
        stack.enter_context(convolution_flags(benchmark=False, deterministic=True, allow_tf32=True))
        for name, wanted in _PRODUCTS.items():
            stack.callback(setattr, matmul, name, getattr(matmul, name))
            setattr(matmul, name, wanted)
        for name, wanted in _ATTENTIONS.items():
            switch = getattr(cuda, f"enable_{name}_sdp")
            stack.callback(switch, getattr(cuda, f"{name}_sdp_enabled")())
            switch(wanted)
        if torch.version.hip:
            # rocBLAS may add with atomic operations unless this is on. On NVIDIA it has nothing to say that the audit
            # does not, and demands an environment variable.
            warn, fill = torch.is_deterministic_algorithms_warn_only_enabled(), "fill_uninitialized_memory"
            was = functools.partial(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
            stack.callback(was, warn_only=warn)
            stack.callback(setattr, deterministic, fill, getattr(deterministic, fill))
            torch.use_deterministic_algorithms(True, warn_only=True)
            setattr(deterministic, fill, False)
        return stack.pop_all()


class Determinism:
    """Around everything an engine runs.

    Args:
        enabled: False: does nothing.
        device: of the network.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self._device_type = device.type
        self._seen: set[Hashable] = set()
        self._audits: list[Audit] = []

    def switched(self) -> AbstractContextManager[None]:
        """The switches without an audit: for what prepares and measures."""
        return switches() if self.enabled else nullcontext()

    @contextmanager
    def around(self, *kind: Hashable) -> Iterator[None]:
        """The first time for each kind of work the operations are audited.

        Raises:
            NotDeterministic: one of them has no deterministic form.
        """
        if not self.enabled:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(switches())
            if kind not in self._seen:
                audit = stack.enter_context(Audit(self._device_type))
                self._audits.append(audit)
                stack.callback(self._audits.remove, audit)
            yield
        self._seen.add(kind)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """For other work in the middle of what is audited: it is looked at on its own account, if at all."""
        paused = [audit for audit in self._audits if not audit.paused]
        for audit in paused:
            audit.paused = True
        try:
            yield
        finally:
            for audit in paused:
                audit.paused = False
