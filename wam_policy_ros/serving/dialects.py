"""What each family of OpenPI clients expects of a server.

They contradict each other (OpenPI spec 0 and 2): some want the reply to be a bare array, some a map, some break on one
key too many. So a dialect is chosen by path, port or parameter, never guessed from a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wam_policy_ros import __version__
from wam_policy_ros.contract.errors import ConfigError, EngineError
from wam_policy_ros.contract.interface import PolicySpec

RESET_ACK = "reset successful"


@dataclass(frozen=True)
class Dialect:
    """One family of clients.

    Attributes:
        name, clients: for people.
        reply: ``bare``: the message is the array of rows; ``map``: a map with the key ``actions``.
        timings: the reply map also carries ``policy_timing`` and ``server_timing``, numbers only, after ``actions``.
        metadata: ``exact``: the six RoboArena keys, one more would break the client; ``flat``: they, the newer optional
            keys of vLLM-Omni, and the contract; ``open``: they and the contract.
        action_space: what its clients take the rows for; None: they read ``action_space`` of the metadata, or are told.
        blind: some of its clients do neither, and execute joint velocities (see ``steps.check_meaning``).
        rows: they insist on this many rows; None: the policy's horizon.
        dtype: of the rows.
        sends: what its clients are known to send that the server has to be told about, or nothing.
        extras: its clients take no offence at further keys of the reply map, behind the others.
    """

    name: str
    clients: str
    reply: Literal["bare", "map"]
    timings: bool
    metadata: Literal["exact", "flat", "open"]
    action_space: str | None = "joint_position"
    blind: bool = False
    rows: int | None = None
    dtype: str = "<f4"
    sends: str = ""
    extras: bool = False


_ONE_CAMERA = (
    "one exterior camera and pictures of 224x224: without --single-exterior dropped_view and --resize pad (or stretch) "
    "every request is refused"
)
_DROID = {"reply": "map", "timings": True, "metadata": "open", "sends": _ONE_CAMERA, "extras": True}

DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        Dialect("dreamzero", "DreamZero test_client_AR, run_sim_eval", "bare", False, "exact"),
        Dialect("roboarena", "RoboArena test client and evaluator", "map", False, "exact", action_space=None),
        Dialect("vllm_omni", "vLLM-Omni openpi_client, droid_sim_eval_client", "bare", False, "flat"),
        Dialect(
            "openpi",
            "openpi-client, inspect-robots, hud",
            "map",
            True,
            "open",
            action_space=None,
            blind=True,
            extras=True,
        ),
        Dialect("openpi_droid", "openpi examples/droid", action_space="joint_velocity", rows=10, **_DROID),  # type: ignore[arg-type]
        Dialect("sim_evals", "sim-evals", **_DROID),  # type: ignore[arg-type]
        Dialect("polaris", "PolaRiS", **_DROID),  # type: ignore[arg-type]
        Dialect("molmospaces", "MolmoSpaces DreamZero client (msgpack-numpy)", "map", False, "exact"),
        Dialect("molmospaces_pi", "MolmoSpaces pi client", **_DROID),  # type: ignore[arg-type]
        Dialect("isaaclab_arena", "IsaacLab-Arena DreamZero client", "map", False, "exact"),
        Dialect("isaaclab_arena_pi0", "IsaacLab-Arena pi0 client", **_DROID),  # type: ignore[arg-type]
        Dialect("robolab", "RoboLab DreamZero client", "map", False, "exact"),
        Dialect("robolab_pi0", "RoboLab pi0 client", **_DROID),  # type: ignore[arg-type]
        Dialect("ihmc", "IHMC Java client", "map", True, "open", action_space=None, dtype="<f8"),
    )
}


def get_dialect(name: str) -> Dialect:
    """By name; ``-`` counts as ``_``.

    Raises:
        ConfigError: unknown; lists the known ones.
    """
    dialect = DIALECTS.get(name.replace("-", "_"))
    if dialect is None:
        raise ConfigError("unknown OpenPI dialect", got=repr(name), expected=f"one of {sorted(DIALECTS)}")
    return dialect


def check_fit(dialect: Dialect, spec: PolicySpec) -> None:
    """A client that executes velocities must never be answered with positions, nor one that needs more rows than are.

    Raises:
        ConfigError: this policy cannot speak this dialect.
    """
    if dialect.action_space is not None and dialect.action_space != spec.action_space:
        raise ConfigError(
            f"clients of the dialect {dialect.name!r} execute the actions as {dialect.action_space}",
            got=f"a policy that gives {spec.action_space}",
            expected=f"a policy that gives {dialect.action_space}",
            remedy="choose the dialect of a client that executes what the policy gives",
        )
    if dialect.rows is not None and spec.horizon < dialect.rows:
        raise ConfigError(
            f"clients of the dialect {dialect.name!r} need {dialect.rows} rows", got=f"a chunk of {spec.horizon} rows"
        )


def metadata(dialect: Dialect, spec: PolicySpec, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The first frame of a connection. Key order as RoboArena sends it (OpenPI spec 1.3, TV5)."""
    sizes = {(c.height, c.width) for c in spec.cameras}
    wrist = any("wrist" in c.name for c in spec.cameras)
    six: dict[str, Any] = {
        "image_resolution": list(next(iter(sizes))) if len(sizes) == 1 else None,
        "needs_wrist_camera": wrist,
        "n_external_cameras": min(2, sum("wrist" not in c.name for c in spec.cameras)),
        "needs_stereo_camera": False,
        "needs_session_id": True,
        "action_space": spec.action_space,
    }
    if dialect.metadata == "exact":
        return six
    if dialect.metadata == "flat":
        six |= {
            "action_horizon": spec.horizon,
            "max_action_horizon": spec.horizon,
            "action_dim": spec.action_dim,
            "action_keys": [f.name for f in spec.action],
        }
    return six | {"contract": contract(spec, limits) | {"dialect": dialect.name}}


