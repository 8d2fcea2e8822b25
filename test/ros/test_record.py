"""A node that records: what the robot's policy and its clients' got and gave, and that the bits are the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.contract.fakes import HoldPolicy, ScriptedPolicy
from wam_policy_ros.contract.interface import Observation
from wam_policy_ros.records.events import CHUNK, CLOSE, OBSERVATION, OPEN
from wam_policy_ros.records.read import open_records
from wam_policy_ros.records.verify import verify
from wam_policy_ros.ros.backend import make_recorder, record_policy
from wam_policy_ros.ros.diagnostics import diagnose
from wam_policy_ros.ros.parameters import NodeParameters

from .conftest import wait_for


def stand(observation: Observation, step: int) -> np.ndarray:
    return np.tile(np.concatenate(list(observation.state.values())), (24, 1))


def parameters(folder: Path, **changes: Any) -> NodeParameters:
    names = [f"joint{i}" for i in range(8)]
    values = {"backend": "hold", "joints.names": names, "record.folder": str(folder), **changes}
    return NodeParameters.from_values(values)


@pytest.mark.usefixtures("ros")
def test_a_node_records_until_it_is_cleaned_up(tmp_path: Path) -> None:
    from .harness import System

    folder = tmp_path / "records"
    system = System(ScriptedPolicy(stand, latency_s=0.02), **{"record.folder": str(folder)})
    try:
        system.robot.wait_state(substate="running")
        wait_for(lambda: len(system.robot.plans()) >= 3, what="plans")
        told = wait_for(lambda: system.robot.state.get("record"))
        assert told["folder"] == str(folder) and told["files"] == 1 and told["trouble"] == ""
    finally:
        system.close()
    (found,) = open_records(folder)
    events = list(found.events())
    assert found.faults == [] and found.header["how"]["policy"] == "hold"
    chunks = [e for e in events if e.topic == CHUNK]
    assert len(chunks) >= 5 and sum(e.topic == OBSERVATION for e in events) >= len(chunks)
    assert {e.topic for e in events} >= {OPEN, CLOSE}
    seen = [e for e in events if e.topic == OBSERVATION][-1]
    assert seen.values["prompt"] == "stir the pot" and seen.arrays["frames/wrist_image_left"].shape[1:] == (180, 320, 3)
    assert seen.arrays["stamps/wrist_image_left"].dtype == np.int64
    report = verify(found, HoldPolicy())
    assert report.proven and report.same == len(chunks)


def test_a_folder_that_cannot_be_written_is_told_at_configure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="no record can be written"):
        make_recorder(parameters(tmp_path / "file" / "x"), lambda level, line: None)
    assert make_recorder(parameters(Path(""), **{"record.folder": ""}), lambda level, line: None) is None


def test_stages_of_a_policy_without_any_are_refused(tmp_path: Path) -> None:
    params = parameters(tmp_path, **{"record.stages": True})
    recorder = make_recorder(params, lambda level, line: None)
    with pytest.raises(ConfigError, match="no stages"):
        record_policy(HoldPolicy(), recorder, params)
    policy = HoldPolicy()
    assert record_policy(policy, None, params) is policy


def test_diagnostics_tell_how_the_record_goes() -> None:
    record = {
        "folder": "/r",
        "written": 7,
        "dropped": 2,
        "nbytes": 2**20,
        "trouble": "the disk is too slow",
        "files": 1,
    }
    state = {"loading": {"phase": "ready", "message": "", "fraction": 1.0}, "record": record}
    policy = diagnose(state)[0]
    assert policy.values["record"] == "7 events, 1.0 MiB in /r, INCOMPLETE: 2 dropped, the disk is too slow"
    assert "record" not in diagnose({**state, "record": None})[0].values
