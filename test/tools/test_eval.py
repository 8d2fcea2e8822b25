"""``wam eval``: doors that give the same bits, controls that succeed and fail, statistics, reports, pictures."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("mujoco", reason="mujoco is not installed: pip install 'wam_policy_ros[sim]'")

import torch

from test.tiny_checkpoint import edit_json, write_checkpoint
from wam_policy_ros.contract.embodiments import DROID
from wam_policy_ros.contract.errors import (
    Cancelled,
    ConfigError,
    ContractMismatch,
    EngineError,
    MissingDependency,
    UnsafeChunk,
)
from wam_policy_ros.contract.executed import as_executed, carried, sha256_of
from wam_policy_ros.contract.fakes import ScriptedPolicy, example_observation
from wam_policy_ros.contract.rollouts import Blocking, Rollouts
from wam_policy_ros.serving.client import ClientConfig, connect_policy
from wam_policy_ros.serving.client_link import LinkConfig
from wam_policy_ros.sim.errors import RenderingUnavailable, UnknownTask
from wam_policy_ros.tools.eval import add_arguments, plan_of, play_here, price_list
from wam_policy_ros.tools.eval_suite import doors, full, summary
from wam_policy_ros.tools.eval_suite.episode import Episode, EpisodePlayer, sha256_of_all
from wam_policy_ros.tools.eval_suite.paired import Paired
from wam_policy_ros.tools.eval_suite.plan import Plan, seed_range, task_names
from wam_policy_ros.tools.eval_suite.predicted import Call, sheet, video_error, video_table
from wam_policy_ros.tools.eval_suite.ros_door import play_ros
from wam_policy_ros.tools.eval_suite.side_by_side import Shared
from wam_policy_ros.tools.eval_suite.tiers import EMULATED, tier_names, with_tier
from wam_policy_ros.tools.main import main

OFFSETS, EXECUTE = (-3, -2, -1, 0), 4


def player(plan: Plan) -> EpisodePlayer:
    try:
        return EpisodePlayer(plan)
    except RenderingUnavailable as error:
        pytest.skip(str(error))


def played(plan: Plan, *seeds: int) -> list[Episode]:
    made = player(plan)
    try:
        return [made.play(s) for s in seeds]
    finally:
        made.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights, and timing of its own."""
    folder = write_checkpoint(tmp_path_factory.mktemp("eval") / "tiny")
    block = {"frame_offsets": list(OFFSETS), "execute_steps": EXECUTE, "evaluations": 5, "guidance_scale": 1.0}
    edit_json(folder / "experiment_cfg" / "metadata.json", lambda m: m["oxe_droid"].update(inference=block))
    return str(folder)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("further", [[], ["--parallel", "3", "--beside", "2"], ["--workers", "2"]])
def test_in_the_deterministic_tier_the_threads_depend_on_nothing(
    further: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU's bits depend on them."""
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["--random-weights", "tiny", "--device", "cpu", *further]
    assert plan_of(parser.parse_args([*words, "--deterministic"])).threads == 1
    assert plan_of(parser.parse_args([*words, "--engine", "deterministic=true"])).threads == 1
    assert plan_of(parser.parse_args(words)).threads == {0: 1, 4: 6, 2: 3}[len(further)]


# -- doors --------------------------------------------------------------------------------------------------------


def test_both_doors_move_the_arm_alike_bit_for_bit(checkpoint: str, one_thread: None, tmp_path: Path) -> None:
    plan = Plan(checkpoint=checkpoint, device="cpu", options=(("deterministic", True),), max_ticks=12)
    pictures = replace(plan, pictures=str(tmp_path), shown=1)  # who watches does not change what is done
    (here, other) = played(pictures, 3, 4)
    with doors.serving(replace(plan, door="openpi")) as served:
        with pytest.raises(ContractMismatch, match="frames"):
            connect_policy(ClientConfig(LinkConfig(f"{served.url}/vllm_omni"), dialect="vllm_omni"))
        (there,) = played(served, 3)
        (blank,) = played(replace(served, control="blank-cameras"), 3)
    assert len(here.calls_s) == 3 and here.policy["execute"] == there.policy["execute"] == EXECUTE
    assert here.policy["fingerprint"]["id"] == there.policy["fingerprint"]["id"]
    np.testing.assert_array_equal(here.executed, there.executed)
    assert here.actions_sha256 == there.actions_sha256
    # It depends on what is seen, and on the scene.
    assert len({here.actions_sha256, blank.actions_sha256, other.actions_sha256}) == 3
    _look_at(tmp_path, here)


def _look_at(folder: Path, episode: Episode) -> None:
    import av

    (video,) = folder.glob("*.mp4")
    with av.open(str(video)) as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(container.streams.video[0])]
    assert video.stem == f"seed_3_{episode.task}" and len(frames) == episode.ticks + 1
    assert min(f[:352, :640].std() for f in frames) > 5, "the observed side is empty"
    assert max(f[:352, 640:].std() for f in frames) > 5, "no predicted frame was drawn"
    assert video.with_suffix(".png").stat().st_size > 10_000


