"""The slot cache and its masks against recomputation without a cache."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MistralConfig,
    PreTrainedModel,
    StoppingCriteria,
)

from specdec import SpeculativeDecoder, Target, masks, target
from specdec.cache import INITIAL_SLOTS, SlotCache
from specdec.draft import DraftTree, RoundOutcome
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.policies import FixedPolicy
from specdec.sampling import Sampler
from specdec.state import GenerationState
from tests.tiny import build, llama
from tests.trees import path_to, random_tree

VOCAB = 16
WINDOW = 5


def small_llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    return llama(seed, **(sizes | changes))


def small_mistral() -> PreTrainedModel:
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=WINDOW,
    )  # fmt: skip
    return build(config, seed=0)


MODELS = {"llama": small_llama(), "mistral": small_mistral()}


@torch.no_grad()
def recomputed(model: PreTrainedModel, texts: list[list[int]]) -> Tensor:
    """`[T, V]` logits behind every text, each computed from its first token on."""
    width = max(map(len, texts))
    padded = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    logits = model(padded, use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts])]


class Rows:
    """Some rows of text, and a target whose cache must always be as if it had just read them."""

    def __init__(self, model: PreTrainedModel, texts: list[list[int]]) -> None:
        self.target = Target(model)
        self.texts = texts
        self.cache = self.target.new_cache(len(texts))
        self.read_on()

    def read_on(self) -> None:
        """The target reads what its cache lacks, and the check compares the logits behind it."""
        sampler = Sampler(LogitsProcessorList(), do_sample=False)
        self.state = GenerationState(self.texts, self.cache, sampler, [], torch.device("cpu"))
        for starts, counts in target.pieces(self.cache.lengths, self.state.lengths):
            done = self.target.prefill(self.state, starts, counts, features=False)
            places = [place for place, count in enumerate(counts) if count]
            ends = [self.texts[place][: starts[place] + counts[place]] for place in places]
            close(done.logits[places, 0], recomputed(self.target.model, ends))
        self.append([[0]] * len(self.texts))

    def append(self, tokens: list[list[int]]) -> None:
        self.state.append(tokens)
        self.texts = [text + new for text, new in zip(self.texts, tokens, strict=True)]
        assert self.state.lengths == [len(text) for text in self.texts]
        assert self.cache.lengths == [length - 1 for length in self.state.lengths]
        for row, text in enumerate(self.texts):
            assert self.state.ids[row, : len(text)].tolist() == text

    def round(self, rng: random.Random, size: int) -> None:
        """Check the target's pass over a random tree, then commit a random path of it."""
        batch = len(self.texts)
        tree = random_tree(rng, batch, size, VOCAB)
        if rng.random() < 0.3:
            tree = DraftTree.chain(tree.tokens, tree.valid.cumprod(1).bool())
        logits = self.target.verify(tree, self.state, features=False).logits
        nodes = [(row, -1) for row in range(batch)] + tree.valid.nonzero().tolist()
        paths = [path_to(tree.parents[row].tolist(), node) for row, node in nodes]
        texts = [
            self.texts[row] + tree.tokens[row, path].tolist()
            for (row, _), path in zip(nodes, paths, strict=True)
        ]
        found = torch.stack([logits[row, node + 1] for row, node in nodes])
        close(found, recomputed(self.target.model, texts))
        chosen = [
            rng.choice(
                [path for (owner, _), path in zip(nodes, paths, strict=True) if owner == row]
            )
            for row in range(batch)
        ]
        self.commit(rng, tree, chosen)

    def commit(self, rng: random.Random, tree: DraftTree, chosen: list[list[int]]) -> None:
        path_nodes = [[0, *(node + 1 for node in path)] for path in chosen]
        tokens = [
            [*tree.tokens[row, path].tolist(), rng.randrange(VOCAB)]
            for row, path in enumerate(chosen)
        ]
        width = tree.depth + 1
        padded = [nodes + [nodes[-1]] * (width - len(nodes)) for nodes in path_nodes]
        outcome = RoundOutcome(
            rows=self.state.rows, tokens=tokens, accepted=[], drafted=[], draft_length=[], cut=[],
            path=torch.tensor(padded), path_nodes=path_nodes,
        )  # fmt: skip
        self.target.commit(self.state, outcome)
        self.append(tokens)

    def leave(self, rng: random.Random) -> None:
        """Some rows, not all, have finished."""
        stay = sorted(rng.sample(range(len(self.texts)), rng.randint(1, len(self.texts))))
        self.state.keep_rows(stay)
        self.texts = [self.texts[row] for row in stay]

    def rewrite(self, rng: random.Random) -> None:
        """Roll back to somewhere in each text, which goes on in another way from there."""
        kept = [text[: rng.randint(1, len(text))] for text in self.texts]
        self.cache.lengths = [
            min(have, len(text) - 1) for have, text in zip(self.cache.lengths, kept, strict=True)
        ]
        new = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 4))] for _ in kept]
        self.texts = [text + more for text, more in zip(kept, new, strict=True)]
        self.read_on()


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", MODELS)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    size=st.integers(0, 7),
    chunk=st.sampled_from([3, 1024]),
    steps=st.lists(st.sampled_from(["round", "round", "round", "leave", "rewrite"]), max_size=7),
)
def test_any_history_gives_the_logits_of_a_fresh_pass(
    architecture: str, seed: int, batch: int, size: int, chunk: int, steps: list[str]
) -> None:
    """Random trees, acceptances, rows that leave and texts that are rewritten, over ragged rows."""
    rng = random.Random(seed)
    texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))] for _ in range(batch)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "PREFILL_CHUNK", chunk)
        rows = Rows(MODELS[architecture], texts)
        for step in steps:
            if step == "round":
                rows.round(rng, size)
            elif step == "leave":
                rows.leave(rng)
            else:
                rows.rewrite(rng)


