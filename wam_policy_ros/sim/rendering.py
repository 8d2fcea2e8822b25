"""Pictures without a screen. A renderer belongs to the thread that made it, as its OpenGL context does."""

from __future__ import annotations

import sys
from typing import Any

import mujoco
import numpy as np
import numpy.typing as npt

from . import cameras
from .errors import RenderingUnavailable
from .shapes import VISIBLE

REMEDY = (
    "on Debian or Ubuntu: apt-get install -y libegl1 libegl-mesa0 libgles2 libgl1-mesa-dri; with an NVIDIA driver its "
    "own EGL is used; or run without pictures: World(render=False)"
)


class Renderer:
    """Draws the three cameras.

    Args:
        size: width and height in pixels.
        gl: ``egl``, ``osmesa``, ``glfw`` or ``cgl``; None: ``egl``, on a Mac ``cgl``.

    Raises:
        RenderingUnavailable: no OpenGL context can be made here.
    """

    def __init__(self, model: mujoco.MjModel, size: tuple[int, int] = cameras.SIZE, *, gl: str | None = None) -> None:
        width, height = size
        self._model = model
        self._gl = _open_gl(gl or ("cgl" if sys.platform == "darwin" else "egl"), width, height)
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        try:
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        except Exception as error:
            self._gl.free()
            raise RenderingUnavailable("MuJoCo cannot draw here", got=str(error), remedy=REMEDY) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = model.vis.quality.shadowsize > 0
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._options = mujoco.MjvOption()
        self._options.geomgroup[:] = 0
        # A user's own arm has its visible shapes in one of the first groups by custom.
        self._options.geomgroup[: VISIBLE + 1] = 1
        self._options.sitegroup[:] = 0
        self._perturb = mujoco.MjvPerturb()
        self._view = mujoco.MjrRect(0, 0, width, height)
        self._cameras = [(name, model.camera(name).id) for name in cameras.NAMES]

    def draw(self, data: mujoco.MjData) -> dict[str, npt.NDArray[np.uint8]]:
        """Camera name -> uint8 ``[H, W, 3]`` RGB, first row at the top."""
        self._gl.make_current()
        camera = mujoco.MjvCamera()
        camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        everything = mujoco.mjtCatBit.mjCAT_ALL
        images = {}
        for k, (name, index) in enumerate(self._cameras):
            camera.fixedcamid = index
            if k == 0:
                mujoco.mjv_updateScene(self._model, data, self._options, self._perturb, camera, everything, self._scene)
            else:
                mujoco.mjv_updateCamera(self._model, data, camera, self._scene)
            mujoco.mjr_render(self._view, self._scene, self._context)
            picture = np.empty((self._view.height, self._view.width, 3), dtype=np.uint8)
            mujoco.mjr_readPixels(picture, None, self._view, self._context)
            images[name] = np.ascontiguousarray(picture[::-1])
        return images

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self._gl is not None:
            self._gl.make_current()
            self._context.free()
            self._gl.free()
            self._gl = None


def _open_gl(kind: str, width: int, height: int) -> Any:
    try:
        context = _context_class(kind)(width, height)
        context.make_current()
    except RenderingUnavailable:
        raise
    except Exception as error:  # each binding has its own errors: ImportError, AttributeError, EGLError, RuntimeError
        raise RenderingUnavailable(
            f"no OpenGL context can be made with {kind}", got=f"{type(error).__name__}: {error}", remedy=REMEDY
        ) from error
    return context


def _context_class(kind: str) -> Any:
    if kind == "egl":
        from mujoco.egl import GLContext
    elif kind == "osmesa":
        from mujoco.osmesa import GLContext
    elif kind == "glfw":
        from mujoco.glfw import GLContext
    elif kind == "cgl":
        from mujoco.cgl import GLContext
    else:
        raise RenderingUnavailable("no such way to OpenGL", got=kind, expected="egl, osmesa, glfw or cgl")
    return GLContext
