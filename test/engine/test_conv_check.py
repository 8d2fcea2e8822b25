"""Which form a convolution takes, and that a wrong one is never served."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from wam_policy_ros.contract.errors import ConfigError, EngineError
from wam_policy_ros.engine import conv_check
from wam_policy_ros.engine.conv_check import PlainConv, check_conv3d, checked_plan, compare_with_float32, measure_plan
from wam_policy_ros.engine.conv_plan import FORMS, CausalConv, ConvKey, ConvPlan, Form

KEYS = [ConvKey(8, 8, 1), ConvKey(8, 16, 2)]
CPU = torch.device("cpu")


def measure(**options):
    return measure_plan(KEYS, 16, 24, frames=2, device=CPU, dtype=torch.bfloat16, repeats=1, **options)


def test_every_form_is_right_and_one_is_chosen() -> None:
    report = measure()
    assert [(r.key, r.form) for r in report.results] == [(str(k), f) for k in KEYS for f in FORMS]
    # A bf16 result cannot be closer than its rounding; nothing compares a form with itself.
    assert all(5e-4 < r.relative_error < 5e-3 for r in report.results)
    assert set(report.plan.forms) == {str(k) for k in KEYS}
    assert report.warnings == ()
    assert json.loads(json.dumps(report.as_dict()))["torch_version"] == torch.__version__


class _Broken(CausalConv):
    """Gives wrong values in one corner, as a kernel that overflows an index does."""

    def __call__(self, window):
        out = super().__call__(window)
        if self.form in self.broken:
            out[:, -1, -4:] *= 2
        return out


@pytest.mark.parametrize("broken", [("channels_last",), ("stacked", "contiguous")])
def test_a_wrong_form_is_not_used(monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]) -> None:
    monkeypatch.setattr(_Broken, "broken", broken, raising=False)
    monkeypatch.setattr(conv_check, "CausalConv", _Broken)
    report = measure()
    assert not set(broken) & set(report.plan.forms.values())
    assert len(report.warnings) == len(broken) * len(KEYS)


def check(plan: ConvPlan) -> tuple[ConvPlan, list[str]]:
    return checked_plan(plan, KEYS, 16, 24, frames=2, device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize("planned", FORMS)
def test_a_planned_form_that_is_wrong_is_replaced_and_said(monkeypatch: pytest.MonkeyPatch, planned: Form) -> None:
    plan = ConvPlan(default=planned)
    assert check(plan) == (plan, [])
    monkeypatch.setattr(_Broken, "broken", (planned,), raising=False)
    monkeypatch.setattr(conv_check, "CausalConv", _Broken)
    checked, lines = check(plan)
    assert planned not in checked.forms.values() and set(checked.forms) == {str(k) for k in KEYS}
    assert len(lines) == 2 and all(planned in line and torch.__version__ in line for line in lines)


@pytest.mark.parametrize("run", [measure, lambda: check(ConvPlan())])
def test_nothing_is_served_when_all_forms_are_wrong(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    monkeypatch.setattr(_Broken, "broken", FORMS, raising=False)
    monkeypatch.setattr(conv_check, "CausalConv", _Broken)
    with pytest.raises(EngineError, match=r"no form of the convolution 8->8 at 1/1 .* at most 0.02"):
        run()


def test_not_a_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotFinite(CausalConv):
        def __call__(self, window):
            out = super().__call__(window)
            out[0, 0, 0, 0, 0] = float("nan")
            return out

    monkeypatch.setattr(conv_check, "CausalConv", NotFinite)
    with pytest.raises(EngineError, match="relative error inf"):
        measure()


@pytest.mark.parametrize("kernel", [(1, 3, 3), (3, 3, 3)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_plain_convolution(kernel: tuple[int, int, int], channels_last: bool) -> None:
    case = PlainConv(4, 4, (5, 8, 6), kernel)
    half = check_conv3d(case, device=CPU, dtype=torch.bfloat16, channels_last=channels_last, repeats=1)
    full = check_conv3d(case, device=CPU, dtype=torch.float32, channels_last=channels_last, repeats=1)
    assert 5e-4 < half.relative_error < 5e-3 and half.right
    assert full.relative_error < 1e-6


def test_costs_beyond_float32_are_warned_of() -> None:
    case = PlainConv(4, 4, (2, 4, 4), (3, 3, 3))
    full = check_conv3d(case, device=CPU, dtype=torch.float32, channels_last=False, repeats=1)
    full = replace(full, convolution_ms=1.0, workspace_bytes=100 << 20)
    assert compare_with_float32(replace(full, dtype="bfloat16"), full) == []
    slow = compare_with_float32(replace(full, dtype="bfloat16", convolution_ms=1.2), full)
    assert len(slow) == 1 and "slower than in float32 (1.20 ms, 1.00 ms)" in slow[0] and torch.__version__ in slow[0]
    large = compare_with_float32(replace(full, dtype="bfloat16", workspace_bytes=151 << 20), full)
    assert len(large) == 1 and "151 MiB of workspace, 100 MiB in float32" in large[0]


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ConfigError, match="winograd"):
        ConvPlan(forms={"8->8 at 1/1": "winograd"})  # type: ignore[dict-item]


def test_flags_are_put_back() -> None:
    cudnn = torch.backends.cudnn
    before = (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
    with ConvPlan(benchmark=True, deterministic=False).flags():
        assert (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == (True, False, before[3])
    with ConvPlan().flags():
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
    assert (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == before
