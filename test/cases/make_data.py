"""Writes ``data``: small cases of our own, of every kind that is run here. Another robot than anybody's: other names,
limits, sizes and numbers. ``python -m test.cases.make_data`` after a change; the result is committed."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import save

from test.recordings import T0, Message, image, joints, picture, write

from .make_requests import requests

DATA = Path(__file__).parent / "data"
ARM = [f"axis_{c}" for c in "abcdefg"]
FINGER = "jaw"
MEASURED = [0.3, -0.2, 0.15, -0.9, 0.05, 0.7, -0.4]
CAMERAS = {"exterior_0": "/cams/left", "exterior_1": "/cams/right", "wrist": "/cams/hand"}
CONFIG = {
    "robot": {
        "arm_joints": ARM,
        "arm_limits_rad": [-2.5, 2.5],
        "arm_vmax_rad_s": 1.5,
        "gripper_joint": FINGER,
        "gripper_range_m": [0.01, 0.09],
        "gripper_policy_convention": {"open": 0.0, "closed": 1.0},
    },
    "cameras": {name: {"topic": topic, "type": "sensor_msgs/msg/Image"} for name, topic in CAMERAS.items()},
    "joint_states_topic": "/robot/joint_states",
    "model_image_hw": [180, 320],
    "policy": {"horizon": 24, "action_dim": 8, "dt_s": 0.0666667, "action_space": "joint_position"},
    "timing": {
        "image_stale_after_s": 0.4,
        "joint_stale_after_s": 0.3,
        "future_tolerance_s": 0.1,
        "backward_jump_reset_s": 0.5,
    },
}
SCENE = picture(10, 18)


def state(t: float, **fields: Any) -> Message:
    """All joints, in an order of their own."""
    positions = dict(zip([*ARM, FINGER], [*MEASURED, 0.03], strict=True))
    shuffled = {n: positions[n] for n in [ARM[3], FINGER, *ARM[:3], *ARM[4:]]}
    return joints(t, "/robot/joint_states", fields.pop("positions", shuffled), **fields)


def scene(seconds: float, *, rate_hz: float = 10.0, wrist: Any = None, skip: Any = None) -> list[Message]:
    """All cameras and joints; ``wrist(k, t)`` makes the wrist's message, ``skip(name, t)`` leaves one out."""
    out = []
    for k in range(round(seconds * rate_hz)):
        t = k / rate_hz
        for name, topic in CAMERAS.items():
            if skip is not None and skip(name, t):
                continue
            made = wrist(k, t) if wrist is not None and name == "wrist" else image(t, topic, SCENE)
            out += made if isinstance(made, list) else [made]
        out.append(state(t))
    return out


def encoded(t: float, encoding: str, data: np.ndarray, step: int, **fields: Any) -> Message:
    return image(t, CAMERAS["wrist"], SCENE, encoding=encoding, data=data.reshape(-1), step=step, **fields)


def padded_bgr(k: int, t: float) -> Message:
    rows = np.full((10, 68), 0xEE, np.uint8)
    rows[:, :54] = SCENE[..., ::-1].reshape(10, 54)
    return encoded(t, "bgr8", rows, 68)


def short_in_the_middle(k: int, t: float) -> Message:
    data = SCENE.reshape(-1)
    return encoded(t, "rgb8", data[:-1] if k in (2, 3, 5) else data, 54)


