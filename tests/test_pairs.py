"""Pairs of target and drafter that differ, and models that cannot take part."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec import SpecdecError, SpeculativeDecoder, Target
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.policies import FixedPolicy
from tests.drafters import DRAFTERS, eagle2, glide
from tests.tiny import PROMPT, architecture, build, llama, noisy, plain, ragged
from tests.tiny_tokenizers import byte_level, speaking_llama, word_pieces

TARGET = architecture("llama")
NEW = plain(TARGET, PROMPT, 40)
PROMPTS = [[61, 62, 63, 5], *ragged(3)]
"""With ids that a smaller vocabulary does not have."""


# --- vocabularies ---------------------------------------------------------------------------------


def resized(model: PreTrainedModel, rows: int) -> PreTrainedModel:
    """The same model with fewer or more rows of vocabulary; the new ones are likely tokens."""
    other = llama(vocab_size=rows)
    shared = min(rows, model.config.vocab_size)
    state = copy.deepcopy(model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        own = other.state_dict()[name]
        own[:shared] = state[name][:shared]
        state[name] = own
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize("rows", [60, 72])
def test_vocabularies_that_differ_by_padding(rows):
    drafter = AutoregressiveDrafter(model=resized(TARGET, rows))
    decoder = SpeculativeDecoder(TARGET, drafter, FixedPolicy(length=4))
    output = decoder.generate(PROMPTS, max_new_tokens=24, keep_trees=True)
    right = [plain(TARGET, prompt, 24) for prompt in PROMPTS]
    assert output.token_ids == right
    drafted = {token for r in output.rounds for row in r.tree["tokens"] for token in row}
    assert max(drafted) < min(rows, 64)
    if rows == 72:
        assert output.statistics.alpha == 1.0, "padding is no reason for a rejection"
    else:
        assert output.statistics.alpha > 0.2
    sampled = decoder.generate(PROMPTS, max_new_tokens=24, temperature=40.0, seed=0)
    assert max(map(max, sampled.token_ids)) < 64
    assert sampled.statistics.alpha > 0.2


def test_a_target_with_fewer_rows_than_the_drafter_reads_no_others():
    """The target's own padding rows may win in the drafter and are no tokens of the target."""
    small = resized(TARGET, 60)
    decoder = SpeculativeDecoder(small, AutoregressiveDrafter(model=TARGET), FixedPolicy(length=4))
    prompt = [5, 9, 14]
    assert decoder.generate(prompt, max_new_tokens=24).token_ids == [plain(small, prompt, 24)]


# --- tokenizers -----------------------------------------------------------------------------------