needs_ros = pytest.mark.skipif(
    importlib.util.find_spec("rclpy") is None, reason="rclpy is not installed: pip install 'wam_policy_ros[ros-kilted]'"
)


@needs_ros
@pytest.mark.ros
@pytest.mark.flaky(reruns=1)
@pytest.mark.timeout(240)
def test_so_does_the_door_over_topics(checkpoint: str, one_thread: None) -> None:
    plan = Plan(checkpoint=checkpoint, device="cpu", options=(("deterministic", True),), max_ticks=10)
    here = played(plan, 3, 4)
    there, errors = play_ros(replace(plan, door="ros"), range(3, 5), lambda episode: None)
    assert errors == [] and [e.disturbed for e in there] == [{}, {}]
    assert [e.ticks for e in there] == [10, 10]  # in the middle of a chunk
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(a.executed, b.executed)
        assert (a.instruction, a.moved_m, a.highest_m, a.taken) == (b.instruction, b.moved_m, b.highest_m, b.taken)
        assert a.policy["fingerprint"]["id"] == b.policy["fingerprint"]["id"] and b.policy["execute"] == EXECUTE
    assert sha256_of_all(here) == sha256_of_all(there) is not None
    assert here[0].instruction != here[1].instruction and here[0].actions_sha256 != here[1].actions_sha256


@needs_ros
@pytest.mark.ros
def test_a_cell_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did not start.*wam_policy ended.*config\.json"):
        play_ros(Plan(door="ros", checkpoint=str(tmp_path)), range(1), lambda episode: None)


def test_rows_are_named_as_they_are_executed() -> None:
    rows = np.array([[0.1, -0.0, 0, 0, 0, 0, 0, 0.5000001], [1 / 3, 0, 0, 0, 0, 0, 0, 0.5]])
    assert carried(rows)[1, 0] == np.float32(1 / 3) != rows[1, 0]
    assert as_executed(rows)[:, 7].tolist() == [1.0, 0.0] and not np.signbit(as_executed(rows)[0, 1])
    assert (
        as_executed(np.array([0.0, 0.5 + 1e-12]))[1] == 0.0
    )  # a client that decides behind the rounding does the same
    assert sha256_of(as_executed(rows)) != sha256_of(rows)
    with pytest.raises(UnsafeChunk, match="not finite"):  # not "open"
        as_executed(np.array([0.0, np.nan]))


def test_the_actions_do_not_depend_on_who_is_played_or_served_beside(checkpoint: str, one_thread: None) -> None:
    """Also not on whether there are rollouts between: one simulator calls the policy itself."""
    plan = Plan(checkpoint=checkpoint, device="cpu", options=(("deterministic", True),), max_ticks=6)
    alone = played(plan, 3, 4, 5)
    for changes in ({"parallel": 3, "video_error": True}, {"parallel": 2, "beside": 1}):
        told: list[Any] = []
        found, errors = play_here(replace(plan, **changes), range(3, 6), None, told.append)
        assert errors == [] and len(told) == 3 and [e.seed for e in found] == [3, 4, 5]
        assert sha256_of_all(found) == sha256_of_all(alone), changes
        assert [e.video is None for e in found] == ["video_error" not in changes] * 3
        assert [len(e.calls_s) for e in found] == [2, 2, 2] and found[0].policy == alone[0].policy


