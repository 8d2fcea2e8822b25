"""Clients written from the published clients' profiles (OpenPI spec 5.2), with codecs of their own, against the server.

Each does on the wire what the named program does, in its order and with its dtypes, and checks what that program
checks. The programs themselves need simulators or robots; those that can be installed with pip were run beside this.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import pytest
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from .harness import RememberingPolicy, Served, served, small_spec

PROMPT = "Move the pan forward and use the brush in the middle of the plates to brush the inside of the pan"
TASKS = ("put the cube in the bowl", "pick up the can and put it in the mug", "put the banana in the bin")
Request = dict[str, Any]


# -- codecs, written from the wire format ------------------------------------------------------------------------------


def openpi_bytes(message: Any, *, text_keys: bool = False) -> bytes:
    """As openpi-client; ``text_keys``: as the Java client, with NumPy's names for dtypes."""

    def encode(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            dtype = value.dtype.name if text_keys else value.dtype.str
            items = {"__ndarray__": True, "data": value.tobytes(), "dtype": dtype, "shape": value.shape}
        elif isinstance(value, np.generic):
            items = {"__npgeneric__": True, "data": value.item(), "dtype": value.dtype.str}
        else:
            raise TypeError(type(value))
        return items if text_keys else {k.encode(): v for k, v in items.items()}

    return bytes(msgpack.packb(message, default=encode))


def openpi_value(data: bytes) -> Any:
    def decode(item: dict[Any, Any]) -> Any:
        if b"__ndarray__" in item:
            return np.ndarray(buffer=item[b"data"], dtype=np.dtype(item[b"dtype"]), shape=item[b"shape"])
        if b"__npgeneric__" in item:
            return np.dtype(item[b"dtype"]).type(item[b"data"])
        return item

    return msgpack.unpackb(data, object_hook=decode)


def numpy_bytes(message: Any) -> bytes:
    """As the PyPI package msgpack-numpy."""

    def encode(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {
                b"nd": True, b"type": value.dtype.str, b"kind": b"", b"shape": value.shape, b"data": value.tobytes()
            }  # fmt: skip
        if isinstance(value, np.bool_ | np.number):
            return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
        raise TypeError(type(value))

    return bytes(msgpack.packb(message, default=encode))


def numpy_value(data: bytes) -> Any:
    def decode(item: dict[Any, Any]) -> Any:
        if item.get(b"nd") is True:
            return np.ndarray(buffer=item[b"data"], dtype=np.dtype(item[b"type"]), shape=item[b"shape"])
        return item

    return msgpack.unpackb(data, object_hook=decode)


# -- what they have in common ------------------------------------------------------------------------------------------


class Wire:
    """One connection; a str reply is an error to every one of these clients."""

    def __init__(
        self,
        one: Served,
        path: str = "",
        *,
        pack: Callable[[Any], bytes] = openpi_bytes,
        unpack: Callable[[bytes], Any] = openpi_value,
        **options: Any,
    ) -> None:
        address = one.url(path or "/").removesuffix("/") if not path else one.url(path)
        given = {"compression": None, "max_size": None, "proxy": None, "open_timeout": 5, **options}
        self.ws: ClientConnection = connect(address, **given).__enter__()
        self.pack, self.unpack = pack, unpack
        first = self.ws.recv(timeout=5)
        assert isinstance(first, bytes), "a text greeting is a TypeError to openpi-client"
        self.metadata = unpack(first)

    def infer(self, request: Request) -> Any:
        return self.resend(self.pack(request))

    def resend(self, data: bytes) -> Any:
        self.ws.send(data)
        reply = self.ws.recv(timeout=5)
        if isinstance(reply, str):
            raise RuntimeError(f"Error in inference server:\n{reply}")
        return self.unpack(reply)

    def reset(self, message: Request) -> str | bytes:
        self.ws.send(self.pack({**message, "endpoint": "reset"}))
        return self.ws.recv(timeout=5)

    def close(self) -> None:
        self.ws.close()


@dataclass
class PolicyServerConfig:
    """RoboArena's and DreamZero's clients build this from the metadata: one key more is a TypeError."""

    image_resolution: tuple[int, int] | None = (224, 224)
    needs_wrist_camera: bool = True
    n_external_cameras: int = 1
    needs_stereo_camera: bool = False
    needs_session_id: bool = False
    action_space: str = "joint_position"
    extra: None = field(default=None, init=False)


@pytest.fixture
def one() -> Any:
    with served(RememberingPolicy(small_spec(180, 320))) as running:
        yield running


def image(seed: int, height: int = 180, width: int = 320, frames: int = 0) -> np.ndarray:
    shape = (frames, height, width, 3) if frames else (height, width, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def padded(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """openpi-client's resize with pad."""
    if picture.shape[:2] == (height, width):
        return picture
    ratio = max(picture.shape[1] / width, picture.shape[0] / height)
    size = (int(picture.shape[1] / ratio), int(picture.shape[0] / ratio))
    small = Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR)
    out = Image.new("RGB", (width, height), 0)
    out.paste(small, (max(0, (width - size[0]) // 2), max(0, (height - size[1]) // 2)))
    return np.array(out)


def dreamzero(seed: int, session: str, *, frames: int = 0, state: Any = np.float32, prompt: str = PROMPT) -> Request:
    return {
        "observation/exterior_image_0_left": image(seed, frames=frames),
        "observation/exterior_image_1_left": image(seed + 1, frames=frames),
        "observation/wrist_image_left": image(seed + 2, frames=frames),
        "observation/joint_position": np.zeros(7, state),
        "observation/cartesian_position": np.zeros(6, state),
        "observation/gripper_position": np.zeros(1, state),
        "prompt": prompt,
        "session_id": session,
        "endpoint": "infer",
    }


def droid(seed: int, state: Any = np.float64, prompt: str = "pick up the cube") -> Request:
    """One exterior camera and 224x224, as every DROID-style client sends it."""
    rng = np.random.default_rng(seed)
    return {
        "observation/exterior_image_1_left": padded(image(seed, 720, 1280), 224, 224),
        "observation/wrist_image_left": padded(image(seed + 1, 720, 1280), 224, 224),
        "observation/joint_position": rng.uniform(-1, 1, 7).astype(state),
        "observation/gripper_position": rng.uniform(0, 1, 1).astype(state),
        "prompt": prompt,
    }


DROID_SERVER: dict[str, Any] = {"resize": "pad", "single_exterior": "dropped_view"}


# -- A, B, K: openpi ---------------------------------------------------------------------------------------------------


def test_a_openpi_simple_client() -> None:
    policy = RememberingPolicy(small_spec(180, 320))
    with served(policy, dialect="openpi", api_key="k", blind_positions="send", **DROID_SERVER) as one:
        with pytest.raises(InvalidStatus):
            Wire(one)
        client = Wire(one, additional_headers={"Authorization": "Api-Key k"})
        assert isinstance(client.metadata, dict)
        timings = []
        for step in range(2 + 4):
            action = client.infer(droid(step))
            if step < 2:
                continue
            timings.append({"client_infer_ms": 1.0})
            for part, prefix in (("server_timing", "server_"), ("policy_timing", "policy_")):
                for key, value in action[part].items():
                    timings[-1][f"{prefix}{key}"] = float(value) + 0.0
        assert all(set(t) == set(timings[0]) for t in timings), "one table, equally long columns"
        assert {"server_infer_ms", "server_prev_total_ms", "policy_infer_ms"} <= set(timings[0])
        client.close()


@pytest.mark.parametrize(
    "request_",
    [
        {"state": np.ones(14), "images": {"cam_high": image(0, 224, 224).transpose(2, 0, 1)}, "prompt": "do"},
        {
            "observation/state": np.zeros(8),
            "observation/image": image(0, 224, 224),
            "observation/wrist_image": image(1, 224, 224),
            "prompt": "do something",
        },
    ],
    ids=["ALOHA", "K LIBERO"],
)
def test_a_k_requests_of_another_robot_are_errors_that_name_what_is_missing(request_: Request) -> None:
    with served(RememberingPolicy(small_spec(180, 320)), dialect="openpi", **DROID_SERVER) as one:
        client = Wire(one)
        with pytest.raises(RuntimeError, match="observation/exterior_image_1_left is missing"):
            client.infer(request_)
        with pytest.raises(ConnectionClosed):
            client.infer(request_)
        again = Wire(one, "/sim_evals")
        assert again.infer(droid(0))["actions"].shape == (24, 8)
        again.close()


def test_b_openpi_droid_robot_loop() -> None:
    spec = small_spec(180, 320, action_space="joint_velocity", horizon=15)
    with served(RememberingPolicy(spec), dialect="openpi_droid", **DROID_SERVER) as one:
        client = Wire(one)
        for episode, prompt in enumerate(("wipe the table", "close the drawer")):
            for step in range(2):
                chunk = client.infer(droid(10 * episode + step, prompt=prompt))["actions"]
                assert chunk.shape == (10, 8)
                action = np.concatenate([chunk[0][:-1], [1.0 if chunk[0][-1].item() > 0.5 else 0.0]])
                assert np.isfinite(np.clip(action, -1, 1)).all()
        client.close()


def test_b_joint_velocities_are_never_answered_with_joint_positions(one: Served) -> None:
    with pytest.raises(InvalidStatus) as refused:
        Wire(one, "/openpi_droid")
    assert refused.value.response.status_code == 404 and b"joint_velocity" in (refused.value.response.body or b"")


def test_b_nor_for_clients_that_ask_the_same_way_and_read_no_metadata() -> None:
    """inspect-robots-franka, or openpi's DROID loop pointed at the base dialect."""
    policy = RememberingPolicy(small_spec(180, 320))
    with served(policy, dialect="openpi", **DROID_SERVER) as one:
        with pytest.raises(RuntimeError, match=r"joint velocities.*blind_positions: send"):
            Wire(one).infer(droid(0))
        assert policy.opened == 0, "refused before the policy hears of it"
        both = dreamzero(0, "s")
        client = Wire(one)
        assert client.infer(both)["actions"].shape == (24, 8), "the views of this very policy: no velocity client"
        client.close()
    velocities = small_spec(180, 320, action_space="joint_velocity")
    with served(RememberingPolicy(velocities), dialect="openpi", **DROID_SERVER) as one:
        client = Wire(one)
        assert client.infer(droid(0))["actions"].shape == (24, 8)
        client.close()


# -- C, D: DreamZero ---------------------------------------------------------------------------------------------------


def test_c_dreamzero_test_client_with_zero_images_and_with_video(one: Served) -> None:
    client = Wire(one, ping_interval=60, ping_timeout=600)
    config = PolicyServerConfig(**client.metadata)
    assert config.n_external_cameras == 2 and config.needs_wrist_camera and config.action_space == "joint_position"
    assert config.image_resolution is not None
    height, width = config.image_resolution
    session = str(uuid.uuid4())
    zeros = np.zeros((height, width, 3), np.uint8)
    for _ in range(3):
        request = {f"observation/{n}_left": zeros for n in ("exterior_image_0", "exterior_image_1", "wrist_image")}
        request |= {"session_id": session, "observation/joint_position": np.zeros(7, np.float32)}
        request |= {"observation/cartesian_position": np.zeros(6, np.float32)}
        request |= {"observation/gripper_position": np.zeros(1, np.float32), "prompt": PROMPT, "endpoint": "infer"}
        actions = client.infer(request)
        assert isinstance(actions, np.ndarray), "Expected numpy array"
        assert actions.ndim == 2 and actions.shape[-1] == 8
    session = str(uuid.uuid4())
    for chunk in range(4):
        actions = client.infer(dreamzero(chunk, session, frames=0 if chunk == 0 else 4))
        assert isinstance(actions, np.ndarray) and actions.shape == (24, 8)
    assert client.reset({})
    client.close()


def test_d_dreamzero_simulator_client_rotates_its_session_and_never_resets() -> None:
    with served(RememberingPolicy(small_spec(180, 320)), max_sessions=4) as one:
        client = Wire(one)
        for episode in range(12):
            session = str(uuid.uuid4())
            for step in range(2):
                request = dreamzero(episode + step, session, state=np.float64, prompt=TASKS[episode % 3])
                reply = client.infer(request)
                actions = reply["actions"] if isinstance(reply, dict) else reply
                assert actions.ndim == 2 and actions.shape[1] == 8 and len(actions) >= 8
        assert len(one.policy.sessions) <= 4, "what was left behind makes room"
        client.close()


# -- E: RoboArena ------------------------------------------------------------------------------------------------------


def test_e_roboarena_test_client(one: Served) -> None:
    client = Wire(one, "/roboarena")
    config = PolicyServerConfig(**client.metadata)
    assert config.n_external_cameras in (0, 1, 2)
    assert config.action_space in ("joint_position", "joint_velocity", "cartesian_position", "cartesian_velocity")
    height, width = config.image_resolution or (288, 512)
    request: Request = {}
    for i in range(config.n_external_cameras):
        request[f"observation/exterior_image_{i}_left"] = np.zeros((height, width, 3), np.uint8)
    if config.needs_wrist_camera:
        request["observation/wrist_image_left"] = np.zeros((height, width, 3), np.uint8)
    if config.needs_session_id:
        request["session_id"] = "38DSA3hd3"
    request |= {f"observation/{k}_position": np.zeros(n, np.float32) for k, n in
                (("joint", 7), ("cartesian", 6), ("gripper", 1))}  # fmt: skip
    reply = client.infer({**request, "prompt": "test", "endpoint": "infer"})
    assert isinstance(reply, dict) and list(reply) == ["actions"], "exactly the actions"
    assert reply["actions"].ndim == 2 and reply["actions"].shape[-1] == 8
    assert client.reset({}) == "reset successful"
    with pytest.raises(RuntimeError, match="is missing"):
        client.infer({"endpoint": "infer"})
    client.close()


def test_e_roboarena_evaluator_counts_its_cameras_from_one(one: Served) -> None:
    chunks = []
    for policy in "AB":  # a new connection for each policy of a comparison
        client = Wire(one, "/roboarena")
        height, width = client.metadata["image_resolution"]
        session = f"2026-02-09-{policy}"
        for step in range(2):
            small = Image.fromarray(image(step, 288, 512)).resize((width, height), Image.Resampling.LANCZOS)
            request = {
                "observation/exterior_image_1_left": np.asarray(small),
                "observation/exterior_image_2_left": image(step + 5),
                "observation/wrist_image_left": image(step + 9),
                "observation/cartesian_position": np.zeros(6),
                "observation/joint_position": np.zeros(7),
                "observation/gripper_position": np.zeros(1),
                "prompt": "fold the cloth",
                "session_id": session,
                "endpoint": "infer",
            }
            chunks.append(client.infer(request)["actions"])
        assert client.reset({"session_id": session}) == "reset successful"
        assert not one.policy.sessions, "freed before it was acknowledged"
        client.close()
    np.testing.assert_array_equal(chunks[0], chunks[2])
    assert np.abs(chunks[0] - chunks[1]).max() > 0


# -- F: MolmoSpaces ----------------------------------------------------------------------------------------------------


def test_f_molmospaces_speaks_the_other_codec_and_sends_again_after_a_drop(one: Served) -> None:
    client = Wire(one, "/molmospaces", pack=numpy_bytes, unpack=numpy_value)
    assert client.metadata["needs_session_id"] is True
    session = str(uuid.uuid4())
    for step in range(3):
        both = image(step)
        request = dreamzero(step, session, state=np.float64) | {
            "observation/exterior_image_0_left": both,
            "observation/exterior_image_1_left": both,
        }
        data = numpy_bytes(request)
        if step == 2:  # the tunnel breaks: a new connection, the same bytes once more
            client.ws.socket.shutdown(2)
            with pytest.raises(ConnectionClosed):
                client.resend(data)
            client = Wire(one, "/molmospaces", pack=numpy_bytes, unpack=numpy_value)
        actions = client.resend(data)["actions"]
        assert actions.shape == (24, 8) and np.isfinite(actions).all()
    client.close()


# -- G: RoboLab and IsaacLab-Arena -------------------------------------------------------------------------------------


def test_g_environments_interleave_on_one_connection_and_reset_by_list_and_all(one: Served) -> None:
    client = Wire(one, "/robolab", additional_headers={"Authorization": "Bearer t"}, ping_interval=60, ping_timeout=600)
    ids = [str(uuid.uuid4()) for _ in range(3)]
    together = [[client.infer(dreamzero(100 * e + s, ids[e]))["actions"] for e in range(3)] for s in range(3)]
    assert client.reset({"session_ids": ids[:1]}) == "reset successful" and len(one.policy.sessions) == 2
    assert client.reset({"session_ids": None}) == "reset successful" and not one.policy.sessions
    alone = Wire(one, "/robolab")
    for e in range(3):
        session = str(uuid.uuid4())
        for s in range(3):
            np.testing.assert_array_equal(together[s][e], alone.infer(dreamzero(100 * e + s, session))["actions"])
    client.close()
    alone.close()


def test_g_isaaclab_arena_offers_deflate_and_reads_at_most_a_mebibyte(one: Served) -> None:
    client = Wire(one, "/isaaclab_arena", compression="deflate", max_size=2**20)
    assert not client.ws.protocol.extensions, "offered, not negotiated"
    black = dreamzero(0, "env-0") | {"observation/exterior_image_1_left": np.zeros((180, 320, 3), np.uint8)}
    rows = client.infer(black)["actions"]
    assert rows.shape[0] >= 24 and rows.shape[1] in (7, 8)
    del black["observation/wrist_image_left"]
    client.ws.send(client.pack(black))
    texts = 0
    with pytest.raises(ConnectionClosed):  # it reads up to three frames while they are text, so the end must come
        for _ in range(3):
            texts += isinstance(client.ws.recv(timeout=5), str)
    assert texts == 1


# -- H, I, J -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["sim_evals", "polaris", "molmospaces_pi", "isaaclab_arena_pi0", "robolab_pi0"])
def test_h_simulators_with_one_exterior_camera(dialect: str) -> None:
    with served(RememberingPolicy(small_spec(180, 320)), dialect=dialect, **DROID_SERVER) as one:
        client = Wire(one)
        for step in range(2):
            chunk = client.infer(droid(step, np.float32))["actions"]
            assert chunk.ndim == 2 and chunk.shape[1] == 8 and len(chunk) >= 15
        client.close()


def test_i_vllm_omni_client(one: Served) -> None:
    client = Wire(one, "/v1/realtime/robot/openpi", ping_interval=300, ping_timeout=3600)
    needed = {f.name for f in PolicyServerConfig.__dataclass_fields__.values()} - {"extra"}
    assert needed <= set(client.metadata)
    for step in range(3):
        reply = client.infer(dreamzero(step, "vllm", frames=0 if step == 0 else 4, state=np.float64))
        actions = np.asarray(reply)
        assert actions.shape == (24, 8) and np.isfinite(actions).all()
    ack = client.reset({})
    assert isinstance(ack, str) and ack == "reset successful", "its DROID simulator client takes text only"
    client.close()


def test_j_java_client_writes_text_keys_and_reads_in_order() -> None:
    with served(RememberingPolicy(small_spec(180, 320)), dialect="ihmc") as one:
        client = Wire(one, pack=lambda m: openpi_bytes(m, text_keys=True), max_size=2**16)
        data = client.pack(dreamzero(0, "java"))
        assert b"\xab__ndarray__" in data and b"\xa5uint8" in data, "text keys, and NumPy's names of dtypes"
        client.ws.send(data)
        reply = client.ws.recv(timeout=5)
        assert isinstance(reply, bytes)
        pairs = msgpack.unpackb(reply, object_pairs_hook=lambda pairs: pairs)
        assert [key for key, _ in pairs] == ["actions", "policy_timing", "server_timing"]
        actions = openpi_value(reply)["actions"]
        assert actions.dtype == np.dtype("<f8") and actions.shape == (24, 8)
        client.close()


def test_what_is_said_beside_the_wire(one: Served) -> None:
    """What dialects without room for it can be told over HTTP."""
    status, body, _ = one.http("/info")
    assert status == 200 and json.loads(body)["contract"]["horizon"] == 24
    assert one.http("/healthz")[:2] == (200, "OK\n") and one.http("/readyz")[0] == 200
