"""What a policy's memory is spent on, and how many sessions the rest is room for.

Nothing here allocates, and all but the functions ``..._on`` a device is arithmetic. A device is promised to sessions
before they use it: one that was admitted has its window until it is closed, and one too many is refused, so that
nobody's episode ever has to make way.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.model.config import DiTConfig, DreamZeroConfig

PROMPTS_KEPT = 4
"""Instructions of full length that are remembered while nobody uses them: so many bytes, more texts if they are
shorter."""

STEP_GIB_14B = {"plain": 8.0, "fused": 4.0}
"""Room left for what a step needs beside weights and windows: activations, pictures on their way, frames encoded ahead,
what the allocator cannot use. For the published network; smaller ones in proportion. The fused step keeps its
activations in the recordings, which are counted; above what it held 0.7 GiB were seen (bench/h200_step.json)."""
PARAMETERS_14B = 22.92e9


# -- sizes ------------------------------------------------------------------------------------------------------------


def plain_window_bytes(config: DreamZeroConfig, *, branches: int, dtype: torch.dtype, ranks: int = 1) -> int:
    """Bytes of a session's window on the plain path, ``features_bytes`` aside: see ``WindowState``. The fused one's are
    ``SlotLayout.nbytes``."""
    dit = config.dit
    rows = (dit.local_attn_size - dit.num_frame_per_block) * dit.frame_seqlen
    keys = 2 * dit.num_layers * dit.dim * (branches * rows // ranks + config.image.num_tokens)
    pixels = 4 * dit.frame_seqlen  # of a latent frame: tokens are two by two
    return (keys + (dit.in_dim - dit.out_dim) * config.latent_frames * pixels) * dtype.itemsize


def features_bytes(config: DreamZeroConfig, dtype: torch.dtype) -> int:
    """Bytes of what CLIP gives of a window's first frame."""
    return config.image.num_tokens * config.image.vision_dim * dtype.itemsize


def prompt_bytes(dit: DiTConfig, dtype: torch.dtype) -> int:
    """Bytes of an instruction's states and keys, at most: shorter ones take less on the fused path."""
    return (2 * dit.num_layers * dit.dim + dit.text_dim) * dit.text_len * dtype.itemsize


def step_bytes(parameters: float, step: str) -> int:
    """What is left free for a step; see ``STEP_GIB_14B``."""
    return round(STEP_GIB_14B[step] * 2**30 * parameters / PARAMETERS_14B)


