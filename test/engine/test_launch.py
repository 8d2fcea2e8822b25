"""Kernels noted instead of launched, and compiled together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wam_policy_ros.engine.kernels.launch import Launch, Pointer, collecting, compile_together


class Kernel:
    """Remembers what it was asked for."""

    def __init__(self, *names, fails=False):
        constant = {"is_constexpr": False, "do_not_specialize": False}
        self.params = [SimpleNamespace(name=n, **constant | {"is_constexpr": n.isupper()}) for n in names]
        self.fails, self.launched, self.compiled = fails, [], []

    def __getitem__(self, grid):
        return lambda **arguments: self.launched.append(arguments)

    def warmup(self, *, grid, **arguments):
        self.compiled.append((threading.current_thread(), arguments))
        if self.fails:
            raise RuntimeError("no such instruction")


def launch(kernel, x=None, count=32, **more):
    x = torch.zeros(64) if x is None else x
    return Launch(kernel, (1,), {"x_ptr": x, "count": count, "SIZE": 8, "eps": 0.5, **more}, num_warps=4)


NAMES = ("x_ptr", "count", "SIZE", "eps")


def test_what_is_noted_is_not_launched():
    kernel = Kernel(*NAMES)
    with collecting() as noted:
        launch(kernel).run()
        other = threading.Thread(target=launch(kernel, count=5).run)  # somebody else's work is carried out
        other.start()
        other.join()
    assert len(noted) == 1 and [a["count"] for a in kernel.launched] == [5]
    launch(kernel).run()
    assert len(kernel.launched) == 2 and len(noted) == 1


def test_one_launch_of_each_kernel_that_is_compiled_for_itself_and_none_of_their_memory():
    kernel, other = Kernel(*NAMES), Kernel(*NAMES)
    x = torch.zeros(64, dtype=torch.bfloat16)
    same = [launch(kernel), launch(kernel, torch.ones(3, 4)), launch(kernel, count=48), launch(kernel, eps=0.25)]
    different = [launch(kernel, count=5), launch(kernel, count=1), launch(kernel, x), launch(kernel, x[1:])]
    different += [launch(kernel, SIZE=16), launch(other), replace(same[0], num_warps=8)]
    with collecting() as noted:
        for one in (*same, *different, *same):
            one.run()
    assert len(noted) == 1 + len(different)
    pointers = [one.arguments["x_ptr"] for one in noted.values()]
    assert all(isinstance(p, Pointer) for p in pointers) and pointers[0].dtype == torch.float32
    assert (pointers[0].data_ptr() % 16, pointers[0].ptr_range()) == (0, 256)


def test_they_are_compiled_once_each_and_one_that_fails_takes_no_other_along():
    good, bad = Kernel(*NAMES), Kernel(*NAMES, fails=True)
    with collecting() as noted:
        for count in (16, 16, 5):
            launch(good, count=count).run()
            launch(bad, count=count).run()
    assert compile_together(noted, torch.device("cpu")) == 2
    assert len(good.compiled) == len(bad.compiled) == 2 and good.launched == []
    thread, arguments = good.compiled[0]
    assert thread is not threading.current_thread() and arguments["num_warps"] == 4 and arguments["SIZE"] == 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_triton_then_has_every_kernel_and_no_other(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'wam_policy_ros[kernels]'")
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)}
    environment.pop("TRITON_INTERPRET", None)
    program = [sys.executable, str(Path(__file__).with_name("compile_ahead.py")), "sm_90"]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=root, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    *kernels, _ = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) >= 7 and all(k["noted"] == k["compiled"] for k in kernels), kernels
    # Numbers of frames are no reason for another kernel.
    assert {k["kernel"]: k["noted"] for k in kernels}["norm_silu_window_kernel"] == 2
