"""One step of training, recorded as a CUDA graph: small networks otherwise wait for the launches of kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Parts = dict[str, Tensor]
WARM_UP = 4


class Stepper:
    """Loss, gradients, clipping and the optimiser's step.

    Args:
        loss: of the tensors of a batch; the loss and what is reported of it. With a graph it must not wait for the
            device nor depend on values, and draw from PyTorch's own generator.
        graph: record it, after a few steps as usual; if that fails it goes on as usual and says so.
    """

    def __init__(
        self, loss: Callable[..., tuple[Tensor, Parts]], parameters: Iterable[nn.Parameter],
        optimiser: torch.optim.Optimizer, *, graph: bool, say: Callable[[str], None], clip: float = 1.0,
    ) -> None:  # fmt: skip
        self.loss, self.parameters, self.optimiser = loss, list(parameters), optimiser
        self.clip, self.say = clip, say
        self._wanted, self._seen = graph, 0
        self._graph: Any = None
        self._inputs: list[Tensor] = []
        self._parts: Parts = {}

    def set_rate(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def __call__(self, *inputs: Tensor) -> Parts:
        """Values are valid until the next call."""
        if not self._wanted:
            return self._work(*inputs)
        if self._graph is None:
            if self._seen < WARM_UP:
                self._seen += 1
                return self._warm_up(inputs)
            if not self._record(inputs):
                return self._work(*inputs)
        for held, new in zip(self._inputs, inputs, strict=True):
            held.copy_(new)
        self._graph.replay()
        return self._parts

    def _work(self, *inputs: Tensor) -> Parts:
        self.optimiser.zero_grad(set_to_none=True)
        loss, parts = self.loss(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.clip)
        self.optimiser.step()
        return parts

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> Parts:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            parts = self._work(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        return parts

    def _record(self, inputs: tuple[Tensor, ...]) -> bool:
        self._inputs = [t.clone() for t in inputs]
        graph = torch.cuda.CUDAGraph()
        self.optimiser.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._parts = self._work(*self._inputs)
        except RuntimeError as error:
            self._wanted = False
            self.say(f"no CUDA graph of the step: {str(error).splitlines()[0]}")
            torch.cuda.synchronize()
            return False
        self._graph = graph
        return True


def adamw(groups: Any, rate: float, device: torch.device, *, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW whose step fits into a CUDA graph."""
    cuda = device.type == "cuda"
    lr: Any = torch.tensor(rate, device=device) if cuda else rate
    return torch.optim.AdamW(
        groups, lr=lr, betas=(0.9, 0.98), weight_decay=weight_decay, fused=cuda or None, capturable=cuda
    )
