"""``docs/parameters.md``, from the code: ``python -m wam_policy_ros.ros.parameter_table > docs/parameters.md``."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from .parameters import NodeParameters

_HEAD = """\
# Parameters of the node `wam_policy`

Made by `python -m wam_policy_ros.ros.parameter_table > docs/parameters.md`; `ros2 param describe /wam_policy NAME` and
[`config/dreamzero.yaml`](../config/dreamzero.yaml) say the same. Whole numbers are accepted for doubles. A parameter
can change *until configure* (and after cleanup), *always*, only *tighter* while the node is configured, or only *at
start* of the process; what is refused says why.
"""


def table() -> str:
    """One table per group, in the order of declaration."""
    lines, group = [_HEAD.rstrip()], None
    for name, f in NodeParameters.names().items():
        own = name.split(".")[0] if "." in name else "general"
        if own != group:
            group = own
            lines += [
                "",
                f"## {own}",
                "",
                "| parameter | default | unit, values | changes | meaning |",
                "|---|---|---|---|---|",
            ]
        lines.append(_row(name, f))
    return "\n".join(lines) + "\n"


def _row(name: str, f: dataclasses.Field[Any]) -> str:
    meta = f.metadata
    default = json.dumps(list(f.default) if isinstance(f.default, tuple) else f.default)
    values = [meta["unit"]] if meta["unit"] else []
    values += [f"{meta['low']:.12g} to {meta['high']:.12g}"] if meta["low"] is not None else []
    values += [", ".join(f"`{json.dumps(c)}`" for c in meta["choices"])] if meta["choices"] else []
    changes = "at start" if meta["read_only"] else "always" if meta["live"] else "until configure"
    changes = "tighter" if meta["tightens"] else changes
    cells = (f"`{name}`", f"`{default}`", ", ".join(values), changes, meta["doc"].replace("|", "\\|"))
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    print(table(), end="")
