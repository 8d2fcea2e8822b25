"""``reference_config.yaml`` as parameters of the node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.ros.parameters import NodeParameters

from .case import Case

SPEC = spec_of("oxe_droid", weights="none")
CAMERAS = dict(zip(("exterior_0", "exterior_1", "wrist"), (c.name for c in SPEC.cameras), strict=True))
"""Name in the cases -> name in the embodiment."""


def names(config: Mapping[str, Any]) -> list[str]:
    """Joints in the order of the state fields."""
    return [*config["robot"]["arm_joints"], config["robot"]["gripper_joint"]]


def gripper(config: Mapping[str, Any]) -> tuple[float, float]:
    """Finger position when open and when closed. The larger end of the range is open."""
    low, high = config["robot"]["gripper_range_m"]
    convention = config["robot"]["gripper_policy_convention"]
    assert convention == {"open": 0.0, "closed": 1.0}, f"another convention than the node's: {convention}"
    return high, low


def topic(config: Mapping[str, Any], camera: str) -> str:
    return str(config["cameras"][camera]["topic"])


def values(case: Case, cameras: Mapping[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """ROS name -> value of everything the reference configuration says.

    Args:
        cameras: name in the cases -> topic, instead of the reference's.
        changes: more parameters, dots written as ``__``.
    """
    config = case.config
    cameras = cameras or {name: topic(config, name) for name in config["cameras"]}
    timing, (is_open, is_closed) = config["timing"], gripper(config)
    return {
        "backend": "hold",
        "instruction": "pick up the red cup",
        "joints.topic": config["joint_states_topic"],
        "joints.names": names(config),
        # What is no camera of the embodiment goes in as it is: the node must refuse it.
        "cameras.topics": [f"{CAMERAS.get(name, name)}:={where}" for name, where in cameras.items()],
        "gripper.open": is_open,
        "gripper.closed": is_closed,
        "sync.max_age_s": timing["image_stale_after_s"],
        "sync.joint_max_age_s": timing["joint_stale_after_s"],
        "sync.future_tolerance_s": timing["future_tolerance_s"],
        **limits(config),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }


def limits(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of the limits, as far as this node has them."""
    known = NodeParameters.names()
    low, high = config["robot"]["arm_limits_rad"]
    arm = len(config["robot"]["arm_joints"])
    wanted = {
        "safety.position_min": [float(low)] * arm,
        "safety.position_max": [float(high)] * arm,
        "safety.max_velocity": [float(config["robot"]["arm_vmax_rad_s"])] * arm,
    }
    return {name: value for name, value in wanted.items() if name in known}


def parameters(case: Case, cameras: Mapping[str, str] | None = None, **changes: Any) -> NodeParameters:
    return NodeParameters.from_values(values(case, cameras, **changes))
