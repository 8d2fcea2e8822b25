"""Which room may import which, and where each third-party package lives. Every import counts, deferred ones too.

The table is the architecture: a new import that fails here either belongs elsewhere, or the table changes in a
deliberate commit of its own.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "wam_policy_ros"
SOURCE = Path(__file__).resolve().parents[1] / PACKAGE

# Room -> rooms it may import. No room imports the outbuildings sim, train and tools; the command line knows them
# all, and what trains a network needs the network, the engine that will run it and the simulator it learns in.
# records is a room because what it writes is a policy's, whoever asks it: the node and the server wrap theirs alike,
# and neither a robot's computer without torch nor one without websockets is to need the other's packages for it.
ROOMS: dict[str, set[str]] = {
    "contract": set(),
    "model": set(),
    "engine": {"contract", "model"},
    "serving": {"contract"},
    "records": {"contract"},
    "ros": {"contract"},
    "sim": {"contract"},
    "train": {"contract", "model", "engine", "sim"},
    "tools": {"contract", "model", "engine", "serving", "records", "sim", "train"},
}
# One file may know more than its room does.
DOORS: dict[str, set[str]] = {"ros/backend.py": {"engine", "serving", "records"}, "sim/sim_node.py": {"ros"}}

ROS_PACKAGES = (
    *("rclpy", "ament_index_python", "action_msgs", "builtin_interfaces", "control_msgs", "diagnostic_msgs"),
    *("geometry_msgs", "lifecycle_msgs", "rcl_interfaces", "rosgraph_msgs", "sensor_msgs", "std_msgs", "std_srvs"),
    "trajectory_msgs",
)
# Package -> rooms or folders where it may be imported. What is not listed may be imported nowhere.
HOMES: dict[str, set[str]] = {
    "numpy": {"contract", "engine", "serving", "records", "ros", "sim", "train", "tools"},
    "yaml": {"contract", "engine", "ros", "train", "tools"},
    "torch": {"model", "engine", "train", "tools"},
    "safetensors": {"model", "records/events.py", "tools"},
    "mcap": {"records/files.py"},
    "tokenizers": {"model"},
    "sentencepiece": {"model"},
    "ftfy": {"model"},
    "triton": {"engine/kernels", "train/fused_norm.py"},
    "cudnn": {"engine/kernels"},
    "websockets": {"serving", "tools/bench_suite"},
    "msgpack": {"serving", "tools/bench_suite"},
    "prometheus_client": {"serving"},
    "PIL": {"serving"},
    "mujoco": {"sim"},
    "cv2": {"ros", "sim", "tools"},
    "cv_bridge": {"ros/bridge.py"},
    "rosbags": {"ros/recording.py"},
    "av": {"train/lerobot.py", "tools"},
    "matplotlib": {"train/runlog.py", "tools"},
    "pyarrow": {"train/lerobot.py"},
} | {name: {"ros", "sim/sim_node.py"} for name in ROS_PACKAGES}


# Functions that import what they are told.
LOADERS = ("import_module", "__import__", "run_module", "resolve_name")


def sources() -> dict[str, str]:
    """Path in the package -> text, of every file."""
    return {p.relative_to(SOURCE).as_posix(): p.read_text(encoding="utf-8") for p in sorted(SOURCE.rglob("*.py"))}


def violations(package: dict[str, str]) -> list[str]:
    """Every import that breaks a rule, one line each: ``file:line: what``; of ``sources()``, or as they might be."""
    found: list[str] = []
    edges: dict[str, set[str]] = {}
    for where, text in sorted(package.items()):
        room = where.split("/")[0]
        if "/" in where and room not in ROOMS:
            found.append(f"{where}:1: {room!r} is not a room; expected one of {sorted(ROOMS)}")
            continue
        found += [f"{where}:{line}: {what}" for line, what in _through_doors(package, where, text)]
        for line, target in _imports(text, where):
            if "/" not in where:
                fault: str | None = f"the top of the package imports {target or 'something'}; it may import nothing"
            elif target is None:
                fault = "imports a computed name, which cannot be checked"
            else:
                fault = _fault(where, room, target)
                other = _room_of(target)
                if other is not None and other != room:
                    edges.setdefault(room, set()).add(other)
            if fault:
                found.append(f"{where}:{line}: {fault}")
    cycle = _cycle(edges)
    return [*found, f"rooms import each other in a circle: {' -> '.join(cycle)}"] if cycle else found


def _through_doors(package: dict[str, str], where: str, text: str) -> Iterator[tuple[int, str]]:
    """Names that a file takes from a door of its room although the door only imported them itself."""
    for door in (d for d in DOORS if d != where and d.split("/")[0] == where.split("/")[0]):
        module = door.removesuffix(".py").replace("/", ".")
        if door not in package:
            continue
        for line, of, names in _taken(text):
            if of not in (f"{PACKAGE}.{module}", module.split(".")[-1]):
                continue
            for name in names:
                if name not in _defined(package[door]):
                    yield line, f"takes {name!r} through the door {door}, which only imported it"


@functools.cache
def _taken(text: str) -> tuple[tuple[int, str | None, tuple[str, ...]], ...]:
    """(line, module, names) of every ``from`` import in a file's text."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
    return tuple((n.lineno, n.module, tuple(a.name for a in n.names)) for n in nodes)


