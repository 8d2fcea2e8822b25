"""cuDNN's 8-bit attention through its own front end, which PyTorch does not offer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros.contract.errors import ConfigError, MissingDependency

WEIGHT_SCALE = 256.0
"""The softmax's weights, at most 1 before they are summed, are rounded to fp8 after this factor: 256 leaves those
down to 7.6e-6 of the largest one in the format's range."""


@dataclass(frozen=True)
class _Plan:
    """A graph built for one set of shapes and strides. Streams run it side by side, each with memory of its own."""

    graph: Any
    uids: dict[str, int]
    workspaces: dict[int, Tensor]
    amax: Tensor


class CudnnFp8:
    """Unmasked softmax attention of e4m3 queries, keys and values with one scale per tensor; the result is e4m3, too.

    Results go through a plan per shape, built at its first call. Can be captured in a CUDA graph after that.

    Args:
        device: a CUDA device of compute capability 9.0 or later.

    Raises:
        MissingDependency: the Python package ``cudnn`` (nvidia-cudnn-frontend) is not installed.
        ConfigError: cuDNN has no such kernel on this device.
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import cudnn
        except ModuleNotFoundError as error:
            raise MissingDependency("nvidia-cudnn-frontend", "fp8-attention", "attention: fp8") from error
        self._cudnn = cudnn
        self._device = device
        with torch.cuda.device(device):
            self._handle = cudnn.create_handle()
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._weight = self._scalar(WEIGHT_SCALE), self._scalar(1 / WEIGHT_SCALE)

    def scalars(self, q: float, k: float, v: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What :meth:`__call__` takes, from the factors the tensors were multiplied with before rounding.

        The result is a mean of rows of v and therefore gets v's factor.
        """
        return self._scalar(1 / q), self._scalar(1 / k), self._scalar(1 / v), self._scalar(v)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scalars: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor:
        """``q [B, L, H, Dh]``, ``k, v [B, T, H, Dh]`` -> ``[B, L, H, Dh]``, all e4m3."""
        out = torch.empty_like(q)
        tensors = {"q": q, "k": k, "v": v, "o": out}
        key = tuple((t.shape, t.stride()) for t in tensors.values())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._build(tensors)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._cudnn.set_stream(handle=self._handle, stream=stream)
        if stream not in plan.workspaces:
            size = max(plan.graph.get_workspace_size(), 1)
            plan.workspaces[stream] = torch.empty(size, dtype=torch.uint8, device=self._device)
        pack = self._pack(plan.uids, tensors, scalars, plan.amax)
        plan.graph.execute(pack, plan.workspaces[stream].data_ptr(), handle=self._handle)
        return out

    def plans(
        self, q: Tensor, k: Tensor, v: Tensor, scalars: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> list[tuple[str, Callable[[], Tensor]]]:
        """Every kernel that cuDNN offers for these shapes, by name, the one that :meth:`__call__` takes first: for
        measurements."""
        out = torch.empty_like(q)
        tensors = {"q": q, "k": k, "v": v, "o": out}
        graph, uids = self._graph(tensors, [self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK])
        amax = torch.zeros(2, 1, device=self._device)
        held = (tensors, scalars, amax)  # a pack is addresses only
        pack = self._pack(uids, *held)
        found: list[tuple[str, Callable[[], Tensor]]] = []
        for index in range(graph.get_execution_plan_count()):
            try:
                graph.build_plan_at_index(index)
                size = graph.get_workspace_size_plan_at_index(index)
            except Exception:  # one that does not run here
                continue
            workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=self._device)

            def run(index: int = index, workspace: Tensor = workspace, held: Any = held) -> Tensor:
                stream = torch.cuda.current_stream(self._device).cuda_stream
                self._cudnn.set_stream(handle=self._handle, stream=stream)
                graph.execute_plan_at_index(pack, workspace.data_ptr(), index, self._handle)
                return out

            found.append((str(graph.get_plan_name_at_index(index)), run))
        return found

    def _pack(
        self,
        uids: dict[str, int],
        tensors: dict[str, Tensor],
        scalars: tuple[Tensor, Tensor, Tensor, Tensor],
        amax: Tensor,
    ) -> dict[int, int]:
        """Addresses by cuDNN's numbers."""
        scale_s, descale_s = self._weight
        descale_q, descale_k, descale_v, scale_o = scalars
        given = tensors | {
            "descale_q": descale_q,
            "descale_k": descale_k,
            "descale_v": descale_v,
            "descale_s": descale_s,
            "scale_s": scale_s,
            "scale_o": scale_o,
            "amax_s": amax[0],
            "amax_o": amax[1],
        }
        return {uids[name]: tensor.data_ptr() for name, tensor in given.items()}

    def _build(self, tensors: dict[str, Tensor]) -> _Plan:
        graph, uids = self._graph(tensors, [self._cudnn.heur_mode.A])
        try:
            graph.build_plans()
        except Exception as error:
            raise _none_here(tensors, error) from error
        return _Plan(graph, uids, {}, torch.zeros(2, 1, device=self._device))

    def _graph(self, tensors: dict[str, Tensor], modes: list[Any]) -> tuple[Any, dict[str, int]]:
        """A graph with what could run it, and the numbers of its tensors by name."""
        kinds = self._cudnn.data_type
        graph = self._cudnn.pygraph(
            io_data_type=kinds.FP8_E4M3,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self._handle,
        )

        def heads_first(t: Tensor) -> dict[str, list[int]]:
            view = t.transpose(1, 2)
            return {"dim": list(view.shape), "stride": list(view.stride())}

        nodes = {n: graph.tensor(name=n, data_type=kinds.FP8_E4M3, **heads_first(tensors[n])) for n in ("q", "k", "v")}
        one = {"dim": [1, 1, 1, 1], "stride": [1, 1, 1, 1], "data_type": kinds.FLOAT}
        scales = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        nodes |= {name: graph.tensor(name=name, **one) for name in scales}
        try:
            out, _, amax_s, amax_o = graph.sdpa_fp8(
                **nodes, generate_stats=False, attn_scale=1 / math.sqrt(tensors["q"].shape[-1]), use_causal_mask=False
            )
            where = heads_first(tensors["o"])
            out.set_output(True).set_dim(where["dim"]).set_stride(where["stride"]).set_data_type(kinds.FP8_E4M3)
            for amax in (amax_s, amax_o):
                amax.set_output(True).set_dim(one["dim"]).set_stride(one["stride"]).set_data_type(kinds.FLOAT)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans(modes)
            graph.check_support()
        except Exception as error:  # the front end raises its own exceptions, and RuntimeError
            raise _none_here(tensors, error) from error
        nodes |= {"o": out, "amax_s": amax_s, "amax_o": amax_o}
        return graph, {name: node.get_uid() for name, node in nodes.items()}

    def _scalar(self, value: float) -> Tensor:
        return torch.full((1, 1, 1, 1), value, dtype=torch.float32, device=self._device)


def _none_here(tensors: dict[str, Tensor], error: Exception) -> ConfigError:
    return ConfigError(
        "cuDNN has no 8-bit attention for these shapes here",
        got=f"{[tuple(t.shape) for t in tensors.values()]}: {str(error).splitlines()[0]}",
        remedy="set attention: cudnn",
    )
