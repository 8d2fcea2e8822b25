"""The lifecycle node ``wam_policy``: wires topics, worker and control loop together, and computes nothing itself."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rcl_interfaces.msg import SetParametersResult
from rclpy.exceptions import NameValidationException
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from std_msgs.msg import String

from wam_policy_ros.contract.errors import ConfigError, NotReady, WamError
from wam_policy_ros.contract.interface import Policy
from wam_policy_ros.contract.progress import ProgressLog

from . import parameters
from .assembly import Assembly, assemble
from .backend import make_policy, make_recorder, make_server, record_policy, record_summary, server_summary
from .bridge import find_bridge
from .control import ControlLoop
from .frames import DecodeAhead
from .lifecycle import Autostart, steady_clock, transition
from .operator import Operator
from .parameters import NodeParameters
from .qos import latched_qos
from .reporter import Reporter
from .reports import Monitor
from .stall import StallWatch
from .streams import Now
from .subscriptions import subscribe
from .video import VideoOutput
from .wiring import RobotOutputs, serve, watch_description
from .worker import InferenceWorker, Phase, Progress, WorkerStatus

STOP_S = 0.5
"""How long a transition waits for the worker; a transition blocks every callback."""

SERVER_STOP_S = 1.0
"""The same for the OpenPI server, which takes leave of its clients."""

LOOK_S = 1.0
"""How often an active node looks for others who publish trajectories."""

DESCRIPTION_S = 3.0
"""How long the automatic start waits for limits of the joints, which a robot_description may bring."""


@dataclass
class _Parts:
    """What exists between configure and cleanup."""

    params: NodeParameters
    robot: Assembly
    worker: InferenceWorker
    control: ControlLoop
    server: Any
    outputs: RobotOutputs
    monitor: Monitor
    progress: ProgressLog
    entities: ExitStack
    recorder: Any = None


class PolicyNode(LifecycleNode):
    """See the package's README for topics, services and parameters.

    Args:
        policy_factory: makes the policy in the worker thread; tests inject fakes here.
        kwargs: for ``rclpy.lifecycle.LifecycleNode``.

    Attributes:
        lifecycle: label of the state.
        refused: why the last transition was refused, or empty.
        ended: the process shall end with a failure, see ``exit_on_failure``.
    """

    def __init__(
        self, policy_factory: Callable[[NodeParameters, Progress], Policy] = make_policy, **kwargs: Any
    ) -> None:
        super().__init__("wam_policy", **kwargs)
        self.lifecycle, self.refused, self._closed = "unconfigured", "", False
        self._defective = self._ending = self.ended = False
        self._policy_factory = policy_factory
        self._parts: _Parts | None = None
        self._old_worker: InferenceWorker | None = None
        parameters.declare(self)
        self._operator = Operator(self.resolve_service_name("~/start"))
        self._reporter = Reporter(self)
        # EventsExecutor refuses nodes with guard conditions; a task wakes it instead, a little later.
        events = self.get_parameter("executor").value == "events"
        self._guard = None if events else self.create_guard_condition(self._on_worker)
        self.create_timer(1.0, self.publish_state, clock=steady_clock())
        self.add_on_set_parameters_callback(self._on_set_parameters)
        self._autostart, self._ready_s = None, 0.0
        if self.get_parameter("autostart").value is True:
            self._autostart = Autostart(
                self,
                self._start_phase,
                self._safely,
                self._autostart_failed,
            )
        self.publish_state()

    @property
    def worker_status(self) -> WorkerStatus | None:
        """What the worker is doing, None while unconfigured."""
        return self._parts.worker.status if self._parts else None

    def _start_phase(self) -> Phase | None:
        """The worker's; not yet ready while the robot's description, which nothing can move without, may still come."""
        status = self.worker_status
        if status is None or status.phase is not Phase.READY or status.spec is None:
            return status.phase if status else None
        self._ready_s = self._ready_s or time.monotonic()
        if time.monotonic() - self._ready_s < DESCRIPTION_S:
            try:
                self._need_parts().control.prepare(status.spec)
            except ConfigError:
                return Phase.WARMING_UP
        return Phase.READY

    @property
    def control(self) -> ControlLoop | None:
        """The control loop, None while unconfigured."""
        return self._parts.control if self._parts else None

    def now(self) -> Now:
        """Both clocks."""
        return Now(self.get_clock().now().nanoseconds, time.monotonic_ns())

    @transition("inactive")
    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        if self._old_worker is not None and self._old_worker.alive:
            if self._old_worker.status.phase in (Phase.LOADING, Phase.WARMING_UP):
                raise NotReady(
                    "the policy of the last configuration is still loading",
                    remedy="it stops by itself: configure again in a moment",
                )
            raise ConfigError(
                "the worker thread of the last configuration still runs",
                remedy="a step that hangs in the device's driver cannot be stopped: restart the process",
            )
        self._old_worker = None
        params = parameters.read(self)
        with ExitStack() as entities:
            try:
                self._parts = self._build(params, entities)
            except NameValidationException as error:
                raise ConfigError(f"a topic name is not valid: {error}") from error
            self._parts.entities = entities.pop_all()
        self._parts.worker.start()
        return super().on_configure(state)

    @transition("active")
    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        parts = self._need_parts()
        status = parts.worker.status
        if status.phase is not Phase.READY or status.spec is None:
            raise NotReady("the policy is not ready", got=f"{status.phase.value}: {status.message}")
        parts.robot.check(status.spec)
        if status.spec.random_weights:
            label, weights = "RANDOM WEIGHTS: not a policy", status.spec.weights
            self.get_logger().warning(weights if weights.startswith("RANDOM WEIGHTS") else f"{label} ({weights})")
        parts.outputs.look_for_masters()
        if parts.params.output_exclusive and parts.outputs.masters:
            raise ConfigError(parts.outputs.masters, remedy="stop the other one, or set output.exclusive: false")
        result = super().on_activate(state)
        parts.control.activate(status.spec)
        return result

    @transition("inactive")
    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._need_parts().control.deactivate()
        return super().on_deactivate(state)

    @transition("unconfigured")
    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._release(STOP_S)
        return super().on_cleanup(state)

    @transition("finalized")
    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._ending = True
        self._release(STOP_S)
        return super().on_shutdown(state)

    @transition("unconfigured")
    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._release(STOP_S)
        return TransitionCallbackReturn.SUCCESS

    def close(self, timeout_s: float) -> bool:
        """Before the process ends: hold if active, stop and join the worker. False when its thread does not stop."""
        if self._autostart is not None:
            self._autostart.cancel()
        worker = self._parts.worker if self._parts else self._old_worker
        self._ending = True
        if self.lifecycle != "finalized":
            self._safely(self.trigger_shutdown)
        self._safely(self._release, STOP_S)  # whatever became of the transition
        self._closed = True
        return worker is None or worker.stop(timeout_s)

    def _build(self, params: NodeParameters, entities: ExitStack) -> _Parts:
        """Everything of one configuration. What has to be destroyed later is put on ``entities`` as it is created."""
        bridge, text = find_bridge() if params.image_cv_bridge else (None, "")
        if text:
            self._log("info", text)
        ahead = DecodeAhead()
        entities.callback(ahead.stop)
        outputs: list[RobotOutputs] = []
        video = VideoOutput(self, entities)
        recorder = make_recorder(params, self._log)
        worker = InferenceWorker(
            lambda progress: record_policy(self._policy_factory(params, progress), recorder, params),
            notify=self._wake,
            log=self._log,
            after_step=video.after_step,
            after_step_wanted=video.wanted,
            video_wanted=video.prediction_wanted,
            after_step_share=params.pictures_time_share,
        )
        robot = assemble(
            params,
            worker=worker,
            send=lambda trajectory: outputs[0](trajectory),
            clock=self.now,
            simulated=self.get_parameter("use_sim_time").value is True,
            changed=self.publish_state,
            log=self._log,
            resolve=self.resolve_topic_name,
            bridge=bridge,
            decode_ahead=ahead.add,
            prompt_topic=self.resolve_topic_name("~/prompt"),
            reset_service=self.resolve_service_name("~/reset"),
            operator=self._operator,
        )
        outputs.append(RobotOutputs(self, params, robot.joints, entities))
        outputs[0].serve(robot.control, robot.output)
        control, inputs = robot.control, robot.inputs

        def warn(line: str) -> None:
            self._log("warn", line)

        subscribe(
            self, inputs, params, entities, clock=self.now, guard=self._safely, warn=warn, after_image=control.on_image
        )
        prompt = self.create_subscription(
            String, "~/prompt", lambda msg: self._safely(control.set_prompt, msg.data), latched_qos()
        )
        entities.callback(self.destroy_subscription, prompt)
        serve(self, params, control, entities, self._safely)
        watch_description(self, params, control, entities, self._safely)
        rate_hz = robot.expected.control_rate_hz
        monitor = Monitor(inputs, rate_hz)

        def on_tick() -> None:
            monitor.ticks.tick(time.monotonic())
            control.on_tick()
            outputs[0].on_tick(self.now().ros_ns)

        def look() -> None:
            if control.active:
                outputs[0].look_for_masters()

        self._operator.wait("")  # whoever was to answer is gone
        looks = self.create_timer(LOOK_S, lambda: self._safely(look), clock=steady_clock())
        entities.callback(self.destroy_timer, looks)
        tick = self.create_timer(1.0 / rate_hz, lambda: self._safely(on_tick), clock=steady_clock())
        entities.callback(self.destroy_timer, tick)
        if params.safety_executor_stall_s:
            watch = StallWatch(
                params.safety_executor_stall_s,
                lambda: control.ticked_ns,
                lambda: robot.output.hold(self.now().ros_ns),
            )
            watch.start()
            entities.callback(watch.stop)
        progress = ProgressLog(lambda line: self._log("info", line))
        server = make_server(params, worker.owner, self._log, recorder)
        if server is not None:
            # It listens from now on, and greets nobody before the policy is ready.
            entities.callback(server.stop, SERVER_STOP_S)
            server.start()
        return _Parts(params, robot, worker, control, server, outputs[0], monitor, progress, entities, recorder)

    def _release(self, timeout_s: float) -> None:
        parts, self._parts = self._parts, None
        if parts is None:
            return
        self._old_worker = parts.worker
        try:
            parts.control.deactivate()
        finally:
            if parts.server is not None and not parts.server.stop(SERVER_STOP_S):
                self.get_logger().warning("the OpenPI server still runs; its port is free when it has ended")
            # Whoever ends the process joins the worker himself.
            if not parts.worker.stop(timeout_s) and not self._ending:
                self.get_logger().warning("the worker thread still runs; configure is refused until it has ended")
            parts.entities.close()

    def _autostart_failed(self, what: str, remedy: str) -> None:
        self.ended = self.get_parameter("exit_on_failure").value is True
        then = "the process ends (exit_on_failure)" if self.ended else f"{remedy}, or start again"
        self.get_logger().error(f"autostart gave up: {what}; {then}")

    def _need_parts(self) -> _Parts:
        if self._parts is None:
            raise NotReady("the node is not configured")
        return self._parts

    def _wake(self) -> None:
        """Called in the worker thread: run ``_on_worker`` on the executor."""
        if self._closed:
            return
        try:
            if self._guard is not None:
                self._guard.trigger()
            elif self.executor is not None:
                self.executor.create_task(self._on_worker)
        except Exception:
            # Raised on, it would end the worker.
            self.get_logger().error(f"the executor cannot be woken\n{traceback.format_exc()}")

    def _on_worker(self) -> None:
        if self._parts is None:
            return
        self._safely(self._parts.progress.update, self._parts.worker.status)
        self._safely(self._parts.control.on_worker)
        if self._parts.worker.status.phase is not Phase.READY:
            self.publish_state()

    def _safely(self, step: Callable[..., Any], *args: Any) -> Any:
        """Every callback runs through here: a defect of ours must stop the robot, not the process.

        Returns:
            What ``step`` returns; None after a defect.
        """
        try:
            return step(*args)
        except Exception as error:
            self.get_logger().error(f"defect in the node\n{traceback.format_exc()}", throttle_duration_sec=1.0)
            self._hold_after(f"defect in the node ({type(error).__name__}: {error}), see the log")
            return None

    def _hold_after(self, defect: str) -> None:
        control = self._parts.control if self._parts else None
        if self._defective or control is None or not control.active or control.fault:
            return
        self._defective = True  # a defect on the way to the hold is logged, no more
        try:
            control.latch(defect)
        except Exception:
            self.get_logger().error(f"the robot could not be held\n{traceback.format_exc()}")
        finally:
            self._defective = False

    def _on_set_parameters(self, changes: list[Parameter]) -> SetParametersResult:
        result = self._safely(self._set_parameters, changes)
        return result or SetParametersResult(successful=False, reason="defect in the node, see the log")

    def _set_parameters(self, changes: list[Parameter]) -> SetParametersResult:
        given = {p.name: p.value for p in changes}
        if reason := parameters.refusal(given, configured=self._parts is not None):
            return SetParametersResult(successful=False, reason=reason)
        if self._parts is not None and parameters.tightening(given):
            try:
                self._parts.control.tighten(parameters.read(self, given))
            except WamError as error:
                return SetParametersResult(successful=False, reason=str(error))
        if self._parts is not None and "instruction" in given:
            self._parts.control.set_prompt(given["instruction"])
        return SetParametersResult(successful=True)

    def set_parameters_atomically(self, parameter_list: list[Parameter]) -> SetParametersResult:
        """As rclpy's, but a name that does not exist is answered with the nearest ones that do.

        ``ros2 param set`` and the parameter services end here.
        """
        new = [p.name for p in parameter_list if not self.has_parameter(p.name)]
        if unknown := parameters.unknown_names(new):
            return SetParametersResult(successful=False, reason="; ".join(unknown))
        return super().set_parameters_atomically(parameter_list)

    def _log(self, level: str, line: str) -> None:
        logger = self.get_logger()
        # rclpy ties a severity to the line of code that logs, so each needs its own.
        if level == "error":
            logger.error(line)
        elif level == "warn":
            logger.warning(line)
        else:
            logger.info(line)

    def publish_state(self) -> None:
        """``~/state`` and what is said beside it, see ``Reporter``. Never raises."""
        self._safely(self._publish_state)

    def _publish_state(self) -> None:
        self._reporter.publish(self.state_summary())

    def state_summary(self) -> dict[str, Any]:
        """What ``~/state`` says; JSON-serialisable."""
        out: dict[str, Any] = {"lifecycle": self.lifecycle, "refused": self.refused}
        status = self.worker_status
        if self._parts is None or status is None:
            return {**out, "substate": "inactive", "reason": self.refused}
        out |= self._parts.control.summary()
        out |= self._parts.monitor.summary(self.now())
        out["masters"] = self._parts.outputs.masters
        out["loading"] = {"phase": status.phase.value, "message": status.message, "fraction": status.fraction}
        out["warm_up_s"] = list(status.warm_up_s)
        if (spec := status.spec) is not None:
            out["policy"] = {
                "weights": spec.weights,
                "random_weights": spec.random_weights,
                "embodiment": spec.embodiment,
                "horizon": spec.horizon,
                "frame_offsets": list(spec.frame_offsets),
                "control_rate_hz": spec.control_rate_hz,
                "details": dict(spec.details),
                "fingerprint": None if spec.fingerprint is None else spec.fingerprint.as_dict(),
            }
        if self._parts.recorder is not None:
            out["record"] = record_summary(self._parts.recorder)
        if self._parts.server is not None:
            out["openpi"] = server_summary(self._parts.server)
        if not out["reason"] and self.lifecycle != "active":
            out["reason"] = self.refused or f"{status.phase.value}: {status.message}"
        return out
