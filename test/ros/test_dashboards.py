"""Foxglove layout, RViz configuration and record list name only what the node offers or takes, with the right types."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from rclpy.parameter import Parameter

from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.ros.policy_node import PolicyNode

from .harness import NAMES

CONFIG = Path(__file__).parents[2] / "config"
IMAGE, STRING = "sensor_msgs/msg/Image", "std_msgs/msg/String"
CLOCK = {"/clock": "rosgraph_msgs/msg/Clock"}


@pytest.fixture(scope="module")
def graph(ros: None) -> Iterator[dict[str, dict[str, str]]]:
    """Topics and services of a configured node with all defaults: name -> type."""
    given = {"backend": "hold", "joints.names": NAMES, "gripper.closed": 0.8, "autostart": False}
    overrides = [Parameter(k, value=v) for k, v in given.items()]
    node = PolicyNode(lambda params, progress: HoldPolicy(), parameter_overrides=overrides)
    node.trigger_configure()
    assert node.lifecycle == "inactive", node.refused
    topics = {p.topic_name if hasattr(p, "topic_name") else p.topic: p.msg_type for p in node.publishers}
    topics |= {s.topic_name: s.msg_type for s in node.subscriptions}
    services = {s.service_name: s.srv_type for s in node.services}
    yield {
        "topics": {n: type_name(t) for n, t in topics.items()},
        "services": {n: type_name(t) for n, t in services.items()},
    }
    node.close(5.0)
    node.destroy_node()


def type_name(kind: type) -> str:
    package, folder, *_ = kind.__module__.split(".")
    return f"{package}/{folder}/{kind.__name__}"


def check_path(topic_path: str, topics: dict[str, str]) -> None:
    """A Foxglove message path: topic, then fields and indices of its message."""
    topic, _, fields = topic_path.partition(".")
    assert topic in topics, topic
    package, folder, name = topics[topic].split("/")
    message: Any = getattr(import_module(f"{package}.{folder}"), name)
    for field in re.sub(r"\[[^]]*\]", "", fields).split("."):
        kinds = message.get_fields_and_field_types()
        assert field in kinds, f"{topic_path}: {message.__name__} has no {field}"
        inner = re.sub(r"^sequence<(.*?)(, \d+)?>$", r"\1", kinds[field])
        if "/" in inner:
            package, name = inner.split("/")
            message = getattr(import_module(f"{package}.msg"), name)


def test_the_foxglove_layout(graph: dict[str, dict[str, str]]) -> None:
    topics = graph["topics"]
    tree = json.loads((CONFIG / "foxglove_layout.json").read_text())
    seen = set()
    for key, panel in tree["configById"].items():
        kind = key.split("!")[0]
        seen.add(kind)
        if kind == "Image":
            assert topics[panel["imageMode"]["imageTopic"]] == IMAGE, key
        elif kind == "Plot":
            for line in panel["paths"]:
                check_path(line["value"], topics)
        elif kind == "RawMessages":
            check_path(panel["topicPath"], topics)
        elif kind == "DiagnosticSummary":
            assert topics[panel["topicToRender"]] == "diagnostic_msgs/msg/DiagnosticArray"
        elif kind == "Publish":
            assert topics[panel["topicName"]] == panel["datatype"] == STRING
            assert set(json.loads(panel["value"])) == {"data"}
        elif kind == "CallService":
            assert graph["services"][panel["serviceName"]] == "std_srvs/srv/Trigger"
        else:
            pytest.fail(f"{key}: a panel that this test does not know")
    assert {"Image", "Plot", "RawMessages", "DiagnosticSummary"} <= seen

    def leaves(node: Any) -> list[str]:
        return [node] if isinstance(node, str) else leaves(node["first"]) + leaves(node["second"])

    assert sorted(leaves(tree["layout"])) == sorted(tree["configById"]), "every panel is placed once"


def test_the_rviz_configuration(graph: dict[str, dict[str, str]]) -> None:
    tree = yaml.safe_load((CONFIG / "wam_policy.rviz").read_text())
    displays = tree["Visualization Manager"]["Displays"]
    shown = {d["Topic"]["Value"]: d["Class"] for d in displays if "Topic" in d}
    assert len(shown) >= 5
    for topic, kind in shown.items():
        assert kind == "rviz_default_plugins/Image" and graph["topics"][topic] == IMAGE, topic
    (robot,) = [d for d in displays if d["Class"] == "rviz_default_plugins/RobotModel"]
    assert graph["topics"][robot["Description Topic"]["Value"]] == STRING


def test_the_record_list(graph: dict[str, dict[str, str]]) -> None:
    names = (CONFIG / "record_topics.txt").read_text().split()
    known = {**graph["topics"], **CLOCK}
    assert len(names) == len(set(names))
    for name in names:
        assert name.removesuffix("/compressed") in known, name
    for needed in ("/joint_states", "/joint_trajectory", "/wam_policy/state", "/diagnostics", "/clock"):
        assert needed in names


def test_the_readme_names_every_topic_and_service_of_the_node(graph: dict[str, dict[str, str]]) -> None:
    text = (CONFIG.parent / "README.md").read_text(encoding="utf-8")
    own = re.compile("param|/get_|/change_state|/transition_event|/describe_|/list_|/set_|rosout")
    names = [n for n in (*graph["topics"], *graph["services"]) if not own.search(n)]
    assert len(names) > 15
    missing = [n for n in names if "`" + n.replace("/wam_policy/", "~/", 1).removeprefix("/") + "`" not in text]
    assert [n for n in missing if f"`{n}`" not in text] == []
