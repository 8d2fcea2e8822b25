"""Sessions opened, stepped, copied, reset and closed over and over, with something failing in every round, wherever
memory is taken: afterwards all of it is where it was.

WAM_LEAK_ROUNDS=10000 pytest -s --timeout 0 test/engine/test_leaks.py -k fused    # some minutes; tells what it saw
"""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import look, make_policy, same
from wam_policy_ros.contract.errors import Cancelled, EngineError, Overloaded
from wam_policy_ros.engine import closed_loop, window_slots
from wam_policy_ros.engine import policy as policy_module
from wam_policy_ros.engine.config import EngineConfig
from wam_policy_ros.engine.kv_cache import KVWindow
from wam_policy_ros.engine.memory import PROMPTS_KEPT, prompt_bytes

FUSED = EngineConfig(evaluations=5, step="fused", guidance_scale=1.0, memory_budget_gib=1.0)
PLAIN = EngineConfig(evaluations=5, guidance_scale=1.0, memory_budget_gib=1.0)
ROUNDS = int(os.environ.get("WAM_LEAK_ROUNDS", "0"))
EVALUATIONS = 5


class Broken(Exception):
    pass


class Fault:
    """Raises at the n-th pass of a function."""

    def __init__(self) -> None:
        self.point, self.left, self.error = "", 0, Broken
        self.struck = False

    def arm(self, point: str, nth: int, error: type[Exception]) -> None:
        self.point, self.left, self.error, self.struck = point, nth, error, False

    def disarm(self) -> None:
        self.point = ""

    def around(self, point: str, function: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **options: object) -> object:
            if point == self.point:
                self.left -= 1
                if self.left == 0:
                    self.point, self.struck = "", True
                    raise self.error("on purpose")
            return function(*args, **options)

        return run


class World:
    """A policy whose slow parts (pictures to latents) give what they gave once, in memory of its own every time."""

    def __init__(self, config: EngineConfig, patch: pytest.MonkeyPatch) -> None:
        self.policy = policy = make_policy(config)
        self.fused = config.step == "fused"
        path = policy.path
        self.plan = [look(policy.spec, i, frames=f) for i, f in enumerate((1, 4))]
        self.other = replace(self.plan[1], prompt="something else")
        session = policy.open()
        self.expected = [policy.infer(session, o) for o in self.plan]
        policy.close(session)
        self._remember(patch)
        self.fault = fault = Fault()
        # Where memory is taken, in the order of a call.
        targets = {
            "pictures": (policy, "_stitch"), "state": (policy, "_encode_state"),
            "instruction": (path.prompts, "_encode"), "keys": (path.prompts, "_keys"),
            "first frame": (path, "encode_first"), "clip": (path, "encode_clip"), "noise": (path, "draw_noise"),
            "prefill": (path, "prefill"), "end": (path, "wait"), "copy": (path, "cloned"),
            "rows": (policy_module, "decode_actions"), "video": (policy, "_predicted"),
            "chunk": (policy_module, "ActionChunk"),
        }  # fmt: skip
        if self.fused:
            targets |= {
                "window": (path.pool, "acquire"), "picture's keys": (path.dit, "load_image"),
                "text's keys": (path.dit, "load_text"), "evaluation": (path.dit, "evaluate"),
                "copied window": (window_slots.WindowSlot, "copy_"), "frame ahead": (path.vae, "begin"),
                "more ahead": (path.vae, "push"),
            }  # fmt: skip
        else:
            targets |= {"window": (path, "_fresh_window"), "evaluation": (policy.network.model, "forward"),
                        "copied window": (KVWindow, "clone")}  # fmt: skip
        for point, (owner, name) in targets.items():
            patch.setattr(owner, name, fault.around(point, getattr(owner, name)))
        self.points = list(targets)
        self.base = policy.account

    def _remember(self, patch: pytest.MonkeyPatch) -> None:
        policy, path = self.policy, self.policy.path
        known: dict[object, object] = {}

        def once(name: str, function: Callable[..., object], copy: Callable[[object], object]) -> Callable[..., object]:
            def run(x: object, *same: object) -> object:
                key = name, x.shape if isinstance(x, torch.Tensor) else len(next(iter(x.values())))
                if key not in known:
                    known[key] = function(x, *same)
                return copy(known[key])

            return run

        clone = torch.Tensor.clone
        patch.setattr(policy, "_stitch", once("stitch", policy._stitch, clone))
        patch.setattr(closed_loop, "to_model_video", once("video", closed_loop.to_model_video, clone))
        patch.setattr(path, "encode_clip", once("clip", path.encode_clip, clone))
        of = lambda f: type(f)(f.clip_features.clone(), f.ys.clone(), f.latent.clone())  # noqa: E731
        patch.setattr(path, "encode_first", once("first", path.encode_first, of))
        session = policy.open()
        for seen in self.plan:
            policy.infer(session, seen)
        policy.close(session)
        self.known = known

    def still(self) -> None:
        """All is where it was; of instructions there are no more than may be."""
        now = self.policy.admission.account(before=self.base)
        assert now.windows == now.frames_ahead == 0 and (now.noise, now.weights) == (self.base.noise, self.base.weights)
        most = (PROMPTS_KEPT + 0.1) * prompt_bytes(self.policy.network.config.dit, self.policy.network.dtype)
        assert now.instructions <= most
        assert self.policy.admission.sessions == []
        if self.fused:
            pool = self.policy.path.pool
            assert pool.made == pool.idle <= 4 and now.idle == pool.nbytes