def recordings() -> list[dict[str, Any]]:
    """Cases of kind ``mcap``."""
    sha = hashlib.sha256(np.ascontiguousarray(SCENE).tobytes()).hexdigest()
    blue = np.tile(np.array([41, 240, 41, 110], np.uint8), (10, 9))  # Y U Y V of (0, 0, 255)
    vendor = np.zeros((10, 18), np.uint8)
    depth = np.frombuffer(b"\0" * 12 + b"\x89PNG\r\n\x1a\n", np.uint8)
    shapes = {"exterior_0": (20, 20), "exterior_1": (10, 18), "wrist": (24, 30)}
    made: list[tuple[str, list[Message], dict[str, Any]]] = []

    def case(
        id_: str, messages: list[Message], verdict: str, scenario: str, expect: dict[str, Any], **more: Any
    ) -> None:
        made.append((id_, messages, {"verdict": verdict, "scenario": scenario, "expect": expect, **more}))

    case(
        "ROS-101",
        scene(0.6, wrist=padded_bgr),
        "accept",
        "wrist bgr8 with 14 bytes of padding in each row",
        {
            "wrist_frame0_rgb_sha256": sha,
            "wrist_frame2_first_px": SCENE[0, 0].tolist(),
            "wrist_frame2_last_px": SCENE[-1, -1].tolist(),
            "no_pixel_equals": [0xEE] * 3,
            "equal_to": "exterior_1 frame 0",
        },
    )
    case(
        "ROS-102",
        scene(0.7, wrist=short_in_the_middle),
        "drop_sample",
        "three wrist frames lack their last byte",
        {"dropped": 3, "accepted": 4, "alive": True, "log_once": True, "other_cameras_ok": True},
    )
    case(
        "ROS-103",
        scene(0.6, wrist=lambda k, t: encoded(t, "yuv422_yuy2", blue, 36)),
        "accept",
        "yuv422_yuy2, blue",
        {"wrist_px_rgb_approx": [0, 0, 254], "tolerance": 6},
    )
    case(
        "ROS-104",
        scene(0.6, wrist=lambda k, t: encoded(t, "BayerGR8", vendor, 18)),
        "drop_sample",
        "a vendor's name of an encoding",
        {
            "log_contains": ["BayerGR8", "bayer_grbg8"],
            "log_lists_supported": True,
            "other_cameras_ok": True,
            "status": "waiting for wrist",
            "trajectories_published": 0,
            "option": "encoding override bayer_grbg8 for the wrist",
        },
    )
    compressed = {"format": "32FC1; compressedDepth png", "data": depth}
    case(
        "ROS-105",
        scene(
            0.5,
            wrist=lambda k, t: Message(t, f"{CAMERAS['wrist']}/compressed", "compressed", {"stamp_s": t, **compressed}),
        ),
        "drop_sample",
        "compressed depth on the topic of a colour camera",
        {"reason_mentions": "compressedDepth", "alive": True},
    )
    arm, jaw = dict(zip(ARM, MEASURED, strict=True)), {FINGER: 0.05}
    parts = [m for m in scene(0.6) if m.kind != "joints"]
    parts += [state(k / 20, positions=arm, velocity=np.full(7, np.nan)) for k in range(12)]
    parts += [state(k / 10 + 0.155, positions=jaw | {"lamp": 7.0}) for k in range(4)]
    case(
        "ROS-106",
        parts,
        "accept",
        "arm and finger from two publishers, the finger later; velocities NaN",
        {"joint_position": MEASURED, "gripper_position_policy": 0.5, "ready_only_after_both": True, "tolerance": 1e-6},
    )
    empty = [m for m in scene(0.6) if m.kind != "joints"]
    empty += [state(k / 20, **({"position": np.zeros(0), "velocity": np.zeros(8)} if k % 3 else {})) for k in range(12)]
    case(
        "ROS-107",
        empty,
        "drop_sample",
        "two of three JointStates have velocities only",
        {"joint_position": MEASURED, "dropped": 8, "no_zero_fill": True},
    )
    white = np.full_like(SCENE, 255)
    dark = [image(m.at_s, m.topic, white) if m.kind == "image" and m.at_s < 0.45 else m for m in scene(0.9)]
    case(
        "ROS-108",
        dark,
        "accept",
        "the first five frames of all cameras are white",
        {
            "warn": "uniform image on <camera>",
            "option": "min_image_std gate holds the episode start until frame 5",
            "frames_used_when_gated_from": 5,
        },
    )
    sizes = [
        m
        if m.kind == "joints"
        else image(m.at_s, m.topic, picture(*next(s for n, s in shapes.items() if CAMERAS[n] == m.topic)))
        for m in scene(0.6)
    ]
    case(
        "ROS-109",
        sizes,
        "accept",
        "three sizes of pictures",
        {"each_camera_resized_to": [180, 320], "aspect_rule": "padded"},
    )
    case(
        "ROS-110",
        scene(0.8, skip=lambda name, t: name == "exterior_1"),
        "hold",
        "a camera that never publishes",
        {"status_names": ["exterior_image_2_left", "/cams/right"], "trajectories_published": 0},
    )
    case(
        "ROS-111",
        scene(4.0, skip=lambda name, t: name == "exterior_0" and 0.75 < t < 2.45),
        "hold",
        "a camera is silent for 1.8 s and comes back",
        {
            "hold_from_s": 1.1,
            "tolerance_s": 0.1,
            "resumes": True,
            "resumes_by_s": 3.2,
            "log_contains": "back after 1.80 s",
        },
    )
    zero = [m._replace(fields=m.fields | {"stamp_s": float("-inf")}) for m in scene(0.6)]
    case(
        "TIM-101",
        zero,
        "accept",
        "all stamps are zero",
        {"rule": "receive time with a warning, or refuse with a reason", "warn_once_per_topic": True},
    )
    loop = []
    for m in scene(1.2):
        loop += [m, m._replace(at_s=m.at_s + 1.2)]
    loop += [
        Message(k / 10 - 1e-3 + lap * 1.2, "/clock", "clock", {"stamp_s": k / 10}) for k in range(12) for lap in (0, 1)
    ]
    case(
        "TIM-102",
        loop,
        "reset_episode",
        "a recording played in a loop, with its /clock",
        {"resets": 1, "after_reset_inference_within_s": 0.6, "alive": True, "backward_jump_s": 1.1},
        use_sim_time=True,
    )
    behind = scene(0.8, wrist=lambda k, t: image(t, CAMERAS["wrist"], SCENE, stamp_s=t - 4321.0))
    case(
        "TIM-103",
        behind,
        "hold",
        "the wrist camera's clock is 4321 s behind",
        {"status_names": "wrist", "says_age_about_s": 4321, "option": "stamp_source: receive"},
    )
    case(
        "TIM-104",
        scene(2.0, skip=lambda name, t: name == "wrist" and t > 0.65),
        "hold",
        "a camera stops",
        {"hold_from_s": 1.0, "tolerance_s": 0.1, "status_names": "wrist"},
    )
    burst = scene(
        1.5, wrist=lambda k, t: image(0.602 + k * 1e-3 if 2 <= k <= 6 else t, CAMERAS["wrist"], SCENE, stamp_s=t)
    )
    case(
        "TIM-105",
        burst,
        "accept",
        "wrist frames 2 to 6 come together at 0.6 s",
        {"frame_used_after_burst": 6, "extra_inferences_from_burst": 0},
    )
    case(
        "TIM-106",
        scene(0.6),
        "hold",
        "simulated time, but no /clock",
        {"within_wall_s": 5, "status_mentions": "/clock"},
        use_sim_time=True,
    )
    ahead = scene(0.8, wrist=lambda k, t: image(t, CAMERAS["wrist"], SCENE, stamp_s=t + 3.0))
    case(
        "TIM-109",
        ahead,
        "hold",
        "the wrist camera's clock is 3 s ahead",
        {"status_names": ["wrist", "/cams/hand"], "says_age_about_s": 3, "option": "stamp_source: receive"},
    )
    silent = [m for m in scene(4.0) if m.kind != "joints" or not 1.05 < m.at_s < 2.55]
    case(
        "TIM-110",
        silent,
        "hold",
        "the joints are silent for 1.6 s and come back",
        {"hold_from_s": 1.35, "tolerance_s": 0.1, "status_names": "/robot/joint_states", "resumes_by_s": 3.2},
    )
    both = scene(0.8, wrist=lambda k, t: image(t, CAMERAS["wrist"], picture(12, 32)))
    case(
        "ROS-114",
        both,
        "accept",
        "two pictures side by side on the wrist's topic",
        {"warn": "side by side", "option": "the left half for the wrist", "each_camera_resized_to": [180, 320]},
    )
    out = []
    for id_, messages, entry in made:
        folder = id_.lower().replace("-", "_")
        write(DATA / folder, messages, start_ns=T0)
        out.append({"id": id_, "kind": "mcap", "files": [folder], **entry})
    return out  # fmt: skip


