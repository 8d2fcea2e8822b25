"""What each client family receives, byte for byte where it is that strict (OpenPI spec 0, 2 and 5.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from test.serving.harness import HEIGHT, KEYS, WIDTH, Client, RememberingPolicy, request, served, small_spec
from test.serving.test_codec import VECTORS
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.serving.codec import decode, pack
from wam_policy_ros.serving.dialects import DIALECTS, get_dialect, metadata

SIX = ["image_resolution", "needs_wrist_camera", "n_external_cameras", "needs_stereo_camera", "needs_session_id"]
SIX += ["action_space"]
BARE = {"dreamzero", "vllm_omni"}
EXACT = {"dreamzero", "roboarena", "molmospaces", "isaaclab_arena", "robolab"}
POSITIONS = sorted(set(DIALECTS) - {"openpi_droid"})


def test_metadata_of_dreamzero_is_the_recorded_frame():
    assert pack(metadata(get_dialect("dreamzero"), HoldPolicy().spec, {})).hex() == VECTORS["TV5"][1]


@pytest.fixture(scope="module")
def everyone():
    with served() as one:
        yield one


@pytest.mark.parametrize("name", POSITIONS)
def test_metadata_reply_and_ack_of_every_dialect(everyone, name):
    with Client(everyone, f"/{name}") as client:
        assert list(client.metadata)[:6] == SIX
        assert (len(client.metadata) == 6) == (name in EXACT)
        if name not in EXACT:
            told = client.metadata["contract"]
            assert told["dialect"] == name and told["horizon"] == 24 and told["cameras"][0]["height"] == HEIGHT
            assert told["limits"]["max_message_bytes"] >= 16 * 2**20 and told["actions"][0]["unit"] == "rad"
        reply = client.ask(request(session=name))
        if name in BARE:
            assert isinstance(reply, np.ndarray)
            rows = reply
        else:
            rows = reply["actions"]
            wanted = ["actions"] if name in EXACT else ["actions", "policy_timing", "server_timing"]
            assert list(reply) == wanted
            numbers = [v for part in wanted[1:] for v in reply[part].values()]
            assert all(type(v) is float for v in numbers)
        assert rows.shape == (24, 8) and np.isfinite(rows).all()
        assert rows.dtype.str == ("<f8" if name == "ihmc" else "<f4")
        client.send({"endpoint": "reset"})
        assert client.receive() == "reset successful"


def test_paths_ports_and_queries_choose_the_dialect():
    with served(dialect="roboarena") as one:
        for path, kind in (
            ("/", dict),
            ("/v1/realtime/robot/openpi", np.ndarray),
            ("/dreamzero", np.ndarray),
            ("/sim-evals", dict),
            ("/?dialect=dreamzero", np.ndarray),
            ("/v1/realtime/robot/openpi?dialect=openpi&x=1", dict),
        ):
            with Client(one, path) as client:
                assert isinstance(client.ask(request(session=path)), kind), path


def test_two_ports_at_once():
    with served(dialect="dreamzero") as one:
        free = one.server.port
    with served(dialect="dreamzero", port=free, ports={0: "roboarena"}) as one:
        with Client(one) as client:
            assert isinstance(client.ask(request(session="a")), np.ndarray)
        (_, other) = one.server.addresses
        one.server.addresses.insert(0, other)
        with Client(one) as client:
            assert isinstance(client.ask(request(session="b")), dict)


@pytest.mark.parametrize("path", ["/elsewhere", "/?dialect=groot", "/openpi_droid"])
def test_what_cannot_be_served_is_refused_at_the_upgrade(everyone, path):
    with pytest.raises(Exception, match="404"):
        Client(everyone, path)
    assert "refused the connection" in everyone.lines[-1]


def test_positions_are_never_sent_as_velocities_nor_the_other_way():
    with pytest.raises(ConfigError, match=r"joint_velocity.*joint_position"), served(dialect="openpi_droid"):
        pass
    velocities = RememberingPolicy(small_spec(action_space="joint_velocity"))
    with served(velocities, dialect="openpi_droid") as one:
        with Client(one) as client:
            assert client.metadata["action_space"] == "joint_velocity"
            assert client.ask(request())["actions"].shape == (10, 8), "its client asserts exactly ten rows"
        with Client(one, "/openpi") as client:
            assert client.metadata["action_space"] == "joint_velocity"
        with pytest.raises(Exception, match="404"):
            Client(one, "/dreamzero")


def test_each_client_is_answered_in_its_own_codec(everyone):
    with Client(everyone, "/molmospaces", codec="msgpack_numpy") as a, Client(everyone, "/roboarena") as b:
        message = request(session=None)
        for client in (a, b):
            client.send(message)
            frame = client.socket.recv(timeout=5)
            assert decode(frame).codec == client.codec
        (x,), (y,) = decode(frame).value.values(), [decode(frame).value["actions"]]
        assert x.shape == y.shape == (24, 8)


def test_the_reply_is_small_enough_for_default_limits(everyone):
    """64 KiB is the smallest default (Netty)."""
    for name in POSITIONS:
        with Client(everyone, f"/{name}", max_size=2**16) as client:
            client.ask(request(session=f"small {name}"))


def one_camera(number: int = 0) -> dict[str, Any]:
    """A sim-evals request: one exterior camera, 224x224."""
    rng = np.random.default_rng(number)
    return {
        "observation/exterior_image_1_left": rng.integers(0, 256, (224, 224, 3), dtype=np.uint8),
        "observation/wrist_image_left": rng.integers(0, 256, (224, 224, 3), dtype=np.uint8),
        "observation/joint_position": np.zeros(7, np.float32),
        "observation/gripper_position": np.zeros(1, np.float32),
        "prompt": "put the banana in the bin",
    }


def test_a_client_with_one_camera_of_another_size():
    policy = RememberingPolicy()
    policy.record = True
    with (
        served(policy, dialect="sim_evals", resize="pad", single_exterior="dropped_view") as one,
        Client(one) as client,
    ):
        assert client.ask(one_camera())["actions"].shape == (24, 8)
        (seen,) = policy.seen
        assert seen.frames["exterior_image_1_left"].any() and not seen.frames["exterior_image_2_left"].any()
    with served(dialect="sim_evals", single_exterior="dropped_view") as one, Client(one) as client:
        assert "224x224" in client.ask(one_camera())


def test_embodiments_with_other_names_use_their_own_keys():
    base = small_spec()
    spec = replace(
        base,
        cameras=tuple(
            replace(c, name=n) for c, n in zip(base.cameras, ("head_image", "left_image", "right_image"), strict=True)
        ),
        state=(replace(base.state[0], dim=16),),
        action=(replace(base.action[0], dim=16),),
    )
    picture = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    message = {f"observation/{n}_image": picture for n in ("head", "left", "right")}
    message |= {"observation/joint_position": np.zeros(16), "prompt": "wave"}
    with served(RememberingPolicy(spec), dialect="openpi") as one, Client(one) as client:
        assert client.ask(message)["actions"].shape == (24, 16)
        message.pop("observation/head_image")
        assert "observation/head_image is missing" in client.ask(message)


def test_four_frames_per_camera_of_the_real_size():
    """2 073 600 bytes of pictures, above every default limit."""
    policy = RememberingPolicy(small_spec(180, 320))
    rng = np.random.default_rng(0)
    message = request() | {key: rng.integers(0, 256, (4, 180, 320, 3), dtype=np.uint8) for key in KEYS}
    with served(policy) as one, Client(one) as client:
        assert client.ask(message).shape == (24, 8)


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match=r"unknown option.*max_sesions"), served(max_sesions=3):
        pass
    for bad in ({"dialect": "pi"}, {"max_message_bytes": 2**20}, {"resize": "crop"}, {"port": 70000}, {"resume_s": -1}):
        with pytest.raises(ConfigError), served(**bad):
            pass