def contract(spec: PolicySpec, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Everything a client could have to guess otherwise; JSON- and msgpack-serialisable."""
    return {
        "server": f"wam_policy_ros {__version__}",
        "weights": spec.weights,
        "weights_hash": spec.details.get("weights_hash"),
        "fingerprint": None if spec.fingerprint is None else spec.fingerprint.as_dict(),
        "random_weights": spec.random_weights,
        "embodiment": spec.embodiment,
        "cameras": [{"name": c.name, "height": c.height, "width": c.width} for c in spec.cameras],
        "frames_per_call": {"first": 1, "later": len(spec.frame_offsets), "offsets_steps": list(spec.frame_offsets)},
        "state": [{"name": f.name, "dim": f.dim, "unit": f.unit} for f in spec.state],
        "actions": [{"name": f.name, "dim": f.dim, "unit": f.unit, "kind": f.kind} for f in spec.action],
        "action_space": spec.action_space,
        "horizon": spec.horizon,
        "control_rate_hz": spec.control_rate_hz,
        "tier": spec.details.get("tier"),
        "details": {k: v for k, v in spec.details.items() if isinstance(v, str | int | float | bool | None)},
        "limits": dict(limits),
    }


def reply(dialect: Dialect, actions: npt.NDArray[np.float64], spec: PolicySpec) -> Any:
    """The answer to an infer request, timings aside.

    Raises:
        EngineError: the rows are not finite or not ``[N, action_dim]``; nothing of them may be sent.
    """
    rows = np.ascontiguousarray(actions[: dialect.rows], dtype=dialect.dtype)
    if rows.ndim != 2 or rows.shape[1] != spec.action_dim or not len(rows):
        raise EngineError(
            "the policy's actions have the wrong shape", got=list(rows.shape), expected=f"[N, {spec.action_dim}]"
        )
    if not np.isfinite(rows).all():
        raise EngineError(
            "the policy's actions are not finite", got=f"{int((~np.isfinite(rows)).sum())} of {rows.size}"
        )
    return rows if dialect.reply == "bare" else {"actions": rows}