def chunks() -> list[dict[str, Any]]:
    """Cases of kind ``npz``."""
    q = np.array([*MEASURED, 0.25])
    slow = np.tile(q, (24, 1))
    slow[:, 0] += 0.01 * np.arange(1, 25)
    jump, holes, degrees = slow.copy(), slow.copy(), slow.copy()
    jump[12:, 3] += 0.6
    holes[7, 2] = np.inf
    degrees[:, :7] = np.rad2deg(degrees[:, :7])
    made = [
        ("TRJ-101", slow, "accept", "a slow chunk", {"points": 24, "last_tfs_s": 1.6, "tolerance": 1e-3}),
        ("TRJ-102", holes, "reject_chunk", "one value is infinite", {"published": 0, "reason_mentions": "finite"}),
        ("TRJ-103", jump, "accept", "a joint jumps by 0.6 rad", {
            "published_max_abs_velocity": 1.5, "or_verdict": "reject_chunk", "visible_warning": True}),
        ("TRJ-104", degrees, "reject_chunk", "degrees", {
            "reason_mentions": "limit", "must_not": "be clamped to the limits and executed"}),
        ("TRJ-105", slow[:, :6], "reject_chunk", "two columns are missing", {"message_contains": ["6", "8"]}),
    ]  # fmt: skip
    out = []
    for id_, chunk, verdict, scenario, expect in made:
        file = f"{id_.lower().replace('-', '_')}.npz"
        np.savez(DATA / file, chunk=chunk.astype(np.float32), dt=1 / 15, q_measured=np.array(MEASURED))
        out.append(
            {"id": id_, "kind": "npz", "files": [file], "verdict": verdict, "scenario": scenario, "expect": expect}
        )
    actions = np.array([0.0, 0.25, 0.5, 1.0, 1.04, -0.02])
    np.savez(DATA / "trj_106.npz", gripper_action=actions, expected_finger_m=0.09 - 0.08 * np.clip(actions, 0, 1))
    out.append({"id": "TRJ-106", "kind": "npz", "files": ["trj_106.npz"], "verdict": "accept",
                "scenario": "fractions of the gripper, a little beyond both ends",
                "expect": {"finger_m": "expected_finger_m in the file", "tolerance": 1e-6}})  # fmt: skip
    return out


