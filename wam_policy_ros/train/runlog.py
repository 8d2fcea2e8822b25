"""What a training run says while it runs, and the pictures of it afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class RunLog:
    """Lines for people on standard output and in ``log.txt``, numbers in ``curves.jsonl``.

    Args:
        folder: made when absent; an older log is continued.
        say: where lines go besides the file.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._start = folder, time.monotonic()
        self._say = say or (lambda line: print(line, flush=True))

    def line(self, text: str) -> None:
        text = f"[{time.monotonic() - self._start:6.1f} s] {text}"
        self._say(text)
        with (self.folder / "log.txt").open("a", encoding="utf-8") as f:
            f.write(text + "\n")

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """One point of the curves of a stage."""
        entry: dict[str, Any] = {"stage": stage, "step": step, "t_s": round(time.monotonic() - self._start, 2)}
        entry |= {k: round(float(v), 6) for k, v in values.items()}
        with (self.folder / "curves.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(entry) + "\n")
        self.line(f"{stage} {step}: " + "  ".join(f"{k} {float(v):.4g}" for k, v in values.items()))


def draw_curves(folder: Path) -> Path | None:
    """``curves.png`` from ``curves.jsonl``; None when there is nothing to draw or nothing to draw it with."""
    source = folder / "curves.jsonl"
    if not source.is_file():
        return None
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        return None
    points = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    stages = list(dict.fromkeys(p["stage"] for p in points))
    figure, axes = plt.subplots(1, len(stages), figsize=(6 * len(stages), 4), squeeze=False)
    for axis, stage in zip(axes[0], stages, strict=True):
        own = [p for p in points if p["stage"] == stage]
        for name in dict.fromkeys(k for p in own for k in p if k not in ("stage", "step", "t_s", "lr", "per_s")):
            pairs = [(p["step"], p[name]) for p in own if p.get(name, 0) > 0]
            if pairs:
                axis.plot(*zip(*pairs, strict=True), label=name)
        axis.set(title=stage, xlabel="step", yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=90)
    plt.close(figure)
    return folder / "curves.png"


def save_picture(path: Path, pictures: Any) -> None:
    """Pictures ``[B, 3, H, W]`` in [-1, 1] one under the other as a PNG; nothing without matplotlib."""
    try:
        import matplotlib.image
    except ModuleNotFoundError:
        return
    rows = ((pictures.float() + 1) / 2).clamp(0, 1).permute(0, 2, 3, 1).flatten(0, 1)
    matplotlib.image.imsave(path, rows.cpu().numpy())


class Budget:
    """A share of wall-clock time.

    Args:
        seconds: from now on.
        spent: seconds an earlier run spent of them.
    """

    def __init__(self, seconds: float, spent: float = 0.0) -> None:
        self.seconds, self._start = seconds, time.monotonic() - spent

    @property
    def spent(self) -> float:
        return time.monotonic() - self._start

    @property
    def fraction(self) -> float:
        return 1.0 if self.seconds <= 0 else min(1.0, self.spent / self.seconds)

    @property
    def over(self) -> bool:
        return self.spent >= self.seconds

    @property
    def end(self) -> float:
        """On ``time.monotonic()``."""
        return self._start + self.seconds
