"""Which solver steps evaluate the network (DreamZero spec 4.6)."""

from __future__ import annotations

import math

import pytest
import torch

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.engine.config import NUM_STEPS, EngineConfig
from wam_policy_ros.engine.step_schedule import STATIC_MASKS, DynamicSchedule, make_schedule

MASKS = {
    5: [0, 1, 2, 7, 12],
    6: [0, 1, 5, 10, 14, 15],
    7: [0, 1, 2, 6, 10, 14, 15],
    8: [0, 1, 2, 6, 10, 13, 14, 15],
    16: list(range(16)),
}


def _steps(schedule, flow_at=lambda i: torch.ones(1, 4), steps=16):
    ran = []
    for i in range(steps):
        if schedule.should_run(i):
            schedule.evaluated(flow_at(i))
            ran.append(i)
    return ran


@pytest.mark.parametrize("evaluations", MASKS)
def test_static_masks(evaluations):
    assert _steps(make_schedule("static", evaluations, NUM_STEPS)) == MASKS[evaluations]
    assert EngineConfig(evaluations=evaluations).evaluations_text == f"{evaluations} of 16"


def test_eight_is_the_default_and_full_is_all():
    assert EngineConfig.reference() == EngineConfig() and EngineConfig().evaluations == 8
    assert _steps(make_schedule("full", 8, NUM_STEPS)) == list(range(16))
    assert EngineConfig(schedule="full").evaluations_text == "16 of 16"
    assert set(STATIC_MASKS) == {5, 6, 7, 8}


def test_best_case_of_the_dynamic_rule_is_what_the_rule_does_at_its_best():
    assert _steps(make_schedule("dynamic_best", 8, NUM_STEPS)) == _steps(DynamicSchedule()) == [0, 1, 6, 11]
    assert EngineConfig(schedule="dynamic_best").evaluations_text.startswith("4 of 16 (best case")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"guidance_steps": [0, 1]}, "tuple"),
        ({"guidance_steps": (1, 0)}, "rising"),
        ({"guidance_steps": (0, 0)}, "different"),
        ({"guidance_steps": (0, True)}, "integers"),
        ({"guidance_steps": (0, 3)}, r"\[3\] never evaluate"),
        ({"guidance_steps": (1, 2)}, "nothing|no difference"),
        ({"guidance_steps": (), "guidance_between": "reuse"}, "no difference"),
        ({"guidance_steps": (0,), "guidance_scale": 1.0}, "no effect"),
        ({"guidance_between": "off"}, "no effect"),
        ({"guidance_steps": (0,), "guidance_between": "sometimes"}, "sometimes"),
        ({"guidance_steps": (16,), "schedule": "dynamic", "guidance_between": "off"}, r"\[16\]"),
    ],
)
def test_guidance_steps_that_mean_nothing_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        EngineConfig(**options)


def test_guided_steps():
    config = EngineConfig(guidance_steps=(0, 6))
    assert [s for s in range(16) if config.guides(s)] == [0, 6]
    assert config.evaluations_text == "8 of 16, guidance at 2 (reuse between)"
    assert all(EngineConfig().guides(s) for s in range(16)) and not EngineConfig(guidance_scale=1.0).guides(0)
    assert EngineConfig(guidance_steps=(3,), schedule="dynamic", guidance_between="off").guides(3)


def _at_angle(cosine):
    """Flows in a plane, each turned against the one before by the same angle."""
    angle = math.acos(cosine)

    def flow(i, state=[0]):  # noqa: B006 (a counter of evaluations, not of steps)
        state[0] += 1
        a = angle * state[0]
        return torch.tensor([[math.cos(a), math.sin(a)]], dtype=torch.float64)

    return flow


@pytest.mark.parametrize(
    ("cosine", "expected"),
    [
        (1.0, [0, 1, 6, 11]),
        (0.96, [0, 1, 6, 11]),
        (0.9501, [0, 1, 6, 11]),
        (0.9499, [0, 1, 4, 7, 10, 13]),
        (0.94, [0, 1, 4, 7, 10, 13]),
        (0.9301, [0, 1, 4, 7, 10, 13]),
        (0.9299, list(range(16))),
        (0.5, list(range(16))),
        (-1.0, list(range(16))),
    ],
)
def test_dynamic_patterns_of_a_constant_similarity(cosine, expected):
    assert _steps(make_schedule("dynamic", 8, NUM_STEPS), _at_angle(cosine)) == expected


@pytest.mark.parametrize(("cosine", "expected"), [(0.95, [0, 1, 4]), (0.93, [0, 1, 2, 3, 4, 5])])
def test_thresholds_are_strict(monkeypatch, cosine, expected):
    from wam_policy_ros.engine import step_schedule

    monkeypatch.setattr(
        step_schedule.F, "cosine_similarity", lambda *a, **k: torch.tensor([cosine], dtype=torch.float64)
    )
    assert _steps(DynamicSchedule(), steps=6) == expected


def test_similarity_is_the_mean_over_the_batch_of_flattened_flows():
    """One row alike (1.0) and one orthogonal (0.0): mean 0.5, no pause; over everything it would be 0.99."""
    a = torch.zeros(2, 2, 2, 1, 1)
    a[0], a[1, 0] = 10.0, 1.0
    b = a.clone()
    b[1] = 0
    b[1, 1] = 1.0
    flows = iter([a, b] * 8)
    assert _steps(DynamicSchedule(), lambda i: next(flows), steps=4) == [0, 1, 2, 3]


def test_similarity_compares_the_last_two_evaluations():
    """After a pause the flows of steps 6 and 1 are compared: there they differ, so the network runs on."""
    flows = {0: [1.0, 0], 1: [1.0, 0.01], 6: [0, 1.0], 7: [1.0, 0]}
    assert _steps(DynamicSchedule(), lambda i: torch.tensor([flows.get(i, [0.0, (-1.0) ** i])])) == [
        0, 1, *range(6, 16)
    ]  # fmt: skip


def test_every_call_starts_afresh():
    assert make_schedule("dynamic", 8, NUM_STEPS) is not make_schedule("dynamic", 8, NUM_STEPS)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"evaluations": 4}, "4"),
        ({"evaluations": "8"}, "8"),
        ({"schedule": "cosine"}, "cosine"),
        ({"dtype": "float16"}, "float16"),
        ({"sigma_shift": 0}, "sigma_shift"),
        ({"sigma_shift": float("nan")}, "sigma_shift"),
        ({"guidance_scale": "5"}, "guidance_scale"),
        ({"guidance_scale": float("inf")}, "guidance_scale"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_wrong_engine_options(options, word):
    with pytest.raises(ConfigError, match=word):
        EngineConfig(**options)


def test_a_typo_is_refused_by_name():
    """MOD-05: an unknown option must not be dropped silently."""
    with pytest.raises(ConfigError, match="num_inference_step") as error:
        EngineConfig.from_dict({"num_inference_step": 4, "guidance_scale": 1.0})
    assert "evaluations" in str(error.value)  # what would have been accepted
    assert EngineConfig.from_dict({"guidance_scale": 1}).guidance_scale == 1