def texts() -> list[dict[str, Any]]:
    """Cases of the kinds ``json``, ``yaml`` and ``scenario``: (id, kind, verdict, scenario, expect, content)."""
    names = [*ARM, FINGER]
    point = {"positions": [0.1] * 8, "time_from_start": 0.1}
    later = {"positions": [0.1] * 8, "time_from_start": 0.05}
    good = {"joint_names": names, "points": [point, {**point, "time_from_start": 0.3}]}
    messages = {
        "backwards": {**good, "points": [point, later]},
        "stamped": {**good, "header": {"stamp": {"sec": 5, "nanosec": 0}}},
        "velocity_at_end": {**good, "points": [{**point, "velocities": [0.2] * 8}]},
        "hole": {**good, "points": [{**point, "positions": [None] * 8}]},
        "nobody": {**good, "joint_names": []},
    }
    topics = {name: {"topic": topic} for name, topic in CAMERAS.items()}
    typo = {("hand" if name == "wrist" else name): topic for name, topic in topics.items()}
    qos = [
        ("/cams/left", "best_effort", "volatile", 2),
        ("/cams/right", "reliable", "transient_local", 1),
        ("/cams/hand", "reliable", "volatile", 4),
        ("/robot/joint_states", "best_effort", "volatile", 3),
    ]
    publishers = [dict(zip(("topic", "reliability", "durability", "depth"), q, strict=True)) for q in qos]
    return [
        _text("ROS-112", "yaml", "refuse_start", "a camera's key is not the embodiment's",
              {"message_contains": ["hand", "wrist_image_left"]}, {"cameras": typo}),
        _text("ROS-113", "json", "accept", "publishers of four kinds of QoS",
              {"all_matched": True, "on_mismatch": "an event with the topic is logged"}, {"publishers": publishers}),
        _text("TIM-107", "scenario", "accept", "the system's clock is set back by 30 s",
              {"control_loop_gap_s_max": 0.5, "inferences_continue": True},
              {"events": [{"t": 0, "do": "run", "input": "nominal"}, {"t": 3, "do": "set_system_clock", "delta_s": -30},
                          {"t": 3, "do": "keep_publishing", "seconds": 5}]}),
        _text("TIM-108", "scenario", "accept", "a step of 0.2 s while /clock stands still",
              {"measured_latency_s": 0.2, "tolerance_s": 0.05, "clock": "steady"},
              {"events": [{"t": 0, "do": "sim"}, {"t": 1, "do": "infer", "wall_latency_s": 0.2}]}),
        _text("TRJ-107", "json", "never_published", "trajectories that no controller executes as meant",
              {"validator_flags_all": list(messages), "good_shape": "as the node's own"}, messages),
        _text("TRJ-108", "scenario", "accept", "two chunks, then ticks only", {"trajectories_published": 2},
              {"events": [{"t": 0, "do": "chunk"}, {"t": 0.6, "do": "chunk"}, {"t": 0.7, "do": "timer_tick"},
                          {"t": 0.8, "do": "timer_tick"}]}),
        _text("TRJ-109", "json", "accept", "latency in steps", {"skip": "see cases"},
              {"dt_s": 1 / 15, "horizon": 24, "running_chunk": True, "cases": [
                  {"latency_s": 0.0, "skip": 0}, {"latency_s": 0.1, "skip": 2}, {"latency_s": 4 / 15, "skip": 4},
                  {"latency_s": 0.79, "skip": 12}]}),
        _text("TRJ-110", "json", "refuse_start", "the policy speaks of another action space",
              {"message_contains": ["cartesian_position", "joint_position"]},
              {"server_metadata": {"action_space": "cartesian_position"}}),
        _text("TRJ-111", "scenario", "hold", "the operator stops in the middle of a chunk",
              {"published_after_stop": "one hold", "never": "an empty trajectory"},
              {"events": [{"t": 0, "do": "chunk"}, {"t": 0.9, "do": "stop"}], "q_measured_at_stop": MEASURED}),
        _text("OPS-101", "yaml", "accept", "whole numbers where fractions are meant",
              {"control_hz": 15.0, "image_stale_after_s": 2.0},
              {"policy_node": {"ros__parameters": {"control_hz": 15, "image_stale_after_s": 2}}}),
        _text("OPS-102", "yaml", "refuse_start", "another period than the policy's",
              {"message_contains": ["0.05", "0.066"]}, {"policy": {"dt_s": 0.05}, "checkpoint_dt_s": 0.0666667}),
        _text("OPS-103", "scenario", "accept", "SIGTERM while the robot moves",
              {"exit_code": 0, "within_s": 5, "threads_left": 0, "last_published": "hold or nothing"},
              {"events": [{"t": 0, "do": "running"}, {"t": 1, "do": "SIGTERM"}]}),
        _text("MOD-101", "json", "accept", "normalisation and back", {"tolerance": 1e-6},
              {"stats": {"q01": [-2.0, 0.0], "q99": [2.0, 10.0]}, "mode": "q99", "raw": [1.0, 12.0],
               "normalised_clipped": [0.5, 1.0], "action_normalised": [-0.5, 1.0], "action_raw": [-1.0, 10.0]}),
        _text("MOD-102", "yaml", "refuse_start", "an option with a typo", {"message_contains": "guidence_scale"},
              {"policy": {"guidence_scale": 2.0}}),
    ]  # fmt: skip


