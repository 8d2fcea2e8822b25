"""Which sessions may hold a window. Nobody's is taken away: a session too many is refused before it begins."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from wam_policy_ros.contract.errors import Overloaded

from .account import account_of, capacity_of, fullest, local_paths
from .device import on_device
from .memory import Account, Capacity, shown
from .parallel.split_path import SplitPath
from .session import Session

if TYPE_CHECKING:
    from .policy import DreamZeroPolicy


class Admission:
    """The open sessions of a policy, and its memory. Each session has its place from ``admit`` to ``leave``, also while
    it holds no window yet, or no more: one that was opened never fails for want of memory that another was given.

    Weak: a session that was dropped without being closed has no place.

    Args:
        policy: whose; not kept alive.
    """

    def __init__(self, policy: DreamZeroPolicy) -> None:
        self._owner = weakref.ref(policy)
        self._open: WeakSet[Session] = WeakSet()
        self._capacity: Capacity | None = None
        self._told: tuple[Account, int] | None = None

    def shared_with(self, policy: DreamZeroPolicy) -> Admission:
        """For a policy that has the same windows: the same places."""
        other = copy.copy(self)
        other._owner = weakref.ref(policy)
        return other

    @property
    def _policy(self) -> DreamZeroPolicy:
        policy = self._owner()
        assert policy is not None
        return policy

    @property
    def bounded(self) -> bool:
        """Whether memory decides how many sessions there may be."""
        policy = self._policy
        return policy.network.device.type != "cpu" or policy.config.memory_budget_gib > 0

    @property
    def sessions(self) -> list[Session]:
        return [session for session in self._open if not session.closed]

    def admit(self, session: Session) -> None:
        """
        Raises:
            Overloaded: all places are taken, or a window that was counted on cannot be made; nothing was changed.
        """
        if self.bounded:
            self._check_room()
        self._open.add(session)
        try:
            if self.bounded:
                with self._policy.running("another session's window", "window"):
                    for part in local_paths(self._policy.path):
                        part.provide(len(self.sessions))
        except BaseException:
            self._open.discard(session)
            raise
        self.changed()

    def _check_room(self) -> None:
        held, capacity = len(self.sessions), self.capacity
        if capacity.sessions is not None and held >= capacity.sessions:
            raise Overloaded(
                f"{capacity.where} has memory for no other session",
                got=f"{held} of {capacity.sessions} open, {shown(capacity.session_bytes)} each",
                remedy="close one, or try again later; the preset fp8, whose windows take half the memory, or a larger "
                "memory_budget_gib make room for more",
            )

    def leave(self, session: Session) -> None:
        """Idempotent."""
        self._open.discard(session)
        self.changed()

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> Capacity:
        """Of the moment of ``measure``, or of the first time that somebody asks."""
        return self._capacity or self.measure()

    def measure(self) -> Capacity:
        """How many sessions there may be, as things are now."""
        policy, path = self._policy, self._policy.path
        with on_device(policy.network.device):
            account = self.account()
            elsewhere = fullest(path.far.reports()) if isinstance(path, SplitPath) else None
            self._capacity = capacity_of(policy.network, policy.config, path, account, elsewhere=elsewhere)
        for part in local_paths(path) if self._capacity.where == "this budget" else []:
            part.bound(self._capacity.windows)
        self._told = account, len(self.sessions)
        return self._capacity

    def fitting(self) -> int | None:
        """Windows that there is room for on this process's device, as things are now; None: nothing bounds them."""
        policy = self._policy
        return capacity_of(policy.network, policy.config, policy.path, self.account()).windows

    def account(self, before: Account | None = None) -> Account:
        """See ``account_of``. From the thread that calls the policy."""
        policy, sessions = self._policy, self.sessions
        ahead = [s.ahead for s in sessions if s.ahead is not None]
        windows = [s.window for s in sessions]
        return account_of(policy.network, policy.path, windows, ahead, policy.fixed_memory, before=before)

    def changed(self) -> None:
        """Memory was taken or given back: ``details`` say so, once somebody has asked how much there is."""
        if self._told is not None:
            self._told = self.account(self._told[0]), len(self.sessions)

    @property
    def details(self) -> dict[str, Any]:
        """As of the last change. Any thread."""
        if (told := self._told) is None or (capacity := self._capacity) is None:
            return {}
        account, sessions = told
        return {
            "sessions_capacity": capacity.sessions,
            "sessions_open": sessions,
            "memory_bytes": account.by_noun(),
        }