def saved(model: PreTrainedModel, tokenizer: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_different_tokenizers_are_refused_with_both_named(tmp_path):
    model, tokenizer = speaking_llama()
    target = Target.load(saved(model, tokenizer, tmp_path / "ours"))
    theirs = saved(llama(), word_pieces(), tmp_path / "theirs")
    with pytest.raises(SpecdecError) as error:
        SpeculativeDecoder(target, AutoregressiveDrafter(model=theirs))
    assert str(tmp_path / "ours") in str(error.value)
    assert str(tmp_path / "theirs") in str(error.value)
    assert "16 tokens" in str(error.value)


def test_the_same_words_with_other_ids_are_refused(tmp_path):
    model, tokenizer = speaking_llama()
    target = Target.load(saved(model, tokenizer, tmp_path / "ours"))
    retrained = byte_level(size=310)
    shuffled = saved(llama(vocab_size=320), retrained, tmp_path / "theirs")
    ids, others = tokenizer.get_vocab(), retrained.get_vocab()
    assert {word: ids.get(word) for word in others} == others, "a shorter training is a prefix"
    SpeculativeDecoder(target, AutoregressiveDrafter(model=shuffled))
    text = (tmp_path / "theirs" / "tokenizer.json").read_text()
    swapped = text.replace('"!": 4', '"!": 5').replace('"\\"": 5', '"\\"": 4')
    assert swapped != text
    (tmp_path / "theirs" / "tokenizer.json").write_text(swapped)
    with pytest.raises(SpecdecError, match="2 tokens have another id"):
        SpeculativeDecoder(target, AutoregressiveDrafter(model=shuffled))


def test_a_drafter_with_a_few_tokens_more_is_taken(tmp_path):
    model, tokenizer = speaking_llama()
    target = Target.load(saved(model, tokenizer, tmp_path / "ours"))
    more = byte_level()
    more.add_tokens(["<extra>", "<other>"])
    theirs = saved(llama(seed=5, vocab_size=322), more, tmp_path / "theirs")
    decoder = SpeculativeDecoder(target, AutoregressiveDrafter(model=theirs))
    prompt = tokenizer("the cat")["input_ids"]
    assert decoder.generate("the cat", max_new_tokens=8).token_ids == [plain(model, prompt, 8)]


# --- dtypes and quantisation ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_drafter_in_another_dtype(dtype):
    drafter = AutoregressiveDrafter(model=noisy(TARGET, 0).to(dtype))
    decoder = SpeculativeDecoder(TARGET, drafter, "fixed")
    output = decoder.generate(ragged(3), max_new_tokens=24)
    assert output.token_ids == [plain(TARGET, prompt, 24) for prompt in ragged(3)]
    assert output.statistics.alpha > 0.9
    sampled = decoder.generate(ragged(3), max_new_tokens=24, temperature=40.0, top_p=0.9, seed=1)
    assert sampled.statistics.alpha > 0.7


@pytest.mark.parametrize("drafter", ["autoregressive", "eagle2", "glide", "cape"])
def test_a_target_in_low_precision_takes_drafters_in_full(drafter):
    target = llama()
    made = DRAFTERS[drafter](target)
    decoder = SpeculativeDecoder(target.to(torch.bfloat16), made, "svip")
    for settings in ({}, {"temperature": 1.0, "seed": 0}):
        output = decoder.generate(ragged(3), max_new_tokens=12, **settings)
        assert [len(row) for row in output.token_ids] == [12, 12, 12]


def test_a_drafter_whose_logits_overflow():
    wild = noisy(TARGET, 0)
    wild.lm_head.weight.data *= 1e3
    decoder = SpeculativeDecoder(
        TARGET, AutoregressiveDrafter(model=wild.to(torch.float16)), "svip"
    )
    assert decoder.generate(PROMPT, max_new_tokens=16).token_ids == [NEW[:16]]
    sampled = decoder.generate(ragged(3), max_new_tokens=16, temperature=1.0, seed=0)
    assert [len(row) for row in sampled.token_ids] == [16, 16, 16]


def quantised(dtype: torch.dtype) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is moving this to another package
        return torch.ao.quantization.quantize_dynamic(TARGET, {torch.nn.Linear}, dtype)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_target_with_quantised_weights(drafter):
    target = quantised(torch.float16)
    assert not isinstance(target.lm_head, torch.nn.Linear), "the output layer is quantised too"
    random = {"eagle2": eagle2, "glide": glide}.get(drafter)
    made = random(target) if random else DRAFTERS[drafter](TARGET)
    output = SpeculativeDecoder(target, made, "fixed").generate(ragged(3), max_new_tokens=16)
    assert output.token_ids == [plain(target, prompt, 16) for prompt in ragged(3)]


def test_a_target_that_quantises_its_inputs():
    """Dynamic int8 scales what goes into a layer by its largest number, so what a token gets
    depends on the tokens beside it: no decoding that checks several at once can be exact. Where the
    texts part, the two passes must disagree by more than the best token leads."""
    target = quantised(torch.qint8)
    decoder = SpeculativeDecoder(target, DRAFTERS["twin"](TARGET), "fixed")
    ours = decoder.generate(PROMPT, max_new_tokens=16).token_ids[0]
    asked = {"max_new_tokens": 16, "return_dict_in_generate": True, "output_logits": True}
    theirs = target.generate(torch.tensor([PROMPT]), do_sample=False, **asked)
    new = theirs.sequences[0, len(PROMPT) :].tolist()
    place = next((i for i in range(16) if ours[i] != new[i]), None)
    if place is not None:
        alone = theirs.logits[place][0]
        with torch.no_grad():
            together = target(torch.tensor([PROMPT + new[:place]])).logits[0, -1]
        lead = alone.topk(2).values
        assert lead[0] - lead[1] <= 2 * (together - alone).abs().max()


def test_caches_that_the_configurations_turn_off(monkeypatch):
    drafter = noisy(TARGET, 0.05)
    for model in (TARGET, drafter):
        monkeypatch.setattr(model.config, "use_cache", False)
        monkeypatch.setattr(model.generation_config, "use_cache", False)
    decoder = SpeculativeDecoder(TARGET, AutoregressiveDrafter(model=drafter), "fixed")
    assert decoder.generate(PROMPT, max_new_tokens=24).token_ids == [NEW[:24]]


def test_a_drafter_that_hardly_helps_is_told_of_once():
    decoder = SpeculativeDecoder(TARGET, DRAFTERS["stranger"](TARGET), FixedPolicy(length=2))
    with pytest.warns(UserWarning, match=r"hardly helps: 1\.0") as caught:
        decoder.generate(PROMPT, max_new_tokens=110)
    assert len(caught) == 1


# --- contexts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrapped", [False, True], ids=["autoregressive", "cape"])
def test_a_drafter_with_a_shorter_context_stops_there_and_says_so_once(wrapped):
    short = noisy(TARGET, 0)
    short.config.max_position_embeddings = 20
    drafter: Any = AutoregressiveDrafter(model=short)
    if wrapped:
        drafter = {"name": "cape", "base": drafter}
    decoder = SpeculativeDecoder(TARGET, drafter, FixedPolicy(length=4))
    with pytest.warns(UserWarning, match="drafter's context ends at 20 tokens") as caught:
        output = decoder.generate([PROMPT, ragged(4)[3]], max_new_tokens=24)
    assert len(caught) == 1
    assert output.token_ids == [NEW[:24], plain(TARGET, ragged(4)[3], 24)]
    assert all(
        record.drafted[record.rows.index(1)] == 0 for record in output.rounds if 1 in record.rows
    )
    written = len(PROMPT) + 1
    for record in output.rounds:
        if 0 in record.rows:
            place = record.rows.index(0)
            assert written + record.draft_length[place] <= 20 or record.drafted[place] == 0
            written += record.committed[place]
    assert output.row_statistics[0].drafted > 0


# --- models that cannot take part -----------------------------------------------------------------

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def t5() -> PreTrainedModel:
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, d_kv=16))


