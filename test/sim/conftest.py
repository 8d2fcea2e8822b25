"""Worlds are made once per file: a scene takes a tenth of a second, an OpenGL context more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("mujoco", reason="mujoco is not installed: pip install 'wam_policy_ros[sim]'")

from wam_policy_ros.sim.errors import RenderingUnavailable
from wam_policy_ros.sim.world import World


@pytest.fixture(scope="module")
def world() -> World:
    """Without pictures."""
    return World(render=False)


@pytest.fixture(scope="module")
def seeing() -> Iterator[World]:
    """With pictures, where there is EGL."""
    try:
        made = World()
    except RenderingUnavailable as error:
        pytest.skip(str(error))
    yield made
    made.close()
