"""Checkpoints that come with the package, by name: folders of ``wam_policy_ros/weights``."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"


def packaged() -> dict[str, Path]:
    """Name -> folder; empty when none is shipped."""
    return {path.parent.name: path.parent for path in sorted(WEIGHTS.glob("*/config.json"))}


def located(checkpoint: str | Path) -> Path:
    """A folder as it is given; where there is none, the packaged one of this name, if there is one."""
    folder = Path(checkpoint).expanduser()
    return folder if folder.is_dir() else packaged().get(str(checkpoint), folder)
