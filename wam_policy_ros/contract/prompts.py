"""From an operator's instruction to the sentence the text encoder was trained on.

Cleaning (Unicode repair, HTML entities, whitespace) happens afterwards, on the whole sentence, in the tokenizer.
"""

from __future__ import annotations

import ast
import functools

from .errors import ConfigError, PromptError

NEGATIVE_PROMPT = (
    "Vibrant colors, overexposed, static, blurry details, text, subtitles, style, artwork, painting, image, still, "
    "grayscale, dull, worst quality, low quality, JPEG artifacts, ugly, mutilated, extra fingers, bad hands, bad face, "
    "deformed, disfigured, mutated limbs, fused fingers, stagnant image, cluttered background, three legs, many people "
    "in the background, walking backwards."
)
"""DreamZero spec, Appendix A. Tokenized without a template."""

# They switch training-time behaviour on and need data that no robot has (DreamZero spec 1.4).
UNSUPPORTED_MARKERS = ("<LAPA>", "<DREAM>", "<COTRAIN>")


def build_prompt(instruction: str | bytes, template: str, *, allow_empty: bool = False) -> str:
    """Parse, lower-case and insert into the embodiment's template (DreamZero spec 1.4).

    A string that reads as a Python list or tuple stands for its first element, one that reads as another literal for
    ``str`` of its value; parsing precedes lower-casing.

    Args:
        instruction: str, or bytes in UTF-8.
        template: contains ``{p}`` at least once.
        allow_empty: the published server lets an empty instruction through; a robot should not move on one.

    Raises:
        PromptError: not text, not UTF-8, a list, an empty list in a string, blank, or with a training-time marker.
        ConfigError: the template has no place for the instruction.
    """
    if "{p}" not in template:
        raise ConfigError("the prompt template has no place for the instruction", got=repr(template), expected="'{p}'")
    text = parse_instruction(instruction)
    if not text.strip() and not allow_empty:
        raise _error("the instruction is empty", got=repr(instruction), expected="a sentence such as 'pick up the cup'")
    return template.replace("{p}", text.lower())


def parse_instruction(instruction: str | bytes) -> str:
    """The instruction as plain text, case kept. Raises PromptError as ``build_prompt`` does."""
    if isinstance(instruction, bytes | bytearray):
        try:
            instruction = bytes(instruction).decode("utf-8")
        except UnicodeDecodeError as e:
            raise _error("the instruction is not UTF-8", got=str(e), expected="str, or bytes in UTF-8") from e
    if not isinstance(instruction, str):
        raise _error("the instruction is not text", got=type(instruction).__name__, expected="one str")
    text = _literal_value(instruction)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise _error("the instruction has a lone surrogate", got=str(e), expected="valid Unicode") from e
    for marker in UNSUPPORTED_MARKERS:
        if marker in instruction or marker in text:
            raise _error(
                f"the marker {marker} is for training only", got=repr(instruction[:80]), remedy="leave the marker out"
            )
    return text


@functools.lru_cache(maxsize=64)  # an episode says the same again at every call, and to parse it costs 0.1 ms
def _literal_value(text: str) -> str:
    try:
        value = ast.literal_eval(text)
        if isinstance(value, list | tuple):
            if not value:
                raise _error("the instruction is an empty list", got=repr(text), expected="a sentence")
            value = value[0]
        return str(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text  # the normal case: a sentence is not a Python literal


def _error(what: str, *, got: object, expected: object = None, remedy: str | None = None) -> PromptError:
    return PromptError(what, field="prompt", got=got, expected=expected, remedy=remedy)
