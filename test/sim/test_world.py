"""Reset, step, snapshot, success: what policies and data generation rely on."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import mujoco
import numpy as np
import pytest

from wam_policy_ros.sim import objects, panda
from wam_policy_ros.sim.errors import InvalidTarget, SceneError, SimError, UnknownTask
from wam_policy_ros.sim.layout import GAP_M, Variation, _discs, sample_layout
from wam_policy_ros.sim.tasks import HOLD_TICKS, TASKS, find_task
from wam_policy_ros.sim.world import Frame, World


def _walk(world: World, ticks: int, seed: int = 5) -> list[Frame]:
    """Targets that wander and grip: an episode with contacts is harder to repeat than one without."""
    rng = np.random.Generator(np.random.PCG64(seed))
    target, frames = world.target_rad, []
    for k in range(ticks):
        target = target + rng.uniform(-0.04, 0.04, 7) + [0, 0.02, 0, 0, 0, 0.02, 0]
        frames.append(world.step(target, float(k % 12 > 6)))
    return frames


def _digest(frames: list[Frame]) -> str:
    sha = hashlib.sha256()
    for f in frames:
        sha.update(f.joint_position.tobytes() + f.joint_velocity.tobytes() + repr(f.gripper_position).encode())
        for image in f.images.values():
            sha.update(image.tobytes())
    return sha.hexdigest()


_OTHER_PROCESS = """
from test.sim.test_world import _digest, _walk
from wam_policy_ros.sim.world import World
world = World(render={render})
frames = [world.reset(11, "lift_mug"), *_walk(world, {ticks})]
print(_digest(frames), world.snapshot().state.tobytes().hex()[-400:])
"""


def _here(world: World, ticks: int) -> str:
    frames = [world.reset(11, "lift_mug"), *_walk(world, ticks)]
    return f"{_digest(frames)} {world.snapshot().state.tobytes().hex()[-400:]}"


def _elsewhere(render: bool, ticks: int) -> str:
    code = _OTHER_PROCESS.format(render=render, ticks=ticks)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_two_processes_give_the_same_bits(world: World) -> None:
    assert _here(world, 30) == _elsewhere(False, 30)


def test_two_processes_give_the_same_pictures(seeing: World) -> None:
    assert _here(seeing, 8) == _elsewhere(True, 8)


def test_a_second_reset_gives_the_same_as_the_first(world: World) -> None:
    first = _digest([world.reset(3), *_walk(world, 20)])
    world.reset(4)
    _walk(world, 7)
    assert _digest([world.reset(3), *_walk(world, 20)]) == first
    assert _digest([world.reset(4), *_walk(world, 20)]) != first


def test_a_restored_world_goes_on_bit_for_bit(world: World) -> None:
    world.reset(7, "lift_mug")
    _walk(world, 25)
    moment = world.snapshot()
    first = _digest(_walk(world, 25, seed=6)), world.snapshot().state
    world.restore(moment)
    again = _digest(_walk(world, 25, seed=6)), world.snapshot().state
    assert first[0] == again[0] and np.array_equal(first[1], again[1])
    # In another world that stands elsewhere, too.
    other = World(render=False)
    other.reset(8)
    other.restore(moment)
    assert other.task is TASKS["lift_mug"] and other.snapshot().tick == 25
    assert _digest(_walk(other, 25, seed=6)) == first[0]


def test_a_restored_world_looks_the_same(seeing: World) -> None:
    seeing.reset(7)
    frames = _walk(seeing, 10)
    moment = seeing.snapshot()
    seeing.reset(8)
    seeing.restore(moment)
    assert _digest([seeing.observe()]) == _digest(frames[-1:])


def test_a_snapshot_is_not_moved_by_the_world(world: World) -> None:
    world.reset(1)
    moment = world.snapshot()
    kept = moment.state.copy(), moment.target.copy()
    _walk(world, 3)
    assert np.array_equal(moment.state, kept[0]) and np.array_equal(moment.target, kept[1])


def test_time_is_ticks(world: World) -> None:
    assert (world.reset(0).tick, world.reset(0).stamp_ns) == (0, 0)
    frames = _walk(world, 15)
    assert [f.tick for f in frames] == list(range(1, 16))
    assert frames[-1].stamp_ns == 1_000_000_000
    assert world.data.time == pytest.approx(1.0)


def test_the_arm_goes_where_it_is_told(world: World) -> None:
    frame = world.reset(0)
    goal = frame.joint_position + np.array([0.2, -0.1, 0.1, 0.2, -0.2, 0.1, 0.3])
    for k in range(1, 16):
        frame = world.step(world.target_rad + (goal - world.target_rad) / (16 - k), 0.0)
    for _ in range(8):
        frame = world.hold()
    assert np.abs(frame.joint_position - goal).max() < 2e-3
    assert np.abs(frame.joint_velocity).max() < 2e-3


def test_holding_does_not_sag(world: World) -> None:
    """The weight of the arm is compensated."""
    start = world.reset(2).joint_position
    for _ in range(30):
        frame = world.hold()
    assert np.abs(frame.joint_position - start).max() < 1e-3
    assert world.outcome.moved_m == {} and not world.outcome.success


def test_targets_beyond_range_or_speed_are_cut_and_named(world: World) -> None:
    frame = world.reset(0)
    far = frame.joint_position.copy()
    far[0] += 1.0
    frame = world.step(far, 0.0)
    assert frame.limited == (0,)
    assert world.target_rad[0] == pytest.approx(world.layout.home_offset_rad[0] + panda.SPEED_RAD_S[0] / 15)
    for _ in range(60):
        frame = world.step([0.0, 0.0, 0.0, -2.0, 0.0, 9.0, 0.0], 0.0)
    assert 5 in frame.limited
    assert world.target_rad[5] == pytest.approx(panda.RANGE_RAD[5][1])
    assert frame.joint_position[5] < panda.RANGE_RAD[5][1] + 0.01


@pytest.mark.parametrize(
    ("targets", "gripper"),
    [([0.0] * 6, 0.0), ([float("nan")] * 7, 0.0), ([0.0] * 7, 1.5), ([0.0] * 7, float("nan")), ([[0.0] * 7], 0.0)],
)
def test_what_is_no_target_moves_nothing(world: World, targets: list[float], gripper: float) -> None:
    world.reset(0)
    before = world.snapshot()
    with pytest.raises(InvalidTarget):
        world.step(targets, gripper)
    assert np.array_equal(world.snapshot().state, before.state) and world.snapshot().tick == 0


def test_before_a_reset_there_is_nothing() -> None:
    bare = World(render=False)
    for ask in (lambda: bare.step([0.0] * 7, 0.0), bare.snapshot):
        with pytest.raises(SimError, match="reset"):
            ask()


def test_the_gripper_closes_and_opens_at_its_speed(world: World) -> None:
    frame = world.reset(0)
    assert frame.gripper_position == pytest.approx(0.0, abs=0.01)
    widths = [world.step(world.target_rad, 1.0).gripper_position for _ in range(9)]
    assert widths[2] < 0.7 and widths[-1] > 0.97
    widths = [world.step(world.target_rad, 0.0).gripper_position for _ in range(9)]
    assert widths[-1] < 0.03


def _carry(world: World, name: str, height: float) -> None:
    """Put a thing in the air by hand; it falls, so it is put again before each tick."""
    address = int(world.model.joint(name).qposadr[0])
    world.data.qpos[address + 2] = objects.THINGS[name].rest_m + height
    world.data.qvel[int(world.model.joint(name).dofadr[0]) :][:6] = 0.0
    world.hold()


def test_success_is_being_held_up_long_enough(world: World) -> None:
    world.reset(0, "lift_mug")
    for k in range(1, HOLD_TICKS):
        _carry(world, "mug", 0.2)
        assert world.outcome.held_ticks == k and not world.outcome.success
    _carry(world, "mug", 0.0)
    assert world.outcome.held_ticks == 0 and not world.outcome.success
    for _ in range(HOLD_TICKS):
        _carry(world, "mug", 0.2)
    assert world.outcome.success
    for _ in range(20):
        world.hold()
    assert world.outcome.success  # it was; what follows does not undo it
    world.reset(0, "lift_mug")
    assert not world.outcome.success


def test_another_thing_in_the_air_is_no_success_but_was_moved(world: World) -> None:
    world.reset(0, "lift_red_apple")
    for _ in range(HOLD_TICKS + 2):
        _carry(world, "green_apple", 0.2)
    assert not world.outcome.success and world.outcome.lifted_m == pytest.approx(0.0, abs=1e-3)
    assert set(world.outcome.moved_m) == {"green_apple"}


def test_things_lie_still_and_apart(world: World) -> None:
    for seed in range(100):
        layout = sample_layout(seed)
        flat = {n: (p[0], p[1], 2 * np.arctan2(p[6], p[3])) for n, p in layout.poses.items()}
        for a in flat:
            for b in flat:
                if a < b:
                    da, db = _discs(a, flat[a]), _discs(b, flat[b])
                    gap = np.linalg.norm(da[:, None, :2] - db[None, :, :2], axis=2) - da[:, None, 2] - db[None, :, 2]
                    assert gap.min() > GAP_M - 1e-9
    for seed in range(4):
        world.reset(seed)
        for _ in range(15):
            world.hold()
        assert np.abs(world.data.qvel).max() < 0.02


def test_seeds_differ_in_everything_that_varies() -> None:
    layouts = [sample_layout(s) for s in range(40)]
    assert len({tuple(lo.poses["mug"]) for lo in layouts}) == 40
    assert len({lo.table for lo in layouts}) == 3
    assert len({tuple(lo.light) for lo in layouts}) == len({tuple(lo.cameras["wrist_image_left"]) for lo in layouts})
    plain = [sample_layout(s, Variation.none()) for s in range(5)]
    assert len({lo.table for lo in plain}) == 1
    assert all(not lo.home_offset_rad.any() and not lo.cameras["wrist_image_left"].any() for lo in plain)
    assert all((lo.tints["mug"] == 1.0).all() for lo in plain)
    assert np.array_equal(plain[3].poses["mug"], layouts[3].poses["mug"])


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(SceneError, match="negative"):
        sample_layout(-1)


def test_tasks_are_found_by_name_and_by_instruction() -> None:
    assert find_task("lift_mug").target == "mug"
    assert find_task("Pick up the white mug.").target == "mug"
    assert find_task("grab the blue book").target == "blue_book"
    assert find_task("lift the red apple").target == "red_apple"
    wordings = [i for t in TASKS.values() for i in t.instructions]
    assert len(wordings) == len(set(wordings)) > 40
    for vague in ("pick up the book", "lift the apple", "make coffee"):
        with pytest.raises(UnknownTask, match="pick up the white mug"):
            find_task(vague)


def test_the_panda_has_its_published_geometry(world: World) -> None:
    """Forward kinematics written out from the parameters, against the compiled model."""
    rng = np.random.Generator(np.random.PCG64(0))
    low, high = np.array(panda.RANGE_RAD).T
    data = mujoco.MjData(world.model)
    for _ in range(5):
        q = rng.uniform(low, high)
        pose = np.eye(4)
        for (a, d, alpha), angle in zip(panda.DH, q, strict=True):
            ca, sa, ct, st = np.cos(alpha), np.sin(alpha), np.cos(angle), np.sin(angle)
            pose = pose @ [
                [ct, -st, 0, a],
                [st * ca, ct * ca, -sa, -d * sa],
                [st * sa, ct * sa, ca, d * ca],
                [0, 0, 0, 1],
            ]
        tcp = pose @ [0, 0, 0.107 + 0.1034, 1]
        data.qpos[world.model.joint("joint1").qposadr[0] :][:7] = q
        mujoco.mj_kinematics(world.model, data)
        np.testing.assert_allclose(data.site("tcp").xpos, tcp[:3], atol=1e-9)
