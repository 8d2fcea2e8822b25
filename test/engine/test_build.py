"""From a folder to a policy: what the checkpoint says about the robot counts, and what it lacks is named once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from test.tiny_checkpoint import conf_yaml, config_json, edit_json, tiny_network, write_checkpoint, write_tokenizer
from wam_policy_ros.contract.embodiments import DROID, YAM
from wam_policy_ros.contract.errors import CheckpointError, ConfigError, StatisticsError, TokenizerError
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.transforms import decode_actions
from wam_policy_ros.engine import build
from wam_policy_ros.engine.build import build_policy, resolve_device, resolve_dtype, synthetic_metadata
from wam_policy_ros.engine.config import EngineConfig

METADATA = "experiment_cfg/metadata.json"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("build") / "DreamZero-Tiny")


@pytest.fixture
def folder(tmp_path, pristine):
    return Path(shutil.copytree(pristine, tmp_path / "ckpt"))


@pytest.fixture
def no_weights(monkeypatch):
    """Fails the test when weights are read: everything must be refused from the headers."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were read although the folder is faulty")

    monkeypatch.setattr(build.WeightSource, "load", refuse)


def _build(folder, **options):
    return build_policy(**{"embodiment": "oxe_droid", "checkpoint": str(folder), "device": "cpu"} | options)


def _conf(folder, change):
    conf = conf_yaml()
    change(conf)
    (folder / "experiment_cfg" / "conf.yaml").write_text(yaml.safe_dump(conf))


def _statistics(metadata):
    return metadata["oxe_droid"]["statistics"]


# -- a complete folder ------------------------------------------------------------------------------------------


def test_policy_from_a_folder(pristine):
    said = []
    policy = _build(pristine, progress=lambda text, fraction: said.append(fraction))
    assert said and said[-1] == 1.0
    spec = policy.spec
    assert spec.embodiment == "oxe_droid" and spec.horizon == 24 and spec.frame_offsets == (-23, -16, -8, 0)
    assert "DreamZero-Tiny" in spec.weights and not spec.random_weights
    assert spec.details["evaluations"] == "8 of 16" and spec.details["dtype"] == "float32"
    json.dumps(dict(spec.details))
    chunk = policy.infer(policy.open(), example_observation(spec))
    assert chunk.actions.shape == (24, 8) and np.isfinite(chunk.actions).all()
    expected = tiny_network().state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in policy.network.state_dict().items())


def test_embodiment_alias_and_dtype(pristine):
    policy = _build(pristine, embodiment="droid", config=EngineConfig(dtype="bfloat16"))
    assert policy.spec.embodiment == "oxe_droid" and policy.network.dtype == torch.bfloat16


def test_horizon_is_the_checkpoints(tmp_path):
    """The embodiment page says 24; the checkpoint was trained with 12."""
    folder = write_checkpoint(tmp_path / "c")
    raw = config_json(num_action_per_block=12)
    raw["action_head_cfg"]["config"]["action_horizon"] = 12
    (folder / "config.json").write_text(json.dumps(raw))
    policy = _build(folder)
    assert policy.spec.horizon == 12
    assert policy.infer(policy.open(), example_observation(policy.spec)).actions.shape == (12, 8)


def test_order_of_conf_yaml_counts(folder):
    def reverse(conf):
        block = conf["transforms"]["oxe_droid"]["transforms"][1]
        block["state_concat_order"] = ["state.gripper_position", "state.joint_position"]
        block["action_concat_order"] = ["action.gripper_position", "action.joint_position"]
        block["video_concat_order"] = ["video.wrist_image_left", "video.exterior_image_2_left",
                                       "video.exterior_image_1_left"]  # fmt: skip

    _conf(folder, reverse)
    policy = _build(folder)
    assert [f.name for f in policy.spec.state] == ["gripper_position", "joint_position"]
    assert [f.name for f in policy.spec.action] == ["gripper_position", "joint_position"]
    assert policy.spec.cameras[0].name == "wrist_image_left"
    observation = example_observation(policy.spec)
    vector = policy._encode_state(observation)[0, 0]
    gripper = 2 * float(observation.state["gripper_position"][0]) - 1  # q01 = 0, q99 = 1
    assert vector[0].item() == pytest.approx(gripper, abs=1e-6) and not vector[8:].any()


