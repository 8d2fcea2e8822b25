"""Cleaning, byte stand-in against recorded ids, and a real vocabulary file built here."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from test.golden_files import GOLDEN_DIR, golden
from wam_policy_ros.contract.embodiments import DROID
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT, build_prompt
from wam_policy_ros.model.errors import ModelConfigError, ModelError, TokenizerFileError
from wam_policy_ros.model.tokenizer import (
    ByteTokenizer,
    PromptTooLong,
    TokenIdError,
    UMT5Tokenizer,
    check_token_ids,
    clean_text,
    find_tokenizer_folder,
)

CASES = range(4)


def _case(index: int) -> dict:
    path = GOLDEN_DIR / "data.json"
    if not path.is_file():
        pytest.skip("fixture data.json is not in this checkout")
    return json.loads(path.read_text())["cases"][index]


@pytest.mark.parametrize("index", CASES)
def test_cleaned_sentences_equal_the_recording(index):
    case = _case(index)
    (negative,), (positive,) = case["tokenised_texts"]
    assert clean_text(build_prompt(case["prompt"], DROID.prompt_template)) == positive
    assert clean_text(NEGATIVE_PROMPT) == negative


@pytest.mark.parametrize("index", CASES)
def test_byte_ids_equal_the_recording(index):
    data = golden("data.safetensors")
    ids, mask = ByteTokenizer(512)([build_prompt(_case(index)["prompt"], DROID.prompt_template), NEGATIVE_PROMPT])
    for row, name in enumerate(("", "_negative")):
        assert torch.equal(ids[row], data[f"case{index}.model_in.text{name}"][0])
        assert torch.equal(mask[row], data[f"case{index}.model_in.text_attention_mask{name}"][0])


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("  a \t\n b  ", "a b"),
        ("a&amp;b", "a&b"),
        ("a &amp;lt; b", "a < b"),
        ("<a&amp;amp;amp;b", "<a&amp;b"),  # twice, not until nothing changes; ftfy leaves text with '<' alone
        ("a&nbsp;&nbsp;b&nbsp;", "a b"),
        ("“quoted”", '"quoted"'),
        ("schÃ¶n", "schön"),
    ],
)
def test_cleaning(text, clean):
    assert clean_text(text) == clean


def test_too_long_is_refused_and_cut_on_request():
    with pytest.raises(PromptTooLong, match="9 tokens"):
        ByteTokenizer(8)(["12345678"])
    assert issubclass(PromptTooLong, ModelError)
    ids, mask = ByteTokenizer(8)(["1234567"])
    assert ids[0, -1] == 1 and mask.sum() == 8
    ids, mask = ByteTokenizer(8, truncate=True)(["123456789"])
    assert ids[0].tolist() == [3 + ord(c) for c in "1234567"] + [1] and mask.all()


def test_folded_bytes_stay_inside_a_tiny_vocabulary():
    ids, _ = ByteTokenizer(64, vocab_size=128)(["prends la tasse é – 取杯子"])
    assert int(ids.max()) < 128 and int(ids.min()) >= 0
    plain, _ = ByteTokenizer(64, vocab_size=259)(["abc"])
    assert plain[0, :4].tolist() == [100, 101, 102, 1]
    with pytest.raises(ModelConfigError):
        ByteTokenizer(64, vocab_size=3)


def test_ids_outside_the_vocabulary():
    check_token_ids(torch.tensor([[0, 127]]), 128)
    for bad in ([0, 128], [-1, 5]):
        with pytest.raises(TokenIdError, match="128"):
            check_token_ids(torch.tensor([bad]), 128)


@given(st.lists(st.text(max_size=40), max_size=3))
def test_rows_are_tokens_then_end_then_padding(texts):
    ids, mask = ByteTokenizer(1024)(texts)
    assert ids.shape == mask.shape == (len(texts), 1024) and ids.dtype == mask.dtype == torch.int64
    for row, text in enumerate(texts):
        n = len(clean_text(text).encode()) + 1
        assert int(mask[row].sum()) == n and bool(mask[row, :n].all())
        assert ids[row, n - 1] == 1 and not ids[row, n:].any() and bool((ids[row, : n - 1] >= 3).all())


def _write_vocabulary(folder, *, pad_first=True):
    """A real Unigram file with umT5's special ids, its own end token, truncation and padding."""
    specials = ["<pad>", "</s>", "<s>", "<unk>"] if pad_first else ["</s>", "<pad>", "<s>", "<unk>"]
    pieces = [(s, 0.0) for s in specials] + [("▁pick", -1.0), ("▁the", -1.5), ("▁cup", -2.0), ("▁", -5.0)]
    pieces += [(c, -6.0) for c in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_vocabulary_file(tmp_path):
    _write_vocabulary(tmp_path)
    ids, mask = UMT5Tokenizer.from_folder(tmp_path, 16)(["pick  the cup", "", "pick \u2603"])
    assert ids[0].tolist() == [4, 5, 6, 1] + [0] * 12
    assert ids[1].tolist() == [1] + [0] * 15
    assert 3 in ids[2].tolist()
    assert mask.sum(1).tolist() == [4, 1, int((ids[2] != 0).sum())]


def test_the_limits_of_the_file_do_not_apply_and_ours_do(tmp_path):
    _write_vocabulary(tmp_path)
    with pytest.raises(PromptTooLong):
        UMT5Tokenizer.from_folder(tmp_path, 4)(["pick the cup pick"])
    ids, _ = UMT5Tokenizer.from_folder(tmp_path, 4, truncate=True)(["pick the cup pick"])
    assert ids[0].tolist() == [4, 5, 6, 1]
    with pytest.raises(TokenIdError):
        UMT5Tokenizer.from_folder(tmp_path, 8, vocab_size=6)(["pick the cup"])


def test_foreign_vocabulary_is_refused(tmp_path):
    _write_vocabulary(tmp_path, pad_first=False)
    with pytest.raises(TokenizerFileError, match="not umT5"):
        UMT5Tokenizer.from_folder(tmp_path)


def test_unreadable_and_absent_files(tmp_path):
    with pytest.raises(TokenizerFileError, match=r"tokenizer\.json"):
        UMT5Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerFileError, match="cannot read"):
        UMT5Tokenizer.from_folder(tmp_path)


