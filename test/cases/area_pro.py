"""Area PRO: what clients send to the endpoint, on real sockets, answered by the tiny engine with random weights.

Times of long steps and of loading are divided by ``FASTER``, client keepalive included.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from test.serving.harness import Client
from wam_policy_ros.contract.errors import CheckpointError
from wam_policy_ros.serving.client import ClientConfig, connect_policy
from wam_policy_ros.serving.client_link import LinkConfig
from wam_policy_ros.serving.codec import CodecError, pack, unpack
from wam_policy_ros.serving.dialects import RESET_ACK
from wam_policy_ros.serving.server import OpenPIServer
from wam_policy_ros.tools import serve

from .case import Case, Outcome, Unavailable
from .endpoint import SlowStart, Talk, alone, message_of, nothing_unpickled, remembering, talk, valid_request

FASTER = 30.0
MIN_LIMIT = 16 * 2**20


def run(case: Case) -> Outcome:
    if case.kind in ("msgpack", "text"):
        return one_frame(case)
    data = case.json()
    if "env" in data and "url" in data:
        return proxies(case, data)
    if "args" in data:
        return command_line(case, data["args"])
    if "images" in data:
        return big_request(case, data)
    events = data["events"] if isinstance(data, dict) else data
    kinds = {e.get("do") for e in events}
    if "start_server" in kinds:
        return slow_start(case, events)
    if "infer" in kinds:
        return slow_step(case, events)
    if kinds <= {None, "send"}:
        return conversation(case, events)
    raise Unavailable(f"no part here runs events {sorted(map(str, kinds))}")


# -- frames and conversations -----------------------------------------------------------------------------------------


def one_frame(case: Case) -> Outcome:
    path = case.path()
    frame: Any = path.read_text(encoding="utf-8") if case.kind == "text" else path.read_bytes()
    valid = pack(valid_request(case.config))
    with talk(case.config) as spoken, nothing_unpickled() as unpickled:
        before = spoken.ask("before", pack(valid_request(case.config, "witness")))
        opened = spoken.one.policy.opened
        reply = spoken.ask("A", frame)
        allocates = spoken.one.policy.opened > opened or bool(spoken.one.server.table.get(_session_of(frame)))
        idempotent = not acknowledged(reply) or acknowledged(spoken.ask("A", frame))
        after = spoken.ask("A", valid)
        second = spoken.ask("before", pack(valid_request(case.config, "witness")))
        outcome = judged(case, spoken, [reply])
    fresh = alone(case.config, [pack(valid_request(case.config, "witness"))] * 2)
    outcome.facts |= {
        "next_valid_request_ok": is_actions(after, case) and same(after, fresh[0]),
        "session_state_unchanged": same(before, fresh[0]) and same(second, fresh[1]),
        "pickle_loads_called": bool(unpickled),
        "allocates_session": allocates and not is_actions(reply, case),
        "idempotent": idempotent,
    }
    if not outcome.facts["next_valid_request_ok"] or not outcome.facts["session_state_unchanged"]:
        outcome.verdicts = frozenset({"another request suffers"})
    return outcome


def _session_of(frame: Any) -> str:
    try:
        value = unpack(frame)
    except CodecError:
        return ""
    name = value.get("session_id") if isinstance(value, dict) else None
    return name if isinstance(name, str) else ""


def conversation(case: Case, events: list[dict[str, Any]]) -> Outcome:
    """Messages of one or more connections, in turn, or all at once where the case is about order."""
    messages = [(str(e.get("conn", "A")), message_of(case, e)) for e in events]
    with talk(case.config) as spoken:
        if "in_order" in case.expect:
            for name, message in messages:
                spoken.send(name, message)
            for name, _ in messages:
                spoken.receive(name)
        else:
            for name, message in messages:
                spoken.ask(name, message)
        outcome = judged(case, spoken, spoken.replies)
    by_conn = {n: [m for name, m in messages if name == n] for n, _ in messages}
    given = {n: [r for (name, _), r in zip(messages, spoken.replies, strict=True) if name == n] for n in by_conn}
    wanted = {n: alone(case.config, sent) for n, sent in by_conn.items()}
    as_alone = all(same(a, b) for n in by_conn for a, b in zip(given[n], wanted[n], strict=True))
    outcome.facts |= {"each_equals_run_alone": as_alone, "in_order": as_alone, "fixed_seed": True}

    def equals_fresh(expected: Any, case: Case, outcome: Outcome, number: int = 0) -> str | None:
        if not re.search(r"fresh|alone|new session", str(expected)):
            return f"the runner does not know what it should equal: {expected!r}"
        reported = "reported" not in str(expected) or "history reset" in outcome.message
        fine = same(spoken.replies[number - 1], alone(case.config, [messages[number - 1][1]])[0])
        return None if fine and reported else f"reply {number}: equal {fine}, reported {reported}"

    for key, value in case.expect.items():
        if found := re.fullmatch(r"reply(\d+)_equals_reply(\d+)", key):
            a, b = (spoken.replies[int(n) - 1] for n in found.groups())
            outcome.facts[key] = same(a, b)
        elif found := re.fullmatch(r"reply(\d+)_equals", key):
            number = int(found.group(1))
            outcome.checks[key] = lambda e, c, o, n=number: equals_fresh(e, c, o, n)  # type: ignore[misc]
        elif key == "replies":
            outcome.facts[key] = len(spoken.replies) if isinstance(value, int) else None
    return outcome


def big_request(case: Case, data: dict[str, Any]) -> Outcome:
    shape = tuple(data["images"]["shape"])
    rng = np.random.default_rng(0)
    message = {
        key: rng.integers(0, 256, shape, dtype=data["images"]["dtype"]) if "image" in key else value
        for key, value in valid_request(case.config).items()
    }
    sent = sum(v.nbytes for k, v in message.items() if "image" in k)
    assert sent == data["bytes"], f"{sent} bytes of pictures, the case says {data['bytes']}"
    with talk(case.config) as spoken:
        spoken.ask("A", pack(message))
        outcome = judged(case, spoken, spoken.replies)
        outcome.facts["no_close_1009"] = not spoken.refusals
        server: OpenPIServer = spoken.one.server
        limits = server.reception.info()["contract"]["limits"]
    ours = LinkConfig("ws://127.0.0.1").max_reply_bytes
    outcome.checks["limit"] = lambda *_: (
        None if min(limits["max_message_bytes"], ours) >= MIN_LIMIT else f"server {limits}, client {ours}"
    )
    return outcome


# -- time -------------------------------------------------------------------------------------------------------------


def slow_step(case: Case, events: list[dict[str, Any]]) -> Outcome:
    """A step that takes long, and what happens meanwhile; the step ends when its time is over."""
    policy = remembering(case.config)
    facts: dict[str, Any] = {}
    limits: dict[str, float] = {}
    step = next(e for e in events if e.get("do") == "infer")
    keepalive = 20.0 / FASTER
    with talk(case.config, policy, ping_interval_s=keepalive) as spoken:
        start = time.monotonic()
        for event in sorted(events, key=lambda e: e["t"]):
            time.sleep(max(0.0, start + event["t"] / FASTER - time.monotonic()))
            name, began = str(event.get("conn", "A")), time.monotonic()
            if event["do"] == "infer":
                spoken.clients[name] = Client(spoken.one, ping_interval=keepalive, ping_timeout=keepalive)
                policy.gate.clear()
                spoken.send(name, pack(valid_request(case.config)))
                assert policy.entered.wait(5)
            elif event["do"] == "connect":
                spoken.client(name)
                limits[f"conn_{name}_metadata_within_s"] = time.monotonic() - began
            elif event["do"] == "ping":
                assert spoken.client(name).socket.ping().wait(10), "no pong"
                limits["pong_within_s"] = time.monotonic() - began
            else:
                raise AssertionError(f"the runner does not know the event {event}")
        time.sleep(max(0.0, start + (step["t"] + step["takes_s"]) / FASTER - time.monotonic()))
        name = str(step.get("conn", "A"))
        facts[f"conn_{name}_open_at_{step['takes_s']:g}s"] = spoken.client(name).socket.close_code is None
        policy.gate.set()
        facts[f"conn_{name}_gets_reply"] = is_actions(spoken.receive(name), case)
        outcome = judged(case, spoken, spoken.replies)
    outcome.facts |= facts
    for key, seconds in limits.items():
        outcome.checks[key] = lambda e, c, o, s=seconds: None if s <= e else f"{s:.2f} s"  # type: ignore[misc]
    return outcome


def slow_start(case: Case, events: list[dict[str, Any]]) -> Outcome:
    """Clients that come while the policy loads, and a policy whose warm-up fails."""
    load = next(e for e in events if e["do"] == "start_server")
    dial = next(e for e in events if e["do"] == "connect")
    starting = SlowStart(case.config, load["load_and_warmup_s"] / FASTER)
    try:
        time.sleep(max(0.0, starting.start_s + (dial["t"] - load["t"]) / FASTER - time.monotonic()))
        early = starting.one.owner.status.spec is None
        client = Client(starting.one)
        served = starting.one.http("/readyz")[0] == 200
        reply = client.ask(pack(valid_request(case.config)))
        client.socket.close()
    finally:
        starting.stop()
    failing = SlowStart(case.config, 0.01, CheckpointError("warm-up fails"))
    failing.wait_ready()
    unready = failing.one.http("/readyz")[0] == 503
    failing.stop()
    fine = early and served and is_actions(reply, case)
    outcome = Outcome(frozenset({"accept"} if fine else {"refuse_start"}), "\n".join(starting.one.lines))
    outcome.checks["never"] = lambda *_: None if fine else "accepted, then dropped or not served"
    outcome.checks["failed_warmup"] = lambda *_: None if unready else "ready after a failed warm-up"
    return outcome


# -- surroundings -----------------------------------------------------------------------------------------------------


def proxies(case: Case, data: dict[str, Any]) -> Outcome:
    """Our client with proxy variables in its environment, to a server on loopback."""
    with talk(case.config) as spoken:
        port = spoken.one.server.port
        url = re.sub(r":\d+", f":{port}", data["url"])
        names = {k: "" for k in os.environ if k.lower() in ("no_proxy", "http_proxy", "https_proxy", "all_proxy")}
        with mock.patch.dict(os.environ, names | data["env"]):
            policy = connect_policy(ClientConfig(LinkConfig(url)))
            spec = policy.spec
            policy.disconnect()
    direct = spec.horizon == case.config["policy"]["horizon"]
    return Outcome(frozenset({"accept"} if direct else {"refuse_start"}), "", {"connects_directly": direct})


def command_line(case: Case, words: list[str]) -> Outcome:
    """``wam serve`` with these arguments, and where the process then listens."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    config = serve.server_config(parser.parse_args(["--fake", "hold", *words]))
    with talk(case.config, remembering(case.config)) as spoken:
        server = OpenPIServer(config, spoken.one.owner, log=spoken.one.log)
        server.start()
        listening = sorted(_listeners(server.port))
        server.stop(5)
    default = serve.server_config(parser.parse_args(["--fake", "hold"])).host
    outcome = Outcome(frozenset({"accept"}), "\n".join(spoken.one.lines), {"listens_on": listening})
    asked = "0.0.0.0" in words
    wide = "0.0.0.0" in listening or default != "127.0.0.1"
    outcome.checks["never"] = lambda *_: f"listens on {listening}" if wide and not asked else None
    return outcome