# --- memory ---------------------------------------------------------------------------------------


def filled(lengths: list[int], layers: int = 2) -> SlotCache:
    """A cache whose keys say row and slot, and whose values say the same, negative."""
    cache = SlotCache(len(lengths))
    write(cache, [0] * len(lengths), max(lengths), layers)
    cache.lengths = list(lengths)
    return cache


def write(cache: SlotCache, starts: list[int], count: int, layers: int = 2) -> None:
    cache.place(starts, count)
    slots = torch.tensor(starts)[:, None] + torch.arange(count)
    named = (1000.0 * torch.arange(len(starts))[:, None] + slots)[:, None, :, None].expand(
        -1, 2, -1, 3
    )
    for layer in range(layers):
        keys, values = cache.update(named, -named, layer)
        assert keys.data_ptr() == cache.layers[layer].keys.data_ptr(), "a view, not a copy"
        assert values.data_ptr() == cache.layers[layer].values.data_ptr()
        assert keys.shape[2] == cache.used == max(starts) + count


def names(cache: SlotCache, row: int) -> list[int]:
    """The original slots of what a row holds now; the same in all layers, heads and places."""
    length, found = cache.lengths[row], []
    for layer in cache.layers:
        for buffer in (layer.keys, -layer.values):
            part = buffer[row, :, :length] - 1000.0 * row
            assert part.eq(part[:1, :, :1]).all()
            found.append(part[0, :, 0].int().tolist())
    assert all(each == found[0] for each in found)
    return found[0]


def pointers(cache: SlotCache) -> list[int]:
    return [buffer.data_ptr() for each in cache.layers for buffer in (each.keys, each.values)]


@pytest.mark.parametrize("lengths", [[4, 4], [4, 7]], ids=["uniform", "ragged"])
def test_committing_a_path_moves_the_accepted_slots_only(lengths: list[int]) -> None:
    cache = filled(lengths)
    before = pointers(cache)
    write(cache, lengths, 6)
    path = torch.tensor([[0, 2, 5], [0, 1, 1]])
    cache.keep_path(path, [[0, 2, 5], [0, 1]])
    assert cache.lengths == [lengths[0] + 3, lengths[1] + 2]
    first, second = lengths
    assert names(cache, 0) == [*range(first), first, first + 2, first + 5]
    assert names(cache, 1) == [*range(second), second, second + 1]
    assert pointers(cache) == before


def test_a_rollback_and_a_chain_move_nothing() -> None:
    cache = filled([8, 5])
    write(cache, cache.lengths, 4)
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
    before = pointers(cache)
    cache.keep_path(torch.tensor([[0, 1, 2], [0, 0, 0]]), [[0, 1, 2], [0]])
    assert cache.lengths == [11, 6]
    cache.lengths = [3, 6]
    assert pointers(cache) == before
    for layer, (keys, values) in zip(cache.layers, kept, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)
    write(cache, cache.lengths, 2)
    cache.keep_path(torch.tensor([[0, 1], [0, 1]]), [[0, 1], [0, 1]])
    assert names(cache, 0) == [*range(5)]
    assert names(cache, 1) == [*range(8)]


def test_rows_that_leave_take_their_slots_along() -> None:
    cache = filled([3, 6, 4])
    cache.keep_rows([1, 2])
    assert cache.lengths == [6, 4]
    assert [int(cache.layers[1].keys[row, 0, 0, 0]) for row in (0, 1)] == [1000, 2000]


