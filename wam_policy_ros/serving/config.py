"""How an OpenPI server is set up. Resolved once, frozen, unknown keys raise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from wam_policy_ros.contract.errors import ConfigError

from .dialects import get_dialect
from .wire import WireRules

MIN_MESSAGE_BYTES = 16 * 2**20
VLLM_OMNI_PATH = "/v1/realtime/robot/openpi"


@dataclass(frozen=True)
class ServerConfig:
    """Everything a server can be told.

    Attributes:
        host, port: where to listen; loopback by default. Port 0: any free one.
        dialect: of clients on the path ``/`` of ``port``.
        ports: further ports, each with the dialect of its path ``/``.
        paths: further paths and their dialects. Every dialect is reachable as ``/<name>`` as well, and as
            ``?dialect=<name>``.
        wire: how requests are read.
        blind_positions: clients that ask as velocity clients do and read no metadata are told so (``refuse``), or get
            joint positions (``send``); see ``steps.check_meaning``.
        errors: after a refused request ``close`` (one text frame, then 1011, which every published client survives) or
            ``keep_open``. A client may ask for ``?errors=keep_open`` itself.
        api_key: clients must send it as ``Authorization: Api-Key <key>`` or ``Bearer <key>``; empty: no key.
        bind: ``early``: listen at once, hold the metadata back until the policy is ready; ``when_ready``.
        max_message_bytes: of one frame; larger ones close the connection with 1009 unread. At least 16 MiB.
        max_connections, max_sessions: bounds; beyond them connections or new sessions are refused with the reason.
        session_idle_s: a session not used for so long ends; 0: never.
        resume_s: how long a session waits after its connection broke.
        deadline_s: from receipt; a request that is not answered by then fails; 0: never. A client may ask for less.
        ping_interval_s: keeps proxies open and lets clients see that the server lives; 0: none.
        dead_peer_s: a client that does not answer pings for so long is dropped; 0: never (a simulator may stall).
        takeover_ping_s: a connection that holds a session wanted by another, and does not answer a ping in this time,
            has lost it.
        pipelined: unanswered requests of one connection that are read.
        grace_s: what ``stop`` waits for.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    dialect: str = "dreamzero"
    ports: Mapping[int, str] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=lambda: {VLLM_OMNI_PATH: "vllm_omni"})
    wire: WireRules = field(default_factory=WireRules)
    blind_positions: Literal["refuse", "send"] = "refuse"
    errors: Literal["close", "keep_open"] = "close"
    api_key: str = field(default="", repr=False)
    bind: Literal["early", "when_ready"] = "early"
    max_message_bytes: int = 64 * 2**20
    max_connections: int = 256
    max_sessions: int = 64
    session_idle_s: float = 0.0
    resume_s: float = 60.0
    deadline_s: float = 0.0
    ping_interval_s: float = 20.0
    dead_peer_s: float = 0.0
    takeover_ping_s: float = 2.0
    pipelined: int = 4
    grace_s: float = 1.5

    def __post_init__(self) -> None:
        for name in (self.dialect, *self.ports.values(), *self.paths.values()):
            get_dialect(name)
        one_of = {
            "blind_positions": ("refuse", "send"),
            "errors": ("close", "keep_open"),
            "bind": ("early", "when_ready"),
            "wire.resize": ("refuse", "pad", "stretch"),
            "wire.single_exterior": ("refuse", "dropped_view"),
        }
        for name, allowed in one_of.items():
            value = getattr(self.wire if "." in name else self, name.split(".")[-1])
            if value not in allowed:
                raise ConfigError(f"server: {name} is unknown", got=repr(value), expected=f"one of {list(allowed)}")
        for port in (self.port, *self.ports):
            if type(port) is not int or not 0 <= port < 65536:
                raise ConfigError("server: port out of range", got=repr(port), expected="0 to 65535")
        if self.max_message_bytes < MIN_MESSAGE_BYTES:
            got, least = self.max_message_bytes, MIN_MESSAGE_BYTES
            raise ConfigError(
                "server: max_message_bytes is too small for camera frames", got=got, expected=f">= {least}"
            )
        for name in ("max_connections", "max_sessions", "pipelined"):
            if getattr(self, name) < 1:
                raise ConfigError(f"server: {name} must be at least 1", got=getattr(self, name))
        for f in dataclasses.fields(self):
            if f.name.endswith("_s") and not getattr(self, f.name) >= 0:
                raise ConfigError(f"server: {f.name} must not be negative", got=getattr(self, f.name))
        if any(not path.startswith("/") for path in self.paths):
            raise ConfigError("server: paths start with '/'", got=list(self.paths))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServerConfig:
        """From plain values; keys of ``WireRules`` may stand beside the server's own.

        Raises:
            ConfigError: unknown key, or a value that does not fit.
        """
        own = {f.name for f in dataclasses.fields(cls)} - {"wire"}
        wire = {f.name for f in dataclasses.fields(WireRules)}
        if unknown := sorted(set(values) - own - wire):
            raise ConfigError("server: unknown option", got=unknown, expected=sorted(own | wire))
        rules = WireRules(**{k: v for k, v in values.items() if k in wire})
        return cls(wire=rules, **{k: v for k, v in values.items() if k in own})

    def announced_limits(self) -> dict[str, float | int | str]:
        """What clients are told where their dialect has room for it."""
        return {
            "max_message_bytes": self.max_message_bytes,
            "max_frames": self.wire.max_frames,
            "max_prompt_chars": self.wire.max_prompt_chars,
            "max_sessions": self.max_sessions,
            "session_idle_s": self.session_idle_s,
            "resume_s": self.resume_s,
            "deadline_s": self.deadline_s,
            "errors": self.errors,
            "resize": self.wire.resize,
            "single_exterior": self.wire.single_exterior,
            "blind_positions": self.blind_positions,
        }
