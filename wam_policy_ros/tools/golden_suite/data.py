"""From raw observations to network inputs and from network outputs to robot actions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wam_policy_ros.contract.embodiment import Embodiment, get_embodiment
from wam_policy_ros.contract.history import FrameHistory
from wam_policy_ros.contract.interface import CameraSpec, FieldSpec, Observation, PolicySpec
from wam_policy_ros.contract.normalization import FieldStatistics, Statistics
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT, build_prompt
from wam_policy_ros.contract.transforms import decode_actions, encode_state
from wam_policy_ros.engine.preprocess import crop_box, stitch_views
from wam_policy_ros.model.tokenizer import ByteTokenizer, clean_text

from .folder import COMPONENT_LIMIT, GoldenFolder, Group, Recording, Row

JSON, DATA, IMAGES = "data.json", "data.safetensors", "data_images.safetensors"
MAX_IMAGE_FAULTS = 1e-3  # fraction of pixels that may be off by one


def check(folder: GoldenFolder) -> list[Row]:
    if not folder.has(JSON):
        return []
    info = folder.json(JSON)
    data = folder.read(DATA, on_cpu=True) if folder.has(DATA) else Recording()
    robot = _robot(info, data)
    rows = [_prompts(info, robot)]
    if info.get("frame_buffer_sequence"):
        rows.append(_frames(info, robot))
    if data:
        found = [_vectors(info, data, robot), _normalisers(info, data, robot)]
        # A recording may hold only one of the two; a file of which nothing was compared stays a miss.
        rows += [r for r in found if r.tensors] or found[:1]
    if folder.has(IMAGES):
        images = folder.read(IMAGES, on_cpu=True)
        rows.append(_images(images, robot))
        if data and (stages := _stages(data, images, robot)).count:
            rows.append(stages.row())
    return rows


def _robot(info: dict[str, Any], data: Recording) -> Embodiment:
    """The embodiment page with the recording's own sizes, fields and relative keys.

    Of several embodiments in the statistics it is the one whose id the recorded inputs carry, else the first.
    """
    tags = list(info["metadata"])
    recorded = next((k for k in data if k.endswith(".model_in.embodiment_id")), None)
    if recorded is not None:
        wanted = int(data[recorded].reshape(-1)[0])
        tags = [t for t in tags if get_embodiment(t).embodiment_id == wanted] or tags
    tag, entry = tags[0], info["metadata"][tags[0]]
    page = get_embodiment(tag)
    modalities = entry["modalities"]
    relative = info.get("relative_action_keys", [])

    def fields(known: tuple[FieldSpec, ...], kind: str) -> tuple[FieldSpec, ...]:
        shapes = modalities[kind]
        return tuple(replace(f, dim=int(shapes[f.name]["shape"][0])) for f in known if f.name in shapes)

    cameras = []
    for camera in page.cameras:
        width, height = modalities["video"][camera.name]["resolution"]
        cameras.append(replace(camera, width=int(width), height=int(height)))
    out_h, out_w = info.get("out_hw", (page.view_height, page.view_width))
    action = tuple(replace(f, relative=f.name in relative) for f in fields(page.action, "action"))
    return replace(
        page,
        cameras=tuple(cameras),
        state=fields(page.state, "state"),
        action=action,
        view_height=out_h,
        view_width=out_w,
        horizon=int(info.get("action_horizon", page.horizon)),
    )


def _prompts(info: dict[str, Any], robot: Embodiment) -> Row:
    group = Group(JSON, "prompt strings", 0.0)
    if "text_negative" in info:
        group.exact("negative prompt", clean_text(NEGATIVE_PROMPT), info["text_negative"])
    for i, case in enumerate(info["cases"]):
        positive = clean_text(build_prompt(case["prompt"], robot.prompt_template, allow_empty=True))
        negative = clean_text(NEGATIVE_PROMPT)
        group.exact(f"case{i}", [[negative], [positive]], case["tokenised_texts"])
    if "crop_size" in info:
        camera = robot.cameras[0]
        group.exact("crop", list(crop_box(camera.height, camera.width, robot.crop_scale)[2:]), info["crop_size"])
    return group.row()


def _frames(info: dict[str, Any], robot: Embodiment) -> Row:
    """Which frames reach the model: unstamped frames, by order of arrival, as the published server does."""
    group = Group(JSON, "frame buffer sequence", 0.0)
    small = tuple(CameraSpec(c.name, c.topic, 1, 4) for c in robot.cameras)
    spec = PolicySpec(
        robot.tag, small, robot.state, robot.action, robot.control_rate_hz, robot.horizon, (-3, -2, -1, 0)
    )
    history, first, sent = FrameHistory(spec), True, 0
    keys = ("ids_ext1", "ids_ext2", "ids_wrist")
    bases = (0, 100, 50)
    for number, entry in enumerate(info.get("frame_buffer_sequence", [])):
        if entry == "reset":
            history, first = FrameHistory(spec), True
            continue
        count = entry["sent_frames"]
        frames = {}
        for camera, base in zip(small, bases, strict=True):
            ids = np.arange(sent, sent + count, dtype=np.uint32) + base
            frames[camera.name] = np.repeat(ids[:, None].view(np.uint8), 3, axis=1).reshape(count, 1, 4, 3)
        sent += count
        history.add(Observation(frames, {}, ""))
        drawn = history.draw(first_call=first)
        first = False
        got = {
            key: [int(np.ascontiguousarray(f.reshape(-1)[::3][:4]).view(np.uint32)[0]) for f in drawn.frames[c.name]]
            for key, c in zip(keys, small, strict=True)
        }
        group.exact(f"send {number}", got, {k: entry[k] for k in keys})
    return group.row()


def _vectors(info: dict[str, Any], data: Recording, robot: Embodiment) -> Row:
    group = Group(DATA, "tokens, state, decoded actions", COMPONENT_LIMIT)
    statistics = Statistics.from_metadata(info["metadata"], robot.tag, state=robot.state, action=robot.action)
    tokenizer = ByteTokenizer(int(info["max_length"]), truncate=True)
    for i, case in enumerate(info["cases"]):
        key = f"case{i}."
        text = build_prompt(case["prompt"], robot.prompt_template, allow_empty=True)
        for name, value in (("text", text), ("text_negative", NEGATIVE_PROMPT)):
            ids, mask = tokenizer([value])
            suffix = "_negative" if name == "text_negative" else ""
            _exact(group, data, key + f"model_in.{name}", ids)
            _exact(group, data, key + f"model_in.text_attention_mask{suffix}", mask)
        for marker in ("has_lapa_action", "is_cotrain_instance"):  # training-time switches, off at inference
            _exact(group, data, key + f"model_in.{marker}", torch.tensor([False]))
        if key + "model_in.state" not in data:
            continue
        state = {f.name: data[f"{key}in.state.{f.name}"].reshape(-1).numpy() for f in robot.state}
        expected = data[key + "model_in.state"]
        vector = encode_state(state, robot.state, statistics, expected.shape[-1])
        group.compare(key + "state", torch.from_numpy(vector).view_as(expected), expected)
        stage = f"stage.{key}state_joint_normalised"
        if stage in data:
            joints = torch.from_numpy(vector[: robot.state[0].dim])
            group.compare(stage, joints.view_as(data[stage]), data[stage])
        _exact(group, data, key + "model_in.state_mask", _mask(expected, robot.state))
        _exact(group, data, key + "model_in.embodiment_id", torch.tensor([robot.embodiment_id]))
        recorded = f"{key}in.action_pred_normalised_bf16_as_f32"
        if recorded in data:
            rows = torch.from_numpy(decode_actions(data[recorded][0].numpy(), robot.action, statistics, state))
            at = 0
            for f in robot.action:
                part = rows[:, at : at + f.dim]
                at += f.dim
                if f"{key}out.action.{f.name}" in data:
                    target = data[f"{key}out.action.{f.name}"]
                    group.compare(f"{key}action.{f.name}", part.reshape(target.shape), target)
    if "convert_action.out" in data:
        joint, gripper = data["convert_action.joint"], data["convert_action.gripper"]
        wire = torch.cat([joint, gripper.reshape(len(joint), -1)], dim=1).float()
        for name in ("out", "out_gripper1d"):
            group.check(wire, data, f"convert_action.{name}")
    return group.row()


def _mask(state: Tensor, fields: tuple[FieldSpec, ...]) -> Tensor:
    mask = torch.zeros_like(state, dtype=torch.bool)
    mask[..., : sum(f.dim for f in fields)] = True
    return mask


def _exact(group: Group, data: Recording, name: str, got: Tensor) -> None:
    if name in data:
        group.exact(name, got.tolist(), data[name].tolist())


def _normalisers(info: dict[str, Any], data: Recording, robot: Embodiment) -> Row:
    group = Group(DATA, "normalisers", COMPONENT_LIMIT)
    raw = info["metadata"][robot.tag]["statistics"]["action"]
    first = next(f.name for f in robot.action)
    tables = {"normaliser": raw[first], "per_horizon": info.get("per_horizon_stats", {})}
    for key in sorted(data):
        match = re.fullmatch(r"(normaliser|per_horizon)\.(\w+)\.(forward|inverse_of_x)", key)
        if not match:
            continue
        arrays = {k: np.asarray(v, dtype=np.float64) for k, v in tables[match[1]].items()}
        statistics = FieldStatistics(first, **{k: v for k, v in arrays.items() if k in _STATISTICS})
        x = data[f"{match[1]}.x"].numpy()
        operation = statistics.forward if match[3] == "forward" else statistics.inverse
        group.compare(key, torch.from_numpy(np.asarray(operation(x, match[2]))), data[key])  # type: ignore[arg-type]
    return group.row()


_STATISTICS = ("q01", "q99", "min", "max", "mean", "std")


def _stages(data: Recording, images: Recording, robot: Embodiment) -> Group:
    """Between crop, resize and the uint8 view: the float values of one camera."""
    group = Group(DATA, "stages of the image path", COMPONENT_LIMIT)
    for key in sorted(data):
        match = re.fullmatch(r"stage\.case(\d+)\.(\w+?)_after_(center_crop_row0|resize_rows0_(\d+)_float)", key)
        if match is None:
            continue
        camera = next((c for c in robot.cameras if c.name.startswith(match[2])), None)
        source = f"case{match[1]}.in.video.{camera.name}" if camera is not None else ""
        if source not in images:
            continue
        frames = images[source]
        top, left, height, width = crop_box(frames.shape[1], frames.shape[2], robot.crop_scale)
        cropped = frames[:, top : top + height, left : left + width].permute(0, 3, 1, 2).float() / 255
        if match[4] is None:
            group.compare(key, cropped[0, :, 0], data[key])
        else:
            size = (robot.view_height, robot.view_width)
            resized = F.interpolate(cropped, size=size, mode="bilinear", align_corners=False, antialias=True)
            group.compare(key, resized[0, :, : int(match[4])], data[key])
    return group


def _images(data: Recording, robot: Embodiment) -> Row:
    """uint8 mosaics: equal, or off by one on at most a thousandth of the values."""
    group = Group(IMAGES, "mosaics (share of values off by one)", MAX_IMAGE_FAULTS)
    if "out_hw" in data.metadata:
        height, width = data.metadata["out_hw"]
        robot = replace(robot, view_height=height, view_width=width)
    for case in sorted({int(m[1]) for k in data if (m := re.match(r"case(\d+)\.model_in\.images", k))}):
        frames = {c.name: data[f"case{case}.in.video.{c.name}"].numpy() for c in robot.cameras}
        cameras = tuple(
            replace(c, height=frames[c.name].shape[1], width=frames[c.name].shape[2]) for c in robot.cameras
        )
        got = stitch_views(frames, robot, cameras=cameras)
        expected = data[f"case{case}.model_in.images"]
        if got.shape != expected.shape:
            group.fail(f"case{case}", f"shape {list(got.shape)} instead of {list(expected.shape)}")
            continue
        apart = (got.int() - expected.int()).abs()
        share = float((apart > 0).float().mean())
        group._add(f"case{case}", float("inf") if int(apart.max()) > 1 else share)
    return group.row()
