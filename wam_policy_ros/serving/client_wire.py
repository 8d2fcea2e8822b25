"""What a client of each dialect sends, and what it makes of a greeting and a reply. No sockets here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import ChunkError, ConfigError, ContractMismatch, RemoteError
from wam_policy_ros.contract.fingerprint import Fingerprint
from wam_policy_ros.contract.interface import CameraSpec, Observation, PolicySpec

UNNAMED = "of a policy server that does not name them"

MAX_TEXT = 500
"""Characters of a server's error that are kept."""


@dataclass(frozen=True)
class Profile:
    """How one family of servers is spoken to.

    Attributes:
        bare: a reply that is the array itself is an answer.
        mapped: a reply that is a map with the array under ``actions`` is an answer.
        map_acknowledges: a reset is acknowledged by the TEXT frame ``reset successful``, or by a map whose ``status``
            says so.
    """

    bare: bool
    mapped: bool
    map_acknowledges: bool = False


PROFILES = {
    "dreamzero": Profile(bare=True, mapped=True),
    "roboarena": Profile(bare=False, mapped=True),
    "vllm_omni": Profile(bare=True, mapped=True, map_acknowledges=True),
    "openpi": Profile(bare=False, mapped=True),
}
ACKNOWLEDGED = "reset successful"


def profile(dialect: str) -> Profile:
    """Raises ConfigError for a dialect that this client does not speak."""
    if dialect not in PROFILES:
        raise ConfigError("unknown dialect of a policy server", got=repr(dialect), expected=f"one of {list(PROFILES)}")
    return PROFILES[dialect]


def image_key(camera: str) -> str:
    """Key of a camera in a request: DROID's exterior cameras count from 0 on the wire, from 1 in the checkpoint."""
    found = re.fullmatch(r"exterior_image_(\d+)_left", camera)
    return f"observation/exterior_image_{int(found[1]) - 1}_left" if found else f"observation/{camera}"


def infer_request(
    frames: Mapping[str, npt.NDArray[np.uint8]], observation: Observation, spec: PolicySpec, session_id: str
) -> dict[str, Any]:
    """The request map in the order of the published client.

    Args:
        frames: camera -> uint8 ``[T, H, W, 3]``, the frames of this call; a single one is sent as ``[H, W, 3]``.
        observation: state and prompt.
    """
    out: dict[str, Any] = {image_key(c.name): _unstacked(frames[c.name]) for c in spec.cameras}
    for field in spec.state:
        out[f"observation/{field.name}"] = np.asarray(observation.state[field.name], dtype=np.float64)
    return out | {"prompt": observation.prompt, "session_id": session_id, "endpoint": "infer"}


def reset_request(session_id: str) -> dict[str, Any]:
    return {"endpoint": "reset", "session_id": session_id}


