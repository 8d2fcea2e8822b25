"""What is evaluated: one frozen, picklable description that every process is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.sim.tasks import TASKS, Task, find_task
from wam_policy_ros.train.generate import choose_task

from .controls import BLANK, CONTROLS, EXPERT, REPLAY

DOORS = {
    "engine": "the policy in the process of the simulator",
    "openpi": "a client of a policy server, over a real WebSocket",
    "ros": "a simulator and a policy node, over ROS topics",
}


@dataclass(frozen=True)
class Plan:
    """One policy, one door, one kind of episode.

    Attributes:
        door: key of ``DOORS``.
        checkpoint, random_weights: which policy; one of the two, or neither with ``url`` or a control.
        attach: the door ros leads to a simulator and a node that run already, with a policy of their own.
        url: of a policy server that runs already; dialect: how it is spoken to.
        tokenizer, device, preset, options: of the engine, see ``EngineFactory``.
        control: key of ``CONTROLS``, or empty.
        tasks: names; a seed picks one of them and one of its wordings.
        instruction: said in every episode instead of the wording; the task still decides what success is.
        execute: rows of a chunk to execute; None: as the checkpoint recommends.
        threads: of PyTorch, per policy.
        video_error: compare the predicted video with what then was seen.
        parallel: simulators in one process, at once.
        beside: clients of the same policy that have nothing to do with it, and ask all the time.
        pictures: folder for videos and plots; empty: none.
        shown: how many failures (``every``: episodes) are drawn there, about.
    """

    door: str = "engine"
    attach: bool = False
    checkpoint: str | None = None
    random_weights: str | None = None
    url: str = ""
    dialect: str = "vllm_omni"
    tokenizer: str | None = None
    device: str = "auto"
    preset: str = "auto"
    options: tuple[tuple[str, Any], ...] = ()
    control: str = ""
    tasks: tuple[str, ...] = tuple(TASKS)
    instruction: str = ""
    execute: int | None = None
    max_ticks: int = 160
    threads: int = 1
    video_error: bool = False
    pictures: str = ""
    shown: int = 3
    every: bool = False
    parallel: int = 1
    beside: int = 0

    def __post_init__(self) -> None:
        if self.door not in DOORS:
            raise ConfigError("unknown door", got=repr(self.door), expected=f"one of {list(DOORS)}")
        if self.control and self.control not in CONTROLS:
            raise ConfigError("unknown control", got=repr(self.control), expected=f"one of {sorted(CONTROLS)}")
        if self.control in (EXPERT, REPLAY) and self.door != "engine":
            raise ConfigError(
                f"the control {self.control} reads the simulator and goes through no other door than engine",
                got=self.door,
            )
        if self.video_error and (self.door != "engine" or (self.control and self.control != BLANK)):
            raise ConfigError(
                "only a network in this process shows its predicted video", got=f"{self.door} {self.control}".strip()
            )
        for name, least in (("max_ticks", 1), ("threads", 1), ("shown", 0), ("parallel", 1), ("beside", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}", got=getattr(self, name))
        if self.execute is not None and self.execute < 1:
            raise ConfigError("at least one row of a chunk must be executed", got=self.execute)
        self._check_policy()
        if self.parallel > 1 and self.door == "ros":
            raise ConfigError("one node moves one robot", got=f"parallel {self.parallel}", expected="1")
        if self.beside and (self.door != "engine" or (self.control and self.control != BLANK)):
            raise ConfigError("clients beside ask the network of the door engine", got=f"door {self.door}")

    def _check_policy(self) -> None:
        if self.attach:
            self._check_attached()
            return
        if self.door == "ros" and self.control == BLANK:
            raise ConfigError("the pictures of the door ros are the simulator's", got=f"the control {self.control}")
        given = [n for n in ("checkpoint", "random_weights", "url") if getattr(self, n)]
        own = bool(self.control) and self.control != BLANK
        if own and given:
            raise ConfigError(f"the control {self.control} is no network", got=", ".join(given), expected="none given")
        if not own and len(given) != 1:
            raise ConfigError(
                "give one policy",
                got=", ".join(given) or "nothing",
                expected="a checkpoint folder, --random-weights tiny, --url, or --control expert",
            )
        if self.url and self.door != "openpi":
            raise ConfigError("an address belongs to the door openpi", got=f"door {self.door}")

    def _check_attached(self) -> None:
        if self.door != "ros":
            raise ConfigError("only the door ros leads to what runs already", got=f"door {self.door}")
        names = ("checkpoint", "random_weights", "url", "control", "options", "execute")
        if given := [n for n in names if getattr(self, n)]:
            raise ConfigError(
                "the door ros leads to a policy node that runs already, with options of its own",
                got=", ".join(given),
                expected="only --seeds, --task, --instruction, --max-ticks and --pictures",
            )

    def chosen(self, seed: int) -> tuple[Task, str]:
        """The task of a seed, and what is said."""
        task, words = choose_task(seed, self.tasks)
        return task, self.instruction or words

    def described(self) -> dict[str, Any]:
        """For a report; no paths but the checkpoint's last name."""
        return {
            "door": self.door,
            **({"attach": True} if self.attach else {}),
            "checkpoint": self.checkpoint.rstrip("/").split("/")[-1] if self.checkpoint else None,
            "random_weights": self.random_weights,
            "url": self.url or None,
            "device": self.device,
            "preset": self.preset,
            "options": dict(self.options),
            "control": self.control or None,
            "tasks": list(self.tasks),
            "instruction": self.instruction or None,
            "execute": self.execute,
            "max_ticks": self.max_ticks,
            "threads": self.threads,
            "parallel": self.parallel,
            "beside": self.beside,
        }


def seed_range(text: str) -> range:
    """``A:B``: A, ..., B - 1; or a single count N: 0, ..., N - 1.

    Raises:
        ConfigError: something else, or nothing in between.
    """
    parts = text.split(":")
    if len(parts) > 2 or not all(p.isdecimal() for p in parts):
        raise ConfigError("seeds are A:B, two whole numbers", got=repr(text), expected="e.g. 0:50")
    first, last = (0, int(parts[0])) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    if first >= last:
        raise ConfigError("there are no seeds in this range", got=repr(text), expected="A below B")
    return range(first, last)


def task_names(tasks: str, instruction: str) -> tuple[str, ...]:
    """Of ``--task`` (names or instructions with commas between them), or the one an instruction means, or all.

    Raises:
        UnknownTask: none is meant.
    """
    if tasks:
        return tuple(find_task(name.strip()).name for name in tasks.split(","))
    return (find_task(instruction).name,) if instruction else tuple(TASKS)
