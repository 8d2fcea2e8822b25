"""What a sentence is about, taught before the rest."""

from __future__ import annotations

import torch

from wam_policy_ros.model.tokenizer import UMT5Tokenizer
from wam_policy_ros.sim.tasks import TASKS
from wam_policy_ros.train.fit_text import encode_prompts, prompts_of_all_tasks, teach_words
from wam_policy_ros.train.preset import MUG, TOY
from wam_policy_ros.train.vocabulary import write_tokenizer

from .stand_in import network


def test_every_wording_of_every_task_is_there_with_its_thing():
    prompts, things = prompts_of_all_tasks("<{p}>")
    names = sorted({t.target for t in TASKS.values()})
    assert len(prompts) == len(things) == len(set(prompts)) == sum(len(t.instructions) for t in TASKS.values())
    for prompt, number in zip(prompts, things, strict=True):
        words = prompt.replace("cup with the handle", "mug").strip("<>")
        assert all(part in words for part in names[number].split("_"))


def test_a_prompt_of_a_preset_fits_into_its_text(tmp_path):
    write_tokenizer(tmp_path)
    _, mask, _ = encode_prompts(UMT5Tokenizer.from_folder(tmp_path, MUG.text_len), MUG.embodiment.prompt_template)
    assert mask.sum(1).max() < MUG.text_len and mask.sum(1).min() > 20


def test_afterwards_every_token_tells_the_thing_and_nothing_else_has_changed(tmp_path):
    made, before = network(), network()
    write_tokenizer(tmp_path)
    tokens = UMT5Tokenizer.from_folder(tmp_path, TOY.text_len)
    ids, mask, things = encode_prompts(tokens, TOY.embodiment.prompt_template)
    ids, mask, things = ids[::6], mask[::6], things[::6]  # some of each, which takes less time
    assert len(set(things)) == 5
    found = teach_words(made, ids, mask, things, steps=300)
    assert found["right_before"] < 0.5 and found["right"] > 0.99 and found["steps"] < 300, found
    taught = ("text_encoder.", "model.text_embedding.")
    for (name, a), b in zip(made.named_parameters(), before.parameters(), strict=True):
        assert name.startswith(taught) or torch.equal(a, b), name
    # Prompts of two things are further from each other than two wordings of one.
    with torch.no_grad():
        states = made.model.text_embedding(made.text_encoder(ids, mask) * mask[..., None])
    means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    apart = torch.cdist(means, means)
    same = torch.tensor(things)[:, None] == torch.tensor(things)
    assert apart[same].max() < apart[~same].min()
    again = teach_words(made, ids, mask, things, steps=1)
    assert again["right_before"] > 0.99 and again["steps"] == 1
