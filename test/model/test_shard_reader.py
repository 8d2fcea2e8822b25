"""Bytes of many tensors through few large reads: any chunk size, any number of threads, files that end early."""

from __future__ import annotations

import os

import pytest
import torch

from wam_policy_ros.model import shard_reader
from wam_policy_ros.model.errors import CheckpointFileError
from wam_policy_ros.model.shard_reader import Extent, read_tensors

CPU = torch.device("cpu")
SHAPES = [(3, 5), (1,), (0, 4), (64, 33), (), (7,), (200, 11), (2, 2, 2)]
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float64: "F64"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files with gaps between the tensors; (extents in shuffled order, tensors)."""
    folder = tmp_path_factory.mktemp("shards")
    extents, tensors = [], []
    for f in range(2):
        data = bytearray(os.urandom(17))
        for i, shape in enumerate(SHAPES):
            dtype = list(NAMES)[(i + f) % 4]
            tensor = torch.randn(shape).to(dtype)
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            extents.append(Extent(folder / f"{f}.bin", len(data), len(data) + len(raw), NAMES[dtype], shape))
            tensors.append(tensor)
            data += raw + (os.urandom(9) if i % 3 == 0 else b"")
        (folder / f"{f}.bin").write_bytes(data)
    order = torch.randperm(len(extents), generator=torch.Generator().manual_seed(1)).tolist()
    return [extents[i] for i in order], [tensors[i] for i in order]


def _bytes(t):
    return t.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(("chunk", "depth", "threads"), [(37, 1, 1), (97, 3, 2), (2**20, 8, 4), (100, 50, 1)])
def test_every_tensor_arrives_whole(files, chunk, depth, threads):
    extents, tensors = files
    got = dict(read_tensors(extents, CPU, chunk_bytes=chunk, depth=depth, threads=threads))
    assert sorted(got) == list(range(len(extents)))
    for i, tensor in got.items():
        assert tensor.dtype == tensors[i].dtype and tensor.shape == tensors[i].shape
        assert torch.equal(_bytes(tensor), _bytes(tensors[i]))


def test_order_is_that_of_the_files(files):
    extents, _ = files
    order = [i for i, t in read_tensors(extents, CPU, chunk_bytes=50) if t.numel()]
    assert order == sorted(order, key=lambda i: (extents[i].shard, extents[i].begin))


def test_few_large_reads(files, monkeypatch):
    extents, _ = files
    reads = []
    real = os.preadv
    monkeypatch.setattr(shard_reader.os, "preadv", lambda f, v, at: (reads.append(sum(map(len, v))), real(f, v, at))[1])
    list(read_tensors(extents, CPU))
    assert len(reads) <= 10 < len(extents) and sum(reads) == sum(e.end - e.begin for e in extents)


def test_short_reads_go_on(files, monkeypatch):
    extents, tensors = files
    real = os.preadv
    monkeypatch.setattr(shard_reader.os, "preadv", lambda f, v, at: real(f, [v[0][:97]], at))
    got = dict(read_tensors(extents, CPU))
    assert all(
        torch.equal(got[i].view(-1).view(torch.uint8), t.view(-1).view(torch.uint8)) for i, t in enumerate(tensors)
    )


def test_only_what_is_in_flight_is_held(files):
    """A consumer that stops early leaves no reader behind and no file open."""
    extents, _ = files
    before = len(os.listdir("/proc/self/fd"))
    reader = read_tensors(extents, CPU, chunk_bytes=64, depth=2)
    for _ in range(3):
        next(reader)
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_ends_early(tmp_path):
    (tmp_path / "a").write_bytes(b"12345678")
    with pytest.raises(CheckpointFileError, match="ends early, at byte 8"):
        list(read_tensors([Extent(tmp_path / "a", 0, 16, "F32", (4,))], CPU))
    with pytest.raises(CheckpointFileError, match="cannot be read"):
        list(read_tensors([Extent(tmp_path / "b", 0, 16, "F32", (4,))], CPU))