def round_of(world: World, number: int, dice: random.Random) -> bool:
    """One session's life, in which something fails. Whether it did."""
    policy, fault = world.policy, world.fault
    point = world.points[number % len(world.points)]
    nth = dice.randint(1, EVALUATIONS) if point == "evaluation" else 1
    error = dice.choice([Broken, torch.OutOfMemoryError, EngineError])
    session = policy.open()
    done = dice.randint(0, 1)  # calls before the one that fails
    for seen in world.plan[:done]:
        policy.infer(session, seen)
    before = session.window, session.history, session.step
    texts = (f"task {number}", f"task {number % 7}")
    seen = replace(world.plan[done], prompt=texts[0]) if dice.random() < 0.7 else replace(world.other, prompt=texts[1])
    if point in ("copy", "copied window"):
        call = lambda: policy.close(policy.fork(session))  # noqa: E731
    elif point in ("frame ahead", "more ahead"):
        views = [{name: f[min(t, len(f) - 1)] for name, f in seen.frames.items()} for t in range(4)]
        call = lambda: [policy.observe(session, t, view) for t, view in enumerate(views)]  # noqa: E731
    elif number % 11 == 10:
        nth = dice.randint(1, EVALUATIONS)
        asked = iter(range(1, 10**6))
        call = lambda: policy.infer(session, seen, cancelled=lambda: next(asked) >= nth)  # noqa: E731
    else:
        call = lambda: policy.infer(session, seen)  # noqa: E731
    fault.arm(point, nth, error)
    failed = False
    try:
        call()
    except (Broken, Overloaded, EngineError) as caught:
        failed = fault.struck or isinstance(caught, Cancelled)
    fault.disarm()
    if failed:
        assert (session.window, session.history, session.step) == before, point
        if number % 10 == 0:  # usable, with the bits of a session to which nothing happened
            policy.reset(session)
            for seen, expected in zip(world.plan, world.expected, strict=True):
                assert same(policy.infer(session, seen), expected), point
    if dice.random() < 0.2:
        policy.reset(session)
    policy.close(session)
    return failed


def alive() -> tuple[int, int]:
    """Tensors, and their bytes."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) is torch.Tensor]
    return len(found), sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found}.values())


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("config", "rounds"), [(FUSED, 96), (PLAIN, 40)], ids=["fused", "plain"])
def test_nothing_is_left_behind(config: EngineConfig, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world, dice = World(config, monkeypatch), random.Random(1)
    rounds = ROUNDS or rounds
    failed, watched, start_s = 0, [], time.monotonic()
    settled: tuple[int, int] | None = None
    memory = [rss()]
    for number in range(rounds):
        # What a round needs for the first time (a second window, instructions that are remembered) is there by then.
        if number == rounds // 4:
            settled = alive()
            memory.append(rss())
        failed += round_of(world, number, dice)
        world.still()
        if number % (rounds // 8) == 0:
            session = world.policy.open()
            watched.append(weakref.ref(session))
            world.policy.infer(session, world.plan[0])
            watched.append(weakref.ref(session.window))
            world.policy.close(session)
            del session
    count, nbytes = alive()
    memory.append(rss())
    assert settled is not None
    assert failed > 0.6 * rounds, "faults strike"
    assert [ref() for ref in watched] == [None] * len(watched)
    # Remembered instructions differ in number and length; nothing else may.
    instructions = world.policy.account.instructions
    assert abs(nbytes - settled[1]) <= instructions and abs(count - settled[0]) < 400, (settled, count, nbytes)
    if ROUNDS:
        seconds = time.monotonic() - start_s
        shown = ", ".join(f"{n / 2**20:.1f}" for n in memory)
        print(f"\n{rounds} rounds in {seconds:.0f} s, {failed} faults; resident MiB at the start, after a quarter and "
              f"at the end: {shown}; tensors {settled} then, {(count, nbytes)} now; {world.base}")  # fmt: skip


def test_the_test_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is not given back, a session that is not let go of, a tensor that somebody keeps."""
    world = World(FUSED, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(world.policy.path, "let_go", lambda unwanted, kept: None)
        session = world.policy.open()
        world.policy.infer(session, world.plan[0])
        slot = session.window.slot
        world.policy.close(session)
    with pytest.raises(AssertionError):
        world.still()
    world.policy.path.pool.release(slot)
    world.still()
    kept = world.policy.open()
    with pytest.raises(AssertionError):
        world.still()
    world.policy.close(kept)
    before = alive()
    keeps = torch.from_numpy(np.zeros(1000))
    assert alive()[1] == before[1] + keeps.nbytes
