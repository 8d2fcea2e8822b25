"""The text encoder whose weights wait on the host."""

from __future__ import annotations

import threading

import pytest
import torch

from test.engine.tiny_policy import TEXT_LEN, make_network
from wam_policy_ros.engine import streamed_text
from wam_policy_ros.engine.streamed_text import StreamedTextEncoder

CPU = torch.device("cpu")


@pytest.fixture
def texts():
    ids = torch.randint(2, 60, (1, TEXT_LEN), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[:, 40:] = 0
    return ids, mask


def test_the_same_bits_before_while_and_after_the_weights_move(texts, monkeypatch):
    network = make_network()
    expected = network.text_encoder(*texts)
    sizes = [t.nbytes for block in network.text_encoder.blocks for t in block.state_dict().values()]
    turn, moved = threading.Semaphore(0), threading.Semaphore(0)
    take = streamed_text._Room.take

    def one_at_a_time(self, weights):
        turn.acquire()
        out = take(self, weights)
        moved.release()
        return out

    monkeypatch.setattr(streamed_text._Room, "take", one_at_a_time)
    streamed = StreamedTextEncoder(network.text_encoder, CPU)
    assert streamed.nbytes == sum(sizes)
    assert all(p.is_meta for p in network.text_encoder.blocks.parameters())
    assert network.text_encoder.token_embedding.weight.is_meta
    assert torch.equal(streamed(*texts), expected)
    for _ in network.text_encoder.blocks:
        turn.release()
        moved.acquire()
        assert torch.equal(streamed(*texts), expected)
    streamed.settle()
    assert torch.equal(streamed(*texts), expected)


def test_weights_share_chunks_of_host_memory(monkeypatch):
    monkeypatch.setattr(streamed_text, "_CHUNK_BYTES", 1 << 14)
    room = streamed_text._Room(pinned=False)
    sizes = [(3, 1000), (40, 100), (7,), (1 << 13,), (1,)]
    given = [{f"{i}": torch.randn(shape) for i, shape in enumerate(sizes)} for _ in range(5)]
    given[0]["0"] = given[0]["0"].bfloat16()
    kept = [room.take(weights) for weights in given]
    memory = {}
    for before, after in zip(given, kept, strict=True):
        assert list(before) == list(after)
        for name, t in after.items():
            assert torch.equal(t, before[name]) and t.dtype == before[name].dtype and t.data_ptr() % 64 == 0
            memory[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    used = sum(t.nbytes for weights in kept for t in weights.values())
    assert used <= sum(memory.values()) < 1.5 * used and len(memory) < 25


def test_a_host_without_room_is_told_of_to_who_waits_and_the_encoder_goes_on(texts, monkeypatch):
    network = make_network()
    expected = network.text_encoder(*texts)

    def full(self, weights):
        raise RuntimeError("cannot pin memory")

    monkeypatch.setattr(streamed_text._Room, "take", full)
    streamed = StreamedTextEncoder(network.text_encoder, CPU)
    with pytest.raises(RuntimeError, match="pin"):
        streamed.settle()
    assert torch.equal(streamed(*texts), expected)