def test_order_of_metadata_does_not_count(folder):
    """metadata.json lists fields alphabetically and more of them than are used."""
    edit_json(
        folder / METADATA,
        lambda m: _statistics(m).__setitem__("state", {"cartesian_position": {"q01": [0] * 6, "q99": [1] * 6},
                                                       **dict(sorted(_statistics(m)["state"].items()))}),
    )  # fmt: skip
    assert [f.name for f in _build(folder).spec.state] == ["joint_position", "gripper_position"]


@pytest.mark.parametrize(
    ("change", "relative"),
    [
        ({"relative_action_keys": ["joint_position"]}, [True, False]),
        ({"relative_action_keys": ["action.gripper_position"]}, [False, True]),
        ({"relative_action_keys": ["joint_position", "gripper_position"]}, [True, True]),
        ({"relative_action": False}, [False, False]),
        ({"relative_action_keys": []}, [False, False]),
        ({"relative_action_keys": None}, [True, False]),  # not said: the embodiment page counts
    ],
)
def test_relative_keys_of_conf_yaml_count(folder, change, relative):
    _conf(folder, lambda conf: conf.update(change))
    policy = _build(folder)
    assert [f.relative for f in policy.spec.action] == relative
    zero, one = example_observation(policy.spec), example_observation(policy.spec)
    one.state["joint_position"][:] += 1e-9  # too small for the network to notice in float32
    a, b = (policy.infer(policy.open(), o).actions for o in (zero, one))
    moved = np.abs(b - a)[:, :7]
    assert (np.abs(moved - 1e-9) < 1e-11).all() if relative[0] else (moved == 0).all()


def test_without_conf_yaml_the_embodiment_page_counts(folder):
    (folder / "experiment_cfg" / "conf.yaml").unlink()
    policy = _build(folder)
    assert policy.spec.state == DROID.state and policy.spec.action == DROID.action


def test_raw_camera_size_of_the_metadata_counts(folder):
    def shrink(metadata):
        for camera in metadata["oxe_droid"]["modalities"]["video"].values():
            camera["resolution"] = [160, 96]  # width, height

    edit_json(folder / METADATA, shrink)
    policy = _build(folder)
    assert {(c.height, c.width) for c in policy.spec.cameras} == {(96, 160)}
    observation = example_observation(policy.spec)
    assert observation.frames["wrist_image_left"].shape == (1, 96, 160, 3)
    policy.infer(policy.open(), observation)


def test_statistics_are_the_folders(folder):
    edit_json(folder / METADATA, lambda m: _statistics(m)["action"]["gripper_position"].update(q01=[5.0], q99=[5.0]))
    policy = _build(folder)
    actions = policy.infer(policy.open(), example_observation(policy.spec)).actions
    assert (actions[:, 7] == 5.0).all()  # q01 == q99 decodes to the constant


def test_tokenizer_folder_can_be_named(folder, tmp_path):
    shutil.rmtree(folder / "umt5-xxl")
    place = write_tokenizer(tmp_path / "elsewhere")
    _build(folder, tokenizer=str(place))


# -- faults -----------------------------------------------------------------------------------------------------


def test_exactly_one_source_of_weights(pristine):
    for options in ({}, {"checkpoint": str(pristine), "random_weights": "tiny"}, {"checkpoint": ""}):
        with pytest.raises(ConfigError, match="exactly one"):
            build_policy(embodiment="oxe_droid", device="cpu", **options)


def test_unknown_names(pristine):
    with pytest.raises(ConfigError, match="tiny"):
        build_policy(embodiment="oxe_droid", random_weights="medium", device="cpu")
    with pytest.raises(ConfigError, match="oxe_droid"):  # the known ones are listed
        _build(pristine, embodiment="my_robot")


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "meta", "", "cpu:x", "mps"])
def test_unknown_device(device, pristine):
    with pytest.raises(ConfigError, match="device is not available"):
        _build(pristine, device=device)


def test_devices_and_dtypes():
    assert resolve_device("cpu") == torch.device("cpu")
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("float64", torch.device("cuda")) == torch.float64


def test_statistics_absent(folder, no_weights):
    (folder / METADATA).unlink()
    with pytest.raises(StatisticsError, match="no normalisation statistics") as error:
        _build(folder)
    assert "no identity fallback" in str(error.value)


