"""The policy as its callers see it: sessions that do not touch each other, steps that happen wholly or not at all."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import look, make_network, make_policy, same, shared_network
from wam_policy_ros.contract.errors import (
    Cancelled,
    EngineError,
    InvalidImage,
    InvalidState,
    MissingInput,
    ObservationError,
    PromptError,
    SessionError,
    StaleInput,
)
from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.interface import Observation, Policy, PolicySession, ResetReason
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.policy import with_config
from wam_policy_ros.engine.sampler import Noise

CUP, BOX = "pick up the red cup", "open the box"


@pytest.fixture(scope="module")
def policy():
    return make_policy()


def _script(spec, seed, prompts):
    """One unstamped frame per call, as a simulator sends them."""
    return [look(spec, 100 * seed + i, prompt=p) for i, p in enumerate(prompts)]


# -- protocol and first calls -----------------------------------------------------------------------------------


def test_protocol(policy):
    assert isinstance(policy, Policy) and isinstance(policy.open(), PolicySession)
    assert policy.open("mine").session_id == "mine"
    assert policy.open().session_id != policy.open().session_id


def test_chunk(policy):
    session = policy.open("s")
    chunk = policy.infer(session, look(policy.spec, 0))
    assert chunk.actions.shape == (24, 8) and chunk.actions.dtype == np.float64
    assert np.isfinite(chunk.actions).all()
    assert (chunk.session_id, chunk.step, chunk.reset) == ("s", 0, ResetReason.FIRST_CALL)
    assert chunk.dt_s == pytest.approx(1 / 15) and chunk.stamp_ns is None
    stages = {"preprocess", "text", "first_frame", "prefill", "denoise", "decode_actions", "total"}
    assert set(chunk.timings_s) == stages and all(v >= 0 for v in chunk.timings_s.values())
    assert chunk.timings_s["total"] >= max(v for k, v in chunk.timings_s.items() if k != "total")
    assert chunk.info["evaluated"] == [0, 1, 2, 7, 12] and chunk.info["frames"] == 1
    json.dumps(dict(chunk.info))
    chunk = policy.infer(session, look(policy.spec, 1))
    assert (chunk.step, chunk.reset, chunk.info["frames"], chunk.info["padded"]) == (1, None, 4, 2 * 3)


def test_rows_are_relative_to_the_state_of_the_call(policy):
    """DreamZero spec 1.7: joints are added to the raw float64 state, the gripper is not."""
    chunks = []
    for shift in (0.0, 1e-9):  # too small for the network to see
        observation = look(policy.spec, 0)
        observation.state["joint_position"][:] += shift
        chunks.append(policy.infer(policy.open(), observation).actions)
    assert np.allclose(chunks[1][:, :7] - chunks[0][:, :7], 1e-9, rtol=0, atol=1e-12)
    assert np.array_equal(chunks[1][:, 7], chunks[0][:, 7])


def test_weights_and_pictures_and_words_matter(policy):
    base = policy.infer(policy.open(), look(policy.spec, 0)).actions
    assert np.array_equal(base, policy.infer(policy.open(), look(policy.spec, 0)).actions)
    other_prompt = policy.infer(policy.open(), look(policy.spec, 0, prompt=BOX)).actions
    other_picture = look(policy.spec, 0)
    other_picture.frames["wrist_image_left"][:] //= 2
    other_weights = make_policy(network=make_network(seed=9))
    for actions in (
        other_prompt,
        policy.infer(policy.open(), other_picture).actions,
        other_weights.infer(other_weights.open(), look(policy.spec, 0)).actions,
    ):
        assert not np.array_equal(base, actions)


# -- sessions ---------------------------------------------------------------------------------------------------


def test_interleaved_sessions_equal_separate_runs(policy):
    """Bit for bit, over six calls with a window restart in both and a change of prompt in one."""
    scripts = {
        "a": _script(policy.spec, 1, [CUP] * 6),
        "b": _script(policy.spec, 2, [BOX, BOX, BOX, CUP, CUP, CUP]),
    }
    alone = {}
    for name, script in scripts.items():
        fresh = make_policy()  # nothing shared but the weights
        session = fresh.open()
        alone[name] = [fresh.infer(session, o) for o in script]
    sessions = {name: policy.open(name) for name in scripts}
    mixed = {name: [] for name in scripts}
    for i in range(6):
        for name in ("ab", "ba")[i % 2]:
            mixed[name].append(policy.infer(sessions[name], scripts[name][i]))
    for name in scripts:
        assert all(same(a, b) for a, b in zip(alone[name], mixed[name], strict=True))
    assert [c.reset for c in mixed["a"]] == [ResetReason.FIRST_CALL, None, None, None, ResetReason.WINDOW_FULL, None]
    assert mixed["b"][3].reset is ResetReason.PROMPT_CHANGED and mixed["b"][5].reset is None


def test_reset_equals_a_new_session(policy):
    used, fresh = policy.open(), policy.open()
    for o in _script(policy.spec, 3, [CUP] * 2):
        policy.infer(used, o)
    policy.reset(used)
    for o in _script(policy.spec, 4, [CUP] * 2):
        assert same(policy.infer(used, o), policy.infer(fresh, o))


def test_a_seed_belongs_to_its_session(policy):
    first, second = _script(policy.spec, 3, [CUP, CUP])

    def rows(seed):
        session = policy.open(seed=seed)
        return [policy.infer(session, o).actions for o in (first, second)]

    plain, same_as_plain, other, again = rows(None), rows(policy.config.seed), rows(7), rows(7)
    for a, b, c, d in zip(plain, same_as_plain, other, again, strict=True):
        assert np.array_equal(a, b) and np.array_equal(c, d) and not np.array_equal(a, c)


def test_closed_and_foreign_sessions(policy):
    session = policy.open("gone")
    policy.infer(session, look(policy.spec, 0))
    policy.close(session)
    policy.close(session)  # idempotent
    assert session.window.cond is None  # its memory is free
    for call in (lambda: policy.infer(session, look(policy.spec, 0)), lambda: policy.reset(session)):
        with pytest.raises(SessionError, match="gone"):
            call()
    foreign = make_policy().open("elsewhere")
    for call in (policy.reset, policy.close, lambda s: policy.infer(s, look(policy.spec, 0))):
        with pytest.raises(SessionError, match="another policy"):
            call(foreign)
    with pytest.raises(SessionError, match="NoneType"):
        policy.infer(None, look(policy.spec, 0))  # type: ignore[arg-type]


def test_nothing_is_kept_on_modules(policy):
    """Attributes, parameters and buffers of every module are the same objects with the same values after a call."""

    def snapshot():
        out = {}
        for name, module in policy.network.named_modules():
            out[name] = {k: v for k, v in vars(module).items() if not k.startswith("_")}
            for kind in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"):
                out[name][kind] = {k: id(v) for k, v in vars(module)[kind].items()}
        return out

    values = {k: v.clone() for k, v in policy.network.state_dict().items()}
    assert not list(policy.network.buffers())
    before = snapshot()
    session = policy.open()
    for seed, prompt in enumerate([CUP, CUP, BOX]):
        policy.render_video(policy.infer(session, look(policy.spec, seed, prompt=prompt)))
    after = snapshot()
    assert before == after
    assert all(torch.equal(v, values[k]) for k, v in policy.network.state_dict().items())
    assert not any(p.requires_grad for p in policy.network.parameters())


# -- steps that do not happen -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "prompt"), [(0, CUP), (2, CUP), (2, BOX), (4, CUP)], ids=["first", "inside", "other prompt", "restart"]
)
def test_a_cancelled_step_leaves_the_session_as_it_was(policy, calls, prompt):
    victim, twin = policy.open("s"), policy.open("s")
    for o in _script(policy.spec, 5, [CUP] * calls):
        policy.infer(victim, o)
        policy.infer(twin, o)
    asked = iter(range(100))
    with pytest.raises(Cancelled):
        policy.infer(victim, look(policy.spec, 77, prompt=prompt), cancelled=lambda: next(asked) >= 2)
    assert victim.step == twin.step and len(victim.history) == len(twin.history)
    for seed, p in ((78, CUP), (79, prompt)):
        a, b = (policy.infer(s, look(policy.spec, seed, prompt=p)) for s in (victim, twin))
        assert same(a, b)


def _broken(spec):
    good = look(spec, 0)

    def frames(**changes):
        return replace(good, frames={**good.frames, **changes})

    def state(**changes):
        return replace(good, state={**good.state, **changes})

    wrist = good.frames["wrist_image_left"]
    without = {k: v for k, v in good.frames.items() if k != "wrist_image_left"}
    return {
        "camera missing": (replace(good, frames=without), MissingInput),
        "other size": (frames(wrist_image_left=wrist[:, :100]), InvalidImage),
        "floats": (frames(wrist_image_left=wrist.astype(np.float32)), InvalidImage),
        "no time axis": (frames(wrist_image_left=wrist[0]), InvalidImage),
        "field missing": (replace(good, state={"joint_position": np.zeros(7)}), MissingInput),
        "six joints": (state(joint_position=np.zeros(6)), InvalidState),
        "not finite": (state(joint_position=np.full(7, np.nan)), InvalidState),
        "empty prompt": (replace(good, prompt="  "), PromptError),
        "long prompt": (replace(good, prompt="word " * 500), PromptError),
        "stamps now": (example_observation(spec, stamp_ns=10**9), ObservationError),
    }


@pytest.mark.parametrize("fault", sorted(_broken(make_policy().spec)))
def test_a_refused_observation_leaves_the_session_as_it_was(policy, fault):
    observation, kind = _broken(policy.spec)[fault]
    victim, twin = policy.open("s"), policy.open("s")
    for session in (victim, twin):
        policy.infer(session, look(policy.spec, 1))
    with pytest.raises(kind) as error:
        policy.infer(victim, observation)
    assert isinstance(error.value, ObservationError) and error.value.field
    assert same(*(policy.infer(s, look(policy.spec, 2)) for s in (victim, twin)))


@pytest.mark.parametrize("where", ["action_decoder.layer2.b", "blocks.0.ffn.0.weight", "head.head.weight"])
def test_values_that_are_not_finite_are_an_error_and_no_action(where):
    network = make_network()
    policy = make_policy(network=network)
    session, twin = policy.open("s"), policy.open("s")
    for s in (session, twin):
        policy.infer(s, look(policy.spec, 0))
    weight = network.model.state_dict()[where]
    sound = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        policy.infer(session, look(policy.spec, 1))
    weight.copy_(sound)
    assert session.step == 1
    assert same(*(policy.infer(s, look(policy.spec, 1)) for s in (session, twin)))


# -- frames by time ---------------------------------------------------------------------------------------------


def _stamped(spec, step, seed=None, start=1_000_000_000_000, **changes):
    stamp = start + round(step * 1e9 / 15)
    o = look(spec, step if seed is None else seed)
    stamps = {c.name: np.array([stamp], dtype=np.int64) for c in spec.cameras}
    return replace(o, stamp_ns=stamp, frame_stamps_ns=stamps, **changes)


def test_frames_are_taken_by_time(policy):
    """One stamped frame per call at 15 Hz: the last call looks at -23, -16, -8 and 0 control steps."""
    session = policy.open()
    for step in range(25):
        chunk = policy.infer(session, _stamped(policy.spec, step))
        assert chunk.stamp_ns == 1_000_000_000_000 + round(step * 1e9 / 15)
    for stamps in chunk.info["stamps_ns"].values():
        taken = [(s - chunk.stamp_ns) * 15 / 1e9 for s in stamps]
        assert taken == pytest.approx([-23, -16, -8, 0], abs=1e-6)
    assert chunk.info["off_schedule"] == chunk.info["padded"] == 0 and chunk.info["frames"] == 4
    json.dumps(dict(chunk.info))


def test_frames_by_time_reach_the_network(policy):
    """A session that saw every frame and one that was sent only the four frames of interest predict the same."""
    every, four = policy.open("s"), policy.open("s")
    policy.infer(every, _stamped(policy.spec, 0))
    policy.infer(four, _stamped(policy.spec, 0))
    steps = [1, 8, 16, 24]
    pictures = {s: _stamped(policy.spec, s) for s in range(1, 25)}

    def gathered(chosen):
        last = pictures[24]
        frames = {c.name: np.concatenate([pictures[s].frames[c.name] for s in chosen]) for c in policy.spec.cameras}
        stamps = {c.name: np.concatenate([pictures[s].frame_stamps_ns[c.name] for s in chosen])
                  for c in policy.spec.cameras}  # fmt: skip
        return replace(last, frames=frames, frame_stamps_ns=stamps)

    a, b = policy.infer(every, gathered(range(1, 25))), policy.infer(four, gathered(steps))
    assert same(a, b)


def test_a_clock_set_back_is_refused(policy):
    session = policy.open()
    policy.infer(session, _stamped(policy.spec, 100))
    with pytest.raises(StaleInput):
        policy.infer(session, _stamped(policy.spec, 10))
    assert policy.infer(session, _stamped(policy.spec, 108)).step == 1


def test_frames_before_the_session_are_never_used(policy):
    with pytest.raises(MissingInput, match="since the session started"):
        policy.infer(policy.open(), _stamped(policy.spec, 3, session_start_ns=2_000_000_000_000))


def test_pictures_may_be_overwritten_after_the_call(policy):
    a, b = policy.open("s"), policy.open("s")
    first = look(policy.spec, 0)
    policy.infer(a, first)
    for image in first.frames.values():
        image[:] = 0  # the camera driver reuses its buffer
    policy.infer(b, look(policy.spec, 0))
    assert same(*(policy.infer(s, look(policy.spec, 1)) for s in (a, b)))


# -- video ------------------------------------------------------------------------------------------------------


def test_predicted_video(policy):
    session = policy.open()
    for seed in range(2):  # a window's first call and a later one
        chunk = policy.infer(session, look(policy.spec, seed))
        video = policy.render_video(chunk)
        assert video.shape == (8, 16, 32, 3) and video.dtype == np.uint8
        assert video.std() > 1
        assert chunk.video.latents.shape == (1, 16, 3, 2, 4)
    assert policy.render_video(replace(chunk, video=None)) is None
    latents = chunk.video.latents
    with torch.inference_mode():
        decoded = policy.network.vae.decode(latents)
    assert decoded.shape[2] == 9
    expected = ((decoded[0, :, 1:] + 1) * 127.5).clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0).numpy()
    assert np.array_equal(video, expected)


def test_a_chunk_outlives_its_session(policy):
    session = policy.open()
    chunk = policy.infer(session, look(policy.spec, 0))
    kept = chunk.video.latents.clone()
    for seed in range(1, 6):
        policy.infer(session, look(policy.spec, seed))
    policy.close(session)
    assert torch.equal(chunk.video.latents, kept)
    assert policy.render_video(chunk) is not None


# -- other robots and options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tag", "rows", "frames"), [("agibot", 22, 4), ("yam", 14, 1)])
def test_other_robots(tag, rows, frames):
    policy = make_policy(embodiment=tag)
    session = policy.open()
    first = policy.infer(session, example_observation(policy.spec, seed=0))
    second = policy.infer(session, example_observation(policy.spec, seed=1))
    assert first.actions.shape == second.actions.shape == (24, rows)
    assert np.isfinite(second.actions).all() and second.info["frames"] == frames
    assert policy.spec.control_rate_hz == 30 and first.dt_s == pytest.approx(1 / 30)
    assert second.reset is (ResetReason.SINGLE_FRAME if frames == 1 else None)


@pytest.mark.parametrize(
    ("options", "count", "text"),
    [
        ({"evaluations": 5}, {5}, "5 of 16"),
        ({"evaluations": 6}, {6}, "6 of 16"),
        ({"evaluations": 7}, {7}, "7 of 16"),
        ({"evaluations": 8}, {8}, "8 of 16"),
        ({"evaluations": 16}, {16}, "16 of 16"),
        ({"schedule": "full"}, {16}, "16 of 16"),
        ({"schedule": "dynamic"}, set(range(4, 17)), "dynamic of 16"),
    ],
)
def test_schedules(policy, options, count, text):
    other = with_config(policy, **options)
    chunk = other.infer(other.open(), look(policy.spec, 0))
    assert len(chunk.info["evaluated"]) in count and other.spec.details["evaluations"] == text
    assert policy.config.evaluations == 5  # the original is untouched


def test_without_guidance(policy):
    other = with_config(policy, guidance_scale=1.0)
    session = other.open()
    chunks = [other.infer(session, look(policy.spec, i)) for i in range(2)]
    assert session.window.uncond is None and np.isfinite(chunks[1].actions).all()
    guided = policy.infer(policy.open(), look(policy.spec, 0))
    assert not np.array_equal(chunks[0].actions, guided.actions)


def test_noise(policy):
    dit = policy.network.config.dit
    noise = Noise(torch.zeros(1, 16, 2, 2, 4), torch.zeros(1, 24, dit.action_dim))
    observation = look(policy.spec, 0)
    quiet = policy.infer(policy.open(), observation, noise=noise)
    drawn = policy.infer(policy.open(), observation)
    assert not np.array_equal(quiet.actions, drawn.actions)
    seeded = with_config(policy, seed=7)
    assert not np.array_equal(seeded.infer(seeded.open(), observation).actions, drawn.actions)
    # The same noise in every call: two calls on the same pictures from new sessions agree.
    assert same(policy.infer(policy.open(), observation), drawn)


def test_probe_sees_the_stages(policy):
    seen = {}
    policy.infer(policy.open(), look(policy.spec, 0), probe=seen.__setitem__)
    assert {"ys", "clip_feas", "prefill0.x", "step0.video_flow_neg", "after_step15.action", "prompt_emb1"} <= set(seen)


def test_bf16_stays_bf16_and_close(policy):
    narrow = copy.deepcopy(shared_network()).bfloat16()
    other = make_policy(network=narrow)
    session, wide = other.open(), policy.open()
    for seed in range(2):
        a, b = other.infer(session, look(policy.spec, seed)), policy.infer(wide, look(policy.spec, seed))
        assert a.video.latents.dtype == torch.bfloat16 and session.window.cond.past()[0].k.dtype == torch.bfloat16
        assert np.abs(a.actions - b.actions).max() < 0.15 * b.actions.std()
    assert other.spec.details["dtype"] == "bfloat16"


def test_eight_evaluations_and_seed_1140_are_the_default():
    policy = make_policy(EngineConfig.reference())
    details = policy.spec.details
    assert (details["evaluations"], details["seed"], details["guidance_scale"]) == ("8 of 16", 1140, 5.0)


def test_more_frames_than_the_policy_looks_at(policy):
    """A request may carry many frames; the newest four count, and only the newest one in a first call."""
    rng = np.random.default_rng(0)
    many = {c.name: rng.integers(0, 256, (9, c.height, c.width, 3), dtype=np.uint8) for c in policy.spec.cameras}
    base = look(policy.spec, 0)

    def observation(part):
        return Observation({k: v[part] for k, v in many.items()}, base.state, base.prompt)

    for parts in ((slice(None), slice(-1, None)), (slice(None), slice(-4, None))):
        sessions = [policy.open("s"), policy.open("s")]
        if parts[1].start == -4:
            for s in sessions:
                policy.infer(s, base)
        assert same(*(policy.infer(s, observation(p)) for s, p in zip(sessions, parts, strict=True)))
