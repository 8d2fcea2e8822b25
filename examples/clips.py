"""Pictures for the examples: three mp4 files, or a moving test card that needs nothing but numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import ConfigError, MissingDependency
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.interface import Observation, PolicySpec

FPS = 15.0
Images = dict[str, npt.NDArray[np.uint8]]
Source = Callable[[int], Images]


def moving_card(spec: PolicySpec, *, seed: int = 0) -> Source:
    """Camera -> uint8 ``[H, W, 3]`` at step k: a gradient per camera with a square that moves."""

    def at(step: int) -> Images:
        out = {}
        for i, camera in enumerate(spec.cameras):
            rows = np.linspace(40, 200, camera.height, dtype=np.float32)[:, None, None]
            image = np.broadcast_to(rows, (camera.height, camera.width, 3)).astype(np.uint8)
            side = camera.height // 6
            x = (step * 3 + seed * 17 + i * 31) % (camera.width - side)
            image[camera.height // 2 : camera.height // 2 + side, x : x + side] = (220, 60 * i, 40)
            out[camera.name] = image
        return out

    return at


def clips(folder: Path, spec: PolicySpec) -> tuple[Source, int]:
    """Frames of one mp4 per camera, found by the camera's name in the file name, and how many steps they last.

    Raises:
        MissingDependency: PyAV is not installed.
        ConfigError: a clip is missing, empty, or of another size than the policy wants.
    """
    try:
        import av
    except ModuleNotFoundError as error:
        raise MissingDependency("av", "demo", "reading clips") from error
    frames: dict[str, list[npt.NDArray[np.uint8]]] = {}
    for camera in spec.cameras:
        found = sorted(folder.glob(f"*{camera.name}*.mp4"))
        if not found:
            raise ConfigError(f"no clip for camera {camera.name}", got=folder, expected=f"*{camera.name}*.mp4")
        with av.open(str(found[0])) as container:
            frames[camera.name] = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        size = frames[camera.name][0].shape[:2] if frames[camera.name] else None
        if size != (camera.height, camera.width):
            raise ConfigError(f"{found[0].name} does not fit", got=size, expected=(camera.height, camera.width))
    count = min(map(len, frames.values()))
    return (lambda step: {name: list_[step] for name, list_ in frames.items()}), count


def observe(
    source: Source, step: int, prompt: str, state: dict[str, npt.NDArray[np.float64]], *, since: int = 0
) -> Observation:
    """What a robot that looks at every step since ``since`` would hand to a policy at ``step``."""
    steps = range(max(since, step - 23), step + 1)
    images = [source(s) for s in steps]
    stamps = np.array([round(10**9 + s * 1e9 / FPS) for s in steps], dtype=np.int64)
    return Observation(
        frames={name: np.stack([i[name] for i in images]) for name in images[0]},
        state=state,
        prompt=prompt,
        stamp_ns=int(stamps[-1]),
        frame_stamps_ns=dict.fromkeys(images[0], stamps),
    )


def state_of(values: npt.NDArray[np.float64], spec: PolicySpec) -> dict[str, npt.NDArray[np.float64]]:
    """A vector in the order of the spec as named fields."""
    ends = np.cumsum([f.dim for f in spec.state])[:-1]
    return {f.name: part for f, part in zip(spec.state, np.split(values, ends), strict=True)}


def connect(
    uri: str, *, api_key: str = "", timeout_s: float = 30.0, wait_s: float | None = None, quiet: bool = False
) -> Any:
    """A policy server's policy; unless ``quiet`` it says what it waits for, and what the policy is."""
    try:
        from wam_policy_ros.serving.client import ClientConfig, connect_policy
        from wam_policy_ros.serving.client_link import LinkConfig
    except ModuleNotFoundError as error:
        raise MissingDependency(str(error.name), "serve", "talking to a policy server") from error
    said: list[str] = []

    def progress(line: str, fraction: float) -> None:
        what = line.split(" (attempt")[0]
        if what not in said and not quiet:
            said.append(what)
            print(line, flush=True)

    policy = connect_policy(ClientConfig(LinkConfig(uri, api_key), timeout_s=timeout_s), progress, wait_s=wait_s)
    if not quiet:
        kind = "RANDOM WEIGHTS, not a policy: " if policy.spec.random_weights else "policy: "
        print(f"connected; {kind}{policy.spec.weights}", flush=True)
    return policy


DROID = spec_of("oxe_droid", weights="")