def test_a_simulator_that_fails_ends_the_others_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    player(Plan(control="hold")).close()
    play = EpisodePlayer.play

    def failing(self: EpisodePlayer, seed: int) -> Episode:
        if seed == 2:
            raise EngineError("the simulator broke")
        return play(self, seed)

    monkeypatch.setattr(EpisodePlayer, "play", failing)
    found, errors = play_here(Plan(control="hold", parallel=2, max_ticks=4), range(60), None, lambda episode: None)
    assert errors == ["EngineError: the simulator broke"] and [e.seed for e in found] == [0, 1]
    assert not [t for t in threading.enumerate() if t.name.startswith(("wam_rollouts", "wam_policy_owner"))]


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = doors.serving(Plan(door="openpi", checkpoint=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"did not start.*config\.json"), server:
        pass


def test_the_compiler_is_imported_before_the_first_picture_is_drawn() -> None:
    """Triton and Mesa's software renderer bring an LLVM each; the other way round the process dies."""
    module = (
        "wam_policy_ros.tools.eval_suite.plan"  # every entry point's; it is wam train's train/generate.py that does
    )
    words = [sys.executable, "-c", f"import {module}, sys; sys.exit('torch._dynamo' not in sys.modules)"]
    assert subprocess.run(words).returncode == 0


# -- predicted video ----------------------------------------------------------------------------------------------


def test_predicted_frames_are_compared_with_those_of_their_moment() -> None:
    """Two views side by side, the left one still and the right one brighter by 20 every tick."""
    places = {"left": (slice(0, 2), slice(0, 2)), "right": (slice(0, 2), slice(2, 4))}

    def picture(right: int) -> Any:
        return (
            np.stack([np.full((2, 4), 100, np.uint8)] * 3, axis=-1) + np.array([0, 0, right, right], np.uint8)[:, None]
        )

    seen = {t: picture(20 * t) for t in range(5)}
    # Right about tick 1, off by 10 about tick 2; about tick 3 nothing counts, the next call comes before.
    first = Call(0, np.zeros((4, 8)), np.stack([picture(20), picture(50), picture(0)]), (1.0, 2.0, 3.0))
    second = Call(2, np.zeros((4, 8)), np.stack([picture(60), picture(0)]), (1.0, 1.5))
    found = video_error([first, second], seen, places, 4).summary()
    assert found["frames"] == 3
    assert found["views"]["left"] == {
        "predicted": 0.0, "repeated": 0.0, "changed_share": 0.0, "changed_predicted": None, "changed_repeated": None,
    }  # fmt: skip
    assert found["views"]["right"]["predicted"] == pytest.approx(10 / 3, abs=1e-3)
    assert found["views"]["right"]["repeated"] == pytest.approx((20 + 40 + 20) / 3, abs=1e-3)
    assert found["all"]["changed_share"] == 0.5 and found["all"]["changed_predicted"] == pytest.approx(3.333, abs=1e-3)
    assert "-" in video_table(found) and "26.67" in video_table(found)
    (line,) = {sheet([first, second], seen, 4).shape[1]}  # type: ignore[union-attr]
    assert line == 3 * (192 + 4) and sheet([Call(0, np.zeros((4, 8)))], seen, 4) is None


def test_the_video_of_a_network_is_compared_while_it_plays(checkpoint: str, one_thread: None, tmp_path: Path) -> None:
    plan = Plan(checkpoint=checkpoint, device="cpu", max_ticks=8, video_error=True)
    (watched,) = played(replace(plan, pictures=str(tmp_path), shown=1), 3)
    (other,) = played(replace(plan, video_error=False), 3)
    assert watched.actions_sha256 == other.actions_sha256 and other.video is None
    report = summary.summary(plan, range(3, 4), [watched])["video_error"]
    assert report["frames"] == 2 * 8 and set(report["views"]) == {c.name for c in DROID.cameras}
    assert report["all"]["repeated"] < report["all"]["predicted"] < 255  # random weights predict noise
    (picture,) = tmp_path.glob("*_predicted.png")
    assert picture.stat().st_size > 5_000
    with pytest.raises(ConfigError, match="predicted video"):
        Plan(door="openpi", checkpoint=checkpoint, video_error=True)


# -- controls -----------------------------------------------------------------------------------------------------


def test_the_expert_succeeds_and_standing_still_does_not(tmp_path: Path) -> None:
    (lifted,) = played(Plan(control="expert", tasks=("lift_mug",)), 0)
    assert lifted.success and lifted.highest_m > 0.1 and lifted.taken == () and set(lifted.moved_m) == {"mug"}
    (still,) = played(Plan(control="hold", tasks=("lift_mug",), max_ticks=48), 0)
    assert not still.success and still.ticks == 48 and still.moved_m == {} and abs(still.highest_m) < 0.01


def test_what_was_taken_instead_is_told() -> None:
    """The expert is told the apple, what counts is the mug: no success, and the report says what was taken."""
    plan = Plan(control="expert", tasks=("lift_mug",), max_ticks=90)
    made = player(plan)
    made.policy.policy = _Misled(made.policy.policy)
    episode = made.play(0)
    made.close()
    assert not episode.success and episode.taken == ("red_apple",) and episode.moved_m["red_apple"] > 0.1
    report = summary.summary(plan, range(1), [episode])
    assert report["others_taken"] == {"red_apple": 1} and report["by_task"]["lift_mug"]["took_another"] == 1


class _Misled:
    """Lifts the red apple whatever is asked for."""

    def __init__(self, expert: Any) -> None:
        self.spec, self._expert = expert.spec, expert

    def infer(self, session: Any, observation: Any, *, cancelled: Any = None) -> Any:
        from wam_policy_ros.sim.tasks import TASKS

        world = self._expert.world
        world.task, asked = TASKS["lift_red_apple"], world.task
        try:
            return self._expert.infer(session, observation)
        finally:
            world.task = asked


def test_another_scene_s_demonstration_is_another_one() -> None:
    plan = Plan(control="wrong-seed-replay", tasks=("lift_mug",), max_ticks=16)
    a, b = played(plan, 0, 1)
    (expert,) = played(replace(plan, control="expert", max_ticks=16), 1)
    assert a.executed.shape == b.executed.shape == (16, 8)
    # What is played in scene 0 is what the expert would do in scene 1.
    np.testing.assert_allclose(a.executed[:8], expert.executed[:8], atol=1e-6)
    assert not np.allclose(b.executed[:8], expert.executed[:8], atol=1e-3)


# -- statistics ---------------------------------------------------------------------------------------------------


def test_the_interval_of_a_paired_difference() -> None:
    """By hand. 36, 12, 2, 0 of 50: shares 0.96 and 0.76 with Wilson's intervals 0.8654 to 0.9890 and 0.6259 to 0.8570;
    phi = -24 / sqrt(48 * 2 * 38 * 12) = -0.1147; below 0.2 by sqrt(0.0946^2 + 2 * 0.1147 * 0.0946 * 0.0970 + 0.0970^2)
    = 0.1431, above by sqrt(0.0290^2 + 2 * 0.1147 * 0.0290 * 0.1341 + 0.1341^2) = 0.1404."""
    assert Paired(36, 12, 2, 0).difference == pytest.approx(0.2)
    assert Paired(36, 12, 2, 0).interval() == pytest.approx((0.0569, 0.3404), abs=2e-4)
    # 20, 2, 1, 7 of 30: phi = (138 - 15) / sqrt(22 * 8 * 21 * 9) = 0.6744.
    assert Paired(20, 2, 1, 7).interval() == pytest.approx((-0.0987, 0.1654), abs=5e-4)
    low, high = Paired(20, 1, 2, 7).interval()
    assert (-high, -low) == pytest.approx(Paired(20, 2, 1, 7).interval())  # the other way round, mirrored
    assert Paired(0, 0, 0, 0).interval() == (-1.0, 1.0)


def test_not_worse_needs_enough_episodes_and_a_margin() -> None:
    assert Paired(95, 0, 0, 5).not_worse(0.05)
    assert not Paired(19, 0, 0, 1).not_worse(0.05)  # the same outcomes, too few of them
    assert not Paired(80, 2, 13, 5).not_worse(0.05)
    with pytest.raises(ConfigError, match="margin"):
        Paired(1, 0, 0, 0).not_worse(0.0)
    assert Paired.of([True, True, False], [True, False, True]) == Paired(1, 1, 1, 0)


def episode(seed: int, success: bool, **changes: Any) -> Episode:
    about = {"weights": "w", "random_weights": False, "fingerprint": None, "execute": 8}
    values: dict[str, Any] = {
        "seed": seed, "task": "lift_mug", "instruction": "lift the mug", "success": success, "ticks": 60,
        "highest_m": 0.2 * success, "moved_m": {}, "taken": (), "actions_sha256": sha256_of(np.full((1, 8), seed)),
        "calls_s": (1.0, 0.1), "policy": about, "executed": np.zeros((1, 8)),
    }  # fmt: skip
    return Episode(**(values | changes))


def test_the_report_has_what_is_promised() -> None:
    plan = Plan(control="hold")
    found = [episode(s, s % 2 == 0) for s in range(10)]
    report = json.loads(json.dumps(summary.summary(plan, range(10), found)))
    assert report["episodes"] == 10 and report["successes"] == 5 and report["success_rate"] == 0.5
    assert report["wilson_95"] == [0.2366, 0.7634] and report["complete"] is True
    assert report["actions_sha256"] == sha256_of_all(reversed(found)) != sha256_of_all(found[:9])
    assert [r["seed"] for r in report["rows"]] == list(range(10)) and report["call_s_p50"] == 0.1
    assert {"mujoco", "torch", "numpy", "wam_policy_ros"} <= set(report["versions"])
    assert report["configuration"]["door"] == "engine" and report["configuration"]["seeds"] == [0, 10]
    assert "lift_mug" in summary.table(report) and "0.24 to 0.76" in summary.table(report)
    with pytest.raises(ConfigError, match="changed between"):
        other = {**found[0].policy, "weights": "others"}
        summary.summary(plan, range(2), [found[0], episode(1, True, policy=other)])


def test_a_price_list_compares_the_same_seeds() -> None:
    plan = Plan(control="hold")

    def report(hits: set[int], count: int = 40) -> dict[str, Any]:
        return summary.summary(plan, range(count), [episode(s, s in hits) for s in range(count)])

    reports = {"16": report(set(range(36))), "8": report(set(range(36))), "4": report(set(range(20)), 38)}
    found = summary.price(reports, {"fp8": "no GPU"}, "16", 0.1)
    assert found["tiers"]["4"]["episodes"] == 38 and found["tiers"]["4"]["only_reference"] == 16
    assert [found["tiers"][n]["not_worse"] for n in ("16", "8", "4")] == [None, True, False]
    said = summary.price_table(found)
    assert "not run: no GPU" in said and "not shown" in said and "0.1 than 16" in said


# -- options ------------------------------------------------------------------------------------------------------


def test_tiers_are_engine_options(checkpoint: str) -> None:
    plan = Plan(checkpoint=checkpoint, options=(("seed", 7),))
    assert dict(with_tier(plan, "16").options) == {"seed": 7, "schedule": "static", "evaluations": 16}
    assert dict(with_tier(plan, "4").options)["schedule"] == "dynamic_best"
    assert dict(with_tier(replace(plan, device="cpu"), "fp8").options) == {"seed": 7, **EMULATED}
    guided = replace(plan, options=(("guidance_scale", 5.0), ("evaluations", 8)))
    assert dict(with_tier(guided, "guidance-part").options)["guidance_steps"] == (0, 1, 2, 6)
    with pytest.raises(ConfigError, match="without guidance"):
        with_tier(plan, "guidance-part")
    with pytest.raises(ConfigError, match="at least two"):
        tier_names("16,9")


def test_a_price_list_of_what_this_machine_can_do(checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(checkpoint=checkpoint, device="cpu", max_ticks=4)
    player(Plan(control="hold")).close()  # skips without OpenGL
    names = ["16", "8", "4", "dynamic", "guidance-part", "fp8", "deterministic"]
    found, status = price_list(plan, names, range(2), 1, None, 0.05)
    assert status == 0 and list(found["tiers"]) == [n for n in names if n != "guidance-part"]
    assert "without guidance" in found["not_run"]["guidance-part"]
    details = {n: r["policy"]["details"] for n, r in found["reports"].items()}
    assert details["fp8"]["linears"] == details["fp8"]["attention"] == "fp8 e4m3fn"
    assert [details[n]["evaluations"][:2] for n in ("16", "8", "4")] == ["16", "8 ", "4 "]
    assert len({r["actions_sha256"] for r in found["reports"].values()}) >= 5  # each is another computation
    assert found["reports"]["deterministic"]["policy"]["details"]["deterministic"] is True
    assert "not run" in capsys.readouterr().out


def test_the_whole_report_grows_and_is_taken_up_again(checkpoint: str, tmp_path: Path) -> None:
    plan = Plan(checkpoint=checkpoint, device="cpu")
    asked: list[str] = []
    short = [True]

    def play(one: Plan, seeds: range) -> tuple[list[Episode], list[str]]:
        asked.append(one.control or one.door)
        if one.door == "ros":
            raise MissingDependency("rclpy", "ros-kilted", "the door ros")
        count = len(seeds) - (short[0] and one.control == "hold")
        hits = {"hold": 0, "blank-cameras": 0}.get(one.control, 1)
        return [episode(s, bool(hits and s % 5)) for s in seeds[:count]], []

    said: list[str] = []
    assert full.run_full(plan, range(30), tmp_path, play, 0.05, said.append) == 1  # hold was cut short
    first, short[0] = len(asked), False
    assert full.run_full(plan, range(30), tmp_path, play, 0.05, said.append) == 0
    assert asked[first:] == ["ros", "hold"] and asked[0] == "engine"
    whole = json.loads((tmp_path / "report.json").read_text())
    assert whole["sections"]["policy"]["successes"] == 24 and whole["sections"]["hold"]["episodes"] == 20
    assert whole["doors"]["equal"] is True and set(whole["doors"]["actions_sha256"]) == {"engine", "openpi"}
    assert whole["price_list"]["tiers"]["fp8"]["episodes"] == 30 and "guidance-part" in whole["price_list"]["not_run"]
    page = (tmp_path / "report.md").read_text()
    assert "| the policy | 30 | 24 | 0.80 | 0.63 to 0.91 | - | 0.100 s |" in page and "bit for bit" in page
    assert "not run: the door ros needs" in page and "| 20 | 0 | 0.00 | 0.00 to 0.16 |" in page
    assert full.run_full(plan, range(29), tmp_path, play, 0.05, said.append) == 0
    assert len(asked) > first + 10, "other seeds are another report"
    with pytest.raises(ConfigError, match="whole report"):
        full.run_full(Plan(control="hold"), range(3), tmp_path, play, 0.05, said.append)


@pytest.mark.parametrize("heeded", [True, False])
def test_a_cancelled_step_of_a_shared_policy_is_an_error_or_has_happened(heeded: bool) -> None:
    policy = ScriptedPolicy(lambda o, step: np.zeros((24, 8)), latency_s=60.0 if heeded else 0.2)
    infer, begun = policy.infer, threading.Event()

    def told(session: Any, seen: Any, *, cancelled: Any = None) -> Any:
        begun.set()
        return infer(session, seen, cancelled=cancelled if heeded else None)  # or no evaluation is left

    policy.infer = told  # type: ignore[method-assign]
    with Blocking(Rollouts(lambda progress: policy)) as wait:
        shared = Shared(wait, policy)
        session = shared.open("s")
        seen = example_observation(policy.spec)
        if heeded:
            with pytest.raises(Cancelled):
                shared.infer(session, seen, cancelled=begun.is_set)
        else:
            assert shared.infer(session, seen, cancelled=begun.is_set) is session.last
        assert session.steps == (not heeded)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--random-weights", "tiny", "--full", "there", "--minutes", "1"], "plays every tier, to its end"),
        (["--door", "ros", "--attach", "--control", "hold"], "runs already"),
        (["x", "--attach"], "only the door ros"),
        (["x", "--door", "ros", "--control", "blank-cameras"], "simulator's"),
        (["--door", "ros", "--tiers", "16,8"], "options of the engine"),
        (["--door", "window", "--control", "hold"], "unknown door"),
        ([], "checkpoint folder"),
        (["x", "--control", "expert"], "no network"),
        (["--control", "expert", "--door", "openpi"], "no other door"),
        (["--control", "hold", "--seeds", "5:5"], "no seeds"),
        (["--control", "hold", "--parallel", "0"], "parallel must be at least 1"),
        (["--control", "hold", "--beside", "1"], "network of the door engine"),
        (["--control", "hold", "--door", "ros", "--parallel", "2"], "moves one robot"),
        (["--control", "hold", "--task", "lift_table"], "no such task"),
        (["x", "--tiers", "16,8", "--margin", "5"], "margin"),
        (["--url", "ws://x"], "door openpi"),
    ],
)
def test_options_that_do_not_fit(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *words]) == 1
    assert said in capsys.readouterr().err


