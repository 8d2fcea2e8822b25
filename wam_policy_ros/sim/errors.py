"""Errors of the simulator."""

from __future__ import annotations

from wam_policy_ros.contract.errors import ConfigError, WamError


class SimError(WamError):
    """The simulated world was used wrongly, or its physics failed."""


class InvalidTarget(SimError):
    """A joint target is not finite or has the wrong length. Nothing was moved."""


class UnknownTask(SimError, ConfigError):
    """No task has this name, or no task is meant by this instruction."""


class SceneError(ConfigError):
    """A scene cannot be built: the user's own arm model does not fit, or there is no room for the objects."""


class RenderingUnavailable(ConfigError):
    """No OpenGL context can be made. The world still runs with ``render=False``."""
