"""A small vocabulary for the small text encoder, in the file format of umT5's: whole words where it knows them, letters
elsewhere. The strict loader takes it as it takes the published one.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from wam_policy_ros.contract.embodiments import DROID
from wam_policy_ros.contract.prompts import NEGATIVE_PROMPT

SPACE = "▁"
SPECIALS = ("<pad>", "</s>", "<unk>")
# What people say to a robot at a table. A word that is not here is spelled out.
WORDS = (
    "a an the this that it and or to of in on at from with up down over under off into onto out near beside between "
    "left right top bottom front back middle center please now then pick lift grab take raise grasp get hold hand give "
    "bring move put place push pull set drop release open close turn reach fetch pick-up lift-up mug cup glass bottle "
    "bowl plate dish apple fruit book object thing block box table handle red green blue yellow white black brown "
    "orange small big large little one two other"
)


@functools.cache
def pieces() -> tuple[str, ...]:
    """Every piece; its place is its id. Single characters are as in ASCII, the words are those of the templates."""
    texts = (DROID.prompt_template.replace("{p}", " "), NEGATIVE_PROMPT, WORDS)
    words = sorted({w for text in texts for w in re.findall(r"[\w'-]+", text)})
    marks = [chr(c) for c in range(33, 127)]
    known = [*SPECIALS, SPACE, *marks, *(SPACE + w for w in words)]
    return tuple(dict.fromkeys(known))


def tokenizer_json() -> dict[str, Any]:
    """``tokenizer.json``: a Unigram model in which a whole word always beats its letters."""
    scores = [0.0 if p in SPECIALS else -2.0 if len(p) > 2 else -12.0 for p in pieces()]
    added = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, name in enumerate(SPECIALS)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "Unigram", "unk_id": SPECIALS.index("<unk>"), "byte_fallback": False,
                  "vocab": [list(item) for item in zip(pieces(), scores, strict=True)]},
    }  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """``tokenizer.json`` into ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(), ensure_ascii=False), encoding="utf-8")
