"""What the documents say about the node is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import cv2

from wam_policy_ros.ros.parameter_table import table
from wam_policy_ros.ros.parameters import NodeParameters

ROOT = Path(__file__).parents[2]


def test_the_table_of_parameters_is_the_code() -> None:
    text = (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8")
    assert text == table(), "python -m wam_policy_ros.ros.parameter_table > docs/parameters.md"
    rows = re.findall(r"^\| `([\w.]+)` \|", text, re.M)
    assert rows == list(NodeParameters.names())


def test_parameters_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    groups = {n.split(".")[0] for n in NodeParameters.names() if "." in n} - {"server"}
    found = set(re.findall(rf"`((?:{'|'.join(groups)})\.[a-z_]+)(?:: [^`]*)?`", text)) - {"image.raw"}
    assert found and found <= set(NodeParameters.names()), found - set(NodeParameters.names())


def test_the_picture_of_the_readme_is_there_and_small() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        path = ROOT / name
        assert path.stat().st_size < 300_000 and cv2.imread(str(path)) is not None, name
