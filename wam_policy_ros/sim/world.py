"""The simulated robot cell: reset, step, snapshot. No clock: a step is one control tick, whenever it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.embodiments import DROID

from . import cameras, objects
from .arm import ArmModel
from .errors import InvalidTarget, SimError
from .layout import Layout, Variation, sample_layout
from .rendering import Renderer
from .scene import build_scene, dress
from .tasks import HOLD_TICKS, LIFT_M, MOVED_M, Outcome, Task, find_task

RATE_HZ = DROID.control_rate_hz
SUBSTEPS = 40
"""Physics steps per control tick of 1/15 s."""
GRIPPER_SPEED = 2.5
"""Largest change of the gripper's target per second: 0.4 s from open to closed."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Frame:
    """What the robot sees and feels after a tick.

    Attributes:
        tick: control ticks since the reset, which gives tick 0.
        stamp_ns: simulated time in ns: ``tick / 15 s``.
        images: camera name (``cameras.NAMES``) -> uint8 ``[H, W, 3]`` RGB; empty when not rendered.
        joint_position: float64 ``[7]``, rad, as measured.
        joint_velocity: float64 ``[7]``, rad/s.
        gripper_position: 0 open .. 1 closed, as measured.
        limited: joints whose target was not taken as given in this tick: beyond its range or faster than its speed.
    """

    tick: int
    stamp_ns: int
    images: dict[str, npt.NDArray[np.uint8]]
    joint_position: Array
    joint_velocity: Array
    gripper_position: float
    limited: tuple[int, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """A moment of a world. Only for worlds of the same arm and size of scene."""

    layout: Layout
    task: Task | None
    state: Array
    tick: int
    target: Array
    gripper: float
    rest: Array
    held_ticks: int
    success: bool


class World:
    """One robot at one table.

    The same seed gives the same bits, in another process too. One thread owns a rendering world.

    Args:
        render: make pictures; can be left out per step.
        size: width and height of the pictures.
        variation: what a seed changes besides the poses of the things.
        arm: None: the procedural Panda.
        shadows: soft shadows and smooth edges; several times slower.
        gl: see ``Renderer``.

    Raises:
        RenderingUnavailable: ``render`` and no OpenGL context can be made.
        SceneError: the arm's model does not fit.
    """

    def __init__(
        self,
        *,
        render: bool = True,
        size: tuple[int, int] = cameras.SIZE,
        variation: Variation | None = None,
        arm: ArmModel | None = None,
        shadows: bool = False,
        gl: str | None = None,
    ) -> None:
        self.arm = arm or ArmModel()
        self.variation = variation or Variation()
        self.model = build_scene(self.arm, shadows=shadows)
        self.data = mujoco.MjData(self.model)
        self.layout: Layout | None = None
        self.task: Task | None = None
        m, prefix = self.model, self.arm.prefix
        self._qpos = np.array([m.joint(prefix + n).qposadr[0] for n in self.arm.joints])
        self._qvel = np.array([m.joint(prefix + n).dofadr[0] for n in self.arm.joints])
        self._finger_qpos = np.array([m.joint(prefix + n).qposadr[0] for n in self.arm.fingers])
        self._ctrl = np.array([m.actuator(prefix + n).id for n in self.arm.joints])
        self._finger_ctrl = np.array([m.actuator(prefix + n).id for n in self.arm.fingers])
        self._things = {n: int(m.joint(n).qposadr[0]) for n in objects.THINGS}
        self._ranges = np.stack([m.joint(prefix + n).range for n in self.arm.joints], axis=1)
        self._max_step = np.array(self.arm.speed_rad_s) / RATE_HZ
        self._tick = self._held = 0
        self._success = False
        self._target, self._gripper = np.zeros(7), 0.0
        self._rest = np.zeros((len(objects.THINGS), 3))
        self._renderer = Renderer(m, size, gl=gl) if render else None

    # -- the episode --------------------------------------------------------------------------------------------

    def reset(self, seed: int, task: str | Task | None = None, *, images: bool = True) -> Frame:
        """Begin an episode; the arm stands still at its start and the things lie still.

        Args:
            seed: of the scene. The task does not change it: every task can be asked for in every scene.
            task: name, instruction or Task; None: nothing counts as success.
            images: False leaves out the pictures of this frame.

        Raises:
            SceneError: not a seed. UnknownTask: no such task.
        """
        task = find_task(task) if task is not None else None
        self.layout, self.task = sample_layout(seed, self.variation), task
        dress(self.model, self.layout)
        mujoco.mj_resetData(self.model, self.data)
        self._target = np.clip(np.array(self.arm.home_rad) + self.layout.home_offset_rad, *self._ranges)
        self._gripper = 0.0
        self.data.qpos[self._qpos] = self._target
        self.data.qpos[self._finger_qpos] = self.arm.finger_open
        for name, address in self._things.items():
            self.data.qpos[address : address + 7] = self.layout.poses[name]
        for _ in range(5):  # contacts find their rest
            self._physics(self._target, self._gripper)
        self.data.time = 0.0
        self._tick = self._held = 0
        self._success = False
        self._rest = self._thing_positions()
        return self._frame((), images)

    def step(self, joint_targets_rad: Sequence[float] | Array, gripper: float, *, images: bool = True) -> Frame:
        """One control tick of 1/15 s: the drives' targets move on a straight line from the last ones to these.

        Targets beyond a joint's range or speed are cut to it, as drives do, and named in ``Frame.limited``.

        Args:
            joint_targets_rad: ``[7]``, absolute.
            gripper: 0 open .. 1 closed.
            images: False leaves out the pictures.

        Raises:
            InvalidTarget: wrong length, not finite, or a gripper outside 0..1; nothing was moved.
            SimError: before the first reset, or the physics diverged.
        """
        if self.layout is None:
            raise SimError("the world has no scene yet", remedy="reset(seed) first")
        wanted = self._checked(joint_targets_rad, gripper)
        target = np.clip(wanted, *self._ranges)
        target = np.clip(target, self._target - self._max_step, self._target + self._max_step)
        limited = tuple(int(k) for k in np.nonzero(np.abs(target - wanted) > 1e-9)[0])
        reach = GRIPPER_SPEED / RATE_HZ
        self._physics(target, self._gripper + float(np.clip(gripper - self._gripper, -reach, reach)))
        if not np.isfinite(self.data.qpos).all() or self.data.warning[mujoco.mjtWarning.mjWARN_BADQACC].number:
            raise SimError("the physics diverged", got=f"tick {self._tick}, seed {self.layout.seed}")
        self._tick += 1
        self._count()
        return self._frame(limited, images)

    def hold(self, *, images: bool = True) -> Frame:
        """One tick with the last targets: the negative control. Raises as ``step``."""
        return self.step(self._target, self._gripper, images=images)

    def observe(self, *, images: bool = True) -> Frame:
        """The present frame, once more. Nothing moves."""
        return self._frame((), images)

    @property
    def outcome(self) -> Outcome:
        """How the episode stands."""
        moved = np.linalg.norm(self._thing_positions() - self._rest, axis=1)
        far = {n: float(d) for n, d in zip(objects.THINGS, moved, strict=True) if d > MOVED_M}
        return Outcome(self._success, self._held, self._lifted() if self.task else 0.0, far)

    @property
    def raised_m(self) -> dict[str, float]:
        """Thing -> height (m) above where it lay at the reset."""
        rise = self._thing_positions()[:, 2] - self._rest[:, 2]
        return {n: float(z) for n, z in zip(objects.THINGS, rise, strict=True)}

    @property
    def joint_ranges(self) -> Array:
        """``[2, 7]`` lowest and highest, rad."""
        return self._ranges.copy()

    @property
    def target_rad(self) -> Array:
        """``[7]`` the drives' present targets, a copy."""
        return self._target.copy()

    @property
    def target_gripper(self) -> float:
        return self._gripper

    # -- moments ------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """This moment, exactly. Raises SimError before the first reset."""
        if self.layout is None:
            raise SimError("the world has no scene yet", remedy="reset(seed) first")
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, self.data, state, kind)
        kept = (self._target.copy(), self._gripper, self._rest.copy(), self._held, self._success)
        return Snapshot(self.layout, self.task, state, self._tick, *kept)

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a moment of this world or of an equal one, bit for bit. Raises SimError for another scene's."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        expected = mujoco.mj_stateSize(self.model, kind)
        if snapshot.state.shape != (expected,):
            raise SimError("a snapshot of another scene", got=snapshot.state.shape, expected=(expected,))
        if snapshot.layout is not self.layout:
            self.layout = snapshot.layout
            dress(self.model, self.layout)
        self.task, self._tick = snapshot.task, snapshot.tick
        self._target, self._gripper, self._rest = snapshot.target.copy(), snapshot.gripper, snapshot.rest.copy()
        self._held, self._success = snapshot.held_ticks, snapshot.success
        mujoco.mj_setState(self.model, self.data, snapshot.state, kind)
        self._refresh()

    def close(self) -> None:
        """Free the pictures' context. Idempotent."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    # -- inside -------------------------------------------------------------------------------------------------

    def _checked(self, targets: Sequence[float] | Array, gripper: float) -> Array:
        wanted = np.asarray(targets, dtype=np.float64)
        if wanted.shape != (7,) or not np.isfinite(wanted).all():
            raise InvalidTarget("joint targets", got=wanted.tolist(), expected="7 finite numbers in rad")
        if not 0.0 <= gripper <= 1.0:
            raise InvalidTarget("gripper target", got=gripper, expected="0 (open) to 1 (closed)")
        return wanted

    def _physics(self, target: Array, gripper: float) -> None:
        old, old_gripper, ctrl = self._target, self._gripper, self.data.ctrl
        for k in range(1, SUBSTEPS + 1):
            share = k / SUBSTEPS
            ctrl[self._ctrl] = old + share * (target - old)
            ctrl[self._finger_ctrl] = self.arm.finger_open * (1.0 - old_gripper - share * (gripper - old_gripper))
            mujoco.mj_step(self.model, self.data)
        self._target, self._gripper = target.copy(), gripper
        self._refresh()

    def _refresh(self) -> None:
        """Poses of bodies and cameras from the joints. Leaves the state for the next step as it is."""
        mujoco.mj_kinematics(self.model, self.data)
        mujoco.mj_comPos(self.model, self.data)
        mujoco.mj_camlight(self.model, self.data)

    def _thing_positions(self) -> Array:
        return np.array([self.data.qpos[a : a + 3] for a in self._things.values()])

    def _lifted(self) -> float:
        assert self.task is not None
        k = list(self._things).index(self.task.target)
        return float(self.data.qpos[self._things[self.task.target] + 2] - self._rest[k, 2])

    def _count(self) -> None:
        if self.task is None:
            return
        self._held = self._held + 1 if self._lifted() > LIFT_M else 0
        self._success = self._success or self._held >= HOLD_TICKS

    def _frame(self, limited: tuple[int, ...], images: bool) -> Frame:
        data = self.data
        closed = 1.0 - float(np.mean(data.qpos[self._finger_qpos])) / self.arm.finger_open
        return Frame(
            tick=self._tick,
            stamp_ns=round(self._tick * 1_000_000_000 / RATE_HZ),
            images=self._renderer.draw(data) if self._renderer is not None and images else {},
            joint_position=data.qpos[self._qpos].copy(),
            joint_velocity=data.qvel[self._qvel].copy(),
            gripper_position=min(max(closed, 0.0), 1.0),
            limited=limited,
        )
