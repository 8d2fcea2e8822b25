"""From a request's bytes to an observation that fits, or a typed error that names the key. Nothing is remembered here.

Everything is checked before a session hears of it: which keys, which dtypes, which sizes, finite numbers, the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import InvalidImage, InvalidState, MissingInput, ObservationError, PromptError
from wam_policy_ros.contract.interface import CameraSpec, FieldSpec, Observation, PolicySpec
from wam_policy_ros.contract.prompts import parse_instruction

from .codec import Codec, decode

Resize = Literal["refuse", "pad", "stretch"]
SingleExterior = Literal["refuse", "dropped_view"]

PREFIX = "observation/"
EXTERIOR = "exterior_image_"
MAX_STATE = 1e6
"""No joint, gripper or position is beyond this in SI units; far beyond it the network's arithmetic overflows."""
SCALARS = frozenset({"endpoint", "session_id", "session_ids", "prompt", "seed", "deadline_ms", "newest_wins"})
LAYOUT = "uint8 RGB [H, W, 3] or [T, H, W, 3] (HWC: height, width, 3 channels last)"


@dataclass(frozen=True)
class WireRules:
    """How requests are read.

    Attributes:
        resize: what happens to pictures that have not the announced size: ``refuse``, ``pad`` (aspect kept, black
            bars, bilinear, as OpenPI's client helper does) or ``stretch``.
        single_exterior: one exterior camera where the network has two views: ``refuse``, or ``dropped_view``: the
            second view is black, as in a part of the training.
        instruction: for requests without a prompt; empty: they are refused.
        max_frames: per camera and request.
        max_prompt_chars: longer prompts are refused unread; the text encoder's own limit is in tokens.
        max_session_id_chars: of ``session_id``.
        max_pixels: of one picture before resizing.
    """

    resize: Resize = "refuse"
    single_exterior: SingleExterior = "refuse"
    instruction: str = ""
    max_frames: int = 32
    max_prompt_chars: int = 4096
    max_session_id_chars: int = 256
    max_pixels: int = 4096 * 4096


@dataclass(frozen=True)
class InferRequest:
    """A checked request for actions.

    Attributes:
        session_id: None: the connection's own session.
        cameras: wire keys of the pictures, in the order of the spec; a session may not change them.
        seed: of the session's noise, or None.
        deadline_s: counted from the receipt, or None.
        newest_wins: earlier requests of the same session that are not answered yet are void.
        codec: in which the reply is written.
    """

    observation: Observation
    session_id: str | None
    cameras: tuple[str, ...]
    seed: int | None
    deadline_s: float | None
    newest_wins: bool
    codec: Codec


@dataclass(frozen=True)
class ResetRequest:
    """Forget episodes. ``session_ids`` None: see ``every``; ``every``: all of the connection, else its current one."""

    session_ids: tuple[str, ...] | None
    every: bool


