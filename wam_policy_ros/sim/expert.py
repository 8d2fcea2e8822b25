"""A scripted expert that reads the things' true poses: demonstrations and labels for training. It is not a policy.

It keeps nothing in mind: what it does follows from the world as it stands, so that it can go on from any state. Above
the thing it goes down a funnel; it closes where the thing is between the fingers; it lifts when they have closed on
something; it opens and begins anew when they have closed on nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import objects
from .errors import SimError
from .grasps import Grasp, grasp_of, half_circle
from .ik import Kinematics, pointing_down, rotation_error
from .world import RATE_HZ, World

Array = npt.NDArray[np.float64]

TIP_M = 0.0086  # the fingertips below the tcp
_DT = 1.0 / RATE_HZ


@dataclass(frozen=True)
class Action:
    """One row of what a policy would answer: ``joints_rad`` ``[7]`` absolute, ``gripper`` 0 open .. 1 closed."""

    joints_rad: Array
    gripper: float

    @property
    def row(self) -> Array:
        """``[8]``, joints then gripper, as the rows of an action chunk."""
        return np.append(self.joints_rad, self.gripper)


class Expert:
    """Lifts the thing of the world's task.

    Args:
        world: any world with the arm and the drives it will be asked about; it is not kept.
        speed_m_s, turn_rad_s: of the hand on the way.
        lift_m: how high the thing is lifted.
    """

    AHEAD_RAD = 0.06
    APPROACH_S = 0.10
    """Time constant with which the hand comes to rest."""
    CLEARANCE_M = 0.045
    """Of the fingertips above the highest thing, on the way."""

    def __init__(self, world: World, *, speed_m_s: float = 0.18, turn_rad_s: float = 1.0, lift_m: float = 0.17) -> None:
        self._kinematics = Kinematics(world.model, world.arm)
        self._speed, self._turn, self._lift = speed_m_s, turn_rad_s, lift_m
        self._things = {n: world.model.body(n).id for n in objects.THINGS}

    def act(self, world: World) -> Action:
        """What to do in the next tick. The world is only read.

        Raises:
            SimError: the world has no task.
        """
        if world.task is None:
            raise SimError("the expert needs a task", remedy="world.reset(seed, task)")
        frame = world.observe(images=False)
        joints = frame.joint_position
        pos, rot, _ = self._kinematics.forward(joints)
        grasp = self._grasp(world, world.task.target)
        goal, yaw, gripper, pace = self._decide(world, pos, rot, grasp, frame.gripper_position)
        # The way goes on from where the arm was told to be: the drives lag, and to start from where it is would brake.
        # Pressed against something it must not run ahead, though.
        told = joints + np.clip(world.target_rad - joints, -self.AHEAD_RAD, self.AHEAD_RAD)
        pos, rot, _ = self._kinematics.forward(told)
        way, turn = goal - pos, rotation_error(pointing_down(yaw), rot)
        way[2] = np.clip(way[2], -pace * self._speed * self.APPROACH_S, pace * self._speed * self.APPROACH_S)
        way *= min(self._speed / max(float(np.linalg.norm(way)), 1e-9), 1.0 / self.APPROACH_S) * _DT
        angle = float(np.linalg.norm(turn))
        turned = _turned(rot, turn / max(angle, 1e-9), min(self._turn, angle / self.APPROACH_S) * _DT)
        return Action(self._kinematics.solve(told, pos + way, turned), gripper)

    def label(self, world: World, steps: int = 24) -> Array:
        """What the expert would do from here on: ``[steps, 8]`` absolute joint targets and gripper.

        Played in the world without pictures; afterwards the world stands where it stood, bit for bit.
        """
        moment = world.snapshot()
        rows = []
        for _ in range(steps):
            action = self.act(world)
            rows.append(action.row)
            world.step(action.joints_rad, action.gripper, images=False)
        world.restore(moment)
        return np.array(rows)

    # -- inside -------------------------------------------------------------------------------------------------

    def _grasp(self, world: World, name: str) -> Grasp:
        body = self._things[name]
        return grasp_of(objects.THINGS[name].kind, world.data.xpos[body].copy(), world.data.xmat[body].reshape(3, 3))

    def _decide(
        self, world: World, pos: Array, rot: Array, grasp: Grasp, closed: float
    ) -> tuple[Array, float, float, float]:
        """Where to, at what heading, with what gripper, at what share of the speed up and down."""
        assert world.task is not None
        off = grasp.point_m - pos
        heading = float(np.arctan2(rot[1, 0], rot[0, 0]))
        squeezing = world.target_gripper > 0.99
        if squeezing and 0.02 < closed < 0.97:  # on something
            if np.linalg.norm(off) < 0.035:
                height = grasp.point_m[2] - world.outcome.lifted_m + self._lift
                return np.array([pos[0], pos[1], height]), heading, 1.0, 1.0
            return self._put_down(world, pos, heading)
        across, along = abs(float(off @ rot[:, 1])), abs(float(off @ rot[:, 0]))
        turn = half_circle(grasp.yaw_rad - heading)
        yaw, turned = heading + turn, abs(turn)  # half a turn of the hand is the same grasp: the nearer one
        if abs(yaw) > _WIDEST_RAD:
            yaw, turned = grasp.yaw_rad, abs(_wrapped(grasp.yaw_rad - heading))
        inside = across < 1.3 * grasp.slack_m and along < 2.0 * grasp.reach_m and turned < 0.35
        if inside and world.target_gripper > 0.1 and abs(off[2]) < 0.02:
            return grasp.point_m, yaw, 1.0, 0.3  # closing has begun: see it through
        aligned = across < 0.8 * grasp.slack_m and along < grasp.reach_m and turned < 0.2
        if aligned and abs(off[2]) < 0.010:
            return grasp.point_m, yaw, 1.0, 0.3
        within = inside and pos[2] - TIP_M < grasp.top_m
        if (aligned or within) and closed < 0.1:
            return grasp.point_m, yaw, 0.0, 0.6
        goal, low = self._above(pos, grasp)
        # Closed fingers open above everything: low down they may be in the mug or between two things.
        return goal, yaw, 1.0 if low and closed > 0.6 else 0.0, 1.0

    def _above(self, pos: Array, grasp: Grasp) -> tuple[Array, bool]:
        """A point over the thing, higher the further away, straight up from among things; and whether it is low now."""
        far = float(np.linalg.norm((grasp.point_m - pos)[:2]))
        just_over = grasp.top_m + TIP_M + 0.012
        free = max(_HIGHEST_M + TIP_M + self.CLEARANCE_M, just_over)
        height = just_over + (free - just_over) * float(np.clip((far - 0.01) / 0.06, 0.0, 1.0))
        low = pos[2] - TIP_M < (_HIGHEST_M if far > 0.08 else grasp.top_m) + 0.006
        goal = np.array([pos[0], pos[1], height]) if low else np.array([*grasp.point_m[:2], height])
        return goal, low

    def _put_down(self, world: World, pos: Array, heading: float) -> tuple[Array, float, float, float]:
        """Something else is between the fingers: down with it, then open."""
        heights = {n: world.data.xpos[b][2] - objects.THINGS[n].rest_m for n, b in self._things.items()}
        near = [n for n, b in self._things.items() if np.linalg.norm(world.data.xpos[b] - pos) < 0.09]
        if any(heights[n] > 0.012 for n in near) and pos[2] > 0.03:
            return np.array([pos[0], pos[1], pos[2] - 0.05]), heading, 1.0, 1.0
        return pos, heading, 0.0, 1.0


def _wrapped(angle: float) -> float:
    return float((angle + np.pi) % (2 * np.pi) - np.pi)


# What the last joint allows with some reserve, as the heading of a hand that points down.
_WIDEST_RAD = np.radians(110)
_HIGHEST_M = max(objects.MUG_HEIGHT_M, 2 * objects.BOOK_HALF_M[2], 2 * objects.APPLE_RADIUS_M)


def _turned(rotation: Array, axis: Array, angle: float) -> Array:
    """``rotation`` turned by an angle around an axis of the world (Rodrigues)."""
    x, y, z = axis
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return (np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross) @ rotation
