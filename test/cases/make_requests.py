"""The cases of the endpoint in ``data``: requests of our own, good and bad."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from wam_policy_ros.serving.codec import pack

HEIGHT, WIDTH = 10, 18


def requests(folder: Path) -> list[dict[str, Any]]:
    """Writes the files and returns the entries of the index."""
    out: list[dict[str, Any]] = []

    def case(number: int, kind: str, content: Any, scenario: str, verdict: str, expect: dict[str, Any]) -> None:
        suffix = {"msgpack": "msgpack", "text": "txt"}.get(kind, "json")
        name = f"pro_{number}.{suffix}"
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content, indent=1) + "\n"
            (folder / name).write_text(text, encoding="utf-8")
        out.append({"id": f"PRO-{number}", "kind": kind, "files": [name], "scenario": scenario, "verdict": verdict,
                    "expect": expect})  # fmt: skip

    joints = "observation/joint_position"
    good, other = pack(observation(0)), pack(observation(5, session="robot two", prompt="Öffne die Tür 門"))
    (folder / "pro_good.msgpack").write_bytes(good)
    (folder / "pro_other.msgpack").write_bytes(other)
    next_ok = {"next_valid_request_ok": True}
    case(101, "msgpack", pack(observation(0), "msgpack_numpy"), "the second NumPy codec", "accept",
         {"reply": "actions (24, 8), finite"})  # fmt: skip
    case(102, "msgpack", pack(observation(0) | {joints: np.full(7, np.inf)}), "a state that is not finite",
         "reject_request", next_ok | {"message_contains": [joints, "finite"]})  # fmt: skip
    case(103, "msgpack", msgpack.packb({"endpoint": "infer", joints: msgpack.ExtType(1, b"x")}), "an extension type",
         "reject_request", next_ok)  # fmt: skip
    hostile = {b"nd": True, b"type": "|O", b"kind": b"O", b"shape": [7], b"data": pickle.dumps([0.0] * 7)}
    case(104, "msgpack", msgpack.packb({joints: hostile}), "a pickle in the second codec", "reject_request",
         {"pickle_loads_called": False, "message_contains": joints})  # fmt: skip
    case(105, "msgpack", pack(observation(0) | {"observation/exterior_image_2_left": picture(1)}),
         "three exterior cameras", "reject_request", {"message_contains": "exterior_image_2_left"})  # fmt: skip
    case(106, "text", json.dumps({"endpoint": "infer"}), "JSON in a text frame", "reject_request", next_ok)
    turns = [
        {"conn": c, "send": f} for _ in range(2) for c, f in (("A", "pro_good.msgpack"), ("B", "pro_other.msgpack"))
    ]
    case(107, "scenario", {"events": turns}, "two robots in turn", "accept",
         {"each_equals_run_alone": True, "replies": 4})  # fmt: skip
    one = {"send": "pro_good.msgpack"}
    reset = {"send_dict": {"endpoint": "reset", "session_ids": ["robot one"]}}
    case(108, "scenario", {"events": [one, one, reset, one, one]}, "a list of sessions is reset", "accept",
         {"reply4_equals_reply1": True, "reply5_equals_reply2": True, "fixed_seed": True})  # fmt: skip
    case(109, "scenario", {"events": [one] * 5}, "five requests at once", "accept", {"replies": 5, "in_order": True})
    slow = [{"t": 0, "do": "infer", "conn": "X", "takes_s": 24}, {"t": 3, "do": "connect", "conn": "Y"},
            {"t": 9, "do": "ping", "conn": "X"}]  # fmt: skip
    case(110, "scenario", {"events": slow}, "a long first step", "accept",
         {"conn_Y_metadata_within_s": 2, "pong_within_s": 2, "conn_X_open_at_24s": True,
          "conn_X_gets_reply": True})  # fmt: skip
    return out


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)


def observation(seed: int, *, session: str = "robot one", prompt: str = "close the drawer") -> dict[str, Any]:
    names = ("exterior_image_0_left", "exterior_image_1_left", "wrist_image_left")
    return {f"observation/{name}": picture(seed + i) for i, name in enumerate(names)} | {
        "observation/joint_position": np.linspace(-0.4, 0.5, 7).astype(np.float32),
        "observation/gripper_position": np.array([0.1], np.float32),
        "prompt": prompt,
        "session_id": session,
        "endpoint": "infer",
    }
