"""Instruction to sentence."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wam_policy_ros.contract.embodiments import ALL, DROID
from wam_policy_ros.contract.errors import ConfigError, PromptError
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT, UNSUPPORTED_MARKERS, build_prompt, parse_instruction

T = "a {p} b {p}"


@pytest.mark.parametrize(
    ("instruction", "text"),
    [
        ("Pick up the Red cup", "Pick up the Red cup"),
        ("['Place the bowl', 'other']", "Place the bowl"),
        ("('Place the bowl', 'other')", "Place the bowl"),
        ('"quoted"', "quoted"),
        ("42", "42"),
        ("[7, 8]", "7"),
        ("True", "True"),
        ("['unfinished", "['unfinished"),
        ("[cup]", "[cup]"),
        ("f(x)", "f(x)"),
        ("{'a': 1}", "{'a': 1}"),
        ("'\\u0041bc'", "Abc"),
        (b"Pick \xc3\xa9", "Pick é"),
        (b"['Pick']", "Pick"),
        ("0x" + "f" * 9000, "0x" + "f" * 9000),  # a literal whose decimal digits Python refuses to print
    ],
)
def test_literals(instruction, text):
    assert parse_instruction(instruction) == text


def test_parsed_before_lower_cased():
    """Lower-casing first would turn the escape into a syntax error."""
    assert build_prompt("'\\N{LATIN SMALL LETTER E WITH ACUTE}X'", T) == "a éx b éx"


def test_the_template_is_filled_at_every_place_and_only_there():
    assert build_prompt("Use {p} AND {0}", T) == "a use {p} and {0} b use {p} and {0}"


def test_whitespace_is_left_to_the_tokenizer():
    assert build_prompt("  Pick   up ", "x {p}") == "x   pick   up "


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (["pick", "cup"], "not text"),
        (("pick",), "not text"),
        (None, "not text"),
        (3, "not text"),
        ("[]", "empty list"),
        ("()", "empty list"),
        ("", "is empty"),
        (" \n", "is empty"),
        ("['']", "is empty"),
        (b"", "is empty"),
        (b"\xff\xfe", "UTF-8"),
        ("lone \ud800", "surrogate"),
        *((f"{marker} pick up", marker) for marker in UNSUPPORTED_MARKERS),
        ("['\\x3cLAPA> pick']", "<LAPA>"),
    ],
)
def test_refusals_are_typed(instruction, message):
    with pytest.raises(PromptError, match=message) as e:
        build_prompt(instruction, T)
    assert e.value.field == "prompt"


def test_empty_on_request():
    assert build_prompt("", T, allow_empty=True) == "a  b "


def test_template_without_a_place():
    with pytest.raises(ConfigError, match="no place"):
        build_prompt("pick", "a b")


def test_every_embodiment_has_a_usable_template():
    for embodiment in ALL:
        assert build_prompt("Pick UP", embodiment.prompt_template).count("pick up") == 2


def test_known_sentences():
    assert build_prompt("Go", DROID.prompt_template).startswith("A multi-view video shows that a robot go The video is")
    assert NEGATIVE_PROMPT.startswith("Vibrant colors, overexposed") and NEGATIVE_PROMPT.endswith("walking backwards.")


@given(st.text() | st.binary())
def test_never_anything_but_text_or_a_typed_error(instruction):
    with contextlib.suppress(PromptError):
        assert isinstance(build_prompt(instruction, T), str)


@given(st.text(min_size=1))
def test_a_literal_list_gives_its_first_element(text):
    try:
        expected = parse_instruction(repr(text))
    except PromptError:
        return
    assert parse_instruction(repr([text, "other"])) == expected == text
