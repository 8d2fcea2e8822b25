"""Plays seeds through a simulator and a policy node that run already, and says how each went: the door ``ros`` of
``wam eval``. It gives no command to the arm: it resets the scene, waits, and counts.

One line of JSON per episode on stdout. ``python -m wam_policy_ros.ros.sim_episodes --help`` names the options.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import rclpy
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.parameter_client import AsyncParameterClient
from std_msgs.msg import String
from std_srvs.srv import Trigger

from wam_policy_ros.contract.errors import PolicyUnavailable, WamError

from .params_files import split_arguments
from .qos import latched_qos

FOUND_S, ANSWER_S = 15.0, 60.0


class SimEpisodes(Node):
    """A client of ``wam_sim``.

    Args:
        sim: name of its node, with the namespace; quiet_s: an episode in which the arm is told nothing for so long is
            no episode; kwargs: for ``rclpy.node.Node``.
    """

    def __init__(self, sim: str = "wam_sim", *, quiet_s: float = 60.0, **kwargs: Any) -> None:
        super().__init__("wam_sim_episodes", **kwargs)
        self._quiet_s = quiet_s
        self._said: list[dict[str, Any]] = []
        self._sim_parameters = AsyncParameterClient(self, sim)
        self._reset: Any = self.create_client(Trigger, "sim/reset")
        self.create_subscription(String, "sim/episode", lambda m: self._said.append(json.loads(m.data)), latched_qos())

    def play(self, seed: int, task: str, max_ticks: int) -> dict[str, Any]:
        """Reset to a seed, wait for success or the end.

        Raises:
            PolicyUnavailable: no simulator, it refuses, or nothing moves its arm.
        """
        if not self._reset.wait_for_service(FOUND_S) or not self._sim_parameters.wait_for_services(FOUND_S):
            raise PolicyUnavailable(
                "no simulator answers", expected="wam_sim in this namespace and ROS domain", remedy="start wam_sim"
            )
        answers = self._wait(
            self._sim_parameters.set_parameters([Parameter("seed", value=seed), Parameter("task", value=task)])
        ).results
        if refused := [a.reason for a in answers if not a.successful]:
            raise PolicyUnavailable("the simulator refuses the episode", got="; ".join(refused))
        reset = self._wait(self._reset.call_async(Trigger.Request()))
        if not reset.success:
            raise PolicyUnavailable("the simulator does not reset", got=reset.message)
        return self._watch(json.loads(reset.message), max_ticks)

    def _watch(self, first: dict[str, Any], max_ticks: int) -> dict[str, Any]:
        last, highest, ticked_s = first, 0.0, time.monotonic()
        while True:
            rclpy.spin_once(self, timeout_sec=0.1)
            said, self._said = self._said, []
            for status in (s for s in said if s["episode"] == first["episode"]):
                if status["tick"] != last["tick"]:
                    ticked_s = time.monotonic()
                last, highest = status, max(highest, status["lifted_m"])
                if last["success"] or last["tick"] >= max_ticks:
                    return _row(last, highest, max_ticks)
            if any(s["episode"] > first["episode"] for s in said):
                raise PolicyUnavailable("somebody else reset the simulator", got=f"seed {last['seed']} was cut short")
            if time.monotonic() - ticked_s > self._quiet_s:
                raise PolicyUnavailable(
                    "nothing moves the simulated arm",
                    got=f"tick {last['tick']} for {self._quiet_s:.0f} s",
                    remedy="activate the policy node; its ~/status says what it waits for",
                )

    def _wait(self, future: Any) -> Any:
        rclpy.spin_until_future_complete(self, future, timeout_sec=ANSWER_S)
        if not future.done():
            raise PolicyUnavailable("the simulator does not answer", got=f"nothing in {ANSWER_S:.0f} s")
        return future.result()


def _row(status: dict[str, Any], highest_m: float, max_ticks: int) -> dict[str, Any]:
    """A message may have been lost: a success that is first heard of behind the end does not count."""
    names = ("seed", "task", "instruction", "tick", "moved_m", "refused")
    success = status["success"] and status["tick"] <= max_ticks
    return {n: status[n] for n in names} | {"highest_m": highest_m, "success": success}


def main(args: Sequence[str] | None = None) -> int:
    """Exit status 0 when every episode was played, 1 with a line on stderr otherwise."""
    argv = list(sys.argv if args is None else args)
    parser = argparse.ArgumentParser(description="Play seeds through a running simulator and policy node.")
    parser.add_argument("--episodes", required=True, help='JSON: [[seed, "task"], ...]')
    parser.add_argument("--max-ticks", type=int, default=160)
    parser.add_argument("--sim", default="wam_sim", help="name of the simulator's node")
    parser.add_argument("--quiet-s", type=float, default=60.0)
    options = parser.parse_args(split_arguments(argv[1:])[0])
    rclpy.init(args=argv)
    try:
        node = SimEpisodes(options.sim, quiet_s=options.quiet_s)
        for seed, task in json.loads(options.episodes):
            print(json.dumps(node.play(seed, task, options.max_ticks)), flush=True)
    except WamError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
