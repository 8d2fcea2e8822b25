"""Plays seeds through a simulator and a policy node that run already, and says how each went: the door ``ros`` of
``wam eval``. It gives no command to the arm: it says what to do, resets the scene, waits, and asks what was done.

One line of JSON per episode on stdout. ``python -m wam_policy_ros.ros.sim_episodes --help`` names the options.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import rclpy
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.parameter_client import AsyncParameterClient
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

from wam_policy_ros.contract.errors import PolicyUnavailable, WamError

from .params_files import split_arguments
from .qos import latched_qos

FOUND_S, ANSWER_S = 15.0, 60.0
DISTURBANCES = ("late", "refused", "clamped", "discarded", "executor_stalls", "stop_and_go", "off_schedule")
"""Counters of the node. What they count makes an arm do something else than the policy said."""


class SimEpisodes(Node):
    """A client of ``wam_sim`` and of the policy node.

    Args:
        sim: name of the simulator's node, policy: of the policy node, both in this namespace; empty: none, somebody
            else commands the arm.
        start_s: the policy node may take so long to become active; quiet_s: an episode in which the arm is told nothing
            for so long is no episode; kwargs: for ``rclpy.node.Node``.
    """

    def __init__(
        self,
        sim: str = "wam_sim",
        policy: str = "wam_policy",
        *,
        start_s: float = FOUND_S,
        quiet_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__("wam_sim_episodes", **kwargs)
        self._start_s, self._quiet_s, self._policy = start_s, quiet_s, policy
        self._status: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._execute: int | None = None
        self._sim_parameters = AsyncParameterClient(self, sim)
        self._reset: Any = self.create_client(Trigger, "sim/reset")
        self._executed: Any = self.create_client(Trigger, "sim/executed")
        self.create_subscription(
            String, "sim/episode", lambda m: setattr(self, "_status", json.loads(m.data)), latched_qos()
        )
        if policy:
            self._hold: Any = self.create_client(SetBool, f"{policy}/hold")
            self._policy_parameters = AsyncParameterClient(self, policy)
            self._prompt = self.create_publisher(String, f"{policy}/prompt", latched_qos())
            self.create_subscription(String, f"{policy}/state", self._on_state, latched_qos())

    def play(self, seed: int, task: str, max_ticks: int, instruction: str = "") -> dict[str, Any]:
        """Reset to a seed, wait for success or the end.

        Args:
            instruction: what the policy is told; empty: the task's first wording.

        Raises:
            PolicyUnavailable: no simulator, it refuses, no policy node, it is latched, or nothing moves the arm.
        """
        if not self._reset.wait_for_service(FOUND_S) or not self._sim_parameters.wait_for_services(FOUND_S):
            raise PolicyUnavailable(
                "no simulator answers", expected="wam_sim in this namespace and ROS domain", remedy="start wam_sim"
            )
        self._set(seed=seed, task=task, instruction=instruction, max_ticks=max_ticks)
        if self._policy:
            self._pause()
        before = dict(self._state.get("counters", {}))
        answer = self._wait(self._reset.call_async(Trigger.Request()))
        if not answer.success:
            raise PolicyUnavailable("the simulator does not reset", got=answer.message)
        first = json.loads(answer.message)
        self._began(first)
        if self._policy:
            self._go_on(first["instruction"])
        last = self._watch(first, max_ticks)
        names = ("seed", "task", "instruction", "success", "tick", "highest_m", "moved_m", "others_taken", "refused")
        return {n: last[n] for n in names} | {"rows": self._rows(first), "policy": self._about(before)}

    def restore(self) -> None:
        """What was set for episodes is not to stay in a simulator that is still there."""
        if self._sim_parameters.services_are_ready():
            self._set(instruction="", max_ticks=0)

    def _began(self, first: dict[str, Any]) -> None:
        """A new episode; for those who listen along."""

    def _on_state(self, msg: String) -> None:
        self._state = json.loads(msg.data)

    # -- inside -------------------------------------------------------------------------------------------------

    def _set(self, **values: Any) -> None:
        given = [Parameter(n, value=v) for n, v in values.items()]
        answers = self._wait(self._sim_parameters.set_parameters(given)).results
        if refused := [a.reason for a in answers if not a.successful]:
            raise PolicyUnavailable("the simulator refuses the episode", got="; ".join(refused))

    def _pause(self) -> None:
        """The policy node stands still, and so does the arm: what was under way must not reach into a new episode."""
        self._until(
            lambda: self._state.get("lifecycle") == "active" or self._state.get("refused"),
            self._start_s,
            lambda: PolicyUnavailable(
                "no active policy node",
                got=self._state.get("reason") or "nobody says its state",
                expected=f"{self._policy} in this namespace and ROS domain",
            ),
        )
        if self._state["lifecycle"] != "active":
            raise PolicyUnavailable("the policy node does not start", got=self._state["refused"])
        found = self._hold.wait_for_service(FOUND_S) and self._policy_parameters.wait_for_services(FOUND_S)
        if not found:
            raise PolicyUnavailable("the policy node offers no services", got=f"{self._policy}/hold is not there")
        if self._execute is None:
            asked = self._policy_parameters.get_parameters(["control.execute_steps"])
            self._execute = int(self._wait(asked).values[0].integer_value)
        self._wait(self._hold.call_async(SetBool.Request(data=True)))
        self._until(
            lambda: self._status.get("rests"),
            ANSWER_S,
            lambda: PolicyUnavailable(
                "the simulated arm does not come to rest", got=f"tick {self._status.get('tick')}"
            ),
        )

    def _go_on(self, words: str) -> None:
        """With an instruction that is known before the first frame is looked at."""
        self._prompt.publish(String(data=words))
        self._until(
            lambda: self._state.get("prompt") == words.strip(),
            ANSWER_S,
            lambda: PolicyUnavailable("the policy node does not take the instruction", got=self._state.get("prompt")),
        )
        answer = self._wait(self._hold.call_async(SetBool.Request(data=False)))
        if not answer.success or self._state.get("fault"):
            raise PolicyUnavailable("the policy node is latched", got=self._state.get("fault") or answer.message)

    def _watch(self, first: dict[str, Any], max_ticks: int) -> dict[str, Any]:
        last, ticked_s = first, time.monotonic()
        while True:
            rclpy.spin_once(self, timeout_sec=0.1)
            status = self._status
            if status.get("episode", -1) > first["episode"]:
                raise PolicyUnavailable("somebody else reset the simulator", got=f"seed {last['seed']} was cut short")
            if status.get("episode") == first["episode"]:
                if status["tick"] != last["tick"]:
                    ticked_s = time.monotonic()
                last = status
                if last["over"]:
                    return last
            if self._state.get("fault"):
                raise PolicyUnavailable("the policy node is latched", got=self._state["fault"])
            if time.monotonic() - ticked_s > self._quiet_s:
                raise PolicyUnavailable(
                    "nothing moves the simulated arm",
                    got=f"tick {last['tick']} of {max_ticks} for {self._quiet_s:.0f} s"
                    + (f"; the node says: {self._state.get('reason')}" if self._policy else ""),
                    remedy="activate the policy node; its ~/status says what it waits for",
                )

    def _rows(self, first: dict[str, Any]) -> list[list[float]]:
        if not self._executed.wait_for_service(FOUND_S):
            raise PolicyUnavailable("the simulator does not say what it did", expected="its service sim/executed")
        answer = self._wait(self._executed.call_async(Trigger.Request()))
        told = json.loads(answer.message) if answer.success else {}
        if told.get("episode") != first["episode"]:
            raise PolicyUnavailable("the simulator does not say what it did", got=answer.message[:200])
        rows: list[list[float]] = told["rows"]
        return rows

    def _about(self, before: dict[str, int]) -> dict[str, Any] | None:
        """The policy, as its node says; None without one."""
        if not self._policy:
            return None
        now = self._state.get("counters", {})
        more = {n: now.get(n, 0) - before.get(n, 0) for n in DISTURBANCES}
        disturbed = {n: count for n, count in more.items() if count > 0}
        return dict(self._state.get("policy") or {}) | {"execute": self._execute, "disturbed": disturbed}

    def _until(self, reached: Callable[[], Any], patience_s: float, error: Callable[[], WamError]) -> None:
        end_s = time.monotonic() + patience_s
        while not reached():
            if time.monotonic() > end_s:
                raise error()
            rclpy.spin_once(self, timeout_sec=0.1)

    def _wait(self, future: Any) -> Any:
        rclpy.spin_until_future_complete(self, future, timeout_sec=ANSWER_S)
        if not future.done():
            raise PolicyUnavailable("simulator or policy node does not answer", got=f"nothing in {ANSWER_S:.0f} s")
        return future.result()


def main(args: Sequence[str] | None = None) -> int:
    """Exit status 0 when every episode was played, 1 with a line on stderr otherwise."""
    argv = list(sys.argv if args is None else args)
    parser = argparse.ArgumentParser(description="Play seeds through a running simulator and policy node.")
    parser.add_argument("--episodes", required=True, help='JSON: [[seed, "task", "instruction"], ...]')
    parser.add_argument("--max-ticks", type=int, default=160)
    parser.add_argument("--minutes", type=float, help="begin no episode after this time")
    parser.add_argument("--sim", default="wam_sim", help="name of the simulator's node")
    parser.add_argument("--policy", default="wam_policy", help="name of the policy node; empty: none")
    parser.add_argument("--start-s", type=float, default=FOUND_S, help="for the policy node to become active")
    parser.add_argument("--quiet-s", type=float, default=60.0)
    options = parser.parse_args(split_arguments(argv[1:])[0])
    end_s = time.monotonic() + 60 * options.minutes if options.minutes is not None else float("inf")
    rclpy.init(args=argv)
    node = SimEpisodes(options.sim, options.policy, start_s=options.start_s, quiet_s=options.quiet_s)
    try:
        for seed, task, words in json.loads(options.episodes):
            if time.monotonic() >= end_s:
                break
            print(json.dumps(node.play(seed, task, options.max_ticks, words)), flush=True)
        node.restore()
    except WamError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        with contextlib.suppress(WamError):
            node.restore()
        return 1
    finally:
        rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
