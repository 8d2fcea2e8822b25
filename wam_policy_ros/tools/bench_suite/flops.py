"""Floating-point operations of every stage, counted from the configuration (DreamZero spec 9.2): 1 MAC = 2 operations.

Counted is the work the published algorithm cannot avoid: what is the same in the next evaluation, or in both guidance
branches (the first layer up to its cross-attention), is counted once, what is thrown away (the last layer of a prefill
behind its keys and values, that of an evaluation for a video nobody wants) not at all. Who does more gets a lower rate
for it, not a higher one. Convolutions, matrix products and attention are counted, element-wise work is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from wam_policy_ros.model.config import DiTConfig, DreamZeroConfig
from wam_policy_ros.model.config_encoders import ImageEncoderConfig, TextEncoderConfig, VAEConfig

IMAGE_TOKENS = 257


@dataclass(frozen=True)
class DiTWork:
    """Operations of one call of the DiT for one guidance branch, by the unit that does them.

    Attributes:
        linear: matrix products with weights.
        attention: self-attention; cross: cross-attention to text and image.
    """

    linear: int
    attention: int
    cross: int

    @property
    def total(self) -> int:
        return self.linear + self.attention + self.cross


def evaluation(cfg: DreamZeroConfig, cached_tokens: int) -> DiTWork:
    """One denoising evaluation with ``cached_tokens`` video tokens in the window."""
    dit = cfg.dit
    video = dit.num_frame_per_block * dit.frame_seqlen
    rows, states = dit.num_action_per_block, dit.num_state_per_block
    tokens = video + rows + states
    body = _blocks(dit, tokens, cached_tokens + tokens, dit.num_layers)
    hidden, d = dit.hidden_size, dit.dim
    action = 2 * rows * (dit.action_dim * d + 2 * d * d + d * d + d * hidden + hidden * dit.action_dim)
    state = 2 * states * (dit.max_state_dim * hidden + hidden * d)
    head = 2 * video * d * 4 * dit.out_dim
    ends = _patches(dit, video) + _time(dit, dit.num_frame_per_block + rows + states) + action + state + head
    return DiTWork(body.linear + ends, body.attention, body.cross)


def prefill(cfg: DreamZeroConfig, frames: int, cached_tokens: int, *, whole: bool = False) -> DiTWork:
    """Keys and values of ``frames`` observed latent frames. ``whole``: with the outputs that nobody reads."""
    dit = cfg.dit
    tokens = frames * dit.frame_seqlen
    ends = _patches(dit, tokens) + _time(dit, frames)
    if whole:
        body = _blocks(dit, tokens, cached_tokens + tokens, dit.num_layers)
        return DiTWork(body.linear + ends + 2 * tokens * dit.dim * 4 * dit.out_dim, body.attention, body.cross)
    body = _blocks(dit, tokens, cached_tokens + tokens, dit.num_layers - 1)
    last = 2 * tokens * 2 * dit.dim**2  # keys and values of the last layer
    return DiTWork(body.linear + ends + last, body.attention, body.cross)


def common(cfg: DreamZeroConfig, tokens: int, keys: int) -> DiTWork:
    """Of one branch's call, what the other branch has in common: the first layer up to its cross-attention."""
    d = cfg.dit.dim
    return DiTWork(2 * tokens * 5 * d * d, 4 * tokens * keys * d, 0)


def unwatched(cfg: DreamZeroConfig, cached_tokens: int) -> DiTWork:
    """Of one evaluation, what only its video flow needs: the last layer of all tokens but the action rows, their keys
    and values excepted, and the head."""
    dit = cfg.dit
    video, others = dit.num_frame_per_block * dit.frame_seqlen, dit.num_state_per_block
    keys = cached_tokens + video + others + dit.num_action_per_block
    layer = _blocks(dit, video + others, keys, 1)
    kept = 2 * (video + others) * 2 * dit.dim**2
    return DiTWork(layer.linear - kept + 2 * video * dit.dim * 4 * dit.out_dim, layer.attention, layer.cross)


def _blocks(dit: DiTConfig, tokens: int, keys: int, layers: int) -> DiTWork:
    d = dit.dim
    return DiTWork(
        linear=2 * tokens * layers * (6 * d * d + 2 * d * dit.ffn_dim),
        attention=4 * tokens * keys * d * layers,
        cross=4 * tokens * (dit.text_len + IMAGE_TOKENS) * d * layers,
    )


def _patches(dit: DiTConfig, tokens: int) -> int:
    return 2 * tokens * 4 * dit.in_dim * dit.dim


def _time(dit: DiTConfig, vectors: int) -> int:
    return 2 * vectors * (dit.freq_dim * dit.dim + dit.dim**2 + 6 * dit.dim**2)