class RequestReader:
    """Reads requests for one policy.

    Args:
        spec: cameras and fields; wire keys are ``observation/<name>``. Exterior cameras are counted: with
            ``exterior_image_0_left`` from 0, else from 1 (OpenPI spec 0.3).
        rules: see ``WireRules``.
    """

    def __init__(self, spec: PolicySpec, rules: WireRules) -> None:
        self._spec, self._rules = spec, rules
        self._exteriors = [c for c in spec.cameras if c.name.startswith(EXTERIOR) and c.name.endswith("_left")]

    def read(self, frame: bytes | str, default_codec: Codec = "openpi") -> InferRequest | ResetRequest:
        """One frame.

        Raises:
            ObservationError: it cannot be used; ``field`` names the key. Subclasses as the field demands.
        """
        if isinstance(frame, str):
            raise ObservationError(
                "the request is a text frame", field="message", got="text", expected="a binary frame with a msgpack map"
            )
        message = decode(frame)
        if not isinstance(message.value, dict):
            raise ObservationError(
                "the request is not a map", field="message", got=type(message.value).__name__, expected="a msgpack map"
            )
        request = _flat(message.value)
        endpoint = request.get("endpoint", "infer")
        if not isinstance(endpoint, str):  # an array would not even compare
            endpoint = type(endpoint).__name__
        elif endpoint == "reset":
            return self._reset(request)
        if endpoint != "infer":
            raise ObservationError(
                "unknown endpoint", field="endpoint", got=repr(endpoint)[:80], expected="'infer' or 'reset'"
            )
        frames, cameras = self._frames(request)
        observation = Observation(
            frames=frames,
            state={f.name: self._field(request, f) for f in self._spec.state},
            prompt=self._prompt(request.get("prompt")),
            want_video=False,  # no reply has a place for it
        )
        return InferRequest(
            observation=observation,
            session_id=self._session_id(request.get("session_id"), "session_id"),
            cameras=cameras,
            seed=_seed(request.get("seed")),
            deadline_s=_deadline(request.get("deadline_ms")),
            newest_wins=_flag(request.get("newest_wins", False), "newest_wins"),
            codec=message.codec or default_codec,
        )

    def _reset(self, request: Mapping[str, Any]) -> ResetRequest:
        if "session_ids" in request:
            ids = request["session_ids"]
            if ids is None:
                return ResetRequest(None, every=True)
            if not isinstance(ids, list):
                raise ObservationError(
                    "session_ids is no list",
                    field="session_ids",
                    got=type(ids).__name__,
                    expected="list of str, or nil",
                )
            names = [self._session_id(one, f"session_ids[{i}]") for i, one in enumerate(ids)]
            return ResetRequest(tuple(name for name in names if name is not None), every=False)
        name = self._session_id(request.get("session_id"), "session_id")
        return ResetRequest(None if name is None else (name,), every=False)

    def _session_id(self, value: Any, field: str) -> str | None:
        if value is None:
            return None
        limit = self._rules.max_session_id_chars
        if not isinstance(value, str) or not 0 < len(value) <= limit or "\0" in value:
            got = repr(value)[:40] if isinstance(value, str) else type(value).__name__
            expected = f"text of 1 to {limit} characters, without NUL"
            raise ObservationError(f"{field} is unusable", field=field, got=got, expected=expected)
        return value

    # -- pictures -----------------------------------------------------------------------------------------------------

    def _frames(self, request: Mapping[str, Any]) -> tuple[dict[str, npt.NDArray[np.uint8]], tuple[str, ...]]:
        keys = self._exterior_keys(request) | {
            c.name: f"{PREFIX}{c.name}" for c in self._spec.cameras if c not in self._exteriors
        }
        out: dict[str, npt.NDArray[np.uint8]] = {}
        for camera in self._spec.cameras:
            key = keys[camera.name]
            if key is not None:
                out[camera.name] = self._picture(request, key, camera)
        if len(out) < len(self._spec.cameras):  # the dropped view; as long as what stands beside it
            count = len(out[self._exteriors[0].name])
            out = {
                c.name: out[c.name] if c.name in out else np.zeros((count, c.height, c.width, 3), np.uint8)
                for c in self._spec.cameras
            }
        return out, tuple(key or "" for key in (keys[c.name] for c in self._spec.cameras))

    def _exterior_keys(self, request: Mapping[str, Any]) -> dict[str, str | None]:
        """Camera name -> wire key, None for the view that is dropped."""
        if not self._exteriors:
            return {}
        given = sorted(
            int(number)
            for key in request
            if key.startswith(PREFIX + EXTERIOR) and key.endswith("_left")
            if (number := key[len(PREFIX + EXTERIOR) : -len("_left")]).isdecimal() and len(number) < 4
        )
        base = 0 if 0 in given else 1
        wanted = [base + i for i in range(len(self._exteriors))]
        keys: dict[str, str | None] = {
            c.name: f"{PREFIX}{EXTERIOR}{n}_left" for c, n in zip(self._exteriors, wanted, strict=True)
        }
        if given == wanted:
            return keys
        names = [f"{PREFIX}{EXTERIOR}{n}_left" for n in given]
        if given == wanted[:1] and len(wanted) == 2:
            if self._rules.single_exterior == "dropped_view":
                return keys | {self._exteriors[1].name: None}
            raise MissingInput(
                f"{keys[self._exteriors[1].name]} is missing: only one exterior camera was sent",
                field=str(keys[self._exteriors[1].name]),
                got=names,
                expected=list(keys.values()),
                remedy="send both, or start the server with single_exterior: dropped_view",
            )
        if not given:
            first = str(keys[self._exteriors[0].name])
            raise MissingInput(f"{first} is missing", field=first, got=_shown(request), expected=list(keys.values()))
        raise ObservationError(
            f"the exterior cameras {names} fit neither way of counting",
            field=names[-1],
            got=names,
            expected=f"{EXTERIOR}0_left and _1_left, or {EXTERIOR}1_left and _2_left",
        )

    def _picture(self, request: Mapping[str, Any], key: str, camera: CameraSpec) -> npt.NDArray[np.uint8]:
        image = request.get(key)
        if image is None:
            remedy = "an image is never made up; check the key"
            raise MissingInput(f"{key} is missing", field=key, got=_shown(request), expected=LAYOUT, remedy=remedy)
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
            raise InvalidImage(f"{key}: not an array of uint8", field=key, got=_got(image), expected=LAYOUT)
        given = image
        if image.ndim == 3:
            image = image[None]
        if image.ndim != 4 or image.shape[3] != 3 or 0 in image.shape:
            hint = ""
            if image.ndim == 4 and image.shape[1] == 3 and image.shape[3] != 3:
                hint = " (these look like channels first)"
            what = f"{key}: wrong image layout{hint}"
            remedy = "no batch axis, no alpha, height before width, RGB"
            raise InvalidImage(what, field=key, got=_got(given), expected=LAYOUT, remedy=remedy)
        if len(image) > self._rules.max_frames:
            raise InvalidImage(
                f"{key}: too many frames", field=key, got=_got(given), expected=f"T <= {self._rules.max_frames}"
            )
        size = (camera.height, camera.width)
        if image.shape[1:3] == size:
            return image
        if self._rules.resize == "refuse":
            raise InvalidImage(
                f"{key}: the picture has another size than the server announces",
                field=key,
                got=f"{image.shape[1]}x{image.shape[2]} (HxW)",
                expected=f"{size[0]}x{size[1]} (HxW)",
                remedy="resize before sending, or start the server with resize: pad or stretch",
            )
        if image.shape[1] * image.shape[2] > self._rules.max_pixels:
            raise InvalidImage(
                f"{key}: too large", field=key, got=_got(given), expected=f"<= {self._rules.max_pixels} pixels"
            )
        # Imported here: only servers that resize need it.
        from .resize import resize

        return resize(image, size, keep_aspect=self._rules.resize == "pad")

    # -- numbers and text ---------------------------------------------------------------------------------------------

    def _field(self, request: Mapping[str, Any], field: FieldSpec) -> npt.NDArray[np.float64]:
        key = PREFIX + field.name
        value = request.get(key)
        wanted = f"{field.dim} finite number(s), {field.unit}"
        if value is None:
            raise MissingInput(f"{key} is missing", field=key, got=_shown(request), expected=wanted)
        if isinstance(value, list):
            value = np.array(value) if all(type(v) in (int, float) for v in value) else None
        array = np.asarray(value) if isinstance(value, np.ndarray | np.generic | int | float) else None
        if array is None or array.dtype.kind not in "fiu":
            got = type(request[key]).__name__ if array is None else str(array.dtype)
            raise InvalidState(f"{key}: not numbers", field=key, got=got, expected=wanted)
        if array.ndim == 0 and field.dim == 1:
            array = array[None]
        if array.shape != (field.dim,):
            raise InvalidState(
                f"{key}: wrong shape", field=key, got=f"{array.dtype} {list(array.shape)}", expected=f"[{field.dim}]"
            )
        numbers = array.astype(np.float64)
        if not (np.abs(numbers) <= MAX_STATE).all():  # false for what is not a number, too
            what = "far beyond any robot" if np.isfinite(numbers).all() else "not finite"
            expected = f"{wanted}, at most {MAX_STATE:g}"
            raise InvalidState(f"{key}: {what}", field=key, got=[float(n) for n in numbers], expected=expected)
        return numbers

    def _prompt(self, value: Any) -> str:
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as error:
                raise PromptError("prompt: not UTF-8", field="prompt", got=str(error)) from None
        if value is None or (isinstance(value, str) and not value.strip()):
            if self._rules.instruction:
                return self._rules.instruction
            raise PromptError(
                "prompt: there is no instruction",
                field="prompt",
                got=repr(value)[:40],
                expected="a sentence such as 'pick up the cup'",
                remedy="send one, or start the server with a default instruction",
            )
        if not isinstance(value, str):
            raise PromptError("prompt: not text", field="prompt", got=type(value).__name__, expected="one str")
        if len(value) > self._rules.max_prompt_chars:
            raise PromptError(
                "prompt: too long; it is refused, not cut",
                field="prompt",
                got=f"{len(value)} characters",
                expected=f"at most {self._rules.max_prompt_chars} characters (and 512 tokens)",
            )
        parse_instruction(value)  # for its errors; the policy parses it again, with its own template
        return value


