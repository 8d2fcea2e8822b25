"""Note launches, compile them in threads for a GPU that is not there, and print what Triton then has, one JSON line per
kernel. A program of its own: see ``compile_kernels.py``."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from test.engine.compile_kernels import launches
from wam_policy_ros.engine.kernels import conv3d_triton
from wam_policy_ros.engine.kernels.launch import MACHINES, Launch, collecting, compile_together


class NoGPU:
    """What the compiler asks a driver."""

    def __init__(self, name: str) -> None:
        machine = MACHINES[name]
        self.target = GPUTarget(machine.backend, machine.arch, machine.warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def vae() -> None:
    """Windows that differ in their numbers of frames, and one with what nothing precedes."""
    for frames, before in ((1, 1), (2, 2), (4, 2), (2, 0)):
        x = torch.empty(1, frames, 6, 7, 96, dtype=torch.bfloat16)
        past = torch.empty(1, 2, 6, 7, 96, dtype=torch.bfloat16) if before else None
        conv3d_triton.norm_silu_window(x, None, x[0, 0, 0, 0], past, frames=frames, stacked=True, stepwise=True)
        conv3d_triton.padded_sum(x, x)


def main(name: str) -> int:
    driver.set_active(NoGPU(name))
    with collecting() as noted:
        for _, launch in launches(name, MACHINES[name]):
            launch.run()
            launch.run()  # the same again
        vae()
    begin = time.perf_counter()
    count = compile_together(noted, torch.device("cpu"))
    wanted = Counter(launch.kernel for launch in noted.values())
    for kernel, number in wanted.items():
        cached = kernel.device_caches[0][0]
        print(json.dumps({"kernel": kernel.fn.__name__, "noted": number, "compiled": len(cached)}))
    assert all(isinstance(launch, Launch) for launch in noted.values()) and count == len(noted) > 10
    print(json.dumps({"seconds": time.perf_counter() - begin, "triton": triton.__version__}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
