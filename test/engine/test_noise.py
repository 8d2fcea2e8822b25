"""The noise of the deterministic tier: known integers, known values, the right distribution."""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch

from test.engine.tiny_policy import make_network, shared_network
from wam_policy_ros.engine.noise import ACTION, VIDEO, counted_normal, normal_of, words
from wam_policy_ros.engine.sampler import draw_noise

CPU = torch.device("cpu")

# float64, exactly: (seed, stream) -> the first four values.
VALUES = {
    (1140, VIDEO): ["0x1.d04e90e2d2d9fp+0", "0x1.d9a9b81471a32p-1", "0x1.9564ee29afea5p-5", "0x1.ea43699960891p+0"],
    (1140, ACTION): ["0x1.1a7df474f4cf9p-1", "-0x1.80b44ad8e7f00p-5", "0x1.eeb06bd1e28f8p-3", "0x1.69b1773d43474p-1"],
    (7, VIDEO): ["0x1.493037f76d80fp+0", "0x1.86fda206a82d5p-1", "0x1.ce430f5e5c51fp+0", "-0x1.462c36aeddfffp+0"],
    (7, ACTION): ["-0x1.26c34fdbef1fcp-4", "-0x1.bcaa047e6337ap-5", "-0x1.832aea4a6028ap+0", "0x1.65954205cb514p-3"],
}
# The video noise of a call of the published network, 112640 values: sha256 of its bfloat16 and of its float64 bytes.
WHOLE = {
    1140: (
        "e6d33538f5f58960f5d52aeae09deb05615fd8e1bf7c11b7f5a228acafbb5392",
        "bdcb12003552a917fa1e2736e0bb0cf44ddeab608acacca5df12829bc47e4b26",
    ),
    7: (
        "a7c0bd22a3bcaa355d5a548c8987c7c46948d7d613c7df05d6f1bc99e541a59a",
        "d955c3fe9fb95ae10d7a48bcb49a19440788b084237db72524daf695a27b7ec2",
    ),
}
SHAPE = (1, 16, 2, 44, 80)


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 in Python's integers, from the paper."""
    mask = 2**64 - 1
    c = [(counter >> (64 * i)) & mask for i in range(4)]
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k0, b & mask, (a >> 64) ^ c[3] ^ k1, a & mask]
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c


def test_the_integers_are_philox():
    # The first line of the known answers that the paper's authors publish.
    assert [hex(int(w)) for w in words(0, 0, 4)] == [
        "0x16554d9eca36314c", "0xdb20fe9d672d0fdc", "0xd7e772cee186176b", "0x7e68b68aec7ba23b",
    ]  # fmt: skip
    for seed, stream in ((1140, 0), (1140, 1), (2**63 + 5, 3), (-1, 0)):
        expected = [w for i in range(5) for w in philox(i, (seed % 2**64, stream))]
        assert words(seed, stream, 18).tolist() == expected[:18]


@pytest.mark.parametrize(("seed", "stream"), VALUES)
def test_the_values_are_these(seed, stream):
    assert [v.hex() for v in normal_of(words(seed, stream, 4)).tolist()] == VALUES[seed, stream]


@pytest.mark.parametrize("seed", WHOLE)
def test_all_values_of_a_call_are_these(seed):
    drawn = counted_normal(seed, VIDEO, SHAPE, CPU, torch.bfloat16)
    wide = normal_of(words(seed, VIDEO, drawn.numel()))
    narrow, exact = WHOLE[seed]
    assert hashlib.sha256(wide.tobytes()).hexdigest() == exact
    assert hashlib.sha256(drawn.view(torch.int16).numpy().tobytes()).hexdigest() == narrow
    assert (
        drawn.flatten()[:3].tolist() == [float(torch.tensor(float.fromhex(v)).bfloat16()) for v in VALUES[seed, 0]][:3]
    )


def test_other_vector_instructions_give_the_same_bits():
    """As far as this CPU has any that NumPy and PyTorch can leave out."""
    umath = np._core._multiarray_umath if hasattr(np, "_core") else np.core._multiarray_umath
    there = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__.get(name)]
    if not there:
        pytest.skip("this build of NumPy dispatches nothing here")
    code = (
        "import hashlib, torch; from wam_policy_ros.engine.noise import counted_normal, normal_of, words;"
        "print(hashlib.sha256(normal_of(words(1140, 0, 112640)).tobytes()).hexdigest());"
        "x = counted_normal(1140, 0, (112640,), torch.device('cpu'), torch.bfloat16);"
        "print(hashlib.sha256(x.view(torch.int16).numpy().tobytes()).hexdigest())"
    )
    env = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(there), "ATEN_CPU_CAPABILITY": "default"}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split() == list(reversed(WHOLE[1140]))


def test_it_is_the_inverse_of_the_normal_distribution():
    """Python's own implementation of the same functions, with the library's logarithm, in the middle and the tails."""
    drawn = np.random.default_rng(0).integers(0, 2**64, 20000, dtype=np.uint64)
    ends = np.array([0, 2**64 - 1, 2**63, 2**63 - 1], np.uint64)
    bits = np.concatenate([drawn, ends, np.uint64(1) << np.arange(12, 63, dtype=np.uint64)])
    exact = statistics.NormalDist()
    u = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    expected = np.array([exact.inv_cdf(v) for v in u.tolist()])
    got = normal_of(bits)
    assert (np.abs(got - expected) <= 4e-15 * np.abs(expected)).all() and np.abs(got).max() < 8.3
    assert (np.diff(got[np.argsort(u)]) >= 0).all()


def test_the_values_are_normal():
    x = normal_of(words(3, VIDEO, 400_000))
    assert abs(x.mean()) < 0.006 and abs(x.var() - 1) < 0.01 and abs((x**4).mean() - 3) < 0.06
    below = np.searchsorted(np.sort(x), [-2.0, -1.0, 0.0, 1.0, 2.0]) / len(x)
    assert np.abs(below - [statistics.NormalDist().cdf(v) for v in (-2, -1, 0, 1, 2)]).max() < 0.003
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.006
    assert abs(np.corrcoef(x, normal_of(words(3, ACTION, 400_000)))[0, 1]) < 0.006


def test_a_call_has_the_same_noise_in_every_dtype_and_its_own_for_every_seed():
    network = shared_network()
    latents = torch.zeros(1, 16, 2, 2, 4)
    a, b = draw_noise(1140, latents, network, counted=True), draw_noise(7, latents, network, counted=True)
    narrow = draw_noise(1140, latents, make_network().to(torch.bfloat16), counted=True)
    assert a.video.shape == (1, 16, 2, 2, 4) and a.action.shape == (1, 24, 32) and a.video.dtype is torch.float32
    assert narrow.video.dtype is torch.bfloat16 and torch.equal(narrow.video.float(), a.video)
    assert torch.equal(narrow.action.float(), a.action)
    assert not torch.equal(a.video, b.video) and not torch.equal(a.action, b.action)
    assert not torch.equal(a.video, draw_noise(1140, latents, network).video)
    assert not torch.equal(a.video.flatten()[:100], a.action.flatten()[:100])
