"""A first and a later call in a throwaway session, so that no robot waits for kernels to be built."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .fakes import example_observation
from .interface import Policy


def warm_up(
    policy: Policy, progress: Callable[[str, float], None], cancelled: Callable[[], bool] = lambda: False
) -> Iterator[float]:
    """Seconds of the first call and of a later one, each as it ends.

    Args:
        progress: told before each call; may raise to give up.
    """
    spec, session = policy.spec, policy.open()
    step_ns = 1e9 / spec.control_rate_hz
    later = len(spec.frame_offsets)
    try:
        for call, frames in enumerate((1, later)):
            progress(f"warm-up call {call + 1} of 2", call / 2)
            stamp_ns = 10**9 - round(min(spec.frame_offsets) * step_ns) * (call + 1)
            observation = example_observation(spec, frames=frames, stamp_ns=stamp_ns)
            start = time.monotonic()
            policy.infer(session, observation, cancelled=cancelled)
            yield time.monotonic() - start
    finally:
        policy.close(session)
