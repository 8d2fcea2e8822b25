"""A Franka Emika Panda from its published numbers; its shapes are ours, turned on a lathe.

Facts: modified (Craig) Denavit-Hartenberg parameters, joint ranges, speed and torque limits and the hand's dimensions
as the manufacturer publishes them. Masses are rounded; the arm compensates its weight, as the real one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mujoco
import numpy as np

from .meshes import Surface, extrude, lathe, rounded, rounded_rectangle, sweep
from .shapes import ARM_BITS, Geom, Vector, capsule_between, collider, surface, visible_box

# Per joint: a (m), d (m), alpha (rad).
DH = (
    *((0.0, 0.333, 0.0), (0.0, 0.0, -np.pi / 2), (0.0, 0.316, np.pi / 2), (0.0825, 0.0, np.pi / 2)),
    *((-0.0825, 0.384, -np.pi / 2), (0.0, 0.0, np.pi / 2), (0.088, 0.0, np.pi / 2)),
)
FLANGE_M, FINGERS_M, TCP_M = 0.107, 0.0584, 0.1034
"""Joint 7 to the hand, the hand to its fingers, the hand to the middle between the fingertips."""

RANGE_RAD = (
    *((-2.8973, 2.8973), (-1.7628, 1.7628), (-2.8973, 2.8973), (-3.0718, -0.0698)),
    *((-2.8973, 2.8973), (-0.0175, 3.7525), (-2.8973, 2.8973)),
)
SPEED_RAD_S = (2.175, 2.175, 2.175, 2.175, 2.61, 2.61, 2.61)
TORQUE_NM = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0)
MASS_KG = (3.0, 3.0, 3.0, 2.5, 3.0, 1.5, 0.8)
FINGER_TRAVEL_M = 0.04
GRIP = (1.2, 0.01, 0.0002)
"""Friction of the rubber fingertips."""
HOME_RAD = (0.0, -0.20, 0.0, -2.45, 0.0, 2.25, np.pi / 4)

WHITE, GREY, DARK, METAL = "arm_white", "arm_grey", "arm_dark", "arm_metal"
MATERIALS: dict[str, dict[str, Any]] = {
    WHITE: {"rgba": [0.93, 0.94, 0.95, 1], "specular": 0.45, "shininess": 0.6},
    GREY: {"rgba": [0.62, 0.65, 0.69, 1], "specular": 0.4, "shininess": 0.5},
    DARK: {"rgba": [0.10, 0.11, 0.13, 1], "specular": 0.4, "shininess": 0.4},
    METAL: {"rgba": [0.42, 0.45, 0.49, 1], "specular": 0.6, "shininess": 0.7},
}


def _drum(radius: float, half: float, bevel: float = 0.012) -> Surface:
    return lathe(rounded(radius, -half, half, bevel))


def _bone(start: tuple[float, float], end: tuple[float, float], radius: float) -> Surface:
    """A tube in the x-z plane with soft ends."""
    t = np.array([0.0, 0.06, 0.94, 1.0])[:, None]
    path = np.array([start[0], 0.0, start[1]]) * (1 - t) + np.array([end[0], 0.0, end[1]]) * t
    return sweep(path, [radius * 0.8, radius, radius, radius * 0.8], sides=16)


def _visible(link: int) -> Sequence[tuple[Surface, str, Vector, Vector]]:
    """Surfaces of a link in its Denavit-Hartenberg frame: shape, material, place, axis."""
    o, y, z = (0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)
    column = [(0.0, 0.0), (0.098, 0.0), (0.098, 0.012), (0.084, 0.05), (0.073, 0.10), (0.066, 0.132), (0.0, 0.132)]
    forearm = [(0, -0.248), (0.05, -0.248), (0.058, -0.24), (0.058, -0.19), (0.052, -0.09), (0.046, -0.01), (0, 0)]
    return {
        0: [
            (lathe(column), WHITE, o, z),
            (extrude(rounded_rectangle(0.085, 0.075, 0.03), 0.0, 0.07, 0.012), WHITE, (-0.085, 0.0, 0.0), z),
            (lathe(rounded(0.061, 0.130, 0.146, 0.002)), DARK, o, z),
        ],
        1: [
            (lathe(rounded(0.064, -0.188, 0.045, 0.03)), WHITE, o, z),
            (_drum(0.065, 0.058), WHITE, o, y),
        ],
        2: [
            (_drum(0.056, 0.078), GREY, o, z),
            (lathe(rounded(0.059, 0.05, 0.178, 0.01)), WHITE, o, (0.0, -1.0, 0.0)),
            (lathe(rounded(0.054, 0.176, 0.186, 0.002)), DARK, o, (0.0, -1.0, 0.0)),
        ],
        3: [
            (lathe(rounded(0.059, -0.132, -0.03, 0.02)), WHITE, o, z),
            (_bone((0.0, -0.06), (0.0825, 0.0), 0.056), WHITE, o, z),
            (_drum(0.062, 0.055), WHITE, (0.0825, 0.0, 0.0), y),
        ],
        4: [
            (_drum(0.053, 0.074), GREY, o, z),
            (_bone((0.0, 0.0), (-0.0825, 0.075), 0.054), WHITE, o, (0.0, 1.0, 0.0)),
            (lathe(rounded(0.058, 0.05, 0.128, 0.015)), WHITE, (-0.0825, 0.0, 0.0), y),
            (lathe(rounded(0.053, 0.126, 0.136, 0.002)), DARK, (-0.0825, 0.0, 0.0), y),
        ],
        5: [
            (lathe(forearm), WHITE, o, z),
            (_drum(0.052, 0.05), WHITE, o, y),
        ],
        6: [
            (_drum(0.045, 0.066), GREY, o, z),
            (_bone((0.0, 0.0), (0.088, 0.0), 0.045), WHITE, o, z),
            (lathe(rounded(0.049, -0.05, 0.042, 0.014)), WHITE, (0.088, 0.0, 0.0), (0.0, -1.0, 0.0)),
        ],
        7: [
            (lathe(rounded(0.046, 0.043, 0.078, 0.006)), DARK, o, z),
            (lathe(rounded(0.034, 0.07, FLANGE_M, 0.003)), METAL, o, z),
        ],
    }[link]  # fmt: skip


# Capsules of the links in their own frames: start, end, radius. They collide with things and the table only.
_CAPSULES: dict[int, tuple[tuple[tuple[float, ...], tuple[float, ...], float], ...]] = {
    1: (((0, 0, -0.12), (0, 0, 0), 0.06),),
    2: (((0, 0, 0), (0, -0.14, 0), 0.058),),
    3: (((0, 0, -0.08), (0.0825, 0, 0), 0.058),),
    4: (((0, 0, 0), (-0.0825, 0.09, 0), 0.056),),
    5: (((0, 0, -0.19), (0, 0, 0), 0.052),),
    6: (((0, 0, 0), (0.088, 0, 0), 0.047),),
    7: (((0, 0, 0.03), (0, 0, 0.07), 0.045),),
}


def add_panda(spec: mujoco.MjSpec) -> None:
    """Add the arm, its hand and its actuators to the world, base at the origin.

    Makes joints ``joint1`` .. ``joint7``, ``finger_joint1``, ``finger_joint2`` and the body ``hand``.
    """
    for name, look in MATERIALS.items():
        spec.add_material(name=name, **look)
    body = spec.worldbody.add_body(name="link0")
    _dress(spec, body, 0)
    collider(body, Geom.mjGEOM_CYLINDER, (0.08, 0.07), 3.0, ARM_BITS, pos=(0, 0, 0.07))
    for k, (a, d, alpha) in enumerate(DH, start=1):
        c, s = np.cos(alpha), np.sin(alpha)
        body = body.add_body(name=f"link{k}", pos=[a, -d * s, d * c], quat=[np.cos(alpha / 2), np.sin(alpha / 2), 0, 0])
        body.add_joint(
            name=f"joint{k}",
            type=mujoco.mjtJoint.mjJNT_HINGE,
            axis=[0, 0, 1],
            limited=mujoco.mjtLimited.mjLIMITED_TRUE,
            range=list(RANGE_RAD[k - 1]),
            armature=0.1,
        )
        _dress(spec, body, k)
        for start, end, radius in _CAPSULES[k]:
            capsule_between(body, start, end, radius, MASS_KG[k - 1], ARM_BITS)
    _add_hand(spec, body)


def _dress(spec: mujoco.MjSpec, body: mujoco.MjsBody, link: int) -> None:
    for n, (shape, material, pos, axis) in enumerate(_visible(link)):
        surface(spec, body, f"link{link}_{n}", shape, material, pos=pos, axis=axis)


def _add_hand(spec: mujoco.MjSpec, flange: mujoco.MjsBody) -> None:
    half_turn = -np.pi / 8  # the hand sits on the flange turned by -45 degrees
    hand = flange.add_body(name="hand", pos=[0, 0, FLANGE_M], quat=[np.cos(half_turn), 0, 0, np.sin(half_turn)])
    surface(spec, hand, "hand_top", extrude(rounded_rectangle(0.031, 0.075, 0.025), 0.0, 0.03, 0.006), WHITE)
    surface(spec, hand, "hand_body", extrude(rounded_rectangle(0.032, 0.102, 0.022), 0.022, 0.06, 0.008), WHITE)
    surface(spec, hand, "hand_rail", extrude(rounded_rectangle(0.022, 0.098, 0.012), 0.056, 0.0659, 0.002), DARK)
    collider(hand, Geom.mjGEOM_BOX, (0.032, 0.102, 0.033), 0.73, ARM_BITS, pos=(0, 0, 0.033))
    for n, quat in ((1, [1, 0, 0, 0]), (2, [0, 0, 0, 1])):
        finger = hand.add_body(name=f"finger{n}", pos=[0, 0, FINGERS_M], quat=quat)
        finger.add_joint(
            name=f"finger_joint{n}",
            type=mujoco.mjtJoint.mjJNT_SLIDE,
            axis=[0, 1, 0],
            limited=mujoco.mjtLimited.mjLIMITED_TRUE,
            range=[0.0, FINGER_TRAVEL_M],
            armature=0.1,
            damping=5.0,
        )
        visible_box(finger, (0.0105, 0.011, 0.014), METAL, pos=(0, 0.015, 0.012))
        visible_box(finger, (0.0095, 0.0055, 0.0148), METAL, pos=(0, 0.0077, 0.0385))
        visible_box(finger, (0.0088, 0.0012, 0.0092), DARK, pos=(0, 0.0012, 0.0440))
        # High friction of rubber tips; torsion keeps a held thing from swinging around the line between them.
        collider(
            finger, Geom.mjGEOM_BOX, (0.0095, 0.0065, 0.0148), 0.015, ARM_BITS, pos=(0, 0.0065, 0.0388), friction=GRIP
        )
        collider(finger, Geom.mjGEOM_BOX, (0.0105, 0.011, 0.012), 0.015, ARM_BITS, pos=(0, 0.015, 0.012))
