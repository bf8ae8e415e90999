"""The front door of the library: a target, a drafter and a policy that write text together."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.custom_generate import as_transformers, not_handed_over, read_request
from specdec.drafters.base import Drafter
from specdec.errors import SpecdecError
from specdec.generation import (
    GenerationSettings,
    StopRules,
    eos_ids,
    make_criteria,
    make_processors,
)
from specdec.loop import Generation, Request
from specdec.metrics import RoundRecord, Statistics
from specdec.params import validate
from specdec.plugins import make_drafter, make_policy, round_observers
from specdec.policies.base import LengthPolicy
from specdec.policies.fixed import FixedPolicy
from specdec.prompts import read_prompts
from specdec.target import Target
from specdec.text import TextPieces


@dataclass
class GenerationOutput:
    """What a generation wrote.

    Attributes:
        token_ids: the new tokens of each row, without the prompt.
        prompts: the prompt's token ids of each row.
        texts: the new tokens as text, special tokens left out; None without a tokenizer.
        finish_reasons: of each row `eos`, `stop` (a stop string or criterion) or `length`.
        statistics: of all rows together; `row_statistics` has the counts of each.
        rounds: the records of all rounds, in order.
        scores, logits: of each row and new token the target's processed scores and raw logits `[V]`,
            when `output_scores` was asked for.
    """

    token_ids: list[list[int]]
    prompts: list[list[int]]
    texts: list[str] | None
    finish_reasons: list[str]
    statistics: Statistics
    row_statistics: list[Statistics]
    rounds: list[RoundRecord]
    scores: list[list[Tensor]] | None = None
    logits: list[list[Tensor]] | None = None
    generation: Generation = field(repr=False, default=None)  # type: ignore[assignment]

    @property
    def text(self) -> str:
        """The only row's text.

        Raises:
            SpecdecError: there are several rows, or no tokenizer.
        """
        if self.texts is None or len(self.texts) != 1:
            raise SpecdecError(
                "output.text is for one row with a tokenizer; use output.texts or output.token_ids."
            )
        return self.texts[0]


class SpeculativeDecoder:
    """Speculative decoding with any drafter and any length policy.

    Args:
        target: a `Target`, a transformers causal LM, or a name that `Target.load` takes.
        drafter: an instance, a registered name, or `{"name": ..., parameter: ...}`; None decodes
            plainly, one token a round.
        policy: likewise; `fixed(length=5)` by default.
        tokenizer: of the target, for text in and out; the one loaded with it by default.
        settings: defaults for `generate`, for instance those of a config file.
        seed: default seed; None draws one for each call.

    Raises:
        SpecdecError: the parts do not fit together; the message says which and why.

    Example:
        >>> decoder = SpeculativeDecoder("smollm2-135m", drafter="ngram", policy="svip")
        >>> decoder.generate("Once upon a time", max_new_tokens=64).text
    """

    def __init__(
        self,
        target: Target | PreTrainedModel | str,
        drafter: Drafter | dict[str, Any] | str | None = None,
        policy: LengthPolicy | dict[str, Any] | str | None = None,
        *,
        tokenizer: Any = None,
        settings: GenerationSettings | None = None,
        seed: int | None = None,
    ) -> None:
        self.target = _as_target(target, tokenizer)
        self.settings = settings or GenerationSettings.model_validate({})
        self.seed = seed
        self.set_drafter(drafter)
        self.set_policy(policy)

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    def set_drafter(self, drafter: Drafter | dict[str, Any] | str | None) -> None:
        """Exchange the drafter; generations under way keep theirs."""
        # A copy: the same drafter may be handed to a decoder with another target.
        self.drafter = copy.copy(make_drafter(drafter))
        if self.drafter is not None:
            self.drafter.attach(self.target)

    def set_policy(self, policy: LengthPolicy | dict[str, Any] | str | None) -> None:
        """Exchange the length policy; generations under way keep theirs."""
        self.policy = FixedPolicy() if policy is None else make_policy(policy)

    def generate(
        self,
        prompt: Any,
        *,
        attention_mask: Tensor | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        streamer: Any = None,
        seed: int | None = None,
        output_scores: bool = False,
        keep_trees: bool = False,
        continue_from: GenerationOutput | None = None,
        **settings: Any,
    ) -> GenerationOutput:
        """Write behind one prompt or a batch of them.

        Args:
            prompt: text, a list of texts, token ids (a list or a 1-D tensor), a list of id lists, a
                2-D tensor, or what a tokenizer returns (`input_ids` and `attention_mask`).
            attention_mask: `[B, L]` 0 for padding, for a 2-D prompt.
            logits_processor: transformers' or your own; each sees the text of the very position whose
                scores it changes.
            stopping_criteria: called after every token with one row's text `[1, L]`.
            streamer: a transformers streamer (one row): gets every token once, in order.
            seed: makes sampling repeatable.
            output_scores: keep scores and logits of every new token.
            keep_trees: keep each round's draft tree in its record.
            continue_from: an earlier output (one row); what its text and this prompt have in common
                is not read again. Its caches move to the new output: continued a second time, it is
                read again.
            **settings: any field of `GenerationSettings`, e.g. `max_new_tokens`, `temperature`.

        Raises:
            SpecdecError: an unknown or impossible argument, an empty prompt, a prompt that is longer
                than the target's context.
        """
        generation = self._begin(
            prompt,
            continue_from,
            attention_mask=attention_mask,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            seed=seed,
            output_scores=output_scores,
            keep_trees=keep_trees,
            **settings,
        )
        if streamer is not None and len(generation.texts) == 1:
            streamer.put(torch.tensor(generation.request.prompts))
        return self._write(generation, streamer)

    def stream(self, prompt: Any, **arguments: Any) -> Stream:
        """Write behind one prompt, piece by piece; takes what `generate` takes.

        Returns:
            An iterator of text pieces; after the last one its `output` is the `GenerationOutput`.

        Raises:
            SpecdecError: as `generate`, and for several prompts or a target without a tokenizer.
        """
        if self.tokenizer is None:
            raise SpecdecError("stream: the target has no tokenizer; use generate, or pass one.")
        if "streamer" in arguments:
            raise SpecdecError("stream: takes no streamer; it is an iterator of text itself.")
        generation = self._begin(prompt, **arguments)
        if len(generation.texts) != 1:
            raise SpecdecError("stream: takes one prompt; use generate for a batch.")
        return Stream(self, generation)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        generation_config: Any = None,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """`model.generate(**inputs, custom_generate=decoder)`: transformers prepares, specdec decodes.

        Honours the generation config, processors, stopping criteria and streamer of that call, and
        returns what its `generate` returns. `last_output` has the statistics.

        Raises:
            SpecdecError: another model than the decoder's target, or something asked for that
                speculative decoding cannot give.
        """
        if model is not self.target.model:
            raise SpecdecError(
                "custom_generate: this decoder was made for another model object; build it with "
                "SpeculativeDecoder(model, ...) from the model you call generate on."
            )
        dropped = not_handed_over()
        request = read_request(
            self.target, input_ids, logits_processor, stopping_criteria, generation_config,
            model_kwargs,
        )  # fmt: skip
        request.seed, request.auto_off = self.seed, self.settings.auto_off
        request.observers = round_observers()
        generation = Generation(self.target, self.drafter, self.policy, request)
        # The prompt is with the streamer already.
        self.last_output = self._write(generation, streamer or dropped.get("streamer"))
        return as_transformers(input_ids, self.last_output, generation_config)

    # --- from arguments to a request and back -----------------------------------------------------

    def request(
        self,
        prompt: Any,
        *,
        attention_mask: Tensor | None = None,
        logits_processor: Sequence[LogitsProcessor] = (),
        stopping_criteria: Sequence[StoppingCriteria] = (),
        seed: int | None = None,
        output_scores: bool = False,
        keep_trees: bool = False,
        **settings: Any,
    ) -> Request:
        """What `generate` hands to the loop; for code that drives a `Generation` itself.

        Raises:
            SpecdecError: as `generate`.
        """
        chosen = self._settings(settings)
        prompts = read_prompts(prompt, attention_mask, self.target)
        return Request(
            prompts=prompts,
            processors=make_processors(chosen, logits_processor, self.target.device),
            do_sample=chosen.temperature > 0,
            stop=StopRules(
                [chosen.max_new_tokens] * len(prompts),
                eos_ids(chosen.eos_token_id, self.target.default_eos),
                make_criteria(chosen, stopping_criteria, self.tokenizer),
            ),
            seed=self.seed if seed is None else seed,
            min_new_tokens=[chosen.min_new_tokens] * len(prompts),
            keep_scores=output_scores,
            keep_trees=keep_trees,
            auto_off=chosen.auto_off,
            observers=round_observers(),
        )

    def _begin(
        self, prompt: Any, continue_from: GenerationOutput | None = None, **arguments: Any
    ) -> Generation:
        request = self.request(prompt, **arguments)
        previous = None
        if continue_from is not None:
            if len(request.prompts) != 1 or len(continue_from.prompts) != 1:
                raise SpecdecError("continue_from: only a generation of one row can be continued.")
            previous = continue_from.generation
        return Generation(self.target, self.drafter, self.policy, request, previous)

    def _write(self, generation: Generation, streamer: Any) -> GenerationOutput:
        if streamer is not None and len(generation.texts) != 1:
            raise SpecdecError(
                f"streamer: streams one row, and the batch has {len(generation.texts)}; leave it out."
            )
        started = time.perf_counter()
        for committed in generation.run():
            if streamer is not None:
                for token in committed[0][1]:
                    streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        return self._output(generation, time.perf_counter() - started)

    def _settings(self, given: dict[str, Any]) -> GenerationSettings:
        merged = self.settings.model_dump() | given
        chosen = validate(GenerationSettings, merged, where="generate")
        for name in ("top_k", "top_p", "min_p"):
            if given.get(name) is not None and chosen.temperature == 0:
                raise SpecdecError(
                    f"generate.{name}: has no effect without a temperature above 0 (it is 0, which "
                    "is greedy); give both or neither."
                )
        return chosen

    def _output(self, generation: Generation, wall: float) -> GenerationOutput:
        prompts = generation.request.prompts
        new = [text[len(p) :] for text, p in zip(generation.texts, prompts, strict=True)]
        texts = None
        if self.tokenizer is not None:
            texts = self.tokenizer.batch_decode(
                new, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        kept: Any = generation.scores if generation.request.keep_scores else None
        records = generation.records
        return GenerationOutput(
            token_ids=new,
            prompts=prompts,
            texts=texts,
            finish_reasons=[reason or "length" for reason in generation.finish_reasons],
            statistics=Statistics.from_rounds(
                records, sum(map(len, new)), prefill_s=generation.prefill_seconds, wall_s=wall
            ),
            row_statistics=Statistics.of_rows(records, [len(tokens) for tokens in new]),
            rounds=records,
            scores=kept and [[scores for scores, _ in row] for row in kept],
            logits=kept and [[raw for _, raw in row] for row in kept],
            generation=generation,
        )


class Stream(Iterator[str]):
    """The pieces of one text as they are written; `output` is there when they are all read.

    Attributes:
        parts: the newest piece in parts, each with whether it was drafted.
    """

    def __init__(self, decoder: SpeculativeDecoder, generation: Generation) -> None:
        self._decoder, self._generation = decoder, generation
        self._run = generation.run()
        self._pieces = TextPieces(decoder.tokenizer)
        self._started = time.perf_counter()
        self._ended = False
        self.parts: list[tuple[str, bool]] = []
        self.output: GenerationOutput | None = None

    def __next__(self) -> str:
        while not self._ended:
            committed = next(self._run, None)
            if committed is None:
                self.close()
                self._ended = True
                parts = [(self._pieces.end(), False)]
            else:
                tokens, records = committed[0][1], self._generation.records
                accepted = records[-1].accepted[0] if records else 0
                halves = ((tokens[:accepted], True), (tokens[accepted:], False))
                parts = [(self._pieces.add(half), drafted) for half, drafted in halves if half]
            self.parts = [(text, drafted) for text, drafted in parts if text]
            if self.parts:
                return "".join(text for text, _ in self.parts)
        raise StopIteration

    def close(self) -> None:
        """Stop here; `output` holds what was written so far. What is held back of it still comes."""
        if self.output is None:
            self._run.close()
            wall = time.perf_counter() - self._started
            self.output = self._decoder._output(self._generation, wall)


def _as_target(target: Target | PreTrainedModel | str, tokenizer: Any) -> Target:
    if isinstance(target, str):
        target = Target.load(target)
    elif not isinstance(target, Target):
        return Target(target, tokenizer)
    if tokenizer is not None:
        target.tokenizer = tokenizer
    return target