def mamba() -> PreTrainedModel:
    return MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1))


def hybrid() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, intermediate_size=32, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, num_experts=2, num_experts_per_tok=1,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def gpt_neo() -> PreTrainedModel:
    config = GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=8,
        attention_types=[[["global", "local"], 1]],
    )  # fmt: skip
    return GPTNeoForCausalLM(config)


def other_attention() -> PreTrainedModel:
    model = llama()
    model.set_attn_implementation("flex_attention")
    return model


UNFIT: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "encoder_decoder": (t5, "T5ForConditionalGeneration is an encoder-decoder model"),
    "recurrent": (mamba, "MambaForCausalLM keeps a recurrent state"),
    "hybrid": (hybrid, "Qwen3NextForCausalLM keeps a recurrent state"),
    "alibi": (
        lambda: FalconForCausalLM(FalconConfig(**SMALL, alibi=True)),
        "FalconForCausalLM uses ALiBi",
    ),
    "always_alibi": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)),
        "BloomForCausalLM uses ALiBi",
    ),
    "masks_by_slot": (gpt_neo, "GPTNeoForCausalLM masks its local layers by cache slot"),
    "both_directions": (
        lambda: BertLMHeadModel(BertConfig(**SMALL, intermediate_size=32)),
        "BertLMHeadModel reads in both directions",
    ),
    "kernel": (other_attention, "LlamaForCausalLM runs attention as 'flex_attention'"),
    "no_output": (lambda: architecture("llama").model, "LlamaModel has no output embedding"),
}


@pytest.mark.parametrize(("make", "reason"), UNFIT.values(), ids=UNFIT.keys())
def test_what_cannot_take_part_is_refused_at_once(make, reason):
    model = make()
    with pytest.raises(SpecdecError, match=f"target: {reason}"):
        SpeculativeDecoder(model)
    with pytest.raises(SpecdecError, match=f"drafter.model: {reason}"):
        SpeculativeDecoder(TARGET, AutoregressiveDrafter(model=model))


def test_layers_that_are_not_known(monkeypatch):
    model = build(architecture("gemma3").config, seed=0)
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "chunked_attention"])
    with pytest.raises(SpecdecError, match="layers of type chunked_attention"):
        SpeculativeDecoder(model)


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(SpecdecError, match="cannot load model"):
        Target.load(str(tmp_path))