def devices() -> list[dict[str, Any]]:
    """What a device is asked before it serves, small enough for a CPU."""
    kernel = {"n": 1, "d": 3, "h": 12, "w": 20, "k": [3, 3, 3]}
    out = [
        _text("GPU-101", "json", "accept", "bf16 conv3d against float32", {
            "wrong_result": "refuse or switch the algorithm, never serve"}, {
            "cases": [{"cin": 16, "cout": 24, **kernel}, {"cin": 8, "cout": 8, **kernel}], "max_rel_err": 0.02}),
        _text("GPU-102", "json", "accept", "layouts of a conv3d, timed", {
            "reports": ["torch", "cudnn", "layout chosen"]}, {
            "shape": {"n": 1, "c": 8, "d": 3, "h": 12, "w": 20, "k": 3},
            "dtypes": ["bf16", "fp32"], "layouts": ["contiguous", "channels_last_3d"]}),
        _text("GPU-103", "json", "accept", "8-bit products of odd widths", {
            "no_exception": True, "max_rel_err": 0.08}, {
            "shapes_MKN": [[1, 256, 256], [5, 250, 24], [33, 48, 8], [17, 40, 9]]}),
        _text("GPU-104", "scenario", "accept", "a window, its restart, and a reset", {
            "recompiles_after_warmup": 0, "graph_captures_after_warmup": 0}, {
            "sequence": ["T=1", *["T=4"] * 5, "reset T=1", "T=4"]}),
    ]  # fmt: skip
    rows, columns = np.mgrid[0:11, 0:14]
    image = np.stack([rows * 20, columns * 18, (rows + columns) % 2 * 255], axis=-1).astype(np.uint8)
    np.savez(DATA / "gpu_105.npz", image=image)
    return [*out, {"id": "GPU-105", "kind": "npz", "files": ["gpu_105.npz"], "verdict": "accept",
                   "scenario": "a small picture resized on the device", "expect": {"float_first": True}}]  # fmt: skip


