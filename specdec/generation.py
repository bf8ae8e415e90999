"""The settings of a generation, and the processors and stop rules that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.errors import SpecdecError
from specdec.params import Params


class GenerationSettings(Params):
    """What `generate` takes beside the prompt; the `generation:` section of a config.

    Names and meanings are those of transformers' `GenerationConfig`; `temperature` 0 is greedy.
    """

    max_new_tokens: int = Field(256, ge=0, description="stop after this many new tokens")
    min_new_tokens: int = Field(0, ge=0, description="no end of text before this many new tokens")
    temperature: float = Field(0.0, ge=0, description="0 decodes greedily, above 0 samples")
    top_k: int | None = Field(None, ge=1, description="sample from the k most probable tokens")
    top_p: float | None = Field(
        None, gt=0, le=1, description="sample from the smallest set with this much probability"
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="drop tokens below this share of the top probability"
    )
    repetition_penalty: float = Field(1.0, gt=0, description="above 1 discourages repeated tokens")
    no_repeat_ngram_size: int = Field(0, ge=0, description="no n-gram of this size occurs twice")
    bad_words_ids: list[list[int]] | None = Field(None, description="token sequences never written")
    suppress_tokens: list[int] | None = Field(None, description="token ids never written")
    eos_token_id: int | list[int] | None = Field(
        None, description="ids that end a text; by default the model's own, [] for none"
    )
    stop: str | list[str] | None = Field(None, description="strings that end a text when written")
    auto_off: int | None = Field(
        None,
        ge=1,
        description="stop drafting for a row when drafts have not paid for this many rounds, and "
        "try again later",
    )


@dataclass
class StopRules:
    """When a row ends. Checked token by token, so nothing after the end is ever committed.

    Attributes:
        max_new_tokens: for each row of the batch that the generation started with.
        eos: ids that end a text.
        criteria: transformers' stopping criteria, called for each row and token with that row's
            text alone, `[1, L]`.
    """

    max_new_tokens: list[int]
    eos: list[int] = field(default_factory=list)
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)

    def cut(self, row: int, written: int, prefix: Tensor, new: list[int]) -> tuple[int, str | None]:
        """How many of the `new` tokens stay, and why the text ends there (None: it goes on).

        Args:
            row: index of the row in the original batch.
            written: new tokens of the row before these.
            prefix: `[L]` committed ids of the row before these.
        """
        for index, token in enumerate(new, start=1):
            if token in self.eos:
                return index, "eos"
            if self.criteria and self._criteria_met(prefix, new[:index]):
                return index, "stop"
            if written + index >= self.max_new_tokens[row]:
                return index, "length"
        return len(new), None

    def _criteria_met(self, prefix: Tensor, new: list[int]) -> bool:
        text = torch.cat([prefix, prefix.new_tensor(new)])[None]
        return any(
            bool(torch.as_tensor(criterion(text, None)).all()) for criterion in self.criteria
        )


def make_processors(
    settings: GenerationSettings, user: Sequence[LogitsProcessor], device: torch.device
) -> LogitsProcessorList:
    """transformers' processors for `settings`, in transformers' order, the user's own before warpers.

    `min_new_tokens` is not among them: prompts of a batch differ in length, so `Sampler` applies it
    row by row.
    """
    made = LogitsProcessorList()
    if settings.repetition_penalty != 1.0:
        made.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.no_repeat_ngram_size:
        made.append(NoRepeatNGramLogitsProcessor(settings.no_repeat_ngram_size))
    if settings.bad_words_ids:
        made.append(NoBadWordsLogitsProcessor(settings.bad_words_ids))
    if settings.suppress_tokens:
        made.append(SuppressTokensLogitsProcessor(settings.suppress_tokens, device=str(device)))
    made.extend(user)
    if settings.temperature > 0:
        made.extend(_warpers(settings))
    return made


def _warpers(settings: GenerationSettings) -> list[LogitsProcessor]:
    warpers: list[LogitsProcessor] = []
    if settings.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k is not None:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p is not None and settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(settings.min_p))
    return warpers


def make_criteria(
    settings: GenerationSettings, user: Sequence[StoppingCriteria], tokenizer: Any
) -> StoppingCriteriaList:
    """The user's stopping criteria, and transformers' own for stop strings.

    Raises:
        SpecdecError: stop strings without a tokenizer to read them with.
    """
    criteria = StoppingCriteriaList(user)
    stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop
    if stop:
        if tokenizer is None:
            raise SpecdecError(
                "generation.stop: stop strings need a tokenizer, and the target was given without "
                "one; pass tokenizer=... to SpeculativeDecoder, or use eos_token_id."
            )
        criteria.append(StopStringCriteria(tokenizer, stop))
    return criteria


def eos_ids(value: int | list[int] | None, default: int | list[int] | None) -> list[int]:
    """The ids that end a text: those asked for, else the model's own."""
    chosen = default if value is None else value
    if chosen is None:
        return []
    return [chosen] if isinstance(chosen, int) else list(chosen)
