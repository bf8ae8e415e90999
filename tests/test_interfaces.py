"""The ways in and out: transformers' custom_generate, streams, conversations, scores, refusals."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
    TextIteratorStreamer,
)

from specdec import SpecdecError, SpeculativeDecoder
from specdec.drafters.ngram import NgramDrafter
from specdec.policies import FixedPolicy, HeuristicPolicy
from specdec.text import INCOMPLETE, TextPieces
from tests.drafters import DRAFTERS, autoregressive
from tests.tiny import PROMPT, architecture, left_padded, llama, plain, ragged
from tests.tiny_tokenizers import TEXT, byte_fallback, byte_level, speaking_llama, word_pieces

TARGET = architecture("llama")
NEW = plain(TARGET, PROMPT, 40)
IDS = torch.tensor([PROMPT])
PADDED = left_padded([PROMPT, *ragged(3)])


def decoder(drafter: str = "autoregressive", **arguments: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, DRAFTERS[drafter](TARGET), FixedPolicy(length=4), **arguments)


class Collect:
    """A streamer that keeps what it gets."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


class Ban(LogitsProcessor):
    """Forbids the token that stands `back` places before the next one."""

    def __init__(self, back: int) -> None:
        self.back = back

    def __call__(self, input_ids, scores):
        place = max(0, input_ids.shape[1] - self.back)
        return scores.scatter(1, input_ids[:, place, None], -torch.inf)


# --- model.generate(custom_generate=decoder) ------------------------------------------------------

ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "eos": {"eos_token_id": [NEW[4], NEW[11]]},
    "min_new_tokens": {"eos_token_id": NEW[4], "min_new_tokens": 9},
    "min_length": {"eos_token_id": NEW[4], "min_length": 19},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[NEW[1]], NEW[3:5]]},
    "sequence_bias": {"sequence_bias": {(NEW[2],): -30.0}},
    "own_processor": {"logits_processor": [Ban(2)]},
    "watermark": {"watermarking_config": {"bias": 9.0, "seeding_scheme": "lefthash"}},
    "static_cache": {"cache_implementation": "static"},
    "no_cache": {"use_cache": False},
    "config": {"generation_config": GenerationConfig(max_new_tokens=7, pad_token_id=0)},
}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, PADDED], ids=["one_row", "padded_rows"])
def test_custom_generate_returns_what_generate_returns(inputs, asked):
    limit = {} if "generation_config" in asked else {"max_new_tokens": 16}
    right = TARGET.generate(**inputs, **limit, **asked, do_sample=False)
    ours = TARGET.generate(**inputs, **limit, **asked, do_sample=False, custom_generate=decoder())
    assert torch.equal(ours, right)
    assert ours.dtype == right.dtype


