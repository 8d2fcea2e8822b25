"""One robot put together: streams, joints, control loop, output. The node does it, and a replay of a recording does it
in the same way. Knows no rclpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wam_policy_ros.contract.embodiment import get_embodiment
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.interface import PolicySpec

from .bridge import Bridge
from .checks import check_fit, check_rate, check_steps
from .control import ControlLoop
from .frames import DecodeLater
from .inputs import Inputs
from .joints import JointMap
from .messages import Trajectory
from .outputs import TrajectoryOutput
from .parameters import NodeParameters
from .streams import Now


@dataclass(frozen=True)
class Assembly:
    """The parts between the messages and the trajectories.

    Attributes:
        expected: what the policy must be, by the parameters.
    """

    params: NodeParameters
    expected: PolicySpec
    joints: JointMap
    inputs: Inputs
    output: TrajectoryOutput
    control: ControlLoop

    def activate(self, spec: PolicySpec) -> None:
        """Start with a policy.

        Raises:
            ConfigError: the policy is not what the parameters say.
        """
        self._fit(spec)
        self.control.activate(spec)

    def check(self, spec: PolicySpec) -> None:
        """Raises ConfigError when the loaded policy is not what the parameters say, or may not move this robot."""
        self._fit(spec)
        self.control.prepare(spec)

    def _fit(self, spec: PolicySpec) -> None:
        check_fit(self.expected, spec)
        check_steps(self.params, spec)
        self.inputs.follow(spec)


def assemble(
    params: NodeParameters,
    *,
    worker: Any,
    send: Callable[[Trajectory], None],
    clock: Callable[[], Now],
    simulated: bool,
    changed: Callable[[], None],
    log: Callable[[str, str], None],
    resolve: Callable[[str], str] = lambda topic: topic,
    bridge: Bridge | None = None,
    decode_ahead: DecodeLater | None = None,
    **people: Any,
) -> Assembly:
    """Build the parts from the parameters.

    Args:
        worker: an ``InferenceWorker``, or what stands for it.
        send: hands a trajectory to the controller.
        clock: reads both clocks.
        simulated: the node's clock is /clock.
        changed, people: for ``ControlLoop``.
        log: called with a level (``info``, ``warn``, ``error``) and a line.
        resolve: topic -> its full name, for people.
        bridge: see ``bridge.find_bridge``.
        decode_ahead: see ``Inputs``.

    Raises:
        ConfigError: parameters do not fit the embodiment.
    """
    expected = spec_of(get_embodiment(params.embodiment), weights="")
    check_rate(params, expected)
    joints = JointMap.build(
        expected.state,
        expected.action,
        names=params.joints_names,
        ignore_fields=params.output_ignore_fields,
        gripper_open=params.gripper_open,
        gripper_closed=params.gripper_closed,
        gripper_invert=params.gripper_invert,
    )
    inputs = Inputs(
        params,
        expected,
        joints,
        warn=lambda line: log("warn", line),
        tell=lambda line: log("info", line),
        resolve=resolve,
        bridge=bridge,
        decode_ahead=decode_ahead,
    )
    output = TrajectoryOutput(send, joints.command_names, with_velocities=params.control_publish_velocities)
    control = ControlLoop(
        params, joints, inputs, worker, output, clock=clock, simulated=simulated, changed=changed, log=log, **people
    )
    return Assembly(params, expected, joints, inputs, output, control)
