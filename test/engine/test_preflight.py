"""What is refused or said before the first step, on machines that are made up."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from test.engine.tiny_policy import make_network, make_policy
from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.contract.policy_thread import WARNING, Phase, PolicyThread
from wam_policy_ros.engine import build, paths, preflight
from wam_policy_ros.engine.config import PRESETS, EngineConfig
from wam_policy_ros.engine.fast_attention import TorchAttention
from wam_policy_ros.engine.fp8 import E4M3FN
from wam_policy_ros.engine.policy import with_config
from wam_policy_ros.engine.preflight import Platform, refuse_impossible, slow_products, unwritable, warnings_of
from wam_policy_ros.engine.quantize import Fp8Linear
from wam_policy_ros.model.config import DiTConfig

DIT = DiTConfig()
BF16 = EngineConfig(**PRESETS["bf16"])
FP8 = EngineConfig(**PRESETS["fp8"])
FUSED = EngineConfig(step="fused")


@pytest.fixture
def on(tmp_path):
    """A made-up machine with a home of its own."""

    def make(backend, architecture="", **environment):
        return Platform(backend, architecture, environment, tmp_path)

    return make


def refuse(config, platform, dit=DIT, dtype=torch.bfloat16):
    refuse_impossible(config, platform, dit, dtype)


def test_the_presets_are_possible_where_they_are_for(on):
    for config in (BF16, FP8, EngineConfig()):
        refuse(config, on("cuda", (9, 0)))
    refuse(BF16, on("cuda", (8, 0)))
    refuse(replace(FP8, attention="cudnn"), on("cuda", (8, 9)))
    for architecture in ("gfx942", "gfx950"):
        for config in (BF16, FP8):
            refuse(replace(config, attention="torch"), on("hip", architecture))
    refuse(EngineConfig(step="fused", linears="fp8", attention="fp8", text="streamed"), on("cpu"), dtype=torch.float32)


@pytest.mark.parametrize(
    ("config", "machine", "dtype", "words"),
    [
        (replace(BF16, attention="torch"), ("cpu",), torch.bfloat16, "graphs need a GPU"),
        (replace(BF16, graphs=False), ("cpu",), torch.bfloat16, "cudnn needs a GPU of NVIDIA.*attention: torch"),
        (BF16, ("hip", "gfx942"), torch.bfloat16, "cudnn needs a GPU of NVIDIA.*hip"),
        (BF16, ("cuda", (9, 0)), torch.float32, "cuDNN's attention does not take this network.*float32"),
        (FP8, ("hip", "gfx942"), torch.bfloat16, "attention: fp8 is cuDNN's kernel.*gfx942.*attention: torch"),
        (FP8, ("cuda", (8, 9)), torch.bfloat16, r"attention: fp8 is cuDNN's kernel.*\(8, 9\)"),
        (replace(FP8, attention="torch"), ("cuda", (9, 0)), torch.float32, "8-bit matrix products.*float32"),
        (replace(FUSED, dtype="float32"), ("cuda", (9, 0)), torch.bfloat16, "loaded in another dtype"),
        (EngineConfig(dtype="bfloat16"), ("cpu",), torch.float32, "loaded in another dtype"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(on, config, machine, dtype, words):
    with pytest.raises(ConfigError, match=words):
        refuse(config, on(*machine), dtype=dtype)


@pytest.mark.parametrize(("config", "width"), [(BF16, 100), (FP8, 72)])
def test_heads_a_kernel_does_not_take(on, config, width):
    dit = DiTConfig(dim=width, num_heads=1)
    with pytest.raises(ConfigError, match=f"{width} numbers per head"):
        refuse(config, on("cuda", (9, 0)), dit)


def test_a_kernel_that_is_not_there_is_a_named_error():
    """PyTorch built without cuDNN says so only when it is asked to run."""
    like = torch.zeros(1, 8, 2, 16)
    TorchAttention(cudnn=False).check(like)
    with pytest.raises(ConfigError, match=r"cuDNN has no attention.*float32 \[1, 8, 2, 16\].*attention: torch"):
        TorchAttention(cudnn=True).check(like)


def test_an_option_that_changes_nothing_is_an_error():
    """The weights have the dtype they were loaded in."""
    policy = make_policy(FUSED, network=make_network())
    with pytest.raises(ConfigError, match="another dtype"):
        with_config(policy, dtype="bfloat16")
    assert with_config(policy, dtype="float32").spec.details["dtype"] == "float32"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, {"step": "plain", "tier": "reference"}),
        (
            {"step": "fused", "linears": "fp8", "attention": "fp8", "text": "streamed"},
            {
                "linears": "fp8 e4m3fn",
                "attention": "fp8 e4m3fn",
                "text": "streamed",
                "graphs": False,
                "tier": "numeric",
            },
        ),
    ],
)
def test_details_say_what_runs(options, words):
    details = make_policy(EngineConfig(**options), network=make_network()).spec.details
    assert words.items() <= details.items()


# -- caches and settings ----------------------------------------------------------------------------------------


@pytest.fixture
def taken(tmp_path) -> Path:
    """A path below a file: nobody can make a folder there, not even root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "below"


