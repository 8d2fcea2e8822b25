"""Build the scene once, then dress it for a seed."""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from . import cameras, objects
from .arm import ArmModel, add_arm
from .layout import Layout
from .shapes import THING_BITS, VISIBLE, Geom, collider

TIMESTEP_S = 1.0 / 600.0
TABLE_HALF_M, TABLE_MIDDLE_X_M = (0.48, 0.62), 0.34
_LIGHT_DIRECTION = np.array([-0.25, 0.15, -1.0])
# From the sides of the two exterior cameras: what they see is not in the dark.
_FILLS = {"fill_left": (-0.6, -0.7, -0.35), "fill_right": (-0.6, 0.7, -0.35)}
_DIFFUSE, _FILL, _AMBIENT = 0.50, 0.30, 0.30


def build_scene(arm: ArmModel | None = None, *, shadows: bool = False) -> mujoco.MjModel:
    """Table, floor, light, cameras, things and the arm. Takes about 0.1 s.

    Args:
        arm: None: the procedural Panda.
        shadows: soft shadows of the main light; several times slower.

    Raises:
        SceneError: the user's arm does not fit.
    """
    arm = arm or ArmModel()
    spec = mujoco.MjSpec()
    spec.modelname = "wam_table"
    spec.compiler.degree = False
    spec.option.timestep = TIMESTEP_S
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.option.impratio = 10.0
    spec.stat.extent, spec.stat.center = 1.0, [0.4, 0.0, 0.2]
    _tune_rendering(spec, shadows)
    _add_room(spec, shadows)
    objects.add_things(spec)
    add_arm(spec, arm)
    for name, mount in cameras.MOUNTS.items():
        body = spec.body(arm.prefix + arm.hand) if mount.on_hand else spec.worldbody
        body.add_camera(name=name, pos=list(mount.pos_m), quat=mount.quat.tolist(), fovy=mount.fovy_deg)
    return spec.compile()


def dress(model: mujoco.MjModel, layout: Layout) -> None:
    """Give a compiled scene the cameras, colours and light of a layout. Poses are state, not model: see World."""
    for name, jitter in layout.cameras.items():
        mount, index = cameras.MOUNTS[name], model.camera(name).id
        rotation, quat, turned = np.empty(9), mount.quat, np.empty(4)
        mujoco.mju_quat2Mat(rotation, quat)
        model.cam_pos[index] = np.array(mount.pos_m) + rotation.reshape(3, 3) @ jitter[:3]
        mujoco.mju_copy(turned, quat)
        mujoco.mju_quatIntegrate(turned, np.ascontiguousarray(jitter[3:]), 1.0)
        model.cam_quat[index] = turned
    table = model.geom("table_top").id
    model.geom_matid[table] = model.material(layout.table).id
    for name, tint in layout.tints.items():
        material = layout.table if name == "table" else name
        base = objects.MATERIALS[name]["rgba"][:3] if name in objects.MATERIALS else _PLAIN[material]
        model.mat_rgba[model.material(material).id, :3] = np.clip(np.array(base) * tint, 0.0, 1.0)
    strength, ambient, dx, dy = layout.light
    main = model.light("main").id
    model.light_diffuse[main] = _DIFFUSE * strength
    for fill in _FILLS:
        model.light_diffuse[model.light(fill).id] = _FILL * strength
        # Not of the main light: its shadows would be black.
        model.light_ambient[model.light(fill).id] = _AMBIENT * ambient / len(_FILLS)
    direction = _LIGHT_DIRECTION + np.array([dx, dy, 0.0])
    model.light_dir[main] = direction / np.linalg.norm(direction)


# Colour of a material whose picture is multiplied by the seed's tint.
_PLAIN: dict[str, tuple[float, float, float]] = {
    "table_oak": (0.95, 0.95, 0.95),
    "table_walnut": (0.92, 0.92, 0.92),
    "table_stone": (0.90, 0.90, 0.90),
    "floor": (0.85, 0.85, 0.85),
}


def _tune_rendering(spec: mujoco.MjSpec, shadows: bool) -> None:
    visual = spec.visual
    visual.map.znear, visual.map.zfar = 0.008, 8.0
    visual.quality.offsamples = 4 if shadows else 0
    visual.quality.shadowsize = 4096 if shadows else 0
    visual.map.shadowclip = 2.0
    visual.headlight.active = 0


