"""Faults for a while: nothing is mixed, nothing is lost without a word, and memory is in the end where it was.

For longer than the few seconds of every run: ``WAM_SOAK_S=300 pytest -s test/serving/test_soak.py``.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="needs torch (extra engine)")

from test.serving.soak import Process, Soak

SECONDS = float(os.environ.get("WAM_SOAK_S", "3"))


@pytest.mark.timeout(120 + 2 * SECONDS)
def test_faults_for_a_while_leave_nothing_behind():
    soak = Soak(seed=1) if SECONDS < 30 else Soak(seed=2, clients=5, scripts=3, hang_share=0.1)
    soak.run(SECONDS / 3)  # what is made once
    before = Process.now()
    soak.run(SECONDS)
    after, told = Process.now(), soak.tally
    print(f"\n{SECONDS:g} s: {told}\n{len(soak.path.struck)} faults; {before} -> {after}")
    assert not told.wrong
    assert told.sent == told.answered > 0
    assert told.chunks > 0 and told.robot_chunks > 0 and soak.path.struck and told.errors
    assert soak.policy.lost is None
    assert (after.threads, after.files) == (before.threads, before.files)
    assert after.rss_mib - before.rss_mib < 32, "one window and one step are less"
