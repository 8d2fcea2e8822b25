"""Whose answer it is: in the greeting, in replies that have room for it, in the metrics, and at the remote end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from wam_policy_ros.contract.fakes import example_observation
from wam_policy_ros.contract.fingerprint import Fingerprint
from wam_policy_ros.serving.client import ClientConfig, connect_policy
from wam_policy_ros.serving.client_link import LinkConfig
from wam_policy_ros.serving.dialects import DIALECTS
from wam_policy_ros.serving.metrics import Metrics

from .harness import Client, RememberingPolicy, request, served, small_spec

FINGERPRINT = Fingerprint.of(
    weights={"hash": "sha256:1"}, code={"source": "abc", "commit": None}, device={"name": "a GPU", "memory_GiB": 139.8}
)


class Named(RememberingPolicy):
    """Says what it is."""

    def __init__(self, **sizes):
        details = {"weights_hash": "sha256:1", "deterministic": True}
        super().__init__(small_spec(**sizes, fingerprint=FINGERPRINT, details=details))

    def infer(self, *args, **kwargs):
        return replace(super().infer(*args, **kwargs), fingerprint=FINGERPRINT.id)


def test_the_contract_has_all_of_it_and_exact_metadata_nothing():
    with served(Named()) as one:
        with Client(one, "/openpi") as client:
            assert Fingerprint.from_dict(client.metadata["contract"]["fingerprint"]) == FINGERPRINT
        with Client(one, "/dreamzero") as client:
            assert len(client.metadata) == 6
        info = json.loads(one.http("/info")[1])
        assert info["contract"]["fingerprint"]["id"] == FINGERPRINT.id
    with served() as one:
        assert json.loads(one.http("/info")[1])["contract"]["fingerprint"] is None


@pytest.mark.parametrize("name", [n for n, d in DIALECTS.items() if d.action_space != "joint_velocity"])
def test_a_reply_has_it_last_where_the_dialect_allows_it(name):
    allowed = {"openpi", "sim_evals", "polaris", "molmospaces_pi", "isaaclab_arena_pi0", "robolab_pi0"}
    with served(Named()) as one, Client(one, f"/{name}") as client:
        reply = client.ask(request(0))
    if name in allowed:
        assert list(reply) == ["actions", "policy_timing", "server_timing", "fingerprint"]
        assert reply["fingerprint"] == FINGERPRINT.id
    elif isinstance(reply, dict):
        assert "fingerprint" not in reply and set(reply) <= {"actions", "policy_timing", "server_timing"}
    else:
        assert reply.ndim == 2


def test_a_policy_that_does_not_say_adds_no_key():
    with served() as one, Client(one, "/openpi") as client:
        assert list(client.ask(request(0))) == ["actions", "policy_timing", "server_timing"]


def test_an_info_metric():
    with served(Named()) as one:
        text = one.http("/metrics")[1]
    line = next(line for line in text.splitlines() if line.startswith("wam_openpi_policy_info{"))
    assert f'fingerprint="{FINGERPRINT.id}"' in line and 'weights_hash="sha256:1"' in line and line.endswith(" 1.0")
    assert (
        'source="abc"' in line and 'commit=""' in line and 'device="a GPU"' in line and 'deterministic="True"' in line
    )


def test_gauges_of_what_runs_beside_the_server():
    zero = dict.fromkeys(("ready", "connections", "sessions", "waiting"), lambda: 0.0)
    metrics = Metrics(**zero, more={"wam_record_dropped_events": ("missing in the record", lambda: 3)})
    assert b"\nwam_record_dropped_events 3.0\n" in metrics.text()


@pytest.mark.parametrize("dialect", ["openpi", "dreamzero"])
def test_the_remote_policy_has_the_servers(dialect):
    """Over a greeting with a contract, and over one without, whose server tells it by HTTP."""
    with served(Named(height=180, width=320), dialect=dialect) as one:
        policy = connect_policy(ClientConfig(LinkConfig(one.url()), dialect=dialect))
        assert policy.spec.fingerprint == FINGERPRINT
        session = policy.open()
        chunk = policy.infer(session, example_observation(policy.spec))
        assert chunk.fingerprint == FINGERPRINT.id
        assert "fingerprint" not in policy.spec.details["server"]
        policy.close(session)
        policy.disconnect()
