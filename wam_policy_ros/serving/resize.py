"""Pictures of another size than the network was trained with, brought to that size as OpenPI's client helper does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wam_policy_ros.contract.errors import MissingDependency

try:
    from PIL import Image
except ModuleNotFoundError as error:  # pragma: no cover
    raise MissingDependency("PIL", "serve", "resizing pictures in the server") from error


def resize(images: npt.NDArray[np.uint8], size: tuple[int, int], *, keep_aspect: bool) -> npt.NDArray[np.uint8]:
    """Bilinear, uint8 ``[T, H, W, 3]`` to ``[T, *size, 3]``.

    With ``keep_aspect`` black bars fill the rest (OpenPI spec 5.2, resize-with-pad): the ratio is the larger one,
    sizes are truncated, the picture sits in the middle.
    """
    height, width = size
    inner_h, inner_w = size
    if keep_aspect:
        ratio = max(images.shape[2] / width, images.shape[1] / height)
        inner_h, inner_w = max(1, int(images.shape[1] / ratio)), max(1, int(images.shape[2] / ratio))
    top, left = int((height - inner_h) / 2), int((width - inner_w) / 2)
    out = np.zeros((len(images), height, width, 3), np.uint8)
    for target, image in zip(out, images, strict=True):
        small = Image.fromarray(image).resize((inner_w, inner_h), Image.Resampling.BILINEAR)
        target[top : top + inner_h, left : left + inner_w] = np.asarray(small)
    return out