def _listeners(port: int) -> set[str]:
    """Local addresses in state LISTEN on a port, from the kernel's table."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        address, _, number = local.partition(":")
        if state == "0A" and int(number, 16) == port:
            found.add(".".join(str(b) for b in reversed(bytes.fromhex(address))))
    if Path("/proc/net/tcp6").exists():
        rows = (line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:])
        found |= {"::" for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}
    return found


# -- judging ----------------------------------------------------------------------------------------------------------


def judged(case: Case, spoken: Talk, replies: list[Any]) -> Outcome:
    refused = [r for r in replies if isinstance(r, str) and not acknowledged(r)]
    odd = [r for r in replies if not isinstance(r, str) and not is_actions(r, case)]
    verdict = "reject_request" if refused else "accept"
    outcome = Outcome(
        frozenset({verdict} if not odd else {"odd reply"}), "\n".join([*spoken.refusals, *spoken.one.lines])
    )
    outcome.facts["log_does_not_crash"] = not any("Traceback" in line for line in spoken.one.lines)
    for key, check in {"reply": _reply, "never": _never}.items():
        outcome.checks[key] = check
    outcome.facts |= {"replies": len(replies)}
    return outcome


def _reply(expected: Any, case: Case, outcome: Outcome) -> str | None:
    return None if "accept" in outcome.verdicts else f"expected {expected!r}"


def _never(expected: Any, case: Case, outcome: Outcome) -> str | None:
    """``silent truncation``: a long prompt is refused, so nothing was cut."""
    if "truncat" in str(expected):
        return None if "reject_request" in outcome.verdicts else "accepted without a word"
    return f"the runner does not know what must never be: {expected!r}"


def acknowledged(reply: Any) -> bool:
    return isinstance(reply, str) and reply == RESET_ACK


def is_actions(reply: Any, case: Case) -> bool:
    policy = case.config["policy"]
    shape = (policy["horizon"], policy["action_dim"])
    return isinstance(reply, np.ndarray) and reply.shape == shape and bool(np.isfinite(reply).all())


def same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(np.array_equal(a, b))
