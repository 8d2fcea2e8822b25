"""Between the policy's fields and the robot's joints: names, columns, gripper units. Both directions on this page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.interface import FieldSpec

_EXECUTABLE = ("joint_position", "gripper")


def describe(fields: Sequence[FieldSpec]) -> str:
    """One line for messages, e.g. ``joint_position[7] rad, gripper_position[1] (gripper)``."""
    return ", ".join(f"{f.name}[{f.dim}] {'(gripper)' if f.kind == 'gripper' else f.unit}" for f in fields)


@dataclass(frozen=True)
class JointMap:
    """One robot's joints in terms of one embodiment.

    Attributes:
        names: ROS joint names in the order of the concatenated state.
        state: the embodiment's state fields.
        commanded: indices into ``names`` of the joints that are commanded.
        columns: for each commanded joint its column of the action.
        gripper_open, gripper_closed: joint position at policy value 0 and 1 (the other way round when inverted).
    """

    names: tuple[str, ...]
    state: tuple[FieldSpec, ...]
    commanded: tuple[int, ...]
    columns: tuple[int, ...]
    gripper_open: float
    gripper_closed: float

    @classmethod
    def build(
        cls,
        state: Sequence[FieldSpec],
        action: Sequence[FieldSpec],
        *,
        names: Sequence[str],
        ignore_fields: Sequence[str] = (),
        gripper_open: float = 0.0,
        gripper_closed: float = 0.0,
        gripper_invert: bool = False,
    ) -> JointMap:
        """Resolve names to columns once.

        Args:
            gripper_open, gripper_closed: position of the gripper joints.
            gripper_invert: the policy's 1 is open, not closed.

        Raises:
            ConfigError: wrong number of names, a name twice, an action field that no joint can execute and that is
                not ignored, or a gripper without its two end positions.
        """
        total = sum(f.dim for f in state)
        if len(names) != total or len(set(names)) != len(names) or "" in names:
            raise ConfigError(
                "joints.names does not fit the embodiment",
                got=f"{len(names)} names, {len(set(names))} different: {list(names)}",
                expected=f"{total} different joint names in this order: {describe(state)}",
                remedy="list the robot's joint names, as in /joint_states, in the order of the fields",
            )
        if unknown := [n for n in ignore_fields if n not in {f.name for f in action}]:
            raise ConfigError(
                "output.ignore_fields names unknown action fields", got=unknown, expected=[f.name for f in action]
            )
        if any(f.kind == "gripper" for f in (*state, *action)) and gripper_open == gripper_closed:
            raise ConfigError(
                "gripper.open and gripper.closed are not set",
                got=f"both {gripper_open}",
                expected="the gripper joint's position when open (policy 0) and when closed (policy 1)",
            )
        if gripper_invert:
            gripper_open, gripper_closed = gripper_closed, gripper_open
        offset, starts = 0, {}
        for f in state:
            starts[f.name] = (offset, f)
            offset += f.dim
        commanded: list[int] = []
        columns: list[int] = []
        column = 0
        for f in action:
            if f.name not in ignore_fields:
                twin = starts.get(f.name)
                if f.kind not in _EXECUTABLE or twin is None or twin[1].dim != f.dim:
                    raise ConfigError(
                        f"action field {f.name!r} cannot be sent as joint positions",
                        got=f"kind {f.kind}, {f.dim} values in {f.unit}",
                        expected=f"one of the state fields {describe(state)}",
                        remedy=f"list it in output.ignore_fields: [{f.name}] if the robot shall not execute it",
                    )
                commanded += range(twin[0], twin[0] + f.dim)
                columns += range(column, column + f.dim)
            column += f.dim
        if not commanded:
            raise ConfigError("no action field is left to execute", got=f"output.ignore_fields {list(ignore_fields)}")
        return cls(tuple(names), tuple(state), tuple(commanded), tuple(columns), gripper_open, gripper_closed)

    @property
    def command_names(self) -> tuple[str, ...]:
        """Names of the joints in a trajectory."""
        return tuple(self.names[i] for i in self.commanded)

    @property
    def grippers(self) -> npt.NDArray[np.bool_]:
        """Bool ``[len(command_names)]``: which commanded joints are grippers."""
        kinds = [f.kind for f in self.state for _ in range(f.dim)]
        return np.array([kinds[i] == "gripper" for i in self.commanded])

    def commanded_of(self, positions: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """``[len(names)]`` joint positions -> those of the commanded joints, in the trajectory's order."""
        return np.asarray(positions[list(self.commanded)], dtype=np.float64)

    def fraction(self, position: float) -> float:
        """A gripper joint's position as the policy's value."""
        return (position - self.gripper_open) / (self.gripper_closed - self.gripper_open)

    def action_rows(self, targets: npt.NDArray[np.float64], others: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The other way round than ``command``.

        Args:
            targets: joint targets ``[N, len(command_names)]``.
            others: action rows ``[N, action_dim]`` that give the columns nobody executes.
        """
        out, values = np.array(others, dtype=np.float64), np.array(targets, dtype=np.float64)
        span = self.gripper_closed - self.gripper_open
        values[:, self.grippers] = (values[:, self.grippers] - self.gripper_open) / (span or 1.0)
        out[:, list(self.columns)] = values
        return out

    def state_fields(self, positions: npt.NDArray[np.float64]) -> Mapping[str, npt.NDArray[np.float64]]:
        """``[len(names)]`` joint positions -> state fields of the policy; a gripper becomes 0 (open) .. 1 (closed)."""
        span = self.gripper_closed - self.gripper_open
        out, i = {}, 0
        for f in self.state:
            part = np.array(positions[i : i + f.dim], dtype=np.float64)
            out[f.name] = (part - self.gripper_open) / span if f.kind == "gripper" else part
            i += f.dim
        return out

    def command(self, rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Action rows ``[N, action_dim]`` -> joint targets ``[N, len(command_names)]``.

        A gripper action is a fraction; the network overshoots a little at both ends, so it is clipped to [0, 1] before
        it is mapped to joint units.
        """
        out = rows[:, list(self.columns)].astype(np.float64)
        gripper = self.grippers
        fraction = np.clip(out[:, gripper], 0.0, 1.0)
        out[:, gripper] = self.gripper_open + fraction * (self.gripper_closed - self.gripper_open)
        return out