def test_embodiment_absent(folder, no_weights):
    edit_json(folder / METADATA, lambda m: m.update(agibot=m.pop("oxe_droid"), gr1={}))
    with pytest.raises(StatisticsError) as error:
        _build(folder)
    for word in ("oxe_droid", "agibot", "gr1"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s["state"]["joint_position"].pop("q01"), ["state.joint_position has no 'q01'"]),
        (lambda s: s["action"]["joint_position"]["q99"].pop(), ["action.joint_position.q99", "(6,)", "[7]"]),
        (lambda s: s["action"].pop("gripper_position"), ["action.gripper_position is absent"]),
        (lambda s: s["state"]["joint_position"]["q01"].__setitem__(2, float("nan")), ["q01 is not finite"]),
        (lambda s: s.pop("state"), ["statistics.state"]),
    ],
)
def test_incomplete_statistics(folder, no_weights, change, words):
    edit_json(folder / METADATA, lambda m: change(_statistics(m)))
    with pytest.raises(StatisticsError) as error:
        _build(folder)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("modalities",), ["video"]),
        (("modalities", "video", "wrist_image_left"), 7),
        (("modalities", "video", "wrist_image_left", "resolution"), [320]),
        (("modalities", "video", "wrist_image_left", "resolution"), ["320", "180"]),
        (("modalities", "state", "joint_position", "shape"), 7),
        (("modalities", "state", "joint_position", "shape"), [0]),
    ],
)
def test_strange_metadata(folder, no_weights, path, value):
    def change(metadata):
        section = metadata["oxe_droid"]
        for part in path[:-1]:
            section = section[part]
        section[path[-1]] = value

    edit_json(folder / METADATA, change)
    with pytest.raises(CheckpointError, match=r"metadata\.json"):
        _build(folder)


def test_widths_of_state_and_statistics_must_agree(folder, no_weights):
    edit_json(folder / METADATA, lambda m: m["oxe_droid"]["modalities"]["action"]["joint_position"].update(shape=[6]))
    with pytest.raises(ConfigError, match="relative action fields"):
        _build(folder)


def test_unknown_fields_and_cameras_of_conf_yaml(folder, no_weights):
    def change(kind, name):
        _conf(
            folder,
            lambda c: c["transforms"]["oxe_droid"]["transforms"][1][f"{kind}_concat_order"].append(f"{kind}.{name}"),
        )

    for kind, name in (("state", "torso"), ("action", "torso"), ("video", "ceiling")):
        change(kind, name)
        with pytest.raises(ConfigError, match=name):
            _build(folder)
    _conf(folder, lambda c: c.update(relative_action_keys=["joint_position", "gripper_position"]) or c["transforms"][
        "oxe_droid"]["transforms"][1].update(state_concat_order=["state.joint_position"]))  # fmt: skip
    with pytest.raises(ConfigError, match=r"gripper_position"):
        _build(folder)


def test_broken_conf_yaml(folder, no_weights):
    (folder / "experiment_cfg" / "conf.yaml").write_text("a: [1, 2")
    with pytest.raises(CheckpointError, match=r"conf\.yaml"):
        _build(folder)


def test_tokenizer_absent(folder, no_weights):
    shutil.rmtree(folder / "umt5-xxl")
    with pytest.raises(TokenizerError, match="umT5") as error:
        _build(folder)
    assert "google/umt5-xxl" in str(error.value)


def test_a_token_beyond_the_vocabulary(folder, no_weights):
    """The text encoder of this folder has 64 rows, its tokenizer ids up to 263."""
    write_tokenizer(folder / "umt5-xxl", extra=200)
    with pytest.raises(TokenizerError, match="64 rows"):
        _build(folder)


def test_several_faults_are_one_error(folder, no_weights):
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / METADATA).unlink()
    shutil.rmtree(folder / "umt5-xxl")
    with pytest.raises(CheckpointError) as error:
        _build(folder)
    assert len(error.value.problems) == 3
    for word in ("model-00002-of-00003.safetensors", "statistics", "tokenizer"):
        assert word in str(error.value)


def test_not_a_folder(tmp_path):
    with pytest.raises(CheckpointError, match="not found"):
        _build(tmp_path / "nowhere")


# -- public bug reports as folders ------------------------------------------------------------------------------

_BARE = {
    "model_type": "vla",
    "architectures": ["VLA"],
    "action_head_cfg": {"_target_": "groot.vla.model.dreamzero.action_head.wan_flow_matching_action_tf.WANPolicyHead"},
}


