"""Prompt lookup against a transcription of its definition, one token after the other."""

from __future__ import annotations

import random

import pytest
import torch

from specdec import SpecdecError, SpeculativeDecoder
from specdec.cache import SlotCache
from specdec.drafters.ngram import NgramDrafter
from specdec.policies import FixedPolicy, SVIPPolicy
from specdec.sampling import Sampler
from specdec.state import GenerationState
from tests.tiny import architecture, plain


def drafted(drafter: NgramDrafter, texts: list[list[int]], limits: list[int]) -> list[list[int]]:
    """What is proposed behind each text, without a target."""
    cpu = torch.device("cpu")
    state = GenerationState(texts, SlotCache(len(texts)), Sampler([], False, seed=0), [], cpu)
    state.limits = limits
    drafter.start(state)
    drafter.begin(state)
    if drafter.step() is None:
        return [[] for _ in texts]
    while drafter.extend(True):
        pass
    tree = drafter.finish()
    assert tree.sampled is None, "matches are point masses"
    return [row[mask].tolist() for row, mask in zip(tree.tokens, tree.valid, strict=True)]


def looked_up(text: list[int], longest: int, shortest: int, count: int) -> list[int]:
    """The longest match of the text's last tokens, the latest of them, and what follows it.

    Copied token by token, so that a copy which reaches the end of the text reads what it wrote.
    """
    for size in range(longest, shortest - 1, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[-size:] and size < len(text):
                written = list(text)
                for offset in range(count):
                    written.append(written[start + size + offset])
                return written[len(text) :]
    return []


def test_random_texts():
    draw = random.Random(0)
    for _ in range(150):
        longest = draw.randint(1, 4)
        shortest = draw.randint(1, longest)
        count = draw.randint(1, 6)
        drafter = NgramDrafter(max_ngram=longest, min_ngram=shortest, num_tokens=count)
        texts = [draw.choices(range(4), k=draw.randint(1, 25)) for _ in range(draw.randint(1, 4))]
        limits = [draw.randint(0, 7) for _ in texts]
        if not any(limits):
            limits[0] = 3
        right = [
            looked_up(text, longest, shortest, min(count, limit))
            for text, limit in zip(texts, limits, strict=True)
        ]
        assert drafted(drafter, texts, limits) == right


def test_the_longest_match_wins_over_a_later_one():
    text = [1, 2, 3, 50, 9, 3, 60, 1, 2, 3]
    assert drafted(NgramDrafter(num_tokens=2), [text], [9]) == [[50, 9]]
    assert drafted(NgramDrafter(max_ngram=1, num_tokens=2), [text], [9]) == [[60, 1]]


def test_the_latest_of_equal_matches_wins():
    assert drafted(NgramDrafter(num_tokens=1), [[7, 8, 20, 7, 8, 30, 7, 8]], [9]) == [[30]]


def test_nothing_to_propose():
    assert drafted(NgramDrafter(), [[1, 2, 3], [5]], [9, 9]) == [[], []]
    assert drafted(NgramDrafter(min_ngram=2), [[1, 2, 1]], [9]) == [[]]


def test_impossible_parameters():
    with pytest.raises(SpecdecError, match="must not exceed max_ngram"):
        NgramDrafter(max_ngram=1, min_ngram=2)
    with pytest.raises(SpecdecError, match=r"NgramDrafter\.num_tokens"):
        NgramDrafter(num_tokens=0)


@pytest.mark.parametrize("policy", [FixedPolicy(length=3), SVIPPolicy(max_length=3)])
def test_policies_shorten_what_was_found(policy):
    """A match is certain of itself: entropy 0, probability 1; only a length ends it."""
    target = architecture("llama")
    prompt = [5, 6, 7, 8, 9, 10, 5, 6]
    output = SpeculativeDecoder(target, NgramDrafter(), policy).generate(prompt, max_new_tokens=20)
    assert output.token_ids == [plain(target, prompt, 20)]
    assert max(record.drafted[0] for record in output.rounds) == 3


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_no_token_too_many(count):
    target, prompt = architecture("llama"), [1, 5, 9, 14, 5, 9, 23, 40]
    decoder = SpeculativeDecoder(target, NgramDrafter(num_tokens=5))
    assert decoder.generate(prompt, max_new_tokens=count).token_ids == [
        plain(target, prompt, count)
    ]
