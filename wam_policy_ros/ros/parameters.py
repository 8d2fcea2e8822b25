"""Every parameter of the node: name, default, unit, range, meaning. ``config/dreamzero.yaml`` says the same in YAML."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wam_policy_ros.contract.errors import ConfigError

_OWN_OF_RCLPY = ("use_sim_time", "start_type_description_service", "qos_overrides.")


_PER_JOINT = "one value for all but grippers, or one per commanded joint; never loosens the URDF"


def _p(
    default: Any,
    name: str,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    read_only: bool = False,
    live: bool = False,
    tightens: bool = False,
    numbers: bool = False,
) -> Any:
    """One parameter. ``read_only``: given at the start of the process and never changed; ``live``: may change while the
    node is configured; ``tightens``: the same, if nothing is allowed then that was not before; all others may change
    until configure and after cleanup."""
    meta = {"name": name, "doc": doc, "unit": unit, "low": low, "high": high, "choices": choices}
    meta |= {"read_only": read_only, "live": live or tightens, "tightens": tightens, "numbers": numbers}
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True)
class NodeParameters:
    """The node's configuration, resolved and checked. The ROS name of each is in its metadata."""

    backend: str = _p(
        "engine",
        "backend",
        "engine: the network in this process; openpi: a policy server; hold: no network, the robot stands still",
        choices=("engine", "openpi", "hold"),
    )
    embodiment: str = _p("oxe_droid", "embodiment", "tag of the robot in the checkpoint's metadata.json")
    checkpoint: str = _p("", "checkpoint", "folder of the checkpoint, or the name of one that comes with the package")
    tokenizer: str = _p("", "tokenizer", "tokenizer.json or its folder; empty: look in the checkpoint")
    random_weights: str = _p(
        "",
        "random_weights",
        "untrained network of this size instead of a checkpoint: a test of the machinery, not a policy",
        choices=("", "tiny", "14b"),
    )
    device: str = _p("auto", "device", "torch device, or auto; for replicas several, with commas between them")
    replicas: int = _p(
        1,
        "replicas",
        "policies side by side, each on a GPU of its own in a process of its own; the robot's session is on one of "
        "them, clients' on all",
        low=1,
        high=64,
    )
    instruction: str = _p("", "instruction", "what to do; ~/prompt changes it while the node runs", live=True)
    autostart: bool = _p(
        True, "autostart", "configure at start, activate as soon as the policy is ready", read_only=True
    )
    exit_on_failure: bool = _p(
        False,
        "exit_on_failure",
        "end with exit code 1 when autostart gives up: refused configuration, or a policy that cannot be loaded",
        read_only=True,
    )
    executor: str = _p("single", "executor", "rclpy executor", choices=("single", "events"), read_only=True)

    engine_schedule: str = _p(
        "static",
        "engine.schedule",
        "which solver steps evaluate the network; static as upstream ships it, full: all 16",
        choices=("static", "dynamic", "full"),
    )
    engine_evaluations: int = _p(
        0,
        "engine.evaluations",
        "evaluations of the static schedule: 5, 6, 7, 8 or 16; 0: as the checkpoint recommends, else 8",
        unit="of 16",
        low=0,
        high=16,
    )
    engine_guidance_scale: float = _p(
        0.0,
        "engine.guidance_scale",
        "guidance on the video; 1 leaves the second branch out; 0: as the checkpoint recommends, else 5",
        low=0.0,
        high=100.0,
    )
    engine_preset: str = _p(
        "auto",
        "engine.preset",
        "reference: the published algorithm in plain PyTorch; bf16, fp8: the same one fast, other rounding, GPU only; "
        "auto: bf16 on a GPU, reference on a CPU",
        choices=("auto", "reference", "bf16", "fp8"),
    )
    engine_attention: str = _p(
        "auto",
        "engine.attention",
        "auto: the preset's; fp8 needs nvidia-cudnn-frontend",
        choices=("auto", "torch", "cudnn", "fp8"),
    )
    engine_text: str = _p(
        "auto",
        "engine.text",
        "text encoder resident on the GPU or streamed from the host; auto: the preset's",
        choices=("auto", "resident", "streamed"),
    )
    engine_seed: int = _p(1140, "engine.seed", "of the noise, the same in every call as upstream", low=0, high=2**31)
    engine_dtype: str = _p(
        "auto",
        "engine.dtype",
        "bfloat16 as published; auto: float32 on a CPU",
        choices=("auto", "bfloat16", "float32"),
    )
    engine_gpus: int = _p(
        1,
        "engine.gpus",
        "GPUs that share a step, device and those after it, a process each: 2, 4 or 8; a lost one is a latched fault",
        low=1,
        high=64,
    )
    engine_memory_budget_gib: float = _p(
        0.0,
        "engine.memory_budget_gib",
        "what the policy may take on its device: decides how many sessions there are room for; 0: what a GPU has",
        unit="GiB",
        low=0.0,
        high=4096.0,
    )
    engine_prepared_windows: int = _p(
        0,
        "engine.prepared_windows",
        "windows recorded at the start, where memory has room for them: a later one costs whoever waits up to an "
        "evaluation now and then in its first calls; 0: of all sessions that may be open, at most 16",
        low=0,
        high=4096,
    )
    engine_deterministic: bool = _p(
        False,
        "engine.deterministic",
        "the same weights, seeds and observations give the same bits in every process; other noise than upstream's",
    )

    record_folder: str = _p(
        "",
        "record.folder",
        "record what the policy gets and gives into this folder, for wam replay --verify; needs the extra record",
    )
    record_stages: bool = _p(False, "record.stages", "and a digest of every stage of a call; a step then takes longer")
    record_max_file_mb: float = _p(
        1024.0, "record.max_file_mb", "a larger file is followed by another one", unit="MiB", low=0.1, high=1e6
    )

    server_uri: str = _p("", "server.uri", "backend openpi: address of the policy server, ws://HOST:PORT[/PATH]")
    server_dialect: str = _p(
        "dreamzero",
        "server.dialect",
        "how it replies; dreamzero: the array itself or a map; the others: a map with actions",
        choices=("dreamzero", "roboarena", "vllm_omni", "openpi"),
    )
    server_codec: str = _p("openpi", "server.codec", "how arrays are written", choices=("openpi", "msgpack_numpy"))
    server_timeout_s: float = _p(
        8.0,
        "server.timeout_s",
        "a call that takes longer is given up: the robot holds, and goes on when the server answers again",
        unit="s",
        low=0.01,
        high=3600.0,
    )
    server_api_key: str = _p("", "server.api_key", "key for the policy server, or file:PATH; parameters are no secret")
    server_action_space: str = _p(
        "",
        "server.action_space",
        "what a server that does not announce it is documented to send",
        choices=("", "joint_position", "joint_velocity", "cartesian_position", "cartesian_velocity"),
    )

    openpi_enabled: bool = _p(
        False, "openpi.enabled", "serve the policy to OpenPI clients as well; the robot goes first"
    )
    openpi_host: str = _p("127.0.0.1", "openpi.host", "where to listen; 0.0.0.0: every network")
    openpi_port: int = _p(8000, "openpi.port", "0: any free one", low=0, high=65535)
    openpi_dialects: tuple[str, ...] = _p(
        ("dreamzero",),
        "openpi.dialects",
        "of the port's path /, and NAME:PORT for further ports; every dialect is reachable as /NAME as well",
    )
    openpi_api_key: str = _p("", "openpi.api_key", "key that clients must send, or file:PATH; parameters are no secret")
    openpi_errors: str = _p(
        "close",
        "openpi.errors",
        "after a refused request: close, as every published client expects, or keep_open",
        choices=("close", "keep_open"),
    )
    openpi_instruction: str = _p("", "openpi.instruction", "for requests without a prompt; empty: they are refused")
    openpi_resize: str = _p(
        "refuse",
        "openpi.resize",
        "pictures of another size than announced: refuse, pad or stretch",
        choices=("refuse", "pad", "stretch"),
    )
    openpi_single_exterior: str = _p(
        "refuse",
        "openpi.single_exterior",
        "clients with one exterior camera: refuse, or dropped_view (a black second view, as in a part of the training)",
        choices=("refuse", "dropped_view"),
    )
    openpi_blind_positions: str = _p(
        "refuse",
        "openpi.blind_positions",
        "joint positions for clients of dialect openpi with one exterior camera, some of which execute velocities",
        choices=("refuse", "send"),
    )
    openpi_max_connections: int = _p(64, "openpi.max_connections", "more are turned away", low=1, high=4096)
    openpi_max_sessions: int = _p(
        4, "openpi.max_sessions", "of clients, beside the robot's; each holds device memory", low=1, high=4096
    )
    openpi_max_message_mb: float = _p(
        64.0,
        "openpi.max_message_mb",
        "of one request; a larger one closes the connection",
        unit="MiB",
        low=16.0,
        high=4096.0,
    )
    openpi_session_idle_s: float = _p(
        0.0,
        "openpi.session_idle_s",
        "an unused session of a connected client ends; 0: never",
        unit="s",
        low=0.0,
        high=1e6,
    )
    openpi_resume_s: float = _p(
        60.0, "openpi.resume_s", "a session waits so long for a client that was cut off", unit="s", low=0.0, high=1e6
    )
    openpi_deadline_s: float = _p(
        0.0, "openpi.deadline_s", "a client's request that takes longer fails; 0: never", unit="s", low=0.0, high=1e6
    )

    cameras_topics: tuple[str, ...] = _p(
        (),
        "cameras.topics",
        "image topics in the embodiment's camera order, or CAMERA:=TOPIC each; empty: <suggested name>/image_raw",
    )
    image_compressed: bool = _p(
        False,
        "image.compressed",
        "all cameras as sensor_msgs/CompressedImage; a topic that ends in /compressed is one anyway",
    )
    image_reliable: bool = _p(False, "image.reliable", "reliable instead of best effort for images")
    image_resize: str = _p(
        "pad",
        "image.resize",
        "pad: keep the aspect, black bars; stretch: fill the embodiment's raw size",
        choices=("pad", "stretch"),
    )
    image_encodings: tuple[str, ...] = _p(
        (),
        "image.encodings",
        "in camera order, what the bytes of raw images are, whatever their label says; auto: believe the label",
    )
    image_views: tuple[str, ...] = _p(
        (), "image.views", "in camera order, whole, or left or right half of a side-by-side picture; empty: whole"
    )
    image_min_std: float = _p(
        0.0,
        "image.min_std",
        "a session begins when every camera shows a picture that varies this much (standard deviation); 0: with any",
        unit="of 255",
        low=0.0,
        high=127.0,
    )
    image_cv_bridge: bool = _p(
        True, "image.cv_bridge", "use cv_bridge where one is installed that passes a trial; results are the same"
    )

    joints_topic: str = _p("joint_states", "joints.topic", "sensor_msgs/JointState")
    joints_names: tuple[str, ...] = _p(
        (), "joints.names", "ROS joint names in the order of the state fields, gripper joints included; required"
    )
    gripper_open: float = _p(
        0.0, "gripper.open", "gripper joint at policy value 0", unit="joint unit", low=-1000.0, high=1000.0
    )
    gripper_closed: float = _p(
        0.0,
        "gripper.closed",
        "gripper joint at policy value 1; must differ from open",
        unit="joint unit",
        low=-1000.0,
        high=1000.0,
    )
    gripper_invert: bool = _p(False, "gripper.invert", "the policy's 1 is open and its 0 closed, in state and action")
    gripper_mode: str = _p(
        "in_trajectory",
        "gripper.mode",
        "part of the arm's trajectory, one of its own, GripperCommand, ParallelGripperCommand, Float64, or not sent",
        choices=("in_trajectory", "trajectory", "action", "parallel_action", "float64", "none"),
    )
    gripper_outputs: tuple[str, ...] = _p(
        (),
        "gripper.outputs",
        "topic or action per gripper joint; empty: gripper_trajectory, gripper_cmd or gripper_command, by mode",
    )
    gripper_command: str = _p(
        "continuous",
        "gripper.command",
        "continuous: the policy's value; binary: open or closed by threshold and hysteresis",
        choices=("continuous", "binary"),
    )
    gripper_ease: bool = _p(
        False,
        "gripper.ease",
        "trajectories: half of the way to an end of the range per row; false: at once, and a gripper that is replanned "
        "in mid-stroke is led beyond its end for a moment",
    )
    gripper_threshold: float = _p(
        0.5, "gripper.threshold", "binary: policy values above it mean closed", low=0.0, high=1.0
    )
    gripper_hysteresis: float = _p(
        0.1,
        "gripper.hysteresis",
        "binary: dead band around the threshold; continuous: smaller changes are not sent (action, float64)",
        low=0.0,
        high=1.0,
    )
    gripper_min_interval_s: float = _p(
        0.3,
        "gripper.min_interval_s",
        "shortest time between two commands (action, float64)",
        unit="s",
        low=0.0,
        high=60.0,
    )
    gripper_max_effort: float = _p(
        0.0, "gripper.max_effort", "of action goals; 0: the controller's own", unit="N", low=0.0, high=1e4
    )

    output_mode: str = _p(
        "topic",
        "output.mode",
        "JointTrajectory, FollowJointTrajectory, or JointState at the control rate as Isaac Sim takes it",
        choices=("topic", "action", "joint_command"),
    )
    output_topic: str = _p("joint_trajectory", "output.topic", "trajectory_msgs/JointTrajectory (topic)")
    output_action: str = _p("follow_joint_trajectory", "output.action", "control_msgs/FollowJointTrajectory (action)")
    output_joint_command: str = _p("joint_command", "output.joint_command", "sensor_msgs/JointState (joint_command)")
    output_exclusive: bool = _p(
        False, "output.exclusive", "refuse to run beside another publisher on the output topic; false: warn"
    )
    output_wait_for_controller: bool = _p(
        True,
        "output.wait_for_controller",
        "stand still while nobody takes what is sent; false: run all the same, e.g. to record",
    )
    output_ignore_fields: tuple[str, ...] = _p(
        (), "output.ignore_fields", "action fields that are not executed, e.g. agibot's robot_velocity"
    )

    control_rate_hz: float = _p(
        0.0, "control.rate_hz", "0: the policy's; any other value must equal the policy's", unit="Hz", low=0.0, high=1e3
    )
    control_execute_steps: int = _p(
        8,
        "control.execute_steps",
        "steps from an observation until the chunk of the next one takes over",
        unit="steps",
        low=1,
        high=1000,
    )
    control_mode: str = _p(
        "receding",
        "control.mode",
        "stop_and_go: whole chunks from a standstill; auto: so when a step outlasts a chunk, which receding refuses",
        choices=("receding", "stop_and_go", "auto"),
    )
    control_rtc: str = _p(
        "blend",
        "control.rtc",
        "blend: chunks are joined outside the network; denoiser: committed rows constrain the denoising, too",
        choices=("blend", "denoiser"),
    )
    control_blend_steps: int = _p(
        6, "control.blend_steps", "rows over which a chunk takes over from the last one", unit="steps", low=0, high=1000
    )
    control_min_lead_s: float = _p(
        0.0, "control.min_lead_s", "rows due sooner than this are dropped; 0: one step", unit="s", low=0.0, high=1.0
    )
    control_jitter_s: float = _p(
        0.003,
        "control.jitter_s",
        "from publication to the controller's start, trajectories differ by at most this; limits are kept all the same",
        unit="s",
        low=0.0,
        high=0.02,
    )
    control_publish_velocities: bool = _p(
        True, "control.publish_velocities", "complete velocities, the last zero; false: positions only"
    )
    control_stamp: str = _p(
        "zero",
        "control.stamp",
        "of trajectories; zero: start on receipt; absolute: start at the node's clock",
        choices=("zero", "absolute"),
    )

    sync_max_age_s: float = _p(0.2, "sync.max_age_s", "oldest usable camera frame", unit="s", low=0.001, high=60.0)
    sync_joint_max_age_s: float = _p(
        0.1, "sync.joint_max_age_s", "oldest usable joint position", unit="s", low=0.001, high=60.0
    )
    sync_max_skew_s: float = _p(
        0.05, "sync.max_skew_s", "largest difference between the cameras' stamps", unit="s", low=0.0, high=60.0
    )
    sync_future_tolerance_s: float = _p(
        0.02,
        "sync.future_tolerance_s",
        "how far a stamp may be ahead of the node's clock",
        unit="s",
        low=0.0,
        high=10.0,
    )
    sync_stamp_source: str = _p(
        "header", "sync.stamp_source", "header: message stamps; receive: time of arrival", choices=("header", "receive")
    )

    safety_urdf: str = _p(
        "", "safety.urdf", "file of the robot's URDF, or the text itself; empty: the topic robot_description, if any"
    )
    safety_position_margin: float = _p(
        0.01, "safety.position_margin", "taken off both ends of the URDF's positions", unit="rad", low=0.0, high=10.0
    )
    safety_position_min: tuple[float, ...] = _p(
        (), "safety.position_min", _PER_JOINT, unit="joint unit", low=-1e6, high=1e6, tightens=True, numbers=True
    )
    safety_position_max: tuple[float, ...] = _p(
        (), "safety.position_max", _PER_JOINT, unit="joint unit", low=-1e6, high=1e6, tightens=True, numbers=True
    )
    safety_max_velocity: tuple[float, ...] = _p(
        (), "safety.max_velocity", _PER_JOINT, unit="joint unit/s", low=0.0, high=1e6, tightens=True, numbers=True
    )
    safety_max_acceleration: tuple[float, ...] = _p(
        (),
        "safety.max_acceleration",
        f"{_PER_JOINT}; where nothing else is known, 10",
        unit="joint unit/s^2",
        low=0.0,
        high=1e6,
        tightens=True,
        numbers=True,
    )
    safety_max_first_step_rad: float = _p(
        0.2,
        "safety.max_first_step_rad",
        "farthest that a chunk's first row may be from where the robot is told to be by then",
        unit="rad",
        low=0.0,
        high=10.0,
        tightens=True,
    )
    safety_on_violation: str = _p(
        "reject",
        "safety.on_violation",
        "reject the chunk and hold; clamp: slow it down, see the README; fault: latch at once",
        choices=("reject", "clamp", "fault"),
    )
    safety_clamp_excess: float = _p(
        0.5, "safety.clamp_excess", "clamp values up to 1 + this times their limit", low=0.0, high=10.0
    )
    safety_clamp_outside: float = _p(
        0.1,
        "safety.clamp_outside",
        "positions further outside are refused and latched in every mode",
        unit="rad",
        low=0.0,
        high=1.0,
    )
    safety_max_consecutive_rejects: int = _p(
        3, "safety.max_consecutive_rejects", "so many refusals in a row are a latched fault", low=1, high=1000
    )
    safety_on_fault: str = _p(
        "hold",
        "safety.on_fault",
        "hold: stop where the robot is told to be; stop_publishing: let the plan under way end, at rest",
        choices=("hold", "stop_publishing"),
    )
    safety_executor_stall_s: float = _p(
        0.5,
        "safety.executor_stall_s",
        "hold when the node's callbacks stand still for so long; 0: not watched",
        unit="s",
        low=0.0,
        high=60.0,
    )
    safety_deadline_s: float = _p(
        10.0, "safety.deadline_s", "a request that takes longer is a latched fault", unit="s", low=0.01, high=3600.0
    )

    home_positions: tuple[float, ...] = _p(
        (),
        "home.positions",
        "pose for ~/home, one value per commanded joint, grippers included; empty: ~/home is refused",
        unit="joint unit",
        low=-1e6,
        high=1e6,
        numbers=True,
    )
    home_max_velocity: float = _p(
        0.3, "home.max_velocity", "highest speed on the way home", unit="rad/s", low=0.001, high=10.0
    )
    sim_reset_service: str = _p("", "sim_reset.service", "called by ~/reset; empty: none")
    sim_reset_type: str = _p(
        "trigger", "sim_reset.type", "std_srvs/Trigger or std_srvs/Empty", choices=("trigger", "empty")
    )
    sim_reset_timeout_s: float = _p(
        5.0, "sim_reset.timeout_s", "no answer for so long is a latched fault", unit="s", low=0.1, high=600.0
    )

    pictures_time_share: float = _p(
        0.1,
        "pictures.time_share",
        "most of the worker's time for ~/observed and ~/predicted_video while steps wait; 1: every step is drawn",
        low=0.001,
        high=1.0,
    )

    @classmethod
    def names(cls) -> dict[str, dataclasses.Field[Any]]:
        """ROS name -> dataclass field, in order of declaration."""
        return {f.metadata["name"]: f for f in dataclasses.fields(cls)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> NodeParameters:
        """Coerce, check ranges, cross-check.

        Args:
            values: ROS name -> value; names that are absent, and None, mean the default.

        Raises:
            ConfigError: every problem found, in one message.
        """
        fields, problems = cls.names(), unknown_names(values)
        out: dict[str, Any] = {}
        for name, f in fields.items():
            value = values.get(name)
            if value is None:
                continue
            try:
                out[f.name] = _coerce(name, f, value)
            except ConfigError as error:
                problems.append(str(error))
        if not problems:
            params = cls(**out)
            problems += params._cross_check()
            if not problems:
                return params
        raise ConfigError("; ".join(problems))

    def _cross_check(self) -> list[str]:
        problems = []
        if self.backend == "engine" and bool(self.checkpoint) == bool(self.random_weights):
            given = "both" if self.checkpoint else "neither"
            problems.append(
                f"exactly one of checkpoint and random_weights must be given, got {given}: set checkpoint to a "
                "checkpoint folder, or random_weights to tiny or 14b for a test without trained weights"
                + ("; one that a file gives is taken back with -p \"checkpoint:=''\"" if self.checkpoint else "")
            )
        if self.backend != "engine" and (self.checkpoint or self.random_weights):
            problems.append(f"backend {self.backend} uses no weights, but checkpoint or random_weights is set")
        if self.backend != "engine" and self.replicas > 1:
            problems.append(f"backend {self.backend} has no replicas, but replicas is {self.replicas}")
        if (self.backend == "openpi") != bool(self.server_uri):
            given = "it is empty" if self.backend == "openpi" else f"but backend is {self.backend}"
            problems.append(
                f"backend openpi and server.uri belong together; server.uri is {self.server_uri!r}, {given}"
            )
        if self.backend == "openpi" and self.server_timeout_s >= self.safety_deadline_s:
            problems.append(
                f"server.timeout_s ({self.server_timeout_s} s) must be shorter than safety.deadline_s "
                f"({self.safety_deadline_s} s), which latches a fault"
            )
        return problems


def unknown_names(given: Iterable[str]) -> list[str]:
    """One sentence for each name that is not a parameter of this node, with the nearest ones that are."""
    known = list(NodeParameters.names())
    out = []
    for name in given:
        if name in known or name.startswith(_OWN_OF_RCLPY):
            continue
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        near += [k for k in known if k.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1] and k not in near]
        out.append(f"unknown parameter {name!r}" + (f" (did you mean {', '.join(near)}?)" if near else ""))
    return out