def checkpoints() -> list[dict[str, Any]]:
    """Folders that must be refused before anything large is read."""
    config = {"architectures": ["VLA"], "model_type": "vla", "action_horizon": 24, "action_dim": 32}
    shards = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    index = {"weight_map": {f"blocks.{i}.w": name for i, name in enumerate(shards)}}
    weights = {"blocks.0.w": np.zeros((2, 3), np.float32)}
    robots = {name: {"statistics": {}} for name in ("agibot", "yam")}
    folders: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "MOD-103": ("two of three shards are missing", {"message_contains": shards[1:], "before": "weights are read"},
                    {"model.safetensors.index.json": index, shards[0]: weights}),
        "MOD-104": ("no statistics", {"message_mentions": "statistics", "never": "identity"},
                    {"model.safetensors": weights}),
        "MOD-105": ("statistics of other robots", {"message_contains": ["oxe_droid", "agibot", "yam"]},
                    {"metadata.json": robots}),
    }  # fmt: skip
    out = []
    for id_, (scenario, expect, files) in folders.items():
        folder = DATA / id_.lower().replace("-", "_")
        folder.mkdir()
        for name, content in ({"config.json": config} | files).items():
            if name.endswith(".safetensors"):
                (folder / name).write_bytes(save(content))
            else:
                (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        out.append({"id": id_, "kind": "ckpt_dir", "files": [folder.name], "verdict": "refuse_start",
                    "scenario": scenario, "expect": expect})  # fmt: skip
    return out


def rows() -> list[dict[str, Any]]:
    """Reports without a file: what is odd, as numbers and words; the number of the case is that of the row plus 100."""

    def one(row: str, verdict: str, scenario: str, expect: dict[str, Any], **content: Any) -> dict[str, Any]:
        area, number = row.split("-")
        return _text(f"{area}-{100 + int(number)}", "json", verdict, scenario, expect, {"row": row, **content})

    hip, cuda = ["hip", "gfx942"], ["cuda", [9, 0]]
    return [
        one("MOD-06", "refuse_start", "statistics of several robots, none of them asked for", {
            "message_contains": ["'agibot'", "'yam'"]}, in_file=["agibot", "yam"], asked=["oxe_droid", "", "None"]),
        one("MOD-07", "accept", "a robot with fewer joints than the widest; a gripper whose data stop short of its end",
            {"live_columns": 14, "padding_is_zero": True, "gripper_reaches": 1.0},
            embodiment="yam", width=64, gripper_q99=0.8, gripper=1.0),
        one("MOD-08", "accept", "32 columns, of which 8 are live", {
            "live": 8, "shape": [4, 8], "padding_does_not_matter": True, "message_contains": ["joint_position"]},
            embodiment="oxe_droid", width=32, padding=1e9),
        one("MOD-09", "accept", "no package with an attention kernel", {
            "first_step_works": True, "message_contains": "attention: torch"},
            absent=["flash_attn", "flash_attn_interface", "sageattention", "xformers"]),
        one("MOD-10", "accept", "memory while a checkpoint is loaded", {
            "stored_tensors_at_a_time": 2, "peak_over_final_below": 1.1}),
        one("MOD-11", "accept", "two ranks and no seed", {"one_noise_for_all": True}, gpus=2),
        one("MOD-12", "accept", "one observation through every door", {
            "inputs_bit_equal": True, "actions_equal": True}, seed=4, prompt="pick up the blue cup",
            arm_rad=[0.1, -0.2, 0.3, -0.4, 0.5, -0.6, 0.7], gripper=1.0),
        one("GPU-06", "accept", "pictures of sizes nobody measured", {"sizes_convolved": 1},
            sizes_hw=[[171, 305], [257, 513], [180, 320]]),
        one("GPU-07", "accept", "timing of convolutions is somebody's wish, not a habit", {
            "timed_in_a_call": False, "process_switch_kept": True}),
        one("GPU-08", "accept", "MIOpen with a home that cannot be written, told to search", {
            "warnings": 4, "message_contains": ["MIOPEN_USER_DB_PATH", "MIOPEN_CUSTOM_CACHE_DIR", "MIOPEN_FIND_MODE",
                                                "MIOPEN_FIND_ENFORCE"]},
            machine=hip, home="read-only",
            environment={"TRITON_CACHE_DIR": "own", "MIOPEN_FIND_MODE": "NORMAL", "MIOPEN_FIND_ENFORCE": "3"}),
        one("GPU-09", "accept", "8-bit products that are slower than native ones", {
            "said": [1, 0], "message_contains": ["2.00 against 1.00 ms", "set linears: native"]},
            measured_ms=[[2.0, 1.0], [0.6, 1.0]]),
        one("GPU-10", "accept", "expandable segments on ROCm", {
            "warnings": 1, "message_contains": ["PYTORCH_HIP_ALLOC_CONF", "unset it"]},
            machine=hip, home="own", environment={"PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True"}),
        one("GPU-11", "refuse_start", "a cache of kernels that cannot be written", {
            "message_contains": ["Triton cannot write", "TRITON_CACHE_DIR"]},
            machine=cuda, home="own", environment={"TRITON_CACHE_DIR": "read-only"}),
        one("GPU-12", "refuse_start", "steps that take longer than their chunk lasts", {
            "refused": 2, "message_contains": ["slower than its chunks last", "a step takes 3.00 s", "stop_and_go"]},
            warm_up_s=[3.0, 1.7], mode="receding"),
        one("GPU-13", "accept", "many requests, each from a new thread", {
            "answered": 200, "threads_that_compute": 1, "threads_grow_by_at_most": 3}, requests=200),
        _text("OPS-104", "scenario", "accept", "the host that was asked for, and the one without asking", {
            "listens_on": ["127.0.0.1"], "never": "0.0.0.0 unless asked"},
            {"args": ["--host", "127.0.0.1", "--port", "0"]}),
        one("OPS-05", "accept", "no cv_bridge", {"importers": 0, "picture_comes_back": True},
            absent="cv_bridge", picture_hw=[7, 9]),
        one("OPS-06", "accept", "publishers that are known, and no data", {
            "within_s": 5.0, "nothing_said_without_reason": True,
            "message_contains": ["shared memory", "container", "2 publisher(s)"]},
            publishers=2, look_s=1.0, seconds=6.0),
        one("OPS-07", "accept", "somebody waits in the thread that others need", {
            "others_get_in": True, "woken": True, "ends_by_itself": True}, wait_s=20.0),
        one("OPS-08", "accept", "an engine that fails at every request", {
            "ready_before": 200, "ready": 503, "health": 200, "answers_are_errors": True, "sessions_left": 0,
            "ready_after": 200, "message_contains": ["the last 3 call(s) failed", "no kernel image"]},
            raises="no kernel image is available", requests=3),
        one("OPS-09", "hold", "one bad stream among four", {
            "topics_named": [True], "message_contains": ["truncated image"]}, bad_camera="exterior_1", frames=12),
        one("OPS-10", "accept", "steps of a second, cameras at 10 Hz", {
            "frames_keep_their_stamps": True, "calls": 3}, inference_s=1.0, camera_period_s=0.1, calls=3),
    ]  # fmt: skip


def _text(id_: str, kind: str, verdict: str, scenario: str, expect: dict[str, Any], content: Any) -> dict[str, Any]:
    file = f"{id_.lower().replace('-', '_')}.{'yaml' if kind == 'yaml' else 'json'}"
    dump = yaml.safe_dump(content) if kind == "yaml" else json.dumps(content, indent=1) + "\n"
    (DATA / file).write_text(dump, encoding="utf-8")
    return {"id": id_, "kind": kind, "files": [file], "verdict": verdict, "scenario": scenario, "expect": expect}


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    DATA.mkdir()
    (DATA / "reference_config.yaml").write_text(yaml.safe_dump(CONFIG, sort_keys=False), encoding="utf-8")
    cases = [*recordings(), *chunks(), *texts(), *checkpoints(), *devices(), *rows(), *requests(DATA)]
    (DATA / "index.json").write_text(json.dumps({"cases": cases}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