def _got(value: object) -> str:
    """Only where there is an error: to write a dtype costs more than to check it."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__


def _flat(request: Mapping[Any, Any], prefix: str = "", depth: int = 4) -> dict[str, Any]:
    """Nested maps as ``outer/inner``: OpenPI clients may send either."""
    out: dict[str, Any] = {}
    for key, value in request.items():
        if not isinstance(key, str):
            raise ObservationError("keys must be text", field=repr(key)[:40], got=type(key).__name__, expected="str")
        name = f"{prefix}{key}"
        nested = isinstance(value, dict) and depth and name not in SCALARS
        items = _flat(value, f"{name}/", depth - 1) if nested else {name: value}
        for inner, one in items.items():
            if inner in out:
                raise ObservationError("a key is there twice, nested and flat", field=inner)
            out[inner] = one
    return out


def _shown(request: Mapping[str, Any]) -> str:
    names = sorted(k[:60] for k in request)
    return f"keys {names[:20]}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _seed(value: Any) -> int | None:
    value = value.item() if isinstance(value, np.integer) else value
    if value is None or (type(value) is int and 0 <= value < 2**63):
        return value
    raise ObservationError("seed is unusable", field="seed", got=repr(value)[:40], expected="an int in [0, 2**63)")


def _deadline(value: Any) -> float | None:
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or (type(value) in (int, float) and 0 < value < 1e9):
        return None if value is None else value / 1e3
    raise ObservationError(
        "deadline_ms is unusable", field="deadline_ms", got=repr(value)[:40], expected="0 < ms < 1e9"
    )


def _flag(value: Any, field: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ObservationError(f"{field} is unusable", field=field, got=repr(value)[:40], expected="true or false")
