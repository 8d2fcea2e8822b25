"""What a robot is to the network: cameras and their tiling, state and action fields, rates, prompt template.

The numbers come from DreamZero spec 1.2 to 1.6 (DreamZero's published configurations). A checkpoint's own
``config.json`` and ``metadata.json`` win over what is written here wherever they say something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError
from .interface import CameraSpec, FieldSpec

Mosaic = Literal["wrist_on_top", "quad"]


@dataclass(frozen=True)
class Embodiment:
    """One robot the network was trained on.

    Attributes:
        tag: key in ``metadata.json``.
        aliases: other names accepted on a command line.
        embodiment_id: published id; selects only the prompt template (spec 1.5).
        cameras: view order of the network.
        mosaic: ``wrist_on_top``: view 2 stretched over the top half, views 0 and 1 below; ``quad``: view 0 top left,
            view 2 top right, view 1 bottom left, black bottom right (spec 1.2).
        view_height, view_width: pixels of one view inside the mosaic.
        crop_scale: fraction of each side kept by the centre crop.
        raw_size_published: False when only a checkpoint can say how large the cameras' pictures are; the sizes on the
            page then serve networks without a checkpoint.
        state, action: field order of the concatenated vectors.
        control_rate_hz: rows per second.
        horizon: rows per chunk; the checkpoint's ``action_horizon`` wins.
        frame_offsets: control steps at which frames of later calls are taken.
        prompt_template: with ``{p}`` for the lower-cased instruction.
    """

    tag: str
    aliases: tuple[str, ...]
    embodiment_id: int
    cameras: tuple[CameraSpec, ...]
    mosaic: Mosaic
    state: tuple[FieldSpec, ...]
    action: tuple[FieldSpec, ...]
    control_rate_hz: float
    horizon: int
    frame_offsets: tuple[int, ...]
    prompt_template: str
    view_height: int = 176
    view_width: int = 320
    crop_scale: float = 0.95
    raw_size_published: bool = True


def get_embodiment(name: str) -> Embodiment:
    """Look an embodiment up by tag or alias.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
    """
    from .embodiments import ALL

    for embodiment in ALL:
        if name == embodiment.tag or name in embodiment.aliases:
            return embodiment
    known = sorted(e.tag for e in ALL)
    raise ConfigError(
        "unknown embodiment",
        got=repr(name),
        expected=f"one of {known} (aliases: {sorted(a for e in ALL for a in e.aliases)})",
        remedy="add a page under wam_policy_ros/contract/embodiments for a new robot",
    )
