"""Hashes of weights: every byte counts, what is kept is believed only while the file is untouched."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest
import torch

from test.tiny_checkpoint import tiny_network, write_checkpoint
from wam_policy_ros.engine.fp8_checkpoint import write_fp8_checkpoint
from wam_policy_ros.model import fingerprint as f
from wam_policy_ros.model.checkpoint import read_folder


@pytest.fixture
def shards(tmp_path):
    paths = [tmp_path / f"model-{i}.safetensors" for i in range(3)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 300_000 + os.urandom(200_000))
    return paths


@pytest.fixture
def reads(monkeypatch):
    """Names of the files that were read."""
    seen, original = [], f.hash_file
    monkeypatch.setattr(f, "hash_file", lambda path, stop=None: (seen.append(path.name), original(path, stop))[1])
    return seen


def flip(path, at):
    """One bit, leaving size and modification time as they were."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_every_byte_of_every_shard_counts(shards):
    seen = {f.full_hash(shards)}
    sampled = f.fingerprint(shards)
    for shard in shards:
        for at in (9, 250_001, 499_999):
            flip(shard, at)
            seen.add(f.full_hash(shards))
    assert len(seen) == 10 and all(s.startswith("sha256:") and len(s) == 71 for s in seen)
    flip(shards[0], 9)  # the samples see some of them only
    assert sampled.startswith("sampled-")


def test_it_is_made_of_names_sizes_and_plain_hashes(shards):
    lines = [f"{p.name} 500000 {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in shards]
    assert f.full_hash(reversed(shards)) == "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def test_what_was_hashed_is_not_read_again(shards, reads):
    assert f.known_hash(shards) is None and not reads
    first = f.full_hash(shards)
    assert sorted(reads) == [p.name for p in shards]
    assert f.known_hash(shards) == first and f.full_hash(shards) == first and len(reads) == 3
    flip(shards[1], 77)
    assert f.known_hash(shards) is None
    second = f.full_hash(shards)
    assert second != first and reads[3:] == [shards[1].name]
    with f.FullHash(shards, trust=False) as job:
        assert job.result() == second
    assert len(reads) == 7


def test_a_renamed_or_copied_shard_is_read(shards, reads):
    f.full_hash(shards)
    copy = shards[0].with_name("copy.safetensors")
    copy.write_bytes(shards[0].read_bytes())
    os.utime(copy, ns=(shards[0].stat().st_atime_ns, shards[0].stat().st_mtime_ns))
    kept = json.loads((copy.parent / f.KNOWN).read_text())
    (copy.parent / f.KNOWN).write_text(json.dumps(kept | {copy.name: kept[shards[0].name]}))
    f.full_hash([copy])
    assert reads[3:] == [copy.name]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model-0.safetensors": 7}', '{"model-0.safetensors": {}}'])
def test_a_damaged_record_is_not_believed(shards, reads, text):
    expected = f.full_hash(shards)
    (shards[0].parent / f.KNOWN).write_text(text)
    assert f.known_hash(shards) is None and f.full_hash(shards) == expected == f.known_hash(shards)


def test_a_file_that_changes_while_it_is_read_is_not_known(shards, monkeypatch):
    original = f.hash_file

    def slow(path, stop=None):
        out = original(path, stop)
        if path == shards[0]:
            flip(path, 5)
        return out

    monkeypatch.setattr(f, "hash_file", slow)
    f.full_hash(shards)
    monkeypatch.setattr(f, "hash_file", original)
    assert f.known_hash(shards) is None and f.known_hash(shards[1:]) is not None


def test_a_folder_that_cannot_be_written(shards, reads, monkeypatch):
    from pathlib import Path

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(Path, "write_text", refuse)
    first = f.full_hash(shards)
    assert f.full_hash(shards) == first and len(reads) == 6 and not (shards[0].parent / f.KNOWN).exists()


def test_it_is_given_up_with_the_loading(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    path.write_bytes(bytes(64))
    monkeypatch.setattr(f, "READ_BYTES", 1)
    original, started = hashlib.sha256, []

    class Slow:
        def __init__(self):
            self.real = original()

        def update(self, data):
            started.append(True)
            time.sleep(0.05)

    monkeypatch.setattr(f.hashlib, "sha256", Slow)
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError), f.FullHash([path]):
        1 / 0  # noqa: B018
    assert time.monotonic() - begin < 2.0


def test_tensors_without_a_file():
    a, b = tiny_network(0).state_dict(), tiny_network(0).state_dict()
    assert f.tensors_hash(a) == f.tensors_hash(b) != f.tensors_hash(tiny_network(1).state_dict())
    name = next(iter(b))
    changed = b[name].clone()
    changed.view(-1).view(torch.int32)[0] ^= 1
    assert f.tensors_hash({**b, name: changed}) != f.tensors_hash(a)
    assert f.tensors_hash({k: v.bfloat16() for k, v in a.items()}) != f.tensors_hash(a)


def test_a_quantised_checkpoint_is_hashed_as_it_is_written(tmp_path):
    source = read_folder(write_checkpoint(tmp_path / "source"))
    write_fp8_checkpoint(source, tmp_path / "eight", device=torch.device("cpu"), progress=lambda *a: None)
    shards = sorted((tmp_path / "eight").glob("*.safetensors"))
    known = f.known_hash(shards)
    (tmp_path / "eight" / f.KNOWN).unlink()
    assert known is not None and known == f.full_hash(shards)