def test_buffers_are_allocated_ahead_and_doubled() -> None:
    cache = SlotCache(1)
    sizes = []
    for slot in range(4 * INITIAL_SLOTS):
        write(cache, [slot], 1, layers=1)
        cache.lengths = [slot + 1]
        sizes.append(cache.layers[0].keys.shape[2])
    assert sorted(set(sizes)) == [INITIAL_SLOTS, 2 * INITIAL_SLOTS, 4 * INITIAL_SLOTS]
    assert names(cache, 0) == list(range(4 * INITIAL_SLOTS))


def test_rounds_that_keep_the_length_keep_the_memory() -> None:
    cache = filled([5, 9])
    before = pointers(cache)
    for _ in range(2000):
        write(cache, cache.lengths, 7)
        cache.keep_path(torch.tensor([[0, 3], [0, 0]]), [[0, 3], [0]])
        cache.lengths = [5, 9]
    assert pointers(cache) == before
    assert cache.layers[0].keys.shape[2] == INITIAL_SLOTS


class LiveTensors(StoppingCriteria):
    """Never stops; counts the process's tensors at some lengths."""

    def __init__(self, at: list[int]) -> None:
        self.found = dict.fromkeys(at, 0)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if input_ids.shape[1] in self.found:
            gc.collect()
            count = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
            self.found[input_ids.shape[1]] = count
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_memory_does_not_grow_over_2000_rounds() -> None:
    """A drafter that is always wrong: one token a round. The cache grows with the text, by doubling."""
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    drafter = AutoregressiveDrafter(model=small_llama(seed=9, **sizes))
    decoder = SpeculativeDecoder(small_llama(**sizes), drafter, FixedPolicy(length=1))
    watch = LiveTensors([200, 1100, 2000])
    with pytest.warns(UserWarning, match="hardly helps"):
        out = decoder.generate([[1, 2]], max_new_tokens=2010, stopping_criteria=[watch])
    assert out.statistics.rounds >= 2000
    early, middle, late = watch.found.values()
    assert early == middle == late > 0
    slots = out.generation.state.cache.layers[0].keys.shape[2]
    assert slots <= 2 * (len(out.token_ids[0]) + 2)


# --- masks ----------------------------------------------------------------------------------------

CPU = torch.device("cpu")
STARTS = st.lists(st.integers(0, 6), min_size=1, max_size=4)


@settings(deadline=None)
@given(STARTS, st.integers(1, 5))
def test_causal(starts: list[int], count: int) -> None:
    used = max(starts) + count
    mask = masks.causal(starts, count, used, CPU).expand(len(starts), count, used)
    for row, start in enumerate(starts):
        for query in range(count):
            assert mask[row, query].tolist() == [slot <= start + query for slot in range(used)]


@settings(deadline=None)
@given(STARTS, st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**32))
def test_behind_prefix(base: list[int], count: int, width: int, spare: int, seed: int) -> None:
    used = max(base) + width + spare
    draw = torch.Generator().manual_seed(seed)
    visible = torch.rand(len(base), count, width, generator=draw) < 0.5
    mask = masks.behind_prefix(base, visible, used)
    for row, start in enumerate(base):
        for query in range(count):
            seen = visible[row, query].tolist()
            padding = [False] * (used - start - width)
            assert mask[row, query].tolist() == [True] * start + seen + padding


@settings(deadline=None)
@given(STARTS, st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))
def test_within_window(base: list[int], count: int, window: int, seed: int) -> None:
    used = max(base) + count
    draw = torch.Generator().manual_seed(seed)
    depths = torch.randint(0, 4, (len(base), count), generator=draw)
    positions = torch.tensor(base)[:, None] + depths
    keys = masks.slot_positions(base, positions, used)
    near = masks.within_window(torch.ones(1, 1, used, dtype=torch.bool), positions, keys, window)
    for row, start in enumerate(base):
        place = [*range(start), *positions[row].tolist()]
        assert keys[row, : start + count].tolist() == place
        for query in range(count):
            own = positions[row, query]
            expected = [bool(own - position < window) for position in place]
            assert near[row, query, : start + count].tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive(dtype: torch.dtype) -> None:
    mask = masks.additive(torch.tensor([[[True, False], [False, False]]]), dtype)
    assert mask.shape == (1, 1, 2, 2)
    assert mask.dtype == dtype
    assert mask[0, 0].tolist() == [[0, torch.finfo(dtype).min], [torch.finfo(dtype).min] * 2]
    assert mask.softmax(-1).isfinite().all()