def shown(nbytes: float) -> str:
    """For people: three digits."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size / 10 or unit == "KiB":
            value = nbytes / size
            return f"{value:.{1 if value < 100 else 0}f} {unit}"
    raise AssertionError


# -- admission --------------------------------------------------------------------------------------------------------


def sessions_of(windows: int) -> tuple[int, int]:
    """Sessions that may be open where so many windows fit, and the windows kept free for steps under way.

    A step whose window starts afresh (another instruction, a single frame) holds the old one until it has succeeded.
    The robot's step may run inside a client's, so two such steps may be under way: with more than one session two
    windows are kept free. A single session keeps one if there is one; else it has to be reset before its instruction
    changes.
    """
    if windows <= 3:
        return min(windows, 1), min(max(windows - 1, 0), 1)
    return windows - 2, 2


def windows_of(sessions: int) -> int:
    """The fewest windows with which so many sessions may be open, those under way included."""
    return sessions + min(sessions, 2)


@dataclass(frozen=True)
class Account:
    """Bytes on the device by what they are for. The nouns do not overlap.

    Attributes:
        weights: of the network, prepared ones and tables included.
        recordings: CUDA graphs' memory, their activations included.
        windows: of open sessions and steps under way; idle: windows that belong to nobody and are used again.
        instructions: that are remembered, and those that sessions use.
        noise, frames_ahead, inputs: starting noise by seed; clips encoded ahead of their call; fixed places where
            recordings look for their inputs.
        beside: what the device counts as taken beyond all of these: libraries, kernels, other processes. 0 on a CPU.
        host: the text encoder that waits in (pinned) host memory; not on the device.
    """

    weights: int = 0
    recordings: int = 0
    windows: int = 0
    idle: int = 0
    instructions: int = 0
    noise: int = 0
    frames_ahead: int = 0
    inputs: int = 0
    beside: int = 0
    host: int = 0

    @property
    def taken(self) -> int:
        """On the device."""
        return self.own + self.beside

    @property
    def own(self) -> int:
        """Taken on the device by this policy."""
        return sum(n for name, n in self.by_noun().items() if name not in ("beside", "host"))

    def by_noun(self) -> dict[str, int]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Capacity:
    """How many sessions may be open, and why. Made once, when the policy has been prepared.

    Attributes:
        sessions: bound; None: nothing says how much memory there is (a CPU without a budget).
        session_bytes: of one session: its window and an instruction of its own. window_bytes: of the former.
        windows: that fit; spare: of these, kept free for steps under way, see ``sessions_of``.
        fixed_bytes: taken by everything else, instructions remembered for nobody included.
        reserve_bytes: left free for what a step needs.
        budget_bytes: what all of this has to fit into; None: see ``sessions``.
        where: "this GPU" or "this budget".
        taken: the account it was made from.
    """

    sessions: int | None
    session_bytes: int
    window_bytes: int
    windows: int | None = None
    spare: int = 0
    fixed_bytes: int = 0
    reserve_bytes: int = 0
    budget_bytes: int | None = None
    where: str = "this GPU"
    taken: Account = field(default_factory=Account)

    @classmethod
    def of(
        cls,
        account: Account,
        *,
        window_bytes: int,
        prompt_bytes: int,
        reserve_bytes: int,
        budget_bytes: int | None,
        free_bytes: int | None,
        elsewhere: int | None = None,
    ) -> Capacity:
        """
        Args:
            account: now.
            budget_bytes: of this policy on the device; None: what the device has.
            free_bytes: that the device would still give; None: nobody knows.
            elsewhere: windows that fit on the fullest of the other GPUs that share a step.
        """
        session = window_bytes + prompt_bytes
        rooms = {"this budget": None if budget_bytes is None else budget_bytes - account.own, "this GPU": free_bytes}
        known = {where: room for where, room in rooms.items() if room is not None}
        if not known:
            return cls(None, session, window_bytes, where="this CPU", taken=account)
        where = min(known, key=lambda name: known[name])
        # What sessions have now is theirs as well; of instructions some are kept for nobody.
        theirs = account.windows + account.idle + account.instructions
        all_of_it = account.own if where == "this budget" else account.taken
        fixed = all_of_it - theirs + PROMPTS_KEPT * prompt_bytes
        total = all_of_it + known[where]
        windows = max(total - fixed - reserve_bytes, 0) // session
        if where == "this GPU" and account.windows + account.idle >= window_bytes:
            windows = max(windows, 1)  # there is one
        windows = windows if elsewhere is None else min(windows, elsewhere)
        sessions, spare = sessions_of(windows)
        return cls(sessions, session, window_bytes, windows, spare, fixed, reserve_bytes, total, where, account)

    @property
    def text(self) -> str:
        """One line for people."""
        if self.sessions is None:
            return f"memory bounds no sessions ({shown(self.session_bytes)} each): a CPU without memory_budget_gib"
        fixed = {_FIXED[name]: n for name, n in self.taken.by_noun().items() if n and name in _FIXED}
        if self.where == "this budget":
            fixed.pop(_FIXED["beside"], None)
        fixed["instructions kept"] = self.fixed_bytes - sum(fixed.values())
        most = ", ".join(f"{name} {shown(n)}" for name, n in sorted(fixed.items(), key=lambda i: -i[1])[:4])
        count = f"{self.sessions} session{'s' * (self.sessions != 1)}"
        return (
            f"{self.where} holds {count} ({shown(self.session_bytes)} each, {self.spare} more for steps under way; "
            f"{shown(self.fixed_bytes)} of {shown(self.budget_bytes or 0)} taken by {most}; "
            f"{shown(self.reserve_bytes)} left for a step)"
        )

    def refuse_none(self) -> None:
        """
        Raises:
            ConfigError: not even one session.
        """
        if self.sessions == 0:
            needed = self.fixed_bytes + self.reserve_bytes + self.session_bytes
            raise ConfigError(
                f"{self.where} holds no session",
                got=f"{shown(self.budget_bytes or 0)}: {self.text}",
                expected=f"{shown(needed)} or more",
                remedy="raise memory_budget_gib, or choose the preset fp8, whose weights and windows take half the "
                "memory, or text: streamed",
            )

    def details(self) -> dict[str, Any]:
        """For ``PolicySpec.details``: scalars, so that handshakes carry them."""
        return {
            "sessions_capacity": self.sessions,
            "session_bytes": self.session_bytes,
            "window_bytes": self.window_bytes,
            "spare_windows": self.spare,
            "fixed_bytes": self.fixed_bytes,
            "memory_budget_bytes": self.budget_bytes,
            "memory": self.text,
        }


_FIXED = {
    "weights": "weights", "recordings": "recordings", "noise": "noise", "frames_ahead": "frames ahead",
    "inputs": "inputs", "beside": "libraries and others",
}  # fmt: skip


# -- counting ---------------------------------------------------------------------------------------------------------


class Counter:
    """Bytes of tensors on one device, each counted once, however often and under whatever name it is met.

    Args:
        device: others are left out.

    Attributes:
        seen: addresses of the storages that were counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seen: set[int] = set()
        self._objects: dict[int, object] = {}  # alive, so that no id is used again

    def __call__(self, *roots: object) -> int:
        """Bytes of what these hold and was not counted before: looks into containers, modules, and objects of this
        package, not into closures."""
        total = 0
        for tensor in self._tensors(roots):
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.data_ptr() not in self.seen:
                self.seen.add(storage.data_ptr())
                total += storage.nbytes()
        return total

    def leave_out(self, *objects: object) -> None:
        """What these hold is not counted where they are met."""
        self._objects |= {id(x): x for x in objects}

    def _tensors(self, roots: Iterable[object]) -> Iterator[Tensor]:
        waiting = deque(roots)
        while waiting:
            x = waiting.popleft()
            if id(x) in self._objects or isinstance(x, _LEAVES):
                continue
            self.leave_out(x)
            if isinstance(x, Tensor):
                if x.device.type != "meta" and x.device == self._device:
                    yield x
            elif isinstance(x, Mapping):
                waiting.extend(list(x.values()))
            elif isinstance(x, list | tuple | set | frozenset | deque):
                waiting.extend(x)
            elif isinstance(x, functools.partial):
                waiting += [x.func, *x.args]
            elif isinstance(x, types.MethodType):
                waiting.append(x.__self__)
            elif isinstance(x, torch.nn.Module) or type(x).__module__.startswith("wam_policy_ros."):
                waiting.extend(list(getattr(x, "__dict__", {}).values()))


_LEAVES = (str, bytes, int, float, bool, type(None), type, torch.dtype, torch.device)


def recorded_on(device: torch.device) -> int:
    """Bytes that CUDA graphs keep for themselves."""
    if device.type != "cuda":
        return 0
    return sum(s["total_size"] for s in _segments(device) if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))


def free_on(device: torch.device) -> int | None:
    """Bytes that could still be allocated; None on a CPU, whose memory is not only this process's to give."""
    if device.type != "cuda":
        return None
    whole = (s for s in _segments(device) if tuple(s.get("segment_pool_id", (0, 0))) == (0, 0))
    return torch.cuda.mem_get_info(device)[0] + sum(s["total_size"] for s in whole if not s["active_size"])


def beside_on(device: torch.device, own: int) -> int:
    """Bytes taken on the device beyond ``own``."""
    free = free_on(device)
    return 0 if free is None else max(0, torch.cuda.mem_get_info(device)[1] - free - own)


def _segments(device: torch.device) -> list[dict[str, Any]]:
    index = torch.cuda.current_device() if device.index is None else device.index
    return [s for s in torch.cuda.memory_snapshot() if s["device"] == index]
