"""Training-side flow matching against recorded tables."""

from __future__ import annotations

import pytest
import torch

from test.golden_files import Golden, golden, rel
from wam_policy_ros.model import flow_matching

LIMIT = 5e-6


@pytest.fixture(scope="module")
def recorded() -> Golden:
    return golden("schedulers.safetensors")


@pytest.mark.parametrize("levels", [16, 100, 1000])
def test_tables(recorded: Golden, levels: int) -> None:
    assert rel(flow_matching.sigmas(levels), recorded[f"flowmatch{levels}.sigmas"]) < LIMIT
    assert rel(flow_matching.timesteps(levels), recorded[f"flowmatch{levels}.timesteps"]) < LIMIT


def test_euler_steps(recorded: Golden) -> None:
    levels = [*flow_matching.sigmas(16), torch.zeros(())]
    x = recorded["unipc_a.x_init"]
    for i, flow in enumerate(recorded["unipc_a.model_outputs"]):
        x = flow_matching.euler_step(x, flow, levels[i], levels[i + 1])
        assert rel(x, recorded["flowmatch16.euler_x_after"][i]) < LIMIT


def test_noising_and_target(recorded: Golden) -> None:
    clean, noise, timestep = (recorded[f"flowmatch1000.add_noise.{n}"] for n in ("clean", "noise", "timestep"))
    assert rel(flow_matching.add_noise(clean, noise, timestep), recorded["flowmatch1000.add_noise.out"]) < LIMIT
    assert rel(flow_matching.training_target(clean, noise), recorded["flowmatch1000.training_target"]) < LIMIT


def test_noise_per_frame() -> None:
    clean, noise = torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    out = flow_matching.add_noise(clean, noise, torch.tensor([[250.0, 1000.0]]))
    assert torch.equal(out[0, :, 0, 0], torch.tensor([0.25, 1.0]))


def test_the_flow_leads_from_any_level_to_the_clean_sample() -> None:
    torch.manual_seed(0)
    clean, noise = torch.randn(2, 3, 4).double(), torch.randn(2, 3, 4).double()
    timestep = torch.tensor([800.0, 120.0]).double()
    noised = flow_matching.add_noise(clean, noise, timestep)
    flow = flow_matching.training_target(clean, noise)
    assert rel(flow_matching.euler_step(noised, flow, timestep[:, None, None] / 1000, 0.0), clean) < 1e-12


def test_weights(recorded: Golden) -> None:
    table = flow_matching.timesteps(1000)
    timestep = recorded["flowmatch1000.add_noise.timestep"]
    assert rel(flow_matching.training_weights(table), recorded["flowmatch1000.weights"]) < 5e-5
    assert rel(flow_matching.training_weight(timestep, table), recorded["flowmatch1000.training_weight"]) < 5e-5
