"""The door ``ros`` of ``wam eval``: seeds played through a simulator that runs, over DDS."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("mujoco", reason="mujoco is not installed: pip install 'wam_policy_ros[sim]'")

from wam_policy_ros.contract.errors import PolicyUnavailable
from wam_policy_ros.contract.executed import carried, sha256_of
from wam_policy_ros.ros.sim_episodes import SimEpisodes
from wam_policy_ros.sim.demonstrations import Noise, demonstrate
from wam_policy_ros.sim.expert import Expert
from wam_policy_ros.sim.tasks import TASKS
from wam_policy_ros.sim.world import World
from wam_policy_ros.tools.eval_suite.ros_door import episode_of

from .test_sim_node import FAST, Cell

pytestmark = pytest.mark.usefixtures("ros")


class Robot:
    """Sends the expert's whole way in seed 0, stands still in seed 1, and says nothing in all others."""

    def __init__(self, cell: Cell) -> None:
        world = World(render=False)
        way = demonstrate(world, Expert(world), 0, "lift_mug", noise=Noise.none(), images=False)
        self.rows = {0: np.array([s.executed.row for s in way])}
        world.reset(1)
        self.rows[1] = np.tile(np.append(world.target_rad, 0.0), (40, 1))
        self._cell, self._end = cell, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        done = self._cell.driver.episode["episode"]
        while not self._end.is_set():
            status = self._cell.driver.episode
            if status["episode"] > done and status["seed"] in self.rows:
                done = status["episode"]
                self._cell.driver.send(self.rows[status["seed"]])
            time.sleep(0.01)

    def close(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def cell() -> Iterator[Cell]:
    made = Cell(**FAST, lockstep_ticks=200)
    robot = Robot(made)
    made.way = robot.rows[0]
    yield made
    robot.close()
    made.close()


def test_seeds_are_played_counted_and_told(cell: Cell, capfd: pytest.CaptureFixture[str]) -> None:
    node = SimEpisodes(namespace=cell.namespace, policy="", quiet_s=15.0)
    lifted = episode_of(node.play(0, "lift_mug", 150, "take the cup"))
    assert lifted.success and lifted.seed == 0 and lifted.task == "lift_mug" and 40 < lifted.ticks < 150
    assert lifted.highest_m > 0.1 and set(lifted.moved_m) == {"mug"} and lifted.taken == ()
    assert lifted.instruction == "take the cup" and lifted.executed.shape == (lifted.ticks, 8)
    assert lifted.actions_sha256 == sha256_of(carried(cell.way[: lifted.ticks]))
    still = episode_of(node.play(1, "lift_red_apple", 12))
    assert not still.success and still.ticks == 12 and still.moved_m == {} and still.highest_m < 0.01
    assert still.instruction == TASKS["lift_red_apple"].instructions[0] and not still.executed[:, 7].any()
    log = "".join(capfd.readouterr())
    assert log.count("scene 0: lift_mug, 'take the cup'") == log.count("scene 0: success") == 1
    assert f"success after {lifted.ticks} ticks ({lifted.ticks / 15:.1f} s), {lifted.highest_m:.2f} m up" in log
    assert log.count("scene 1: over after 12 ticks (0.8 s) without success, 0.00 m at most") == 1
    with pytest.raises(PolicyUnavailable, match="refuses"):
        node.play(0, "make coffee", 12)
    node.restore()
    assert cell.node.get_parameter("max_ticks").value == 0 and cell.node.get_parameter("instruction").value == ""
    node.destroy_node()
    alone = SimEpisodes(namespace=cell.namespace, start_s=0.2)
    with pytest.raises(PolicyUnavailable, match="no active policy node"):
        alone.play(0, "lift_mug", 12)
    alone.destroy_node()
    hasty = SimEpisodes(namespace=cell.namespace, policy="", quiet_s=0.5)
    with pytest.raises(PolicyUnavailable, match="nothing moves"):
        hasty.play(2, "lift_mug", 12)
    hasty.destroy_node()