def test_sentencepiece_model_without_the_package(tmp_path, monkeypatch):
    (tmp_path / "spiece.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(TokenizerFileError, match="pip install sentencepiece"):
        UMT5Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("pad", [0, -1])
def test_sentencepiece_model_with_the_package(tmp_path, monkeypatch, pad):
    processor = SimpleNamespace(
        pad_id=lambda: pad, eos_id=lambda: 1, encode=lambda text, out_type: [10 + len(w) for w in text.split()]
    )
    fake = SimpleNamespace(SentencePieceProcessor=lambda model_file: processor)
    monkeypatch.setitem(sys.modules, "sentencepiece", fake)
    (tmp_path / "spiece.model").write_bytes(b"x")
    if pad == 0:
        ids, _ = UMT5Tokenizer.from_folder(tmp_path, 4)([" one  three "])
        assert ids.tolist() == [[13, 15, 1, 0]]
    else:
        with pytest.raises(TokenizerFileError, match="not umT5"):
            UMT5Tokenizer.from_folder(tmp_path, 4)


@pytest.mark.parametrize("sub", ["umt5-xxl", "google/umt5-xxl", "tokenizer"])
def test_search_inside_the_checkpoint(tmp_path, sub):
    _write_vocabulary(tmp_path / sub)
    assert find_tokenizer_folder(tmp_path) == tmp_path / sub
    assert find_tokenizer_folder(tmp_path / "elsewhere", given=tmp_path) == tmp_path / sub


def test_search_lists_the_places_and_a_given_folder_is_binding(tmp_path):
    with pytest.raises(TokenizerFileError) as e:
        find_tokenizer_folder(tmp_path)
    for place in ("umt5-xxl", "google/umt5-xxl", "tokenizer"):
        assert f"looked in {tmp_path / place}" in e.value.problems
    _write_vocabulary(tmp_path / "ckpt" / "tokenizer")
    with pytest.raises(TokenizerFileError, match="mine"):
        find_tokenizer_folder(tmp_path / "ckpt", given=tmp_path / "mine")