def _bare(folder, files):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_BARE))
    for name, content in files.items():
        if name.endswith(".safetensors"):
            save_file(content, folder / name)
        else:
            (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {
                "model.safetensors.index.json": {
                    "weight_map": {
                        "blocks.0.w": "model-00001-of-00002.safetensors",
                        "blocks.1.w": "model-00002-of-00002.safetensors",
                    }
                },
                "model-00001-of-00002.safetensors": {"blocks.0.w": torch.zeros(2, 2)},
            },
            ["model-00002-of-00002.safetensors"],
        ),
        ({"model.safetensors": {"blocks.0.w": torch.zeros(2, 2)}}, ["statistics"]),
        ({"metadata.json": {"agibot": {"statistics": {}}, "gr1": {"statistics": {}}}}, ["oxe_droid", "agibot", "gr1"]),
    ],
    ids=["MOD-01 missing shard", "MOD-02 no statistics", "MOD-03 embodiment absent"],
)
def test_reported_folders(tmp_path, no_weights, files, words):
    with pytest.raises(CheckpointError) as error:
        _build(_bare(tmp_path / "case", files))
    for word in words:
        assert word in str(error.value)


def test_normalisation_vector_both_ways(folder):
    """MOD-04: a raw state and a normalised action with their counterparts, through a built policy."""
    q01, q99 = [-1.0] * 7 + [0.0], [1.0, 1, 2, 1, 1, 1, 1, 1]

    def change(metadata):
        for group in ("state", "action"):
            for name, part in (("joint_position", slice(0, 7)), ("gripper_position", slice(7, 8))):
                _statistics(metadata)[group][name] = {"q01": q01[part], "q99": q99[part]}

    edit_json(folder / METADATA, change)
    _conf(folder, lambda c: c.update(relative_action=False))
    policy = _build(folder)
    observation = example_observation(policy.spec)
    raw = [0, 0.5, 0.5, -1.5, 0, 0, 0, 0.25]
    observation.state.update(joint_position=np.array(raw[:7]), gripper_position=np.array(raw[7:]))  # type: ignore[attr-defined]
    expected = torch.tensor([0, 0.5, 0, -1, 0, 0, 0, -0.5])
    assert torch.allclose(policy._encode_state(observation)[0, 0, :8], expected, atol=1e-6)
    normalised = np.array([[0, 0, 0, 0, 0, 0, 0, -1]], dtype=np.float32)
    rows = decode_actions(normalised, policy.spec.action, policy.statistics, observation.state)
    assert np.allclose(rows, [[0, 0, 0.5, 0, 0, 0, 0, 0]], atol=1e-6)


# -- random weights ---------------------------------------------------------------------------------------------


def test_random_weights_are_marked():
    policy = build_policy(embodiment="oxe_droid", random_weights="tiny", device="cpu")
    assert policy.spec.random_weights and "RANDOM WEIGHTS" in policy.spec.weights


def test_random_weights_with_a_named_tokenizer(tmp_path):
    place = write_tokenizer(tmp_path / "t")
    policy = build_policy(embodiment="oxe_droid", random_weights="tiny", tokenizer=str(place), device="cpu")
    assert type(policy.tokenizer).__name__ == "UMT5Tokenizer"
    with pytest.raises(TokenizerError):
        build_policy(embodiment="oxe_droid", random_weights="tiny", tokenizer=str(tmp_path / "no"), device="cpu")


def test_crop_and_view_size_of_conf_yaml_count(folder):
    def change(conf):
        conf["transforms"]["oxe_droid"]["transforms"] += [
            {"_target_": "groot.vla.data.transform.VideoCrop", "scale": 0.9},
            {"_target_": "groot.vla.data.transform.VideoResize", "height": 96, "width": 160},
        ]

    _conf(folder, change)
    robot = _build(folder).embodiment
    assert (robot.crop_scale, robot.view_height, robot.view_width) == (0.9, 96, 160)


@pytest.mark.parametrize("scale", [0, -1, 1.5, "all", True])
def test_an_impossible_crop_is_refused(folder, no_weights, scale):
    crop = {"_target_": "VideoCrop", "scale": scale}
    _conf(folder, lambda conf: conf["transforms"]["oxe_droid"]["transforms"].append(crop))
    with pytest.raises(CheckpointError, match="scale"):
        _build(folder)


def test_transforms_are_also_found_in_the_copy_of_the_data_set(folder):
    def change(conf):
        conf["train_dataset"] = {"all_transforms": conf.pop("transforms")}
        concat = conf["train_dataset"]["all_transforms"]["oxe_droid"]["transforms"][-1]
        concat["state_concat_order"].reverse()

    _conf(folder, change)
    assert [f.name for f in _build(folder).spec.state] == ["gripper_position", "joint_position"]


def test_per_step_statistics_are_demanded_where_conf_yaml_says_so(folder, no_weights):
    _conf(folder, lambda conf: conf.update(relative_action_per_horizon=True))
    with pytest.raises(StatisticsError, match=r"relative_action_per_horizon.*joint_position"):
        _build(folder)