def _coerce(name: str, f: dataclasses.Field[Any], value: Any) -> Any:
    kind: Any = type(f.default)
    meta = f.metadata
    expected = {float: "a number", int: "a whole number", bool: "true or false", str: "text", tuple: "a list of text"}
    wrong = ConfigError(f"parameter {name}: wrong type", got=repr(value), expected=expected[kind])
    if kind is tuple and meta["numbers"]:
        return _numbers(name, meta, value)
    if kind is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise wrong
        return tuple(v for v in value if v)
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = float(value)
    elif kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not kind:
        raise wrong
    if kind in (float, int):
        low, high = meta["low"], meta["high"]
        if not math.isfinite(value) or (low is not None and value < low) or (high is not None and value > high):
            unit = f" {meta['unit']}" if meta["unit"] else ""
            raise ConfigError(f"parameter {name}: out of range", got=value, expected=f"{low} to {high}{unit}")
    if meta["choices"] and value not in meta["choices"]:
        raise ConfigError(f"parameter {name}: unknown value", got=repr(value), expected=f"one of {meta['choices']}")
    return value


def refusal(changes: Mapping[str, Any], *, configured: bool) -> str:
    """Why parameters cannot take new values; empty when they can. Names of others than this node's are not judged.

    Args:
        changes: ROS name -> new value, None to remove it.
        configured: the node has been configured.
    """
    fields, problems = NodeParameters.names(), []
    for name, value in changes.items():
        if (f := fields.get(name)) is None:
            continue
        if value is None:
            problems.append(f"parameter {name} cannot be removed")
            continue
        try:
            _coerce(name, f, value)
        except ConfigError as error:
            problems.append(str(error))
    if not problems and configured:
        fixed = [name for name in changes if name in fields and not fields[name].metadata["live"]]
        problems += [f"{fixed} can change only after cleanup"] if fixed else []
    return "; ".join(problems)


