"""Episodes on disk, their labels, and the windows made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wam_policy_ros.train.episodes import Episode, labels_of, read_all, read_shard, shards, write_shard
from wam_policy_ros.train.errors import DataError
from wam_policy_ros.train.preset import TOY

from .stand_in import episode, network, sources


def test_a_label_holds_the_targets_that_were_sent_and_then_the_last_one():
    actions = np.arange(6, dtype=np.float32)[:, None].repeat(8, 1)
    label = labels_of(actions, np.ones(6, bool), 4)
    assert label.shape == (7, 4, 8)
    assert label[0, :, 0].tolist() == [0, 1, 2, 3]  # row 0 is what is sent from the very step that was seen
    assert label[4, :, 0].tolist() == [4, 5, 5, 5] and label[6, :, 0].tolist() == [5, 5, 5, 5]


def test_rows_with_a_disturbance_in_them_are_nobody_s():
    wanted = np.ones(10, bool)
    wanted[5:7] = False
    known = np.isfinite(labels_of(np.zeros((10, 8), np.float32), wanted, 3)).all((1, 2))
    assert known.tolist() == [True, True, True, False, False, False, False, True, True, True, True]


def test_shards_come_back_as_they_were(tmp_path):
    made = [episode(k, steps=24 + k) for k in range(3)]
    write_shard(tmp_path, "seeds-0", made)
    assert [p.name for p in shards(tmp_path)] == ["seeds-0.npz"]  # nothing partial is left
    for a, b in zip(made, read_shard(tmp_path / "seeds-0.npz"), strict=True):
        for key, value in vars(a).items():
            np.testing.assert_array_equal(value, getattr(b, key))


def test_what_is_no_shard_is_refused(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="not a shard"):
        read_all([tmp_path])
    with pytest.raises(DataError, match="no episodes"):
        read_all([tmp_path / "empty"])
    e = episode(0)
    with pytest.raises(DataError, match="do not fit"):
        Episode(**{**vars(e), "state": e.state[:-1]})


def test_a_window_s_blocks_and_what_they_lack(tmp_path):
    windows = sources(network(), tmp_path, count=2).windows
    # Episode 0: 40 steps, 21 frames (numbers 0 to 20); blocks of an anchor at frame 8 (step 16) are at steps 16, 24, ..
    batch = windows.batch(torch.tensor([8]))
    assert batch.observed[0].tolist() == [8, 12, 16, 20]
    assert batch.following[0].tolist() == [12, 16, 20, 20]
    assert batch.has_video[0].tolist() == [True, True, True, False]
    assert batch.has_rows[0].tolist() == [True, True, True, True]
    # Episode 1 (frames 21 to 41) is disturbed in steps 20 to 22: no labels at steps 5 to 22 that reach into it.
    batch = windows.batch(torch.tensor([21]))
    assert batch.has_rows[0].tolist() == [True, False, False, True]
    # A block that would begin behind the end does not count.
    batch = windows.batch(torch.tensor([16]))
    assert batch.has_rows[0].tolist() == [True, True, False, False]
    assert not batch.has_video[0, 1:].any()


def test_the_rows_of_a_batch_are_those_of_its_steps(tmp_path):
    windows = sources(network(), tmp_path, count=1).windows
    batch = windows.batch(torch.tensor([4]))
    e = episode(0)
    for block, step in enumerate((8, 16, 24, 32)):
        one = windows.batch(torch.tensor([step // TOY.stride]))
        assert torch.equal(batch.rows[0, block], one.rows[0, 0]) and torch.equal(batch.state[0, block], one.state[0, 0])
        relative = torch.from_numpy(e.label[step][:, :7] - e.state[step][None, :7])
        other = torch.from_numpy(e.label[step][:, :7] - e.state[step + 1][None, :7])
        seen = batch.rows[0, block, :, 0]
        # Affine in the relative target, row by row: the same statistics, so the order of steps shows in the values.
        assert torch.isfinite(seen).all() and not torch.allclose(relative, other)
