"""What the network is trained on is what it is given when it runs: played in the simulator, tensor by tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from wam_policy_ros.contract.interface import ActionChunk, Observation
from wam_policy_ros.contract.normalization import Statistics
from wam_policy_ros.contract.transforms import decode_actions, encode_actions, encode_state
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import DreamZeroPolicy
from wam_policy_ros.model.dreamzero import DreamZero
from wam_policy_ros.model.tokenizer import UMT5Tokenizer
from wam_policy_ros.train.export import export
from wam_policy_ros.train.footage import Footage
from wam_policy_ros.train.latents import encode_all
from wam_policy_ros.train.preset import TOY
from wam_policy_ros.train.samples import Windows, normalised_rows, normalised_states, state_parts, statistics_of
from wam_policy_ros.train.vocabulary import write_tokenizer

pytest.importorskip("mujoco")
from wam_policy_ros.sim.tasks import TASKS
from wam_policy_ros.train import generate
from wam_policy_ros.train.evaluate import Follower, Rollouts

SEED = 10_001


@pytest.fixture(scope="module")
def world() -> Any:
    from wam_policy_ros.sim.errors import RenderingUnavailable
    from wam_policy_ros.sim.world import World

    try:
        made = World()
    except RenderingUnavailable as error:
        pytest.skip(f"no OpenGL here: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def episode(world: Any) -> Any:
    from wam_policy_ros.sim.demonstrations import Noise
    from wam_policy_ros.sim.expert import Expert

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "NOISE", Noise.none())  # so that the same actions lead the same way again
        made = generate.record(world, Expert(world), SEED, generate.Demonstrations("toy"))
    assert made.success
    return made


@pytest.fixture(scope="module")
def policy(episode: Any, tmp_path_factory: pytest.TempPathFactory) -> DreamZeroPolicy:
    network = DreamZero.with_random_weights(TOY.network())
    page = TOY.embodiment
    metadata = TOY.metadata(statistics_of([episode]))
    statistics = Statistics.from_metadata(metadata, page.tag, state=page.state, action=page.action)
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokens = UMT5Tokenizer.from_folder(folder, TOY.text_len)
    config = EngineConfig(evaluations=5, guidance_scale=1.0)
    return DreamZeroPolicy(network, page, statistics, tokens, config, weights="random")


def _sources(policy: DreamZeroPolicy, episode: Any) -> tuple[Windows, Any]:
    footage = Footage(TOY, torch.device("cpu"))
    footage.add([episode])
    windows = Windows(footage, TOY, policy.statistics, policy.tokenizer)
    return windows, encode_all(policy.network.vae, footage, windows.anchors, batch=16, dtype=torch.float32)


class _Watched:
    """Asks the policy, notes what went into its network, and answers with the rows of the recording."""

    def __init__(self, policy: DreamZeroPolicy, episode: Any) -> None:
        self.spec, self.open, self.close = policy.spec, policy.open, policy.close
        self._policy, self._episode = policy, episode
        self.calls: list[dict[str, torch.Tensor]] = []

    def infer(self, session: Any, observation: Observation) -> ActionChunk:
        seen: dict[str, torch.Tensor] = {"proprio": self._policy._encode_state(observation)}
        chunk = self._policy.infer(session, observation, probe=lambda name, value: seen.setdefault(name, value.clone()))
        seen["ids"] = session.window.prompt.ids
        at = TOY.steps * len(self.calls)
        self.calls.append(seen)
        fields, statistics = self.spec.action, self._policy.statistics
        # The label as training sees it, and back as the policy answers it.
        label = encode_actions(self._episode.label[at].astype(np.float64), fields, statistics, observation.state, 8)
        rows = decode_actions(label, fields, statistics, observation.state)
        return ActionChunk(rows, chunk.dt_s, None, chunk.session_id, chunk.step)

    reset: Any = None
    render_video: Any = None


def test_training_sees_what_the_policy_sees_and_its_rows_do_the_task(world, episode, policy):
    from wam_policy_ros.sim.tasks import TASKS
    from wam_policy_ros.train.rollout import roll_out

    windows, latents = _sources(policy, episode)
    watched = _Watched(policy, episode)
    outcome = roll_out(world, watched, SEED, TASKS[episode.task], episode.instruction, execute=TOY.steps)
    # Rows 0 to 7 of every eighth label, executed from where the network looked, lift the thing: no step is off by one.
    assert outcome.success
    assert len(watched.calls) > TOY.blocks + 1  # a second window began
    for number, call in enumerate(watched.calls):
        window, block = divmod(number, TOY.blocks)
        anchor = torch.tensor([window * TOY.blocks * 4])
        batch = windows.batch(anchor)
        ys = latents.conditioning(anchor)
        torch.testing.assert_close(call["proprio"], batch.state[:, block], atol=1e-4, rtol=0)
        assert torch.equal(call["ids"], windows.ids[batch.prompt])
        close = {"atol": 2e-3, "rtol": 0.0}  # the recording was made in another run of the renderer's threads
        if block == 0:
            assert int(call["prefill0.start_frame"]) == 0
            torch.testing.assert_close(call["ys"], ys, **close)
            torch.testing.assert_close(call["prefill0.x"], ys[:, 4:, :1], **close)
        else:
            assert int(call["prefill0.start_frame"]) == 2 * block - 1
            torch.testing.assert_close(call["prefill0.x"], latents.block[batch.observed[:, block]], **close)
            # what was to be predicted one call earlier
            assert torch.equal(batch.observed[:, block], batch.following[:, block - 1])


def test_the_frames_of_a_call_are_its_own(episode, policy):
    """Another frame would not do: the comparison above can fail."""
    windows, latents = _sources(policy, episode)
    batch = windows.batch(torch.tensor([0]))
    assert (latents.block[batch.observed[:, 1]] - latents.block[batch.observed[:, 1] + 1]).abs().max() > 0.02


def test_normalisation_is_the_contract_s(episode, policy):
    page, statistics = TOY.embodiment, policy.statistics
    for s in (0, 7, 20):
        parts = state_parts(episode.state[s])
        expected = encode_state(parts, page.state, statistics, 8)
        np.testing.assert_allclose(normalised_states(episode.state[s][None], statistics)[0], expected, atol=1e-9)
        rows = encode_actions(episode.label[s].astype(np.float64), page.action, statistics, parts, 8)
        found = normalised_rows(episode.label[s][None], episode.state[s][None], statistics)[0]
        np.testing.assert_allclose(found, rows, atol=2e-4)


def test_the_same_seed_is_the_same_episode(world, episode):
    from wam_policy_ros.sim.expert import Expert

    what = generate.Demonstrations("toy", max_ticks=24)
    one, two = (generate.record(world, Expert(world), SEED + 1, what) for _ in range(2))
    for key in ("views", "state", "action", "label"):
        np.testing.assert_array_equal(getattr(one, key), getattr(two, key))
    assert (one.task, one.instruction) == (two.task, two.instruction)
    assert not np.array_equal(one.state, episode.state[: len(one.state)])


def test_what_a_policy_plays_is_labelled_by_the_expert_and_can_be_trained_on(world, episode, policy, tmp_path):
    metadata = TOY.metadata(statistics_of([episode]))
    statistics = metadata[TOY.embodiment.tag]["statistics"]
    folder = export(policy.network, TOY, statistics, tmp_path / "checkpoint", about={})
    follower = Follower(Rollouts(str(folder), "toy", tasks=("lift_mug",), max_ticks=16, label_every=4))
    try:
        played = follower(SEED)
    finally:
        follower.world.close()
    assert played.source == "policy" and played.task == "lift_mug" and not played.success
    assert played.steps == 16 and len(played.views) == 8 and np.isfinite(played.action).all()
    known = np.isfinite(played.label).all((1, 2))
    assert known.tolist() == [k % 4 == 0 for k in range(16)] + [False]
    begin = world.reset(SEED, TASKS["lift_mug"])
    np.testing.assert_array_equal(played.state[0], generate.state_of(begin))
    np.testing.assert_array_equal(played.views[0], generate.shrink(begin, TOY))
    footage = Footage(TOY, torch.device("cpu"))
    footage.add([episode, played])
    windows = Windows(footage, TOY, policy.statistics, policy.tokenizer, every=2)
    at = footage.first[1]
    assert (windows.anchors >= at).any()
    assert windows.batch(torch.tensor([at])).has_rows[0].tolist() == [True, True, False, False]
