"""The solver against recorded trajectories, bit for bit in float32 and bfloat16, and against printed vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from test.golden_files import golden, rel
from wam_policy_ros.engine.unipc import UniPC, decouple, flow_sigmas, timesteps_of

# DreamZero spec 4.3.
SIGMAS = [.9998, .986634, .972006, .955657, .937265, .916422, .892602, .865118, .833055, .795165, .7497, .694136,
          .624687, .535408, .416389, .2498, 0]  # fmt: skip
TIMESTEPS = [999, 986, 972, 955, 937, 916, 892, 865, 833, 795, 749, 694, 624, 535, 416, 249]
DECOUPLED = [999, 997, 994, 990, 987, 983, 978, 972, 966, 958, 949, 938, 924, 906, 883, 849]

# DreamZero spec, Appendix D: sample 1, flow sin(3 x + 0.3 i).
COUPLED_16 = [0.998142, 1.00263, 1.013452, 1.029244, 1.049971, 1.074049, 1.098417, 1.118962, 1.131327, 1.131637,
              1.11665, 1.08329, 1.027832, 0.944966, 0.82744, 0.66668]  # fmt: skip
DECOUPLED_16 = [0.999629, 1.000593, 1.002673, 1.005697, 1.009698, 1.014514, 1.019815, 1.02509, 1.029637, 1.032561,
                1.032771, 1.028942, 1.019413, 1.001898, 0.972779, 0.928613]  # fmt: skip


def _run(sigmas, flows, sample):
    solver, out = UniPC(sigmas), []
    for flow in flows:
        sample = solver.step(flow, sample)
        out.append(sample)
    return torch.stack(out)


def test_schedule():
    sigmas = flow_sigmas(16, 5.0)
    assert sigmas.dtype == torch.float32 and sigmas.shape == (17,) and sigmas[-1] == 0
    assert np.allclose(sigmas, SIGMAS, atol=1e-6)
    assert timesteps_of(sigmas).dtype == torch.int64 and timesteps_of(sigmas).tolist() == TIMESTEPS
    assert timesteps_of(flow_sigmas(4, 5.0)).tolist() == [999, 937, 833, 624]
    assert timesteps_of(flow_sigmas(1, 5.0)).tolist() == [999]


def test_decoupled_schedule_ends_at_the_final_noise():
    sigmas = decouple(flow_sigmas(16, 5.0), 0.8)
    assert sigmas.dtype == torch.float32
    assert sigmas[0] == pytest.approx(0.9998, abs=1e-6) and sigmas[-1] == pytest.approx(0.8, abs=1e-7)
    assert timesteps_of(sigmas).tolist() == DECOUPLED


@pytest.mark.parametrize(
    ("sigmas", "expected"),
    [
        (flow_sigmas(16, 5.0), COUPLED_16),
        (decouple(flow_sigmas(16, 5.0), 0.8), DECOUPLED_16),
        (flow_sigmas(4, 5.0), [0.991175, 1.014668, 1.164995, 1.758479]),
        (flow_sigmas(1, 5.0), [0.858908]),
    ],
    ids=["16", "16 decoupled", "4", "1"],
)
def test_printed_vectors(sigmas, expected):
    solver, x, out = UniPC(sigmas), torch.ones(3), []
    for i in range(len(sigmas) - 1):
        x = solver.step(torch.sin(3 * x + 0.3 * i), x)
        assert x.unique().numel() == 1
        out.append(x[0].item())
    assert out == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("name", ["unipc_a", "unipc_b", "unipc_c", "unipc_d", "unipc_mask8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_trajectories(name, dtype):
    data = golden("schedulers.safetensors")
    source = "unipc_a" if name == "unipc_mask8" else name
    flows = data[f"{source}.model_outputs"]
    if name == "unipc_mask8":
        runs = [i for i, run in enumerate(data["unipc_mask8.mask"].tolist()) if run]
        flows = flows[[max(r for r in runs if r <= i) for i in range(16)]]
    prefix = "bf16." if dtype == torch.bfloat16 else ""
    got = _run(data[f"{source}.sigmas"], flows.to(dtype), data[f"{source}.x_init"].to(dtype))
    assert got.dtype == dtype
    recorded = data[f"{prefix}{name}.x_after"]
    # Bit for bit where the recordings were made; another CPU's expm1 and log may differ in the last place.
    assert rel(got.float(), recorded) < (4e-6 if dtype == torch.float32 else 1.5e-2)  # 1.2e-6 seen


def test_recorded_sigmas():
    data = golden("schedulers.safetensors")
    assert torch.equal(flow_sigmas(16, 5.0), data["unipc_a.sigmas"])
    assert torch.equal(decouple(flow_sigmas(16, 5.0), 0.8), data["unipc_b.sigmas"])
    assert torch.equal(flow_sigmas(4, 5.0), data["unipc_c.sigmas"])
    assert torch.equal(flow_sigmas(10, 3.0), data["unipc_d.sigmas"])
    for name in "abcd":
        assert torch.equal(timesteps_of(data[f"unipc_{name}.sigmas"]), data[f"unipc_{name}.timesteps"])


def test_a_straight_path_is_followed_exactly():
    """With the true flow noise - clean of one sample every order arrives at the sample."""
    torch.manual_seed(0)
    clean, noise = torch.randn(2, 50, dtype=torch.float64)
    for steps in (1, 2, 3, 16):
        sigmas = flow_sigmas(steps, 5.0)
        start = (1 - sigmas[0]) * clean + sigmas[0] * noise
        path = _run(sigmas, [noise - clean] * steps, start)
        assert torch.allclose(path[-1], clean, atol=1e-6)


def test_order_two_is_more_accurate_than_euler():
    """dx/dsigma = c x: the exact end is known."""
    steps, c = 16, 1.5
    sigmas = flow_sigmas(steps, 5.0)
    x = euler = torch.tensor(2.0, dtype=torch.float64)
    solver = UniPC(sigmas)
    for i in range(steps):
        x = solver.step(c * x, x)
        euler = euler + c * euler * (sigmas[i + 1] - sigmas[i])
    exact = 2.0 * math.exp(-c * float(sigmas[0]))
    assert abs(x - exact) < 0.5 * abs(euler - exact)


def test_trajectories_share_nothing():
    sigmas = flow_sigmas(16, 5.0)
    flows = torch.randn(16, 4)
    alone = _run(sigmas, flows, torch.zeros(4))
    a, b = UniPC(sigmas), UniPC(sigmas)
    xa, xb = torch.zeros(4), torch.ones(4)
    for i in range(16):
        xa, xb = a.step(flows[i], xa), b.step(-flows[i], xb)
    assert torch.equal(xa, alone[-1])
