"""What the node says about itself: ``~/state``, ``~/status``, ``~/active_prompt`` and ``/diagnostics``."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from std_msgs.msg import String

from .diagnostics import Status, diagnose
from .qos import latched_qos
from .status_text import status_text

STATUS_PERIOD_S = 0.9
"""``~/status`` and ``/diagnostics`` come at most that often while nothing but numbers changes."""

_NUMBERS = re.compile(r"[-+]?[\d.]+")


class Reporter:
    """Publishers of one node.

    Args:
        node: an rclpy node.
    """

    def __init__(self, node: Any) -> None:
        self._node = node
        self._state = node.create_publisher(String, "~/state", latched_qos())
        self._status = node.create_publisher(String, "~/status", latched_qos())
        self._prompt = node.create_publisher(String, "~/active_prompt", latched_qos())
        self._diagnostics = node.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._shown_prompt: str | None = None
        self._key: tuple[Any, ...] = ()
        self._since_s = self._due_s = 0.0

    def publish(self, state: dict[str, Any]) -> None:
        """Tell everybody.

        Args:
            state: of the node, JSON-serialisable; completed here with ``node``, ``since_s`` and ``prompt_sha256``.
        """
        now_s = time.monotonic()
        key = key_of(state)
        changed = key != self._key
        if changed:
            if key[:4] != self._key[:4]:
                self._since_s = now_s
            self._key = key
        state["node"] = self._node.get_fully_qualified_name()
        state["since_s"] = now_s - self._since_s
        prompt = state.get("prompt")
        if prompt is not None:
            state["prompt_sha256"] = hashlib.sha256(prompt.encode()).hexdigest()[:12]
        self._state.publish(String(data=json.dumps(state, default=str)))
        if prompt is not None and prompt != self._shown_prompt:
            self._shown_prompt = prompt
            self._prompt.publish(String(data=prompt))
        if changed or now_s >= self._due_s:
            self._due_s = now_s + STATUS_PERIOD_S
            self._status.publish(String(data=status_text(state)))
            self._diagnostics.publish(self._message(diagnose(state), state))

    def _message(self, statuses: list[Status], state: Mapping[str, Any]) -> DiagnosticArray:
        msg = DiagnosticArray()
        msg.header.stamp = self._node.get_clock().now().to_msg()
        name, hardware = state["node"], str((state.get("policy") or {}).get("embodiment", ""))
        msg.status = [
            DiagnosticStatus(
                level=bytes([status.level]),
                name=f"{name}: {status.part}",
                message=status.message,
                hardware_id=hardware,
                values=[KeyValue(key=k, value=v) for k, v in status.values.items()],
            )
            for status in statuses
        ]
        return msg


def key_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """What has to change for a report at once: not the ages and counts, which always do."""
    loading = state.get("loading") or {}
    names = ("lifecycle", "substate", "fault", "refused", "session", "prompt")
    streams = tuple(bool(s["problem"]) for s in state.get("streams") or ())
    reason = _NUMBERS.sub("", str(state.get("reason", "")))
    return (*(state.get(n) for n in names), loading.get("phase"), streams, reason)
