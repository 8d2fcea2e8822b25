"""umT5, CLIP and the VAE alone."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from wam_policy_ros.model.config_encoders import ImageEncoderConfig, TextEncoderConfig, VAEConfig
from wam_policy_ros.model.image_encoder import ImageEncoder
from wam_policy_ros.model.text_encoder import TextEncoder, relative_position_bucket, zero_padding
from wam_policy_ros.model.vae import VideoVAE
from wam_policy_ros.model.vae_blocks import VAEStream
from wam_policy_ros.model.vae_tiling import Tiling

from .folder import COMPONENT_LIMIT, GoldenFolder, Group, Recording, Row

T5, CLIP, VAE_IO, VAE_CACHE = "t5.safetensors", "clip.safetensors", "vae_io.safetensors", "vae_stream_cache.safetensors"
VAE_ENC, VAE_DEC = "vae_weights_enc.safetensors", "vae_weights_dec.safetensors"


@torch.inference_mode()
def check(folder: GoldenFolder) -> list[Row]:
    rows: list[Row] = []
    if folder.has(T5):
        rows.append(_text(folder.read(T5)))
    if folder.has(CLIP):
        rows.append(_image(folder.read(CLIP)))
    if folder.has(VAE_IO, VAE_ENC, VAE_DEC):
        rows += _vae(folder)
    return rows


def _text(data: Recording) -> Row:
    group = Group(T5, "hidden states, prompt embeddings, bias", COMPONENT_LIMIT)
    with torch.device("meta"):
        encoder = TextEncoder(TextEncoderConfig.from_dict(data.metadata["config"]))
    encoder.load_state_dict(data.weights("w."), strict=True, assign=True)
    for i in sorted(int(m[1]) for k in data if (m := re.fullmatch(r"in\.ids(\d+)", k))):
        seen: list[Tensor] = []
        hooks = [b.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out)) for b in encoder.blocks]
        hidden = encoder(data[f"in.ids{i}"], data[f"in.mask{i}"])
        for hook in hooks:
            hook.remove()
        group.check(hidden, data, f"out.hidden{i}")
        group.check(zero_padding(hidden, data[f"in.mask{i}"]), data, f"out.encode_prompt{i}")
        for layer, value in enumerate(seen):
            group.check(value, data, f"out.block{layer}_hidden{i}")
    buckets = encoder.config.num_buckets
    if "const.rel_pos" in data:
        got = relative_position_bucket(data["const.rel_pos"], buckets)
        group.exact("rel_pos_bucket", got.tolist(), data["const.rel_pos_bucket"].tolist())
    for key in data:
        if match := re.fullmatch(r"out\.pos_bias_block(\d+)", key):
            positions = torch.arange(data[key].shape[-1], device=data[key].device)
            relative = relative_position_bucket(positions[None] - positions[:, None], buckets)
            bias = encoder.blocks[int(match[1])].get_submodule("pos_embedding")(relative)
            group.compare(key, bias, data[key])
    return group.row()


def _image(data: Recording) -> Row:
    group = Group(CLIP, "features, preprocessing, full transformer", COMPONENT_LIMIT)
    with torch.device("meta"):
        encoder = ImageEncoder(ImageEncoderConfig.from_dict(data.metadata["config"]))
    encoder.load_state_dict(data.weights("w."), strict=True, assign=True)
    for i in sorted(int(m[1]) for k in data if (m := re.fullmatch(r"in\.image(\d+)", k))):
        image = data[f"in.image{i}"]
        group.check(encoder(image), data, f"out.clip_feature{i}")
        if f"out.full_transformer{i}" in data:
            group.check(encoder(image, all_blocks=True), data, f"out.full_transformer{i}")
        pixels = encoder.preprocess(image)
        for key in data:
            if match := re.fullmatch(rf"out\.preprocessed{i}_rows(\d+)_(\d+)", key):
                group.compare(key, pixels[:, :, int(match[1]) : int(match[2])], data[key])
        if f"out.preprocessed{i}_mean_std" in data:
            stats = torch.stack([pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3))])
            group.compare(f"preprocessed{i}", stats, data[f"out.preprocessed{i}_mean_std"])
    return group.row()


def _vae(folder: GoldenFolder) -> list[Row]:
    io = folder.read(VAE_IO)
    with torch.device("meta"):
        vae = VideoVAE(VAEConfig.from_dict(io.metadata["config"]))
    vae.load_state_dict(folder.read(VAE_ENC).weights() | folder.read(VAE_DEC).weights(), strict=True, assign=True)
    clips = Group(VAE_IO, "encode, decode, tiles", COMPONENT_LIMIT)
    for key in sorted(k for k in io if k.startswith("out.")):
        got = _vae_output(vae, io, key.removeprefix("out."))
        if got is None:
            clips.fail(key, "no comparison is defined for this name")
        else:
            clips.compare(key, got, io[key])
    for name, values in (("mean", vae.config.latent_mean), ("std", vae.config.latent_std)):
        if f"const.{name}" in io:
            clips.compare(f"const.{name}", torch.tensor(values), io[f"const.{name}"])
    rows = [clips.row()]
    streams = Group(VAE_IO, "streaming, chunk by chunk", COMPONENT_LIMIT)
    caches = Group(VAE_CACHE, "feature caches after chunks", COMPONENT_LIMIT)
    recorded = folder.read(VAE_CACHE) if folder.has(VAE_CACHE) else Recording()
    _stream(vae, io, streams, recorded, caches)
    return [*rows, *(g.row() for g in (streams, caches) if g.count)]


def _vae_output(vae: VideoVAE, io: Recording, name: str) -> Tensor | None:
    """What a name in the file stands for; None if unknown."""
    if m := re.fullmatch(r"(encode|decode)_tiled_(\d+)x(\d+)_stride_(\d+)x(\d+)", name):
        tiling = Tiling((int(m[2]), int(m[3])), (int(m[4]), int(m[5])))
        if m[1] == "encode":
            return vae.encode(io["in.video_tiled"], tiling=tiling)
        return vae.decode(io["in.latent_tiled"], tiling=tiling)
    if m := re.fullmatch(r"encode_(\w+)_plus_(\d+)_zero_frames", name):
        first = io[f"in.video_{m[1]}"]
        grey = first.new_zeros(*first.shape[:2], int(m[2]), *first.shape[3:])
        return vae.encode(torch.cat([first, grey], dim=2))
    if m := re.fullmatch(r"encode_first(\d+)_of_(\w+)", name):
        return vae.encode(io[f"in.video_{m[2]}"][:, :, : int(m[1])])
    if (m := re.fullmatch(r"encode_(\w+)", name)) and f"in.video_{m[1]}" in io:
        return vae.encode(io[f"in.video_{m[1]}"])
    if m := re.fullmatch(r"decode_(\d+)(_unclamped)?", name):
        count = int(m[1])
        names = [k for k in io if re.fullmatch(r"in\.latent_\d+", k) and io[k].shape[2] >= count]
        if names:
            exact = f"in.latent_{count}"
            return vae.decode(io[exact if exact in io else names[0]][:, :, :count], clamp=m[2] is None)
    return None


def _stream(vae: VideoVAE, io: Recording, streams: Group, recorded: Recording, caches: Group) -> None:
    if "in.video_long" not in io:
        return
    video, z = io["in.video_long"], vae.config.z_dim
    features, latents = VAEStream(), VAEStream()
    for i, chunk in enumerate([video[:, :, :1], *video[:, :, 1:].split(vae.config.temporal_factor, dim=2)]):
        with features.chunk():
            feature = vae.model.encoder(chunk, features)
        results = {
            f"stream.encoder_out_chunk{i}": feature,
            f"stream.logvar_unused_chunk{i}": vae.model.conv1(feature, features)[:, z:],
            f"stream.latent_chunk{i}": vae.encode_chunk(latents, chunk),
        }
        for key, value in results.items():
            streams.check(value, io, key)
        held = [f for f in features.frames if f is not None]
        for key in recorded:
            if m := re.fullmatch(rf"stream\.cache_after_chunk{i}\.(\d+)", key):
                index = int(m[1])
                if index < len(held):
                    caches.compare(key, held[index], recorded[key])
                else:
                    caches.fail(key, f"only {len(held)} entries are kept")