def test_the_tokenizer_file_itself_can_be_named(folder):
    moved = folder.parent / "elsewhere"
    shutil.move(folder / "umt5-xxl", moved)
    assert _build(folder, tokenizer=str(moved / "tokenizer.json")).spec.embodiment == "oxe_droid"
    shutil.copy(moved / "tokenizer.json", folder / "tokenizer.json")
    assert _build(folder).spec.embodiment == "oxe_droid"


@pytest.mark.parametrize("keys", ["joint_position", ["joint_positon"], ["joint_position", "joint_position"], [7], {}])
def test_relative_keys_that_name_nothing_are_refused(folder, no_weights, keys):
    """A misspelled key once turned relative predictions into absolute targets."""
    _conf(folder, lambda conf: conf.update(relative_action_keys=keys))
    with pytest.raises(CheckpointError, match="relative_action_keys"):
        _build(folder)


def test_relative_keys_of_other_robots_do_not_matter(folder):
    _conf(folder, lambda conf: conf.update(relative_action_keys=["joint_position", "left_joint_pos"]))
    assert [f.relative for f in _build(folder).spec.action] == [True, False]


def test_a_flag_that_is_text_is_refused(folder, no_weights):
    _conf(folder, lambda conf: conf.update(relative_action="false"))
    with pytest.raises(CheckpointError, match="relative_action is unusable"):
        _build(folder)


def test_another_normalisation_is_refused(folder, no_weights):
    modes = {"_target_": "StateActionTransform", "normalization_modes": {"action.joint_position": "min_max"}}
    _conf(folder, lambda conf: conf["transforms"]["oxe_droid"]["transforms"].append(modes))
    with pytest.raises(CheckpointError, match="min_max"):
        _build(folder)


def test_crossed_or_textual_statistics_are_refused(folder, no_weights):
    def crossed(metadata):
        entry = _statistics(metadata)["action"]["joint_position"]
        entry["q01"], entry["q99"] = entry["q99"], entry["q01"]

    edit_json(folder / METADATA, crossed)
    with pytest.raises(StatisticsError, match="q01 exceeds q99"):
        _build(folder)


def test_numbers_in_quotes_are_no_statistics(folder, no_weights):
    edit_json(folder / METADATA, lambda m: _statistics(m)["state"]["gripper_position"].update(q01=["0.0"]))
    with pytest.raises(StatisticsError, match="not an array of numbers"):
        _build(folder)


def test_a_key_given_twice_is_refused(folder, no_weights):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"num_frames": 33', '"num_frames": 33, "num_frames": 17', 1))
    with pytest.raises(CheckpointError, match="twice"):
        _build(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("experiment_cfg/conf.yaml", b"\xff\xfe\x00"),
        ("config.json", b"[" * 100_000),
        ("config.json", b'{"a": ' + b"9" * 5000),
    ],
)
def test_unreadable_files_are_named(folder, no_weights, name, content):
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name.rsplit("/", 1)[-1]):
        _build(folder)


def test_pictures_that_do_not_fit_the_network_are_found_before_the_weights(folder, no_weights):
    def change(config):
        head = config["action_head_cfg"]["config"]
        head["target_video_height"], head["target_video_width"] = None, None

    edit_json(folder / "config.json", change)
    with pytest.raises(CheckpointError, match=r"352x640 gives 880 tokens.*frame_seqlen = "):
        _build(folder)


def test_a_long_list_of_faults_is_cut():
    text = str(CheckpointError("broken", problems=[f"fault {i}" for i in range(500)]))
    assert "fault 39" in text and "fault 40" not in text and "460 more" in text


def test_a_picture_size_that_nobody_published_is_not_assumed(folder, no_weights):
    metadata = json.loads((folder / METADATA).read_text()) | synthetic_metadata(YAM)
    del metadata["yam"]["modalities"]["video"]["top_camera-images-rgb"]["resolution"]
    (folder / METADATA).write_text(json.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"top_camera-images-rgb.*resolution"):
        _build(folder, embodiment="yam")


@pytest.mark.parametrize("random_weights", [None, "tiny"])
def test_an_option_this_machine_cannot_carry_out_is_refused_before_weights_are_read(folder, no_weights, random_weights):
    cpu_cannot = EngineConfig.preset("bf16", torch.device("cpu"))
    source = {"random_weights": random_weights, "checkpoint": None} if random_weights else {}
    with pytest.raises(ConfigError, match="graphs need a GPU"):
        _build(folder, config=cpu_cannot, **source)
