"""Names: published checkpoint <-> modules of this room (DreamZero spec 6.2, 6.5). Deliberate skips are a table."""

from __future__ import annotations

PREFIX = "action_head."

# Tensors of a published checkpoint that inference does not use.
SKIPPED_PREFIXES = ("backbone.",)

COMPONENTS = {
    "model.": "DiT",
    "text_encoder.": "umT5 text encoder",
    "image_encoder.model.": "CLIP image encoder",
    "vae.model.": "video VAE",
}


def module_name(checkpoint_name: str) -> str | None:
    """The ``DreamZero.state_dict()`` name of a checkpoint tensor, or None if it is skipped on purpose.

    Old LoRA saves carry ``.base_layer.`` inside names; it is removed. A name outside ``action_head.`` is returned with
    a leading ``?`` so that it shows up as unexpected.
    """
    if checkpoint_name.startswith(SKIPPED_PREFIXES):
        return None
    name = checkpoint_name.replace(".base_layer.", ".")
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else "?" + name


def checkpoint_name(module: str) -> str:
    """The published name of a ``DreamZero.state_dict()`` entry."""
    return PREFIX + module


def is_lora(checkpoint_name: str) -> bool:
    return ".lora_A." in checkpoint_name or ".lora_B." in checkpoint_name