def _unstacked(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return frames[0] if len(frames) == 1 else frames


def read_greeting(greeting: object, expected: PolicySpec, *, action_space: str = "") -> PolicySpec:
    """The spec of the server's policy.

    Args:
        greeting: the first message, unpacked. Servers of this package add a ``contract`` where the dialect allows it.
        expected: what this side was configured for.
        action_space: what the operator knows of a server that does not say it.

    Returns:
        ``expected`` with the server's image size, weights and details.

    Raises:
        ContractMismatch: names the first difference, what the server announces and what is needed.
    """
    if not isinstance(greeting, Mapping):
        raise ContractMismatch(
            "the policy server greets with something else than a map", got=type(greeting).__name__, expected="a map"
        )
    contract = greeting.get("contract", {})
    contract = contract if isinstance(contract, Mapping) else {}
    if not (greeting.get("action_space") or action_space):
        raise ContractMismatch(
            "the policy server does not say what its actions are",
            got=f"a greeting with {sorted(map(str, greeting)) or 'nothing'}",
            expected=f"action_space {expected.action_space}",
            remedy="use a server that announces it, or set server.action_space to what its documentation says",
        )
    for name, got, wanted in _announced(greeting, contract, expected, action_space):
        if got is not None and not _equal(got, wanted):
            raise ContractMismatch(f"the policy server has another {name}", got=got, expected=wanted, remedy=_REMEDY)
    weights = contract.get("weights") or greeting.get("weights")
    known = {
        k: _plain(v)
        for k, v in {**greeting, **contract, **_maps(contract.get("details"))}.items()
        if k != "fingerprint"
    }
    return replace(
        expected,
        cameras=tuple(_sized(c, greeting.get("image_resolution")) for c in expected.cameras),
        weights=str(weights) if weights else UNNAMED,
        random_weights=bool(contract.get("random_weights", greeting.get("random_weights", False))),
        fingerprint=_fingerprint(contract.get("fingerprint")),
        details={"server": {str(k): v for k, v in known.items() if isinstance(v, bool | int | float | str)}},
    )


def timed_as(greeting: object, expected: PolicySpec) -> PolicySpec:
    """``expected`` with the horizon and the frame offsets that a server's contract announces, where it does.

    Raises:
        ContractMismatch: it announces impossible ones.
    """
    contract = _maps(_maps(greeting).get("contract"))
    horizon = contract.get("horizon", expected.horizon)
    offsets = _maps(contract.get("frames_per_call")).get("offsets_steps", list(expected.frame_offsets))
    if type(horizon) is not int or horizon < 1:
        raise ContractMismatch("the policy server announces an impossible horizon", got=horizon, expected="rows")
    whole = isinstance(offsets, list | tuple) and bool(offsets) and all(type(o) is int for o in offsets)
    if not whole or sorted(set(offsets)) != list(offsets) or offsets[-1] != 0:
        raise ContractMismatch(
            "the policy server announces impossible frame offsets", got=offsets, expected="rising, the last one 0"
        )
    return replace(expected, horizon=horizon, frame_offsets=tuple(offsets))


def _fingerprint(told: object) -> Fingerprint | None:
    """The server's; None when it does not say it, or in a way that this version does not understand."""
    try:
        return Fingerprint.from_dict(told) if isinstance(told, Mapping) else None
    except (ConfigError, TypeError, ValueError):
        return None


def _announced(
    greeting: Mapping[Any, Any], contract: Mapping[Any, Any], expected: PolicySpec, action_space: str
) -> list[tuple[str, object, object]]:
    """(name, what the server says or None, what is needed), in the order of importance."""

    def said(key: str, short: str) -> object:
        return greeting.get(key, contract.get(short))

    actions = [(f.name, f.dim) for f in expected.action]
    state = [(f.name, f.dim) for f in expected.state]
    out: list[tuple[str, object, object]] = [
        ("action_space", greeting.get("action_space") or action_space, expected.action_space),
        ("embodiment", said("embodiment", "embodiment"), expected.embodiment),
        ("action_horizon", said("action_horizon", "horizon"), expected.horizon),
        ("action_dim", greeting.get("action_dim"), expected.action_dim),
        ("control_rate_hz", said("control_rate_hz", "control_rate_hz"), expected.control_rate_hz),
        ("cameras", _names(contract.get("cameras")), [c.name for c in expected.cameras]),
        ("actions", _fields(contract.get("actions")), actions),
        ("state", _fields(contract.get("state")), state),
        ("frames", _maps(contract.get("frames_per_call")).get("offsets_steps"), list(expected.frame_offsets)),
        ("needs_stereo_camera", greeting.get("needs_stereo_camera"), False),
    ]
    exterior = [c.name for c in expected.cameras if c.name.startswith("exterior_image_")]
    if exterior:
        out.append(("n_external_cameras", greeting.get("n_external_cameras"), len(exterior)))
        out.append(("needs_wrist_camera", greeting.get("needs_wrist_camera"), True))
    return out


def _maps(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}


def _names(value: object) -> list[object] | None:
    return [_maps(one).get("name") for one in value] if isinstance(value, list) else None


def _fields(value: object) -> list[tuple[object, object]] | None:
    return [(_maps(f).get("name"), _maps(f).get("dim")) for f in value] if isinstance(value, list) else None


_REMEDY = "start the server for this robot, or set embodiment and server.uri to what belongs together"


def _equal(got: object, wanted: object) -> bool:
    if isinstance(wanted, float) and isinstance(got, int | float):
        return abs(got - wanted) <= 1e-6 * wanted
    return type(got) is type(wanted) and got == wanted


def _sized(camera: CameraSpec, resolution: object) -> CameraSpec:
    if resolution is None:
        return camera
    sizes = list(resolution) if isinstance(resolution, list | tuple) else []
    if len(sizes) != 2 or not all(type(n) is int and 16 <= n <= 4096 for n in sizes):
        raise ContractMismatch(
            "the policy server announces an impossible image_resolution",
            got=resolution,
            expected="[height, width] in pixels",
        )
    return replace(camera, height=sizes[0], width=sizes[1])


def _plain(value: object) -> object:
    return value if isinstance(value, bool | int | float | str | None) else str(value)[:MAX_TEXT]


def read_actions(reply: object, spec: PolicySpec, profile: Profile) -> tuple[npt.NDArray[np.float64], dict[str, Any]]:
    """Rows and everything else of a reply that was a BINARY frame.

    Returns:
        float64 ``[horizon, action_dim]``, and the other entries of a map reply.

    Raises:
        RemoteError: an error in the shape of a map.
        ChunkError: anything that is not a full chunk of finite numbers; nothing is padded or cut.
    """
    expected = f"{[spec.horizon, spec.action_dim]} finite floats"
    rest: dict[str, Any] = {}
    if isinstance(reply, Mapping):
        if reply.get("type") == "error" or "error" in reply:
            raise RemoteError(
                "the policy server answers with an error",
                got=str(reply.get("message") or reply.get("error") or dict(reply))[:MAX_TEXT],
            )
        if not profile.mapped or "actions" not in reply:
            raise ChunkError(
                "the reply of the policy server has no actions",
                got=f"a map with the keys {sorted(map(str, reply))}",
                expected="the key 'actions' (a reply with the key 'action' is another dialect and is not taken for it)",
                remedy="check server.dialect",
            )
        rest = {str(k): v for k, v in reply.items() if k != "actions"}
        rows: object = reply["actions"]
    else:
        rows = reply
        if not profile.bare:
            raise ChunkError(
                "the reply of the policy server is not a map",
                got=type(reply).__name__,
                expected="a map with the key 'actions'",
                remedy="check server.dialect",
            )
    if not isinstance(rows, np.ndarray):
        raise ChunkError("the actions are not an array", got=type(rows).__name__, expected=expected)
    if rows.shape != (spec.horizon, spec.action_dim) or not np.issubdtype(rows.dtype, np.floating):
        raise ChunkError("the actions have the wrong shape", got=f"{rows.dtype} {list(rows.shape)}", expected=expected)
    if not np.isfinite(rows).all():
        raise ChunkError("the actions are not finite", got=f"{int((~np.isfinite(rows)).sum())} such", expected=expected)
    return rows.astype(np.float64), rest


def acknowledged(reply: object, profile: Profile) -> bool:
    """Is this the acknowledgement of a reset? ``reply``: text, or an unpacked map."""
    if isinstance(reply, Mapping) and profile.map_acknowledges:
        reply = reply.get("status")
    return isinstance(reply, str) and reply.strip().startswith(ACKNOWLEDGED)
