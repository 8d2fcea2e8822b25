"""Lifecycle transitions that say what went wrong, and the automatic start."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any

from rclpy.clock import Clock, ClockType
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from wam_policy_ros.contract.errors import WamError

from .worker import Phase

AUTOSTART_PERIOD_S = 0.1

_Callback = Callable[[Any, LifecycleState], TransitionCallbackReturn]


def transition(target: str) -> Callable[[_Callback], _Callback]:
    """Decorate ``on_<transition>`` of a node that has a ``lifecycle`` label and ``publish_state``.

    rclpy turns an exception in a transition into an error state without a word. Here our own errors, which a person
    can cure, are logged and make the transition fail; any other is logged with its traceback and goes to ``on_error``.

    Args:
        target: label after success.
    """

    def decorate(callback: _Callback) -> _Callback:
        @functools.wraps(callback)
        def wrapped(self: Any, state: LifecycleState) -> TransitionCallbackReturn:
            name = callback.__name__.removeprefix("on_")
            try:
                result = callback(self, state)
            except WamError as error:
                self.refused = f"{name} refused: {error}"
                self.get_logger().error(self.refused)
                result = TransitionCallbackReturn.FAILURE
            except Exception:
                self.refused = f"{name} failed: {traceback.format_exc(limit=-1).splitlines()[-1]}"
                self.get_logger().error(f"{name} raised\n{traceback.format_exc()}")
                result = TransitionCallbackReturn.ERROR
            if result is TransitionCallbackReturn.SUCCESS:
                self.lifecycle = target
                if name != "error":
                    self.refused = ""
            self.publish_state()
            return result

        return wrapped

    return decorate


class Autostart:
    """Configures a node once, then activates it once as soon as its policy is ready.

    It gives up when configure or activate is refused or the policy cannot be loaded; afterwards the lifecycle belongs
    to whoever calls the services, unless ``gave_up`` ends the process.

    Args:
        node: has a ``lifecycle`` label.
        phase: of the worker.
        guard: calls a function and lets no exception through.
        gave_up: called once, with what failed and what can be done about it in a node that lives on.
    """

    def __init__(
        self,
        node: LifecycleNode,
        phase: Callable[[], Phase | None],
        guard: Callable[[Callable[[], None]], Any],
        gave_up: Callable[[str, str], None],
    ) -> None:
        self._node, self._phase, self._gave_up, self._tried = node, phase, gave_up, False
        self._timer = node.create_timer(AUTOSTART_PERIOD_S, lambda: guard(self._step), clock=steady_clock())

    def cancel(self) -> None:
        """Stop trying."""
        self._timer.cancel()

    def _label(self) -> str:
        return getattr(self._node, "lifecycle", "")

    def _step(self) -> None:
        if self._label() == "unconfigured" and not self._tried:
            self._tried = True
            self._node.trigger_configure()
            if self._label() != "inactive":
                self.cancel()
                self._gave_up("configure was refused", "correct the parameters and configure again")
        elif self._label() == "inactive" and self._phase() is Phase.READY:
            self.cancel()
            self._node.trigger_activate()
            if self._label() != "active":
                self._gave_up("activate was refused", "clean up, correct the parameters, configure and activate")
        elif self._label() == "inactive" and self._phase() is Phase.FAILED:
            self.cancel()
            self._gave_up("the policy cannot be loaded", "clean up, correct the cause, configure and activate")
        elif self._label() != "inactive" or self._phase() is Phase.STOPPED:
            self.cancel()


def steady_clock() -> Clock:
    """For timers that must go on when the node's clock is set, paused or simulated."""
    return Clock(clock_type=ClockType.STEADY_TIME)
