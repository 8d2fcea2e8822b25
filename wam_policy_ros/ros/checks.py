"""Does the configuration fit the policy? Asked once, before anything moves."""

from __future__ import annotations

from collections import Counter
from typing import Any

from wam_policy_ros.contract.chunking import MIN_ROWS
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.interface import PolicySpec

from .parameters import NodeParameters


def check_rate(params: NodeParameters, spec: PolicySpec) -> None:
    """Raises ConfigError when a control rate is given that is not the policy's."""
    given, own = params.control_rate_hz, spec.control_rate_hz
    if given and abs(given - own) > 1e-6 * own:
        raise ConfigError(
            "control.rate_hz is not the policy's",
            got=f"{given} Hz, a period of {1 / given:.4f} s",
            expected=f"{own} Hz, a period of {1 / own:.4f} s",
            remedy="leave control.rate_hz at 0.0",
        )


def check_steps(params: NodeParameters, spec: PolicySpec) -> None:
    """Raises ConfigError when so many steps are executed that every later chunk would come too late."""
    most = spec.horizon - MIN_ROWS
    if params.control_execute_steps > most:
        raise ConfigError(
            "control.execute_steps does not fit the policy's horizon",
            got=f"{params.control_execute_steps} steps of a horizon of {spec.horizon}",
            expected=f"at most {most}: a chunk with fewer than {MIN_ROWS} rows left is late",
            remedy="lower control.execute_steps",
        )


def check_fit(expected: PolicySpec, got: PolicySpec) -> None:
    """The loaded policy must be what the node was configured for; only horizon, raw camera sizes and the moments it
    looks back at may differ.

    Raises:
        ConfigError: names the first difference, or the policy looks further back than the node keeps frames.
    """
    pairs = {
        "action space": (expected.action_space, got.action_space),
        "embodiment": (expected.embodiment, got.embodiment),
        "cameras": ([c.name for c in expected.cameras], [c.name for c in got.cameras]),
        "state fields": ([(f.name, f.dim) for f in expected.state], [(f.name, f.dim) for f in got.state]),
        "action fields": ([(f.name, f.dim) for f in expected.action], [(f.name, f.dim) for f in got.action]),
        "control rate": (expected.control_rate_hz, got.control_rate_hz),
    }
    for name, (want, have) in pairs.items():
        if want != have:
            raise ConfigError(f"the policy does not fit the node: {name}", got=have, expected=want)
    oldest, kept = min(got.frame_offsets), min(expected.frame_offsets)
    if oldest < kept:
        raise ConfigError(
            "the policy looks further back than the node keeps frames",
            got=f"frame offsets {got.frame_offsets}",
            expected=f"none before {kept} control steps",
        )


def other_publishers(node: Any, topic: str) -> list[str]:
    """Full names of the nodes, other than this one, with a publisher on a topic that this node publishes on.

    Args:
        node: an rclpy node.
        topic: its full name.
    """
    found = Counter((p.node_namespace, p.node_name) for p in node.get_publishers_info_by_topic(topic))
    found[node.get_namespace(), node.get_name()] -= 1  # another node may have the very same name
    return sorted(f"{namespace.rstrip('/')}/{name}" for namespace, name in (+found).elements())