def test_triton_needs_a_cache_it_can_write(on, taken, tmp_path):
    for variable in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        with pytest.raises(ConfigError, match=r"Triton cannot write its cache.*below.*set TRITON_CACHE_DIR"):
            refuse(BF16, on("cuda", (9, 0), **{variable: str(taken)}))
    with pytest.raises(ConfigError, match="Triton cannot write"):
        refuse(BF16, Platform("cuda", (9, 0), {}, taken))  # a home that cannot be written
    refuse(BF16, Platform("cuda", (9, 0), {"TRITON_CACHE_DIR": str(tmp_path / "own")}, taken))
    refuse(EngineConfig(), Platform("cuda", (9, 0), {}, taken))  # the plain step has no kernels of ours


def test_a_cache_of_somebody_else_is_said(on, monkeypatch, tmp_path):
    platform = on("cuda", (9, 0), TRITON_CACHE_DIR=str(tmp_path))
    assert warnings_of(BF16, platform) == []
    monkeypatch.setattr("os.getuid", lambda: 4242424)
    assert "another user" in warnings_of(BF16, platform)[0]
    assert warnings_of(EngineConfig(), platform) == []


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_expandable_segments_on_rocm(on, name):
    value = {name: "max_split_size_mb:512, expandable_segments: True"}
    lines = warnings_of(BF16, on("hip", "gfx942", **value))
    assert len(lines) == 1 and name in lines[0] and "unset" in lines[0]
    assert warnings_of(BF16, on("cuda", (9, 0), **value)) == []
    assert warnings_of(BF16, on("hip", "gfx942", **{name: "expandable_segments:False"})) == []


def test_miopen_needs_a_place_and_no_search(on, taken):
    assert warnings_of(EngineConfig(), on("hip", "gfx942")) == []
    lines = warnings_of(EngineConfig(), Platform("hip", "gfx942", {}, taken))
    assert len(lines) == 2 and "MIOPEN_USER_DB_PATH" in lines[0] and "MIOPEN_CUSTOM_CACHE_DIR" in lines[1]
    searching = on("hip", "gfx942", MIOPEN_FIND_MODE="normal", MIOPEN_FIND_ENFORCE="3")
    assert ["search" in line for line in warnings_of(EngineConfig(), searching)] == [True, True]
    assert warnings_of(EngineConfig(), on("hip", "gfx942", MIOPEN_FIND_MODE="FAST")) == []


def test_unwritable_says_why_and_makes_what_it_can(taken, tmp_path):
    assert "below" in unwritable(taken) and unwritable(tmp_path / "a" / "b") == ""
    assert not list((tmp_path / "a" / "b").iterdir())


# -- measured ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("times", "said"), [((2.0, 1.0), True), ((1.0, 1.0), False), ((0.5, 1.0), False)])
def test_eight_bits_that_save_no_time_are_said(monkeypatch, times, said):
    taken = iter(times)
    works = []
    monkeypatch.setattr(preflight, "median_ms", lambda work, *rest: (works.append(work()), next(taken))[1])
    lines = slow_products(Fp8Linear.from_weight(torch.randn(32, 48), None, E4M3FN), 8)
    assert bool(lines) is said and ["2.00 against 1.00 ms" in line for line in lines] == [True] * said
    assert works[0].raw.shape == works[1].shape == (8, 32)


def test_warnings_are_told_and_logged(monkeypatch):
    monkeypatch.setattr(build, "warnings_of", lambda *a: ["of the machine"])
    made = paths._fast_vae
    monkeypatch.setattr(paths, "_fast_vae", lambda *a: (a[2]("of the convolutions"), made(*a))[1])
    told, logged = [], []
    policy = build.build_policy(
        embodiment="oxe_droid",
        random_weights="tiny",
        device="cpu",
        config=FUSED,
        progress=lambda text, fraction: told.append(text),
    )
    lines = ["of the machine", "of the convolutions"]
    assert policy.warnings == lines and [t for t in told if t.startswith(WARNING)] == [WARNING + x for x in lines]

    def load(progress):
        progress(WARNING + "something", 0.0)
        return HoldPolicy()

    owner = PolicyThread(load, log=lambda level, line: logged.append((level, line)))
    ready = threading.Event()
    owner.subscribe(lambda: owner.status.phase is Phase.READY and ready.set())
    owner.start()
    assert ready.wait(10) and owner.stop(5)
    assert ("warn", "something") in logged