@pytest.mark.parametrize(
    "asked",
    [
        {"begin_suppress_tokens": [NEW[0]]},
        {"forced_eos_token_id": 3},
        {"exponential_decay_length_penalty": (4, 1.5), "eos_token_id": NEW[12]},
        {"encoder_repetition_penalty": 1.4},
        {"encoder_no_repeat_ngram_size": 2},
        {"prefix_allowed_tokens_fn": lambda row, text: list(range(row, 30))},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_counts_padding_or_rows_is_exact_or_refused(asked):
    right = TARGET.generate(IDS, max_new_tokens=16, do_sample=False, **asked)
    ours = TARGET.generate(IDS, max_new_tokens=16, custom_generate=decoder(), **asked)
    assert torch.equal(ours, right)
    with pytest.raises(SpecdecError, match="at a time"):
        TARGET.generate(**PADDED, max_new_tokens=16, custom_generate=decoder(), **asked)


def test_a_penalty_that_leaves_out_the_prompt():
    ignoring = RepetitionPenaltyLogitsProcessor(2.0, prompt_ignore_length=len(PROMPT))
    arguments: dict[str, Any] = {"max_new_tokens": 16, "logits_processor": [ignoring]}
    right = TARGET.generate(IDS, do_sample=False, **arguments)
    assert torch.equal(TARGET.generate(IDS, custom_generate=decoder(), **arguments), right)
    with pytest.raises(SpecdecError, match="RepetitionPenaltyLogitsProcessor counts"):
        TARGET.generate(**PADDED, custom_generate=decoder(), **arguments)


@pytest.mark.parametrize("inputs", [{"input_ids": IDS}, PADDED], ids=["one_row", "padded_rows"])
def test_the_dict_of_scores_and_logits(inputs):
    asked: dict[str, Any] = {
        "max_new_tokens": 12, "min_new_tokens": 3, "eos_token_id": [NEW[2], NEW[7]],
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    }  # fmt: skip
    right = TARGET.generate(**inputs, **asked, do_sample=False)
    ours = TARGET.generate(**inputs, **asked, do_sample=False, custom_generate=decoder())
    assert type(ours) is type(right)
    assert torch.equal(ours.sequences, right.sequences)
    assert len(ours.scores) == len(ours.logits) == len(right.scores)
    width = inputs["input_ids"].shape[1]
    ended = torch.zeros(len(ours.sequences), dtype=torch.bool)
    for step, token in enumerate(right.sequences[:, width:].T):
        # transformers goes on computing scores for rows that have ended; they mean nothing.
        assert torch.allclose(ours.scores[step][~ended], right.scores[step][~ended], atol=1e-3)
        assert torch.allclose(ours.logits[step][~ended], right.logits[step][~ended], atol=1e-3)
        ended |= torch.isin(token, torch.tensor(asked["eos_token_id"]))


def test_samples_of_custom_generate_are_repeatable():
    asked: dict[str, Any] = {
        "max_new_tokens": 12, "do_sample": True, "temperature": 30.0, "num_return_sequences": 3,
    }  # fmt: skip
    writer = decoder()
    written = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        written.append(TARGET.generate(IDS, custom_generate=writer, **asked))
    assert written[0].shape[0] == 3
    assert torch.equal(written[0], written[1])
    assert not torch.equal(written[0], written[2])
    assert len({tuple(row.tolist()) for row in written[0]}) == 3, "rows are drawn independently"
    fixed = decoder(seed=5)
    again = [TARGET.generate(IDS, custom_generate=fixed, **asked) for _ in range(2)]
    assert torch.equal(*again)


def test_custom_generate_hears_the_streamer():
    """transformers does not hand it over; unheard, a reader would wait for the end for ever."""
    right, ours = Collect(), Collect()
    TARGET.generate(IDS, max_new_tokens=9, streamer=right, do_sample=False)
    TARGET.generate(IDS, max_new_tokens=9, streamer=ours, custom_generate=decoder())
    assert ours.got == right.got
    assert ours.ended == 1


def test_custom_generate_in_a_thread_of_its_own():
    model, tokenizer = speaking_llama()
    writer = SpeculativeDecoder(model, autoregressive(model), tokenizer=tokenizer)
    inputs = tokenizer("the cat", return_tensors="pt", return_token_type_ids=False)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {**inputs, "streamer": streamer, "max_new_tokens": 12, "custom_generate": writer}
    thread = threading.Thread(target=model.generate, kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == writer.last_output.text


def test_custom_generate_honours_user_criteria():
    class Long(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 13)

    Long.eos_token_id = 3  # what a person calls their attributes decides nothing
    Long.max_length = 5
    right = TARGET.generate(IDS, max_new_tokens=16, do_sample=False, stopping_criteria=[Long()])
    writer = decoder()
    ours = TARGET.generate(
        IDS, max_new_tokens=16, stopping_criteria=[Long()], custom_generate=writer
    )
    assert torch.equal(ours, right)
    assert writer.last_output.finish_reasons == ["stop"]


REFUSED: dict[str, Any] = {
    "num_beams": 2,
    "penalty_alpha": 0.5,
    "dola_layers": "low",
    "output_attentions": True,
    "output_hidden_states": True,
    "assistant_model": TARGET,
    "prompt_lookup_num_tokens": 3,
    "num_assistant_tokens": 3,
    "synced_gpus": True,
    "inputs_embeds": TARGET.get_input_embeddings()(IDS),
    "position_ids": torch.arange(3, 11)[None],
}


@pytest.mark.parametrize("name", REFUSED)
def test_custom_generate_refuses_by_name(name):
    asked = {name: REFUSED[name], "return_dict_in_generate": True}
    with pytest.raises(SpecdecError, match=name):
        TARGET.generate(IDS, max_new_tokens=4, custom_generate=decoder(), **asked)


def test_custom_generate_refuses_guidance():
    with pytest.raises(SpecdecError, match="Guidance"):
        TARGET.generate(IDS, max_new_tokens=4, guidance_scale=1.5, custom_generate=decoder())


def test_custom_generate_refuses_a_cache_that_holds_text():
    written = TARGET.generate(IDS, max_new_tokens=4, return_dict_in_generate=True)
    name = "cache" if "cache" in written else "past_key_values"
    cache = written[name]
    with pytest.raises(SpecdecError, match="already holds text"):
        TARGET.generate(
            written.sequences, max_new_tokens=4, custom_generate=decoder(), **{name: cache}
        )


def test_custom_generate_refuses_another_model():
    with pytest.raises(SpecdecError, match="another model"):
        llama().generate(IDS, max_new_tokens=4, custom_generate=decoder())


def test_custom_generate_gives_statistics():
    writer = decoder()
    TARGET.generate(**PADDED, max_new_tokens=12, custom_generate=writer)
    statistics = writer.last_output.statistics
    assert statistics.new_tokens == 4 * 12
    assert statistics.wall_s > 0
    assert statistics.tokens_per_s > 0


# --- generate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_tokens": 3}, "max_new_tokens"),
        ({"do_sample": True}, "do_sample"),
        ({"num_beams": 2}, "num_beams"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.5, "temperature": 0}, "top_p"),
        ({"max_new_tokens": "many"}, "max_new_tokens"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments, named):
    with pytest.raises(SpecdecError, match=f"generate.*{named}"):
        decoder().generate(PROMPT, **arguments)


def test_prompts_in_every_form():
    writer = decoder()
    prompts = [PROMPT, *ragged(3)]
    right = [plain(TARGET, prompt, 6) for prompt in prompts]
    padded = left_padded(prompts)
    right_padded = {
        "input_ids": torch.tensor([row + [0] * (8 - len(row)) for row in prompts]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (8 - len(row)) for row in prompts]),
    }
    forms = [prompts, padded, padded["input_ids"], right_padded, tuple(map(torch.tensor, prompts))]
    for form in forms:
        assert writer.generate(form, max_new_tokens=6).token_ids == right
    by_argument = writer.generate(
        padded["input_ids"], attention_mask=padded["attention_mask"], max_new_tokens=6
    )
    assert by_argument.token_ids == right
    for form in (PROMPT, torch.tensor(PROMPT), IDS):
        assert writer.generate(form, max_new_tokens=6).token_ids == right[:1]


def test_a_list_of_ids_has_no_padding():
    prompt = [0, 5, 0, 9]
    assert decoder().generate(prompt, max_new_tokens=6).token_ids == [plain(TARGET, prompt, 6)]


@pytest.mark.parametrize(
    ("prompt", "mask", "said"),
    [
        ([], None, "nothing"),
        ([[5], []], None, "prompt 1: it is empty"),
        ([5, 64], None, "found 64"),
        ([-1], None, "found -1"),
        ([1] * 513, None, "context is 512"),
        ("text", None, "tokenizer"),
        ([5, "text"], None, "no mixture"),
        ([[5], [[6]]], None, "no mixture"),
        (5.0, None, "float"),
        (torch.zeros(1, 2), None, "float32"),
        (torch.ones(1, 4, dtype=torch.long), torch.ones(1, 3), "shape"),
        ([[5], [6, 7]], [[1], [1, 1]], "attention_mask"),
        ("text", [1], "attention_mask"),
        ({"input_ids": [[5]], "labels": 1}, None, "labels"),
        ({"input_ids": [[5]], "token_type_ids": [[1]]}, None, "token_type_ids"),
    ],
)
def test_a_wrong_prompt_is_explained(prompt, mask, said):
    with pytest.raises(SpecdecError, match=said):
        decoder().generate(prompt, attention_mask=mask)


def test_text_in_and_out():
    model, tokenizer = speaking_llama()
    writer = SpeculativeDecoder(model, autoregressive(model), tokenizer=tokenizer)
    texts = ["the cat", "sat on the mat, and"]
    output = writer.generate(texts, max_new_tokens=8)
    right = [plain(model, tokenizer(text)["input_ids"], 8) for text in texts]
    assert output.token_ids == right
    assert output.texts == tokenizer.batch_decode(right)
    with pytest.raises(SpecdecError, match=r"output\.texts"):
        _ = output.text


def test_scores_of_every_new_token():
    ban = SuppressTokensLogitsProcessor([NEW[0], NEW[6]])
    output = decoder().generate(
        [PROMPT, *ragged(2)], max_new_tokens=12, output_scores=True, logits_processor=[ban],
        repetition_penalty=1.3, eos_token_id=NEW[9],
    )  # fmt: skip
    for prompt, tokens, scores, logits in zip(
        output.prompts, output.token_ids, output.scores, output.logits, strict=True
    ):
        assert len(scores) == len(logits) == len(tokens)
        right = TARGET.generate(
            torch.tensor([prompt]), max_new_tokens=len(tokens), do_sample=False,
            logits_processor=[ban], repetition_penalty=1.3, return_dict_in_generate=True,
            output_scores=True, output_logits=True,
        )  # fmt: skip
        assert torch.allclose(torch.stack(scores), torch.cat(right.scores), atol=1e-3)
        assert torch.allclose(torch.stack(logits), torch.cat(right.logits), atol=1e-3)
        assert torch.stack(scores).argmax(-1).tolist() == tokens
    assert decoder().generate(PROMPT, max_new_tokens=2).scores is None


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_streamer_gets_each_token_once(drafter):
    streamer = Collect()
    output = decoder(drafter).generate(PROMPT, max_new_tokens=12, streamer=streamer)
    assert streamer.got == [PROMPT, *([token] for token in output.token_ids[0])]
    assert streamer.ended == 1


def test_a_streamer_is_for_one_row():
    with pytest.raises(SpecdecError, match="streamer: streams one row"):
        decoder().generate(ragged(2), max_new_tokens=2, streamer=Collect())


def test_a_stream_is_the_text():
    model, tokenizer = speaking_llama()
    writer = SpeculativeDecoder(model, autoregressive(model), tokenizer=tokenizer)
    stream = writer.stream("the cat sat", max_new_tokens=30)
    assert stream.output is None
    pieces = list(stream)
    assert "".join(pieces) == stream.output.text
    assert INCOMPLETE not in "".join(pieces)
    assert len(pieces) == len(stream.output.rounds) + 1, "a piece for every round"
    with pytest.raises(SpecdecError, match="one prompt"):
        writer.stream(["a", "b"])
    with pytest.raises(SpecdecError, match="no streamer"):
        writer.stream("a", streamer=Collect())
    with pytest.raises(SpecdecError, match="tokenizer"):
        decoder().stream(PROMPT)


def test_a_stream_that_is_closed_early():
    model, tokenizer = speaking_llama()
    writer = SpeculativeDecoder(model, autoregressive(model), tokenizer=tokenizer)
    whole = writer.generate("the cat sat", max_new_tokens=30)
    stream = writer.stream("the cat sat", max_new_tokens=30)
    begun = [next(stream) for _ in range(3)]
    stream.close()
    assert stream.output.text == "".join(begun)
    assert list(stream) == []
    ids = stream.output.prompts[0] + stream.output.token_ids[0]
    rest = writer.generate(
        ids, max_new_tokens=30 - len(stream.output.token_ids[0]), continue_from=stream.output
    )
    assert stream.output.token_ids[0] + rest.token_ids[0] == whole.token_ids[0]


def cut(ids: list[int], seed: int) -> list[list[int]]:
    """The ids in pieces of one to six."""
    draw, pieces = torch.Generator().manual_seed(seed), []
    while ids:
        count = int(torch.randint(1, 7, (), generator=draw))
        pieces.append(ids[:count])
        ids = ids[count:]
    return pieces


@pytest.mark.parametrize("make", [byte_level, byte_fallback, word_pieces])
def test_pieces_of_text_are_whole_characters(make):
    tokenizer = make()
    specials = tokenizer.all_special_ids
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        text = TEXT[seed % len(TEXT)] * 2
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for _ in range(seed % 4):
            place = int(torch.randint(len(ids), (), generator=draw))
            if INCOMPLETE not in tokenizer.decode(ids[:place]):
                ids.insert(place, specials[place % len(specials)])
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        pieces = TextPieces(tokenizer)
        shown = [pieces.add(piece) for piece in cut(ids, seed)]
        assert "".join(shown) + pieces.end() == whole
        assert INCOMPLETE not in "".join(shown)


@pytest.mark.parametrize("make", [byte_level, word_pieces])
def test_pieces_of_any_tokens_make_their_text(make):
    tokenizer = make()
    for seed in range(60):
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(len(tokenizer), (25,), generator=draw).tolist()
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        pieces = TextPieces(tokenizer)
        shown = [pieces.add(piece) for piece in cut(ids, seed)]
        assert "".join(shown) + pieces.end() == whole


def test_text_that_ends_inside_a_character():
    tokenizer = byte_level()
    ids = tokenizer("caf\u00e9 \U0001f600", add_special_tokens=False)["input_ids"]
    pieces = TextPieces(tokenizer)
    shown = [pieces.add([token]) for token in ids[:-1]]
    assert "".join(shown) == "caf\u00e9 "
    assert pieces.end() == INCOMPLETE


# --- conversations --------------------------------------------------------------------------------


def tokens_read(writer: SpeculativeDecoder, monkeypatch) -> list[int]:
    """Tokens of each pass of the target, from now on."""
    counts: list[int] = []
    forward = writer.target.forward

    def spy(tokens, *args, **kwargs):
        counts.append(tokens.shape[1])
        return forward(tokens, *args, **kwargs)

    monkeypatch.setattr(writer.target, "forward", spy)
    return counts


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_second_turn_reads_only_what_is_new(drafter, monkeypatch):
    writer = decoder(drafter)
    output = writer.generate(PROMPT, max_new_tokens=12)
    for turn in range(3):
        text = output.prompts[0] + output.token_ids[0] + [7, 8, 9 + turn]
        right = plain(TARGET, text, 12)
        counts = tokens_read(writer, monkeypatch)
        output = writer.generate(text, max_new_tokens=12, continue_from=output)
        assert output.token_ids == [right]
        assert counts[0] <= 3 + 2, "three new tokens, the last root, and one that is read again"
        monkeypatch.undo()


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2", "glide", "cape", "ngram"])
def test_a_conversation_that_goes_another_way(drafter):
    """The next prompt leaves the earlier text in its middle, or is all of it again, or shorter."""
    writer = decoder(drafter)
    first = writer.generate(PROMPT, max_new_tokens=12)
    text = first.prompts[0] + first.token_ids[0]
    output = first
    for prompt in ([*text[:14], 3, 4], text, PROMPT, PROMPT[:3], [50, 51]):
        output = writer.generate(prompt, max_new_tokens=10, continue_from=output)
        assert output.token_ids == [plain(TARGET, prompt, 10)]


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2", "glide"])
def test_an_output_can_be_continued_twice(drafter):
    writer = decoder(drafter)
    first = writer.generate(PROMPT, max_new_tokens=10)
    text = first.prompts[0] + first.token_ids[0]
    prompts = [[*text[:10], 7, 7, 30, 31], [*text, 2], [*text, 40, 41]]
    outputs = [
        writer.generate(prompt, max_new_tokens=10, continue_from=first) for prompt in prompts
    ]
    assert [output.token_ids[0] for output in outputs] == [
        plain(TARGET, prompt, 10) for prompt in prompts
    ]


def test_caches_go_only_to_the_same_target_and_drafter():
    other = llama(seed=3)
    first = SpeculativeDecoder(other).generate(PROMPT, max_new_tokens=10)
    text = first.prompts[0] + first.token_ids[0]
    ours = SpeculativeDecoder(TARGET).generate(text, max_new_tokens=10, continue_from=first)
    assert ours.token_ids == [plain(TARGET, text, 10)]
    writer = decoder()
    first = writer.generate(PROMPT, max_new_tokens=10)
    writer.set_drafter(NgramDrafter())
    text = first.prompts[0] + first.token_ids[0]
    assert writer.generate(text, max_new_tokens=10, continue_from=first).token_ids == [
        plain(TARGET, text, 10)
    ]


def test_settings_may_change_between_turns():
    writer = decoder("eagle2")
    first = writer.generate(PROMPT, max_new_tokens=10, temperature=1.0, seed=3)
    text = first.prompts[0] + first.token_ids[0]
    greedy = writer.generate(text, max_new_tokens=10, continue_from=first)
    assert greedy.token_ids == [plain(TARGET, text, 10)]


def test_a_batch_has_no_next_turn():
    first = decoder().generate(ragged(2), max_new_tokens=4)
    with pytest.raises(SpecdecError, match="one row"):
        decoder().generate(PROMPT, max_new_tokens=4, continue_from=first)


# --- nothing leaks --------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_call_twice_drafts_the_same(drafter):
    writer = SpeculativeDecoder(TARGET, DRAFTERS[drafter](TARGET), HeuristicPolicy(initial=3))
    runs = [writer.generate(PROMPT, max_new_tokens=16) for _ in range(2)]
    drafts = [[(r.drafted, r.draft_length, r.accepted) for r in run.rounds] for run in runs]
    assert drafts[0] == drafts[1]
    assert "lengths" not in vars(writer.policy), "what a policy learns belongs to one generation"


def test_models_stay_as_they_were():
    drafter = autoregressive(TARGET)
    models = [TARGET, drafter.params.model]

    def condition() -> list[Any]:
        hooks = [len(model.get_output_embeddings()._forward_pre_hooks) for model in models]
        configs = [(model.config.to_dict(), model.generation_config.to_dict()) for model in models]
        return [hooks, configs]

    before = condition()
    SpeculativeDecoder(TARGET, drafter, "heuristic").generate(PROMPT, max_new_tokens=12)
    assert condition() == before


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2", "cape"])
def test_one_drafter_in_two_decoders(drafter):
    made, other = DRAFTERS[drafter](TARGET), llama(seed=3)
    writer = SpeculativeDecoder(TARGET, made, FixedPolicy(length=4))
    before = writer.generate(PROMPT, max_new_tokens=12, keep_trees=True)
    elsewhere = SpeculativeDecoder(other, made).generate(PROMPT, max_new_tokens=12)
    after = writer.generate(PROMPT, max_new_tokens=12, keep_trees=True)
    assert elsewhere.token_ids == [plain(other, PROMPT, 12)]
    assert [each.tree for each in after.rounds] == [each.tree for each in before.rounds]


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2", "glide", "cape", "ngram"])
def test_two_streams_of_one_decoder(drafter):
    model, tokenizer = speaking_llama()
    writer = SpeculativeDecoder(
        model, DRAFTERS[drafter](model), HeuristicPolicy(initial=2), tokenizer=tokenizer
    )
    prompts = ["the cat", "sat on the mat, and the dog"]
    right = [writer.generate(prompt, max_new_tokens=16).text for prompt in prompts]
    streams = [writer.stream(prompt, max_new_tokens=16) for prompt in prompts]
    texts = ["", ""]
    while any(stream.output is None for stream in streams):
        for place, stream in enumerate(streams):
            texts[place] += next(stream, "")
    assert texts == right


def test_parts_can_be_exchanged_while_a_stream_runs():
    model, tokenizer = speaking_llama()
    writer = SpeculativeDecoder(model, autoregressive(model), tokenizer=tokenizer)
    right = writer.generate("the cat", max_new_tokens=16).text
    stream = writer.stream("the cat", max_new_tokens=16)
    text = next(stream)
    writer.set_drafter("ngram")
    writer.set_policy("svip")
    assert text + "".join(stream) == right