def test_seeds_and_tasks_from_words() -> None:
    assert seed_range("3:7") == range(3, 7) and seed_range("4") == range(4)
    assert task_names("", "Lift the mug.") == ("lift_mug",) and len(task_names("", "")) == 5
    plan = Plan(control="hold", tasks=("lift_mug",), instruction="lift the red apple")
    assert plan.chosen(5)[0].target == "mug" and plan.chosen(5)[1] == "lift the red apple"
    with pytest.raises(UnknownTask):
        task_names("", "make coffee")


def test_the_command_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    player(Plan(control="hold")).close()
    before = torch.get_num_threads()
    try:
        words = ["--control", "hold", "--seeds", "0:2", "--workers", "1", "--max-ticks", "4", "--task", "lift_mug"]
        assert main(["eval", *words, "--json", str(tmp_path / "e.json")]) == 0
    finally:
        torch.set_num_threads(before)
    report = json.loads((tmp_path / "e.json").read_text())
    assert report["episodes"] == 2 and report["successes"] == 0 and report["configuration"]["control"] == "hold"
    assert "[2/2] seed 1 lift_mug: failed" in capsys.readouterr().out


# -- the demo -----------------------------------------------------------------------------------------------------


def test_the_demo_in_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    player(Plan(control="hold")).close()
    before = torch.get_num_threads()
    shown = []
    for words in (["--expert", "--seconds", "8"], ["--checkpoint", checkpoint, "--seconds", "0.5"]):
        assert main(["demo", "--sim", "--report", str(tmp_path), "--device", "cpu", *words]) == 0
        shown.append(capsys.readouterr().out)
        report = json.loads((tmp_path / "sim_demo.json").read_text())
        assert report["successes"] == (words[0] == "--expert") and report["rows"][0]["task"] == "lift_mug"
        files = {"sim_demo.mp4", "sim_demo.png", "sim_demo.json"}
        assert {p.name for p in tmp_path.iterdir()} - {"sim_demo_predicted.png"} == files
        assert (tmp_path / "sim_demo_predicted.png").is_file() == (words[0] != "--expert")
    assert torch.get_num_threads() == before
    assert "LIFTED" in shown[0] and "not lifted" in shown[1] and "call took" in shown[1]
    assert main(["demo", "--sim", "--expert", "--checkpoint", checkpoint]) == 1
    assert "no checkpoint" in capsys.readouterr().err