def text_keys(dit: DiTConfig) -> int:
    """Cross-attention keys and values of one prompt."""
    return 2 * dit.text_len * (dit.text_dim * dit.dim + dit.dim**2 + 2 * dit.num_layers * dit.dim**2)


def image_keys(dit: DiTConfig) -> int:
    """Cross-attention keys and values of one image."""
    embedding = dit.clip_dim**2 + dit.clip_dim * dit.dim
    return 2 * IMAGE_TOKENS * (embedding + 2 * dit.num_layers * dit.dim**2)


def text_encoder(cfg: TextEncoderConfig) -> int:
    """umT5 on one prompt, padding included."""
    n = cfg.text_len
    layer = 2 * n * (4 * cfg.dim * cfg.dim_attn + 3 * cfg.dim * cfg.dim_ffn) + 4 * n * n * cfg.dim_attn
    return cfg.num_layers * layer


def image_encoder(cfg: ImageEncoderConfig) -> int:
    """CLIP on one image; the last block is not run."""
    n, d = cfg.num_tokens, cfg.vision_dim
    layer = 2 * n * (4 + 2 * cfg.vision_mlp_ratio) * d * d + 4 * n * n * d
    return 2 * (n - 1) * 3 * cfg.patch_size**2 * d + (cfg.vision_layers - 1) * layer


def vae_encode(cfg: VAEConfig, frames: int, height: int, width: int) -> int:
    """The encoder on a clip of ``frames`` (1 + 4 k) pictures."""
    return sum(_vae_chunk(cfg, 1 if i == 0 else 4, height, width, first=i == 0) for i in range(1 + (frames - 1) // 4))


def _vae_chunk(cfg: VAEConfig, frames: int, height: int, width: int, *, first: bool) -> int:
    def conv(out: int, taps: int, time: int, h: int, w: int, into: int) -> int:
        return 2 * out * into * taps * time * h * w

    def residual(into: int, out: int) -> int:
        shortcut = conv(out, 1, t, h, w, into) if into != out else 0
        return conv(out, 27, t, h, w, into) + conv(out, 27, t, h, w, out) + shortcut

    t, h, w = frames, height, width
    total = conv(cfg.dim, 27, t, h, w, 3)
    width_in = cfg.dim
    for stage, multiple in enumerate(cfg.dim_mult):
        width_out = cfg.dim * multiple
        for _ in range(cfg.num_res_blocks):
            total += residual(width_in, width_out)
            width_in = width_out
        if stage < len(cfg.temporal_downsample):
            h, w = h // 2, w // 2
            total += conv(width_out, 9, t, h, w, width_out)
            if cfg.temporal_downsample[stage] and not first:
                t = t // 2
                total += conv(width_out, 3, t, h, w, width_out)
    spots = h * w
    attention = 2 * t * spots * 4 * width_in**2 + 4 * t * spots * spots * width_in
    total += 2 * residual(width_in, width_in) + attention
    total += conv(2 * cfg.z_dim, 27, t, h, w, width_in) + conv(2 * cfg.z_dim, 1, t, h, w, 2 * cfg.z_dim)
    return total


def step_stages(cfg: DreamZeroConfig, position: int, evaluations: int, branches: int, picture: tuple[int, int],
                *, guided_evaluations: int | None = None, want_video: bool = True) -> dict[str, int]:  # fmt: skip
    """Operations per stage of the call at ``position`` (1 to 4) of a window, text encoding left out (once per prompt).

    Args:
        evaluations: of the network; guided_evaluations: how many of them run both branches (default: all).
        branches: 2 with guidance, else 1.
        picture: height and width of the mosaic.
        want_video: somebody looks at the predicted video.
    """
    dit = cfg.dit
    block, per_frame = dit.num_frame_per_block, dit.frame_seqlen
    observed = 1 if position == 1 else block
    before = 0 if position == 1 else (1 + block * (position - 2)) * per_frame
    cached = before + observed * per_frame
    guided = evaluations if guided_evaluations is None else guided_evaluations
    pairs = guided if branches == 2 else 0
    tokens = block * per_frame + dit.num_action_per_block + dit.num_state_per_block
    again = common(cfg, observed * per_frame, cached).total, pairs * common(cfg, tokens, cached + tokens).total
    out = {
        "prefill": branches * prefill(cfg, observed, before).total - (branches - 1) * again[0],
        "denoise": (evaluations + pairs) * evaluation(cfg, cached).total - again[1]
        - (0 if want_video else unwatched(cfg, cached).total),
    }  # fmt: skip
    if position == 1:
        encode = vae_encode(cfg.vae, cfg.num_frames, *picture)
        return {"first_frame": encode + image_encoder(cfg.image) + image_keys(dit), **out}
    return {"vae_encode": vae_encode(cfg.vae, 1 + 4 * block, *picture), **out}
