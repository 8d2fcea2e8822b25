"""The pictures: names, sizes, what is in them, and what is said where there is no OpenGL."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from wam_policy_ros.contract.embodiments import DROID
from wam_policy_ros.sim import cameras
from wam_policy_ros.sim.errors import RenderingUnavailable
from wam_policy_ros.sim.world import World


def test_pictures_are_those_of_the_embodiment(seeing: World) -> None:
    frame = seeing.reset(0)
    assert list(frame.images) == [c.name for c in DROID.cameras]
    for c in DROID.cameras:
        picture = frame.images[c.name]
        assert picture.shape == (c.height, c.width, 3) and picture.dtype == np.uint8
        assert picture.flags.c_contiguous and picture.std() > 20
    assert len({frame.images[n].tobytes() for n in cameras.NAMES}) == 3


def test_things_are_seen_where_the_intrinsics_say(seeing: World) -> None:
    """The red apple's pixels lie around the projection of its middle, the right way up."""
    seen = 0
    for seed in range(4):
        frame = seeing.reset(seed)
        apple = seeing.data.body("red_apple").xpos
        for name in cameras.NAMES:
            camera = seeing.data.cam(name)
            x, y, z = camera.xmat.reshape(3, 3).T @ (apple - camera.xpos)
            u, v, w = cameras.intrinsics(name) @ [x, -y, -z]
            u, v = u / w, v / w
            if not (20 < u < 300 and 20 < v < 160):
                continue
            r, g, b = np.moveaxis(frame.images[name].astype(int), -1, 0)
            rows, columns = np.nonzero((r > 90) & (r > 2 * g) & (r > 2 * b))
            assert np.hypot(np.median(columns) - u, np.median(rows) - v) < 6
            seen += 1
    assert seen >= 6


def test_pictures_may_be_left_out_and_of_another_size(seeing: World) -> None:
    assert seeing.reset(0, images=False).images == {}
    assert seeing.hold(images=False).images == {}
    small = World(size=(128, 72))
    assert small.reset(0).images[cameras.WRIST].shape == (72, 128, 3)
    small.close()
    small.close()


def test_the_seed_changes_the_look(seeing: World) -> None:
    first, second = seeing.reset(0).images, seeing.reset(1).images
    assert all((first[n] != second[n]).mean() > 0.3 for n in cameras.NAMES)


def test_without_opengl_the_error_says_what_to_install() -> None:
    """A process in which EGL finds no device, as on a machine without Mesa."""
    code = """
import sys
sys.modules["mujoco.egl"] = None
from wam_policy_ros.sim.errors import RenderingUnavailable
from wam_policy_ros.sim.world import World
try:
    World(gl="egl")
except RenderingUnavailable as error:
    print(error)
world = World(render=False)
assert world.reset(0).images == {}
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "egl" in out and "apt-get install -y libegl1" in out and "render=False" in out


def test_an_unknown_way_to_opengl_is_named() -> None:
    with pytest.raises(RenderingUnavailable, match="egl, osmesa"):
        World(gl="vulkan")
