"""The examples as a person runs them: processes of their own, against a server with a policy without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from test.serving.harness import RememberingPolicy, Served, served, small_spec

EXAMPLES = Path(__file__).parents[1] / "examples"
BLOCKED = """
import runpy, sys
from importlib.abc import MetaPathFinder
class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
sys.path.insert(0, {folder!r})
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def one() -> Iterator[Served]:
    with served(RememberingPolicy(small_spec(180, 320))) as running:
        yield running


def run(name: str, *words: str, without: str | None = None) -> subprocess.CompletedProcess[str]:
    argv = [str(EXAMPLES / name), *words]
    command = [sys.executable, *argv]
    if without is not None:
        command = [sys.executable, "-c", BLOCKED.format(name=without, folder=str(EXAMPLES), argv=argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_stream_a_clip(one: Served, tmp_path: Path) -> None:
    done = run("01_stream_clip.py", "--uri", one.url(), "--chunks", "3", "--save", str(tmp_path / "a.npz"))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("chunk")]
    assert [line.split()[3] for line in lines] == ["0", "23", "47"], "as the published client looks at a clip"
    assert " 0.52 MB " in lines[0] and " 2.07 MB " in lines[1], "one frame first, then four"
    assert np.load(tmp_path / "a.npz")["actions"].shape == (3, 24, 8)
    assert not one.policy.sessions, "the episode is over"


def test_stream_real_clips(one: Served, tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    for i, camera in enumerate(one.policy.spec.cameras):
        with av.open(str(tmp_path / f"{camera.name}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=15)
            stream.width, stream.height, stream.pix_fmt = 320, 180, "yuv420p"
            for k in range(30):
                picture = np.full((180, 320, 3), 40 * i + k, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode(None))
    one.policy.record = True
    done = run("01_stream_clip.py", "--uri", one.url(), "--clips", str(tmp_path), "--chunks", "9")
    assert done.returncode == 0 and done.stdout.count("chunk ") == 2, done.stdout + done.stderr
    seen = [o.frames["exterior_image_2_left"][:, 0, 0, 0] for o in one.policy.seen]
    assert seen[0] == pytest.approx([40], abs=4) and seen[1] == pytest.approx([40, 47, 55, 63], abs=4)
    for path in tmp_path.glob("wrist*"):
        path.unlink()
    done = run("01_stream_clip.py", "--uri", one.url(), "--clips", str(tmp_path))
    assert done.returncode == 1 and "no clip for camera wrist_image_left" in done.stderr


def test_parallel_sessions_do_not_mix(one: Served) -> None:
    done = run("02_parallel_sessions.py", "--uri", one.url(), "--sessions", "3", "--steps", "3", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 sessions, 9 calls" in done.stdout and "largest difference 0" in done.stdout
    assert not one.policy.sessions


def test_parallel_sessions_that_mix_are_found(one: Served) -> None:
    infer, calls = one.policy.infer, []

    def mixing(session: object, observation: object, **words: object) -> object:
        calls.append(1)
        chunk = infer(session, observation, **words)  # type: ignore[arg-type]
        chunk.actions[:] += len(calls)
        return chunk

    one.policy.infer = mixing
    done = run("02_parallel_sessions.py", "--uri", one.url(), "--sessions", "2", "--steps", "2", "--check")
    assert done.returncode == 1 and "largest difference 0\n" not in done.stdout


def test_the_evaluation_loop_with_its_stand_in(one: Served, tmp_path: Path) -> None:
    one.policy.record = True
    words = ("--stand-in", "--headless", "--scene", "2", "--episodes", "2", "--max-steps", "20")
    port = one.url().rsplit(":", 1)[1].strip("/")
    done = run("03_droid_eval_isaac_lab.py", "--port", port, *words, "--output", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 of 2 episodes succeeded in the stand-in, which has no task" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    assert [e["calls"] for e in report["episodes"]] == [3, 3] and report["episodes"][0]["steps"] == 20
    assert {o.prompt for o in one.policy.seen} == {"pick up the can and put it in the mug"}
    assert [len(o.frames["wrist_image_left"]) for o in one.policy.seen] == [1, 4, 4] * 2, "a new session per episode"
    grippers = [o.state["gripper_position"][0] for o in one.policy.seen]
    assert set(grippers) <= {0.0, 1.0}, "open or closed, nothing between"


def test_the_evaluation_says_that_isaac_lab_is_missing(one: Served) -> None:
    port = one.url().rsplit(":", 1)[1].strip("/")
    done = run("03_droid_eval_isaac_lab.py", "--port", port)
    assert done.returncode == 1 and "Isaac Lab is not installed" in done.stderr and "--stand-in" in done.stderr


def test_predicted_video_is_written(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    av = pytest.importorskip("av")
    path = tmp_path / "p.mp4"
    done = run("04_save_predicted_video.py", "--network", "tiny", "--chunks", "2", "--output", str(path))
    assert done.returncode == 0, done.stderr
    assert "RANDOM WEIGHTS, not a policy" in done.stdout
    with av.open(str(path)) as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    assert f"({len(frames)} frames)" in done.stdout and len(frames) >= 2
    assert np.ptp(frames[-1]) > 30, "not a uniform picture"


def test_search_with_forks() -> None:
    pytest.importorskip("torch")
    words = ("--network", "tiny", "--chunks", "2", "--tries", "2", "--device", "cpu")
    done = run("06_search_with_forks.py", *words)
    assert done.returncode == 0, done.stderr
    calls = [line.split() for line in done.stdout.splitlines() if line.startswith("call ")]
    for call, line in enumerate(calls):
        costs, seed = [float(x) for x in line[3:5]], int(line[-1])
        assert costs[0] != costs[1] and seed == 2 * call + costs.index(min(costs))
    assert len(calls) == 2 and "1 session is open, of 5 that were" in done.stdout


def test_the_rollouts_of_the_documentation() -> None:
    pytest.importorskip("torch")
    page = (EXAMPLES.parent / "docs" / "sessions.md").read_text(encoding="utf-8")
    code = page.partition("## Rollouts")[2].partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert len(values) == len(set(values)) == 5, "other pictures or other seeds, other actions"


@pytest.mark.parametrize(
    ("name", "words", "package", "extra"),
    [
        ("01_stream_clip.py", (), "websockets", "serve"),
        ("01_stream_clip.py", ("--clips", "/nowhere"), "av", "demo"),
        ("02_parallel_sessions.py", ("--sessions", "1"), "msgpack", "serve"),
        ("03_droid_eval_isaac_lab.py", ("--stand-in",), "websockets", "serve"),
        ("04_save_predicted_video.py", ("--network", "tiny"), "av", "demo"),
        ("04_save_predicted_video.py", ("--network", "tiny"), "torch", "engine"),
        ("06_search_with_forks.py", ("--network", "tiny"), "torch", "engine"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    name: str, words: tuple[str, ...], package: str, extra: str
) -> None:
    done = run(name, *words, without=package)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert package in done.stderr and f"pip install 'wam_policy_ros[{extra}]'" in done.stderr


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("0*.py")), ids=lambda p: p.name)
def test_each_says_how_to_run_it(path: Path) -> None:
    done = run(path.name, "--help")
    assert done.returncode == 0 and f"python examples/{path.name}" in done.stdout