def _add_room(spec: mujoco.MjSpec, shadows: bool) -> None:
    sky = spec.add_texture(name="sky", type=mujoco.mjtTexture.mjTEXTURE_SKYBOX, width=128, height=768)
    sky.builtin = mujoco.mjtBuiltin.mjBUILTIN_GRADIENT
    sky.rgb1, sky.rgb2 = [0.80, 0.83, 0.86], [0.55, 0.58, 0.62]
    oak, walnut = ((0.78, 0.62, 0.44), 0.06), ((0.50, 0.36, 0.26), 0.08)
    _paint(spec, "table_oak", _wood(1, *oak), specular=0.15)
    _paint(spec, "table_walnut", _wood(2, *walnut), specular=0.2)
    _paint(spec, "table_stone", _speckle(3, (0.52, 0.54, 0.56), 0.035), repeat=(3, 4), specular=0.1)
    _paint(spec, "floor", _tiles((0.60, 0.60, 0.58), (0.52, 0.52, 0.50)), repeat=(6, 6))
    spec.add_material(name="steel", rgba=[0.30, 0.32, 0.34, 1], specular=0.3)
    world = spec.worldbody
    world.add_geom(
        name="floor", type=Geom.mjGEOM_PLANE, size=[4, 4, 0.1], pos=[0, 0, -0.74], material="floor", group=VISIBLE,
        contype=0, conaffinity=0,
    )  # fmt: skip
    half_x, half_y = TABLE_HALF_M
    top = world.add_geom(
        name="table_top", type=Geom.mjGEOM_BOX, size=[half_x, half_y, 0.018], pos=[TABLE_MIDDLE_X_M, 0, -0.018],
        material="table_oak", group=VISIBLE,
    )  # fmt: skip
    top.contype = top.conaffinity = 0
    # Thick, so that nothing falls through.
    collider(world, Geom.mjGEOM_BOX, (half_x, half_y, 0.1), 0.0, THING_BITS, pos=(TABLE_MIDDLE_X_M, 0, -0.1))
    for x in (-1, 1):
        for y in (-1, 1):
            leg = world.add_geom(type=Geom.mjGEOM_BOX, size=[0.025, 0.025, 0.352], material="steel", group=VISIBLE)
            leg.pos = [TABLE_MIDDLE_X_M + x * (half_x - 0.05), y * (half_y - 0.05), -0.388]
            leg.contype = leg.conaffinity = 0
    directional = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
    world.add_light(name="main", type=directional, pos=[0.6, -0.3, 2.2], dir=_LIGHT_DIRECTION, castshadow=shadows)
    for name, direction in _FILLS.items():
        fill = world.add_light(name=name, type=directional, pos=[1, 0, 1.5], dir=direction, castshadow=False)
        fill.specular = [0.05] * 3
    spec.light("main").ambient, spec.light("main").specular = [0.0] * 3, [0.35] * 3


def _paint(
    spec: mujoco.MjSpec, name: str, picture: npt.NDArray[np.uint8], *, repeat: tuple[int, int] = (1, 1), **look: Any
) -> None:
    height, width, _ = picture.shape
    texture = spec.add_texture(name=name, type=mujoco.mjtTexture.mjTEXTURE_2D, width=width, height=height, nchannel=3)
    texture.data = picture.tobytes()
    material = spec.add_material(name=name, rgba=[*_PLAIN[name], 1], texrepeat=list(repeat), **look)
    material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = name


def _wood(seed: int, colour: tuple[float, float, float], contrast: float) -> npt.NDArray[np.uint8]:
    """Planks with a grain along y, 256 x 256."""
    rng = np.random.Generator(np.random.PCG64(seed))
    u, v = np.meshgrid(np.arange(256) / 256, np.arange(256) / 256)
    plank = (u * 5).astype(int)
    tone = rng.uniform(-1, 1, 5)[plank]
    phase = rng.uniform(0, 6, 5)[plank]
    grain = np.sin(60 * u + 4 * np.sin(5 * v + phase) + 2 * np.sin(13 * v + 2 * phase) + phase)
    fine = np.repeat(rng.uniform(-1, 1, (16, 256)), 16, axis=0)
    seam = np.where((u * 5) % 1 < 0.02, -2.5, 0.0)
    shade = 1.0 + contrast * (0.8 * tone + 0.5 * grain + 0.5 * fine + seam)
    return np.clip(255 * np.array(colour) * shade[..., None], 0, 255).astype(np.uint8)


def _speckle(seed: int, colour: tuple[float, float, float], contrast: float) -> npt.NDArray[np.uint8]:
    rng = np.random.Generator(np.random.PCG64(seed))
    noise = rng.standard_normal((256, 256))
    smooth = np.sum([np.roll(noise, (a, b), (0, 1)) for a in (-1, 0, 1) for b in (-1, 0, 1)], axis=0) / 3
    return np.clip(255 * np.array(colour) * (1 + contrast * smooth[..., None]), 0, 255).astype(np.uint8)


def _tiles(light: tuple[float, float, float], dark: tuple[float, float, float]) -> npt.NDArray[np.uint8]:
    picture = np.empty((64, 64, 3))
    picture[:] = light
    picture[:32, :32] = picture[32:, 32:] = dark
    return (255 * picture).astype(np.uint8)
