"""Sub-commands that are imported when they are asked for, and say which extra they need."""

from __future__ import annotations

import argparse
import difflib
import importlib
from types import ModuleType
from typing import Any

from wam_policy_ros.contract.errors import MissingDependency

_EXTRAS = {"torch": "engine", "safetensors": "engine", "ftfy": "engine", "tokenizers": "engine"} | {
    "av": "demo",
    "cv2": "vision",
    "matplotlib": "demo",
    "mcap": "record",
    "mujoco": "sim",
    "pyarrow": "train",
    "rclpy": "ros-kilted",
    "msgpack": "serve",
    "websockets": "serve",
    "prometheus_client": "serve",
}


def load(module: str, command: str) -> ModuleType:
    """The module of a sub-command, ``module`` relative to this package.

    Raises:
        MissingDependency: it needs a package that is not installed.
    """
    try:
        return importlib.import_module(f"wam_policy_ros.tools.{module}")
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").split(".")[0])
        if extra is None:
            raise
        raise MissingDependency(str(error.name), extra, command) from error


class StrictParser(argparse.ArgumentParser):
    """A sub-command's parser that refuses words it does not know itself, and names the nearest option.

    argparse leaves them to the outermost parser, whose usage says nothing about the sub-command's options.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=")[0]
            near = difflib.get_close_matches(word, self._option_string_actions, n=1) if word.startswith("-") else []
            hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists what there is"
            self.error(f"unrecognized arguments: {' '.join(unknown)}; {hint}")
        return found, unknown


class LazyParser(StrictParser):
    """A parser whose arguments come from a module's ``add_arguments``, which is imported only when words reach it.

    Sets ``module`` in the namespace, so that the caller can go on with its ``run(args)``.
    """

    def __init__(self, *args: Any, module: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._module = module

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._module:
            name, self._module = self._module, ""
            module = load(name, self.prog)
            module.add_arguments(self)
            self.set_defaults(module=module)
        return super().parse_known_args(args, namespace)
