"""What bodies are made of: visible surfaces without mass, and invisible simple ones that collide."""

from __future__ import annotations

from collections.abc import Sequence

import mujoco
import numpy as np
import numpy.typing as npt

from .meshes import Surface

VISIBLE, COLLISION = 2, 3
"""Geom groups: cameras draw the first, contacts happen on the second."""

# Things and the table touch everything; parts of the arm touch things and the table, never each other.
THING_BITS, ARM_BITS = (1, 3), (2, 1)

Vector = Sequence[float] | npt.NDArray[np.float64]
Geom = mujoco.mjtGeom


def turned_to(axis: Vector) -> npt.NDArray[np.float64]:
    """Quaternion (w, x, y, z) that turns z to ``axis``."""
    quat = np.empty(4)
    mujoco.mju_quatZ2Vec(quat, np.array(axis, dtype=np.float64))
    return quat


def surface(
    spec: mujoco.MjSpec,
    body: mujoco.MjsBody,
    name: str,
    shape: Surface,
    material: str,
    *,
    pos: Vector = (0, 0, 0),
    axis: Vector = (0, 0, 1),
) -> mujoco.MjsGeom:
    """A visible mesh of our own."""
    vertices, faces = shape
    mesh = spec.add_mesh(name=name, uservert=vertices.ravel().tolist(), userface=faces.ravel().tolist())
    mesh.inertia = mujoco.mjtMeshInertia.mjMESH_INERTIA_SHELL
    geom = body.add_geom(type=Geom.mjGEOM_MESH, meshname=name, material=material, pos=list(pos), group=VISIBLE)
    geom.quat = turned_to(axis)
    geom.contype = geom.conaffinity = 0
    geom.mass = 0
    return geom


def visible_box(
    body: mujoco.MjsBody, half: Vector, material: str, *, pos: Vector = (0, 0, 0), quat: Vector = (1, 0, 0, 0)
) -> mujoco.MjsGeom:
    geom = body.add_geom(type=Geom.mjGEOM_BOX, size=list(half), material=material, pos=list(pos), group=VISIBLE)
    geom.quat = list(quat)
    geom.contype = geom.conaffinity = 0
    geom.mass = 0
    return geom


def collider(
    body: mujoco.MjsBody,
    kind: mujoco.mjtGeom,
    size: Vector,
    mass: float,
    bits: tuple[int, int],
    *,
    pos: Vector = (0, 0, 0),
    quat: Vector = (1, 0, 0, 0),
    friction: Vector = (1.0, 0.005, 0.0001),
    condim: int = 4,
) -> mujoco.MjsGeom:
    """An invisible solid that carries the mass.

    Args:
        mass: kg.
        friction: sliding, torsional (m), rolling (m).
    """
    geom = body.add_geom(type=kind, pos=list(pos), group=COLLISION)
    geom.size = [*size, *[0.0] * (3 - len(size))]
    geom.quat = list(quat)
    geom.mass, geom.friction, geom.condim = mass, list(friction), condim
    geom.contype, geom.conaffinity = bits
    geom.rgba = [0.2, 0.8, 0.2, 0.4]
    return geom


def capsule_between(
    body: mujoco.MjsBody, start: Vector, end: Vector, radius: float, mass: float, bits: tuple[int, int]
) -> mujoco.MjsGeom:
    a, b = np.array(start, dtype=np.float64), np.array(end, dtype=np.float64)
    half = float(np.linalg.norm(b - a)) / 2
    return collider(body, Geom.mjGEOM_CAPSULE, (radius, half), mass, bits, pos=(a + b) / 2, quat=turned_to(b - a))
