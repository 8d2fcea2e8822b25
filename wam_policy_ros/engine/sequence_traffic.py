"""How many bytes a rank sends in sequence parallelism, in closed form. docs/parallel.md has the table."""

from __future__ import annotations

from wam_policy_ros.model.config import DiTConfig


def evaluation_bytes(
    dit: DiTConfig, ranks: int, *, branches: int = 1, itemsize: int = 2, kv_itemsize: int = 2,
    with_video: bool = True, plain: bool = False,
) -> int:  # fmt: skip
    """Bytes that one rank sends to all others in one evaluation.

    Args:
        ranks: that share the evaluation. branches: guidance branches they evaluate together.
        itemsize: of the network's dtype; kv_itemsize: of what attention reads and writes.
        with_video: the video flow is wanted; without, the last layer gives the first branch's action rows alone.
        plain: the plain network has nothing in common between branches, and always a video flow.
    """
    if plain and branches > 1:
        return branches * evaluation_bytes(dit, ranks, itemsize=itemsize, kv_itemsize=kv_itemsize)
    rows = dit.num_action_per_block
    run = run_length(dit, ranks, dit.num_frame_per_block)
    passes = _passes(dit, branches)
    numbers = passes * _to_heads(dit, ranks, run)
    whole = passes if with_video else passes - branches
    numbers += whole * _to_tokens(dit, ranks, run + rows + dit.num_state_per_block)
    if with_video:
        return numbers * kv_itemsize + branches * _flow(dit, ranks, run) * itemsize
    return (numbers + _to_tokens(dit, ranks, rows)) * kv_itemsize


def prefill_bytes(
    dit: DiTConfig, ranks: int, frames: int, *, branches: int = 1, itemsize: int = 2, kv_itemsize: int = 2,
    plain: bool = False,
) -> int:  # fmt: skip
    """Bytes that one rank sends to all others in the prefill of so many latent frames.

    Args:
        plain: the plain network computes the last layer to its end and a flow, the fused step only what it keeps.
    """
    run = run_length(dit, ranks, frames)
    if plain:
        layers = dit.num_layers * (_to_heads(dit, ranks, run) + _to_tokens(dit, ranks, run)) * kv_itemsize
        return branches * (layers + _flow(dit, ranks, run) * itemsize)
    passes = _passes(dit, branches)
    return (passes * _to_heads(dit, ranks, run) + (passes - branches) * _to_tokens(dit, ranks, run)) * kv_itemsize


def _passes(dit: DiTConfig, branches: int) -> int:
    """Self-attentions of the fused step: the first layer's is the same for all branches."""
    return branches * dit.num_layers - (branches - 1)


def run_length(dit: DiTConfig, ranks: int, frames: int) -> int:
    """Video tokens of a rank, fillers included."""
    return -(-frames * dit.frame_seqlen // ranks)


def _to_heads(dit: DiTConfig, ranks: int, run: int) -> int:
    """Numbers per layer: of q, k and v the other ranks' heads."""
    return (ranks - 1) * 3 * run * dit.dim // ranks


def _to_tokens(dit: DiTConfig, ranks: int, tokens: int) -> int:
    """Numbers per layer: what own heads gave for the other ranks' tokens, action and state among them."""
    return (ranks - 1) * tokens * dit.dim // ranks


def _flow(dit: DiTConfig, ranks: int, run: int) -> int:
    """Numbers per call: the patches of own tokens, to everybody."""
    return (ranks - 1) * run * 4 * dit.out_dim
