"""The scripted expert: it lifts what it is asked for, from anywhere, and its labels are what it does."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from wam_policy_ros.sim.demonstrations import Disturbance, Noise, demonstrate
from wam_policy_ros.sim.errors import SimError
from wam_policy_ros.sim.expert import Action, Expert
from wam_policy_ros.sim.ik import Kinematics, pointing_down
from wam_policy_ros.sim.tasks import TASKS
from wam_policy_ros.sim.world import World


@pytest.fixture(scope="module")
def expert(world: World) -> Expert:
    return Expert(world)


def _lift(world: World, expert: Expert, ticks: int = 150) -> int:
    for k in range(ticks):
        action = expert.act(world)
        world.step(action.joints_rad, action.gripper)
        if world.outcome.success:
            return k + 1
    return ticks


@pytest.mark.parametrize("task", TASKS)
def test_it_lifts_every_thing_in_spite_of_noise(world: World, expert: Expert, task: str) -> None:
    for seed in (1, 2):
        steps = list(demonstrate(world, expert, seed, task, images=False))
        assert world.outcome.success, (task, seed)
        assert 40 < len(steps) < 150
        assert set(world.outcome.moved_m) <= {TASKS[task].target}


def test_it_keeps_its_speed(world: World, expert: Expert) -> None:
    reach = Kinematics(world.model, world.arm)
    world.reset(3, "lift_red_apple")
    last, fastest = reach.forward(world.target_rad)[0], 0.0
    for _ in range(60):
        action = expert.act(world)
        world.step(action.joints_rad, action.gripper)
        at = reach.forward(action.joints_rad)[0]
        fastest, last = max(fastest, float(np.linalg.norm(at - last)) * 15), at
    assert world.outcome.success and 0.15 < fastest < 0.2


def test_labels_are_what_it_does_and_leave_the_world_alone(world: World, expert: Expert) -> None:
    world.reset(4, "lift_mug")
    _lift(world, expert, 25)
    before = world.snapshot()
    label = expert.label(world, 20)
    after = world.snapshot()
    assert label.shape == (20, 8) and np.array_equal(before.state, after.state)
    assert (after.tick, after.held_ticks, after.gripper) == (before.tick, before.held_ticks, before.gripper)
    assert np.array_equal(after.target, before.target)
    for row in label:
        action = expert.act(world)
        assert np.array_equal(action.row, row)
        world.step(action.joints_rad, action.gripper)


def test_a_label_that_would_succeed_is_no_success_yet(world: World, expert: Expert) -> None:
    world.reset(4, "lift_mug")
    while world.outcome.held_ticks < 3:
        action = expert.act(world)
        world.step(action.joints_rad, action.gripper)
    expert.label(world, 10)
    assert world.outcome.held_ticks == 3 and not world.outcome.success


def test_a_miss_is_felt_and_tried_again(world: World, expert: Expert) -> None:
    """The mug is taken away between the fingers: they close fully, open, and go where it is now."""
    world.reset(0, "lift_mug")
    address = int(world.model.joint("mug").qposadr[0])
    gone = False
    for _ in range(200):
        action = expert.act(world)
        frame = world.step(action.joints_rad, action.gripper)
        if not gone and action.gripper == 1.0:
            gone = True
            world.data.qpos[address : address + 3] = [0.45, 0.30, 0.0]
        if gone and frame.gripper_position > 0.97:
            break
    assert gone
    _lift(world, expert)
    assert world.outcome.success


def test_another_thing_in_the_hand_is_put_down_first(world: World, expert: Expert) -> None:
    world.reset(2, "lift_mug")
    _lift(world, expert)
    assert world.outcome.success
    world.restore(dataclasses.replace(world.snapshot(), task=TASKS["lift_blue_book"], success=False, held_ticks=0))
    highest = 0.0
    for _ in range(200):
        action = expert.act(world)
        world.step(action.joints_rad, action.gripper)
        if action.gripper < 0.5 and world.target_gripper > 0.9:
            highest = max(highest, float(world.data.body("mug").xpos[2]))
        if world.outcome.success:
            break
    assert world.outcome.success and highest < 0.02


def test_it_goes_on_from_where_a_policy_left_it(world: World, expert: Expert) -> None:
    """Low among the things, with closed fingers."""
    world.reset(6, "lift_green_apple")
    reach = Kinematics(world.model, world.arm)
    low = reach.solve(world.target_rad, np.array([0.50, 0.0, 0.13]), pointing_down(0.5), rounds=60)
    start = world.target_rad
    for k in range(1, 21):
        world.step(start + (low - start) * k / 20, 1.0)
    _lift(world, expert, 200)
    assert world.outcome.success


@pytest.mark.parametrize(
    ("name", "lies"),
    [
        ("mug", [0.5, -0.5, -0.5, -0.5]),  # on its side, handle up
        ("mug", [0.6706, -0.6706, 0.2244, 0.2244]),  # on its side and handle
        ("blue_book", [np.sqrt(0.5), np.sqrt(0.5), 0.0, 0.0]),  # on its cover
    ],
)
def test_things_that_fell_over_are_lifted_too(world: World, expert: Expert, name: str, lies: list[float]) -> None:
    world.reset(5, f"lift_{name}")
    joint = world.model.joint(name)
    place = world.data.qpos[int(joint.qposadr[0]) :][:7]
    place[2:] = [0.04, *lies]
    for _ in range(10):
        world.hold()
    _lift(world, expert, 200)
    assert world.outcome.success


def test_without_a_task_it_refuses(world: World, expert: Expert) -> None:
    world.reset(0)
    with pytest.raises(SimError, match="task"):
        expert.act(world)


def test_noise_is_the_seeds_and_leaves_the_label_alone(world: World, expert: Expert) -> None:
    def rows(noise: Noise, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        steps = list(demonstrate(world, expert, seed, "lift_mug", noise=noise, max_ticks=30, images=False))
        return np.array([s.label.row for s in steps]), np.array([s.executed.row for s in steps])

    label, executed = rows(Noise.none())
    assert np.array_equal(label, executed)
    label, executed = rows(Noise())
    assert np.array_equal(rows(Noise())[1], executed)
    error = (executed - label)[:, :7]
    assert 0.002 < error.std() < 0.03 and np.abs(np.corrcoef(error[1:].ravel(), error[:-1].ravel())[0, 1]) > 0.3


def test_bursts_push_and_turn_the_gripper_round() -> None:
    still = Action(np.zeros(7), 1.0)
    noise = Noise(joint_rad=0.0, burst=0.2, burst_grip=0.5)
    disturbance = Disturbance(noise, 0)
    runs, grips, length = [], set(), 0
    for _ in range(400):
        action = disturbance.apply(still)
        if disturbance.bursting:
            assert 0 < np.abs(action.joints_rad).max() <= noise.burst_rad
            grips.add(action.gripper)
            length += 1
        else:
            assert not action.joints_rad.any() and action.gripper == 1.0
            runs, length = [*runs, length], 0
    assert grips == {0.0, 1.0} and max(runs) >= 3


def test_kinematics_reach_a_pose(world: World) -> None:
    reach = Kinematics(world.model, world.arm)
    goal = np.array([0.5, 0.15, 0.1])
    joints = reach.solve(np.array(world.arm.home_rad), goal, pointing_down(0.4), rounds=60)
    pos, rot, _ = reach.forward(joints)
    np.testing.assert_allclose(pos, goal, atol=5e-4)
    np.testing.assert_allclose(rot, pointing_down(0.4), atol=5e-3)
    low, high = world.joint_ranges
    far = reach.solve(np.array(world.arm.home_rad), np.array([3.0, 0.0, 0.1]), pointing_down(0.0), rounds=60)
    assert (far >= low).all() and (far <= high).all()