def tightening(changes: Mapping[str, Any]) -> bool:
    """Whether limits are among the changes."""
    fields = NodeParameters.names()
    return any(name in fields and fields[name].metadata["tightens"] for name in changes)


def _numbers(name: str, meta: Mapping[str, Any], value: Any) -> tuple[float, ...]:
    low, high = meta["low"], meta["high"]
    numbers = value if isinstance(value, (list, tuple)) or hasattr(value, "tolist") else [value]
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in numbers):
        raise ConfigError(f"parameter {name}: wrong type", got=repr(value), expected="a list of numbers, or one number")
    if not all(low <= v <= high for v in numbers):
        unit = f" {meta['unit']}" if meta["unit"] else ""
        raise ConfigError(f"parameter {name}: out of range", got=list(numbers), expected=f"{low:g} to {high:g}{unit}")
    return tuple(float(v) for v in numbers)


def declare(node: Any) -> None:
    """Declare every parameter on a node. Typed dynamically: a YAML integer is accepted where a double is meant."""
    for name, f in NodeParameters.names().items():
        default = list(f.default) if isinstance(f.default, tuple) else f.default
        node.declare_parameter(name, default, _descriptor(name, f, getattr(node, "_parameter_overrides", {})))


def _descriptor(name: str, f: dataclasses.Field[Any], overrides: Mapping[str, Any]) -> Any:
    from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor

    meta, kind = f.metadata, type(f.default)
    notes = [f"unit {meta['unit']}"] if meta["unit"] else []
    notes += [f"range {meta['low']:g} to {meta['high']:g}"] if meta["low"] is not None else []
    notes += [f"one of {', '.join(repr(c) for c in meta['choices'])}"] if meta["choices"] else []
    if meta["tightens"]:
        notes.append("only tightened between configure and cleanup")
    elif not meta["read_only"] and not meta["live"]:
        notes.append("fixed between configure and cleanup")
    descriptor = ParameterDescriptor(
        description=meta["doc"],
        additional_constraints=", ".join(notes),
        dynamic_typing=True,
        read_only=meta["read_only"],
    )
    if meta["low"] is not None and name in overrides and refusal({name: overrides[name].value}, configured=False):
        return descriptor  # with a range rclpy would end the process here; configure says what is wrong
    if kind is float:
        descriptor.floating_point_range = [FloatingPointRange(from_value=meta["low"], to_value=meta["high"])]
    elif kind is int:
        descriptor.integer_range = [IntegerRange(from_value=int(meta["low"]), to_value=int(meta["high"]))]
    return descriptor


def read(node: Any, changes: Mapping[str, Any] | None = None) -> NodeParameters:
    """The node's parameters as they are now, or would be with changes (ROS name -> value).

    Raises:
        ConfigError: see ``NodeParameters.from_values``; also for a parameter given to the node that does not exist.
    """
    values = {name: node.get_parameter(name).value for name in NodeParameters.names()}
    # rclpy keeps what the command line and the YAML files gave for this node, declared or not, only here.
    given = dict.fromkeys(getattr(node, "_parameter_overrides", {}))
    return NodeParameters.from_values({**given, **values, **(changes or {})})