@functools.cache
def _defined(text: str) -> frozenset[str]:
    """Functions and classes that a file's text defines."""
    return frozenset(n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef))


def _room_of(target: str) -> str | None:
    """Room of a dotted module name, None for third parties and for the package itself."""
    parts = target.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def _fault(where: str, room: str, target: str) -> str | None:
    top = target.split(".")[0]
    if target.startswith("."):
        return f"relative import {target!r} leaves the room; write {PACKAGE}.<room>"
    if top != PACKAGE:
        if top in sys.stdlib_module_names:
            return None
        if top not in HOMES:
            return f"third-party package {top!r} is on no list"
        if not any(f"{where}/".startswith(f"{home}/") for home in HOMES[top]):
            return f"third-party package {top!r} may be imported only in {sorted(HOMES[top])}"
        return None
    other = _room_of(target)
    if other is None or other == room or other in ROOMS[room] or other in DOORS.get(where, set()):
        return None
    if other not in ROOMS:
        return f"imports {target}, which is in no room"
    return f"{room} imports {other}; it may import {sorted(ROOMS[room]) or 'no room'}"


@functools.cache
def _imports(text: str, where: str) -> tuple[tuple[int, str | None], ...]:
    """(line, dotted name) of every import in a file's text; None for a name that is computed."""
    found: list[tuple[int, str | None]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            found += [(node.lineno, name) for name in _from_names(node, where)]
            # Under another name its calls would not be found below.
            found += [(node.lineno, None) for a in node.names if a.name == "import_module" and a.asname]
        elif isinstance(node, ast.Call) and _called(node) in LOADERS:
            words = [k.value for k in node.keywords if k.arg in ("name", "mod_name")]
            argument = next(iter([*node.args, *words]), None)
            found.append((node.lineno, None if argument is None else _literal(argument)))
    return tuple(found)


def _from_names(node: ast.ImportFrom, where: str) -> Iterator[str]:
    """Absolute names of a ``from`` import; one that leaves its room through dots keeps the dots."""
    if node.level == 0:
        base = node.module or ""
        # "from wam_policy_ros import engine" names a room, "from wam_policy_ros import __version__" does not.
        if base == PACKAGE:
            rooms = [a.name for a in node.names if a.name in ROOMS or a.name == "*"]
            yield from (f"{PACKAGE}.{name}" for name in rooms)
        else:
            yield base
        return
    parents = [PACKAGE, *where.split("/")[:-1]]
    kept = parents[: len(parents) - node.level + 1]
    if len(kept) < 2:
        yield "." * node.level + (node.module or "")
    else:
        yield ".".join([*kept, *([node.module] if node.module else [])])


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _literal(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
        prefix = str(node.values[0].value)
        # f"wam_policy_ros.tools.{name}": the room is known, the module in it need not be.
        return prefix.rstrip(".") if prefix.startswith(f"{PACKAGE}.") and prefix.count(".") >= 2 else None
    return None


def _cycle(edges: dict[str, set[str]]) -> list[str]:
    """One circle of rooms, or nothing."""
    for start in sorted(edges):
        stack = [[start]]
        while stack:
            path = stack.pop()
            for following in sorted(edges.get(path[-1], ())):
                if following == start:
                    return [*path, start]
                if following not in path:
                    stack.append([*path, following])
    return []


# -- the package ------------------------------------------------------------------------------------------------


def test_the_package_keeps_the_rules():
    assert violations(sources()) == []


def test_every_file_is_read():
    assert {where.split("/")[0] for where in sources()} >= {"contract", "model", "engine", "tools"}
    assert len(sources()) > 50


# -- the checker: one planted violation per rule ----------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> dict[str, str]:
    return sources()


@pytest.fixture
def copy(whole):
    return dict(whole)


def _plant(package: dict[str, str], where: str, code: str) -> list[str]:
    package[where] = f"{package.get(where, '')}\n{code}\n"
    return violations(package)


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        # rooms
        ("contract/x.py", "from wam_policy_ros.model.config import DiTConfig", "contract imports model"),
        ("contract/x.py", "import wam_policy_ros.engine.policy", "contract imports engine"),
        ("model/x.py", "from wam_policy_ros.contract.errors import WamError", "model imports contract"),
        ("model/x.py", "from wam_policy_ros.engine import config", "model imports engine"),
        ("engine/x.py", "from wam_policy_ros.serving.codec import pack", "engine imports serving"),
        ("engine/x.py", "from wam_policy_ros.ros import worker", "engine imports ros"),
        ("serving/x.py", "from wam_policy_ros.engine.policy import DreamZeroPolicy", "serving imports engine"),
        ("serving/x.py", "from wam_policy_ros.model import dit", "serving imports model"),
        ("ros/x.py", "from wam_policy_ros.engine.build import build_policy", "ros imports engine"),
        ("ros/x.py", "from wam_policy_ros.serving.codec import pack", "ros imports serving"),
        ("ros/x.py", "from wam_policy_ros.model import dit", "ros imports model"),
        ("ros/x.py", "from wam_policy_ros.records.recorder import Recorder", "ros imports records"),
        ("serving/x.py", "from wam_policy_ros.records import events", "serving imports records"),
        ("records/x.py", "from wam_policy_ros.engine.policy import DreamZeroPolicy", "records imports engine"),
        ("records/policy.py", "import mcap.writer", "'mcap' may be imported only in ['records/files.py']"),
        ("ros/backend.py", "from wam_policy_ros.model import dit", "ros imports model"),
        ("sim/x.py", "from wam_policy_ros.ros.worker import InferenceWorker", "sim imports ros"),
        ("sim/sim_node.py", "from wam_policy_ros.engine import build", "sim imports engine"),
        ("tools/x.py", "from wam_policy_ros.ros.worker import InferenceWorker", "tools imports ros"),
        ("tools/golden_suite/x.py", "from wam_policy_ros import ros", "tools imports ros"),
        ("engine/x.py", "from wam_policy_ros.tools import golden", "engine imports tools"),
        ("ros/x.py", "from wam_policy_ros.tools import golden", "ros imports tools"),
        ("ros/x.py", "from wam_policy_ros.sim import scene", "ros imports sim"),
        ("engine/x.py", "from wam_policy_ros.train import forward", "engine imports train"),
        ("sim/x.py", "from wam_policy_ros.train import rollout", "sim imports train"),
        ("train/x.py", "from wam_policy_ros.ros import worker", "train imports ros"),
        ("train/x.py", "import mujoco", "'mujoco'"),
        ("engine/x.py", "from wam_policy_ros.sim import scene", "engine imports sim"),
        ("ros/x.py", "from .backend import build_policy", "through the door ros/backend.py"),
        ("ros/x.py", "from wam_policy_ros.ros.backend import build_policy", "through the door"),
        ("contract/x.py", 'import importlib\nimportlib.import_module(name="torch")', "'torch'"),
        ("contract/x.py", '__import__(name="torch")', "'torch'"),
        ("tools/x.py", 'import runpy\nrunpy.run_module("wam_policy_ros.ros.main")', "tools imports ros"),
        ("contract/x.py", 'import pkgutil\npkgutil.resolve_name("torch")', "'torch'"),
        ("engine/x.py", "from wam_policy_ros.attic import y", "which is in no room"),
        ("attic/x.py", "import math", "'attic' is not a room"),
        ("__init__.py", "from wam_policy_ros.contract import errors", "the top of the package imports"),
        ("__init__.py", "import os", "the top of the package imports os"),
        ("extra.py", "from . import contract", "the top of the package imports"),
        # ways to write it
        ("model/x.py", "def f():\n    from wam_policy_ros.engine import config", "model imports engine"),
        ("model/x.py", "class A:\n    def f(self):\n        import wam_policy_ros.engine.build", "imports engine"),
        ("model/x.py", "try:\n    import wam_policy_ros.engine\nexcept ImportError:\n    pass", "model imports engine"),
        ("model/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from wam_policy_ros.engine import a",
         "model imports engine"),
        ("model/x.py", "import math, wam_policy_ros.engine", "model imports engine"),
        ("model/x.py", "from wam_policy_ros import contract, engine", "model imports engine"),
        ("model/x.py", "from wam_policy_ros import *", "in no room"),
        ("model/x.py", "from ..engine import config", "leaves the room"),
        ("model/x.py", "from .. import engine", "leaves the room"),
        ("tools/golden_suite/x.py", "from ...ros import worker", "leaves the room"),
        ("model/x.py", "import importlib\nimportlib.import_module('wam_policy_ros.engine.config')", "imports engine"),
        ("model/x.py", "from importlib import import_module\nimport_module('wam_policy_ros.engine')",
         "model imports engine"),
        ("model/x.py", "from importlib import import_module as load", "computed name"),
        ("model/x.py", "__import__('wam_policy_ros.engine')", "model imports engine"),
        ("model/x.py", "import importlib\nimportlib.import_module(f'wam_policy_ros.engine.{1}')", "imports engine"),
        ("model/x.py", "import importlib\nimportlib.import_module('..engine', __package__)", "leaves the room"),
        ("model/x.py", "import importlib\nimportlib.import_module('wam' + '_policy_ros.engine')", "computed name"),
        ("model/x.py", "import importlib\nimportlib.import_module(f'wam_policy_ros.{1}')", "computed name"),
        # third parties
        ("contract/x.py", "import torch", "'torch' may be imported only in ['engine', 'model', 'tools', 'train']"),
        ("ros/x.py", "import torch", "'torch'"),
        ("serving/x.py", "def f():\n    import torch.nn", "'torch'"),
        ("engine/x.py", "from safetensors import safe_open", "'safetensors'"),
        ("engine/x.py", "import triton", "'triton' may be imported only in ['engine/kernels', 'train/fused_norm.py']"),
        ("engine/kernels_of_mine.py", "import triton.language", "'triton'"),
        ("engine/x.py", "import tokenizers", "'tokenizers'"),
        ("engine/x.py", "import ftfy", "'ftfy'"),
        ("ros/x.py", "import websockets", "'websockets'"),
        ("tools/x.py", "import msgpack", "'msgpack'"),
        ("engine/x.py", "import rclpy", "'rclpy' may be imported only in ['ros', 'sim/sim_node.py']"),
        ("tools/x.py", "from sensor_msgs.msg import Image", "'sensor_msgs'"),
        ("contract/x.py", "from trajectory_msgs.msg import JointTrajectory", "'trajectory_msgs'"),
        ("sim/x.py", "import rclpy.node", "'rclpy'"),
        ("tools/x.py", "import mujoco", "'mujoco' may be imported only in ['sim']"),
        ("engine/x.py", "import cv2", "'cv2'"),
        ("serving/x.py", "import cv2", "'cv2'"),
        ("model/x.py", "import yaml", "'yaml'"),
        ("model/x.py", "import numpy as np", "'numpy'"),
        ("serving/x.py", "import yaml", "'yaml'"),
        ("ros/x.py", "import av", "'av'"),
        ("ros/x.py", "import matplotlib.pyplot as plt", "'matplotlib'"),
        ("engine/x.py", "import diffusers", "'diffusers' is on no list"),
        ("tools/x.py", "def f():\n    import pandas", "'pandas' is on no list"),
        ("model/x.py", "import importlib\nimportlib.import_module('flash_attn')", "'flash_attn' is on no list"),
    ],
)  # fmt: skip
def test_a_planted_violation_is_caught_and_named(copy, where, code, words):
    named = _plant(copy, where, code)
    assert any(line.startswith(f"{where}:") and words in line for line in named), named
    # Nothing else is blamed, but a circle that the plant may close.
    assert all(line.startswith((f"{where}:", "rooms import each other")) for line in named), named


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("ros/backend.py", "from wam_policy_ros.engine.build import build_policy"),
        ("ros/backend.py", "from wam_policy_ros.serving import codec"),
        ("ros/backend.py", "from wam_policy_ros.records.recorder import Recorder"),
        ("sim/sim_node.py", "from wam_policy_ros.ros.worker import InferenceWorker"),
        ("sim/sim_node.py", "import rclpy"),
        ("tools/eval.py", "from wam_policy_ros.sim import rollout"),
        ("sim/world.py", "import mujoco, cv2, numpy"),
        ("engine/kernels/rope.py", "import triton\nimport triton.language as tl"),
        ("engine/kernels/rope.py", "from ..policy import DreamZeroPolicy"),
        ("tools/golden_suite/x.py", "from ..golden import run\nfrom wam_policy_ros import __version__"),
        ("tools/x.py", "import importlib\nimportlib.import_module(f'wam_policy_ros.tools.{1}')"),
        ("ros/x.py", "import rclpy.node\nfrom std_msgs.msg import String"),
        ("contract/x.py", "from __future__ import annotations\nimport json, yaml, numpy"),
    ],
)
def test_what_is_allowed_is_not_blamed(copy, where, code):
    assert _plant(copy, where, code) == []


def test_a_circle_of_rooms_is_named(copy):
    _plant(copy, "model/x.py", "from wam_policy_ros.serving import codec")
    named = _plant(copy, "serving/x.py", "def f():\n    from wam_policy_ros.engine import policy")
    assert "rooms import each other in a circle: engine -> model -> serving -> engine" in named
    assert not any("circle" in line for line in violations(sources()))
