"""What can be asked of the robot, in several wordings, and when it is done."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UnknownTask

LIFT_M, HOLD_TICKS = 0.10, 8
"""A thing is lifted when it was higher than this above its rest, for so many ticks in a row."""
MOVED_M = 0.02
"""A thing further than this from where it lay was moved."""


@dataclass(frozen=True)
class Task:
    """Lift one thing.

    Attributes:
        name: e.g. ``lift_mug``.
        target: key of ``objects.THINGS``.
        instructions: wordings that mean this task and no other; the first is the usual one.
    """

    name: str
    target: str
    instructions: tuple[str, ...]


_WORDINGS = (
    *("pick up the {}", "lift the {}", "grab the {}", "take the {}", "raise the {}", "grasp the {} and lift it"),
    *("pick the {} up", "lift up the {}", "get the {}"),
)
_NAMES: dict[str, tuple[str, ...]] = {
    "mug": ("white mug", "mug", "white cup with the handle"),
    "red_apple": ("red apple",),
    "green_apple": ("green apple",),
    "blue_book": ("blue book",),
    "yellow_book": ("yellow book",),
}

TASKS: dict[str, Task] = {
    f"lift_{target}": Task(
        f"lift_{target}", target, tuple(wording.format(name) for name in names for wording in _WORDINGS)
    )
    for target, names in _NAMES.items()
}


def find_task(name: str | Task) -> Task:
    """A task by itself, by its name or by one of its instructions.

    Raises:
        UnknownTask: none is meant.
    """
    if isinstance(name, Task):
        return name
    if name in TASKS:
        return TASKS[name]
    words = " ".join(name.lower().split()).rstrip(".")
    for task in TASKS.values():
        if words in task.instructions:
            return task
    usual = [t.instructions[0] for t in TASKS.values()]
    raise UnknownTask("no such task", got=repr(name), expected=f"one of {sorted(TASKS)}, or an instruction as {usual}")


@dataclass(frozen=True)
class Outcome:
    """How an episode stands.

    Attributes:
        success: the task's thing was held up long enough, once; stays true until the next reset. False without task.
        held_ticks: for how many ticks in a row it has been up until now.
        lifted_m: height of the task's thing above its rest now; 0 without task.
        moved_m: thing -> distance (m) from where it lay, only those further than ``MOVED_M``.
    """

    success: bool
    held_ticks: int
    lifted_m: float
    moved_m: dict[str, float]
