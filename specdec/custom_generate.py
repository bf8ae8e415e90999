"""`model.generate(**inputs, custom_generate=decoder)`: what transformers hands over, as a request.

transformers counts lengths over the whole batch, padding included; specdec takes the padding out,
and every row counts its own tokens. What cannot be honoured is refused by name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    SuppressTokensAtBeginLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec.errors import SpecdecError
from specdec.generation import StopRules
from specdec.loop import Request
from specdec.prompts import read_prompts

if TYPE_CHECKING:
    from specdec.decoder import GenerationOutput
    from specdec.target import Target

HARMLESS = {"use_cache", "cache_position", "logits_to_keep"}
"""They say how transformers' own loop would run the model, and change no token."""
OF_THE_DECODER = {
    "assistant_model", "prompt_lookup_num_tokens", "max_matching_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
}  # fmt: skip
COUNTS_PADDING = (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
)


def read_request(
    target: Target,
    input_ids: Tensor,
    processors: LogitsProcessorList | None,
    criteria: StoppingCriteriaList | None,
    config: Any,
    model_kwargs: dict[str, Any],
) -> Request:
    """The loop's request for what transformers prepared.

    Args:
        input_ids: `[B, L]`, padded where `model_kwargs` has an `attention_mask`.

    Raises:
        SpecdecError: something asked for that speculative decoding cannot give.
    """
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    _check_config(config)
    _check_model_kwargs(model_kwargs, mask)
    prompts = read_prompts(input_ids, mask, target)
    width = input_ids.shape[1]
    least, kept = _read_processors(processors or LogitsProcessorList(), mask)
    most, eos, others = config.max_length - width, [], StoppingCriteriaList()
    for criterion in criteria or []:
        if isinstance(criterion, EosTokenCriteria):
            eos += torch.as_tensor(criterion.eos_token_id).flatten().tolist()
        elif isinstance(criterion, MaxLengthCriteria):
            most = min(most, criterion.max_length - width)
        else:
            others.append(criterion)
    return Request(
        prompts=prompts,
        processors=kept,
        do_sample=bool(config.do_sample),
        stop=StopRules([most] * len(prompts), eos, others),
        min_new_tokens=[least] * len(prompts),
        keep_scores=bool(config.output_scores or config.output_logits),
    )


def as_transformers(
    input_ids: Tensor, output: GenerationOutput, config: Any
) -> Tensor | GenerateDecoderOnlyOutput:
    """`[B, L]`: prompts as they came, new tokens, padding; or the dict transformers returns."""
    longest = max(map(len, output.token_ids))
    pad = config._pad_token_tensor
    pad_id = 0 if pad is None else int(pad)
    new = [tokens + [pad_id] * (longest - len(tokens)) for tokens in output.token_ids]
    written = torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)
    sequences = torch.cat([input_ids, written], dim=1)
    if not config.return_dict_in_generate:
        return sequences
    kept: dict[str, Any] = {"sequences": sequences}
    if config.output_scores:
        kept["scores"] = _by_step(output.scores, longest, pad_id)
    if config.output_logits:
        kept["logits"] = _by_step(output.logits, longest, pad_id)
    return GenerateDecoderOnlyOutput(**kept)


def not_handed_over() -> dict[str, Any]:
    """What the caller's `generate` was called with and does not hand on: a streamer, for one.

    transformers drops these arguments when `custom_generate` is a callable. A streamer that is never
    told of the end leaves its reader waiting for ever, so they are read where they are: in the frame
    of `generate`. Empty when someone else calls.

    Raises:
        SpecdecError: an argument among them that speculative decoding cannot honour.
    """
    frame = sys._getframe(2)
    place = frame.f_globals.get("__name__"), frame.f_code.co_name
    if place != ("transformers.generation.utils", "generate"):
        return {}
    caller = frame.f_locals
    named = {name: caller.get(name) for name in ("streamer", "synced_gpus", "assistant_model")}
    given = named | caller.get("kwargs", {})
    for name in sorted(OF_THE_DECODER):
        if given.get(name) is not None:
            raise SpecdecError(
                f"custom_generate: {name} has no effect here: the decoder's own drafter and policy "
                "draft; leave it out."
            )
    _refuse({"synced_gpus": bool(given["synced_gpus"])})
    return named


def _check_config(config: Any) -> None:
    _refuse(
        {
            "num_beams": (config.num_beams or 1) > 1,
            "penalty_alpha": bool(config.penalty_alpha),
            "dola_layers": config.dola_layers is not None,
            "output_attentions": bool(config.output_attentions),
            "output_hidden_states": bool(config.output_hidden_states),
        }
    )


def _refuse(asked: dict[str, bool]) -> None:
    for name, is_asked in asked.items():
        if is_asked:
            raise SpecdecError(
                f"custom_generate: {name} is not available with speculative decoding; leave it out."
            )


def _check_model_kwargs(model_kwargs: dict[str, Any], mask: Tensor) -> None:
    for name, value in model_kwargs.items():
        if name in ("cache", "past_key_values"):
            # transformers makes an empty one ahead; specdec decodes on its own.
            if value is not None and value.get_seq_length() > 0:
                raise SpecdecError(
                    f"custom_generate: {name} already holds text, which specdec cannot take over; "
                    "leave it out, or use decoder.generate(..., continue_from=...)."
                )
        elif name == "position_ids":
            counted = mask.cumsum(-1) - 1
            if value is not None and not torch.equal(value[mask > 0], counted[mask > 0]):
                raise SpecdecError(
                    "custom_generate: position_ids must count each prompt's own tokens from 0; "
                    "leave them out."
                )
        elif name != "attention_mask" and name not in HARMLESS and value is not None:
            raise SpecdecError(
                f"custom_generate: argument '{name}' is not supported; leave it out."
            )


def _read_processors(
    processors: LogitsProcessorList, mask: Tensor
) -> tuple[int, LogitsProcessorList]:
    """The new tokens before which no text may end, and all other processors, made for rows without
    padding."""
    width, least, kept = mask.shape[1], 0, LogitsProcessorList()
    for processor in processors:
        if isinstance(processor, MinLengthLogitsProcessor):
            least = max(least, processor.min_length - width)
        elif isinstance(processor, MinNewTokensLengthLogitsProcessor):
            least = max(least, processor.min_new_tokens)
        else:
            kept.append(processor if bool(mask.all()) else _without_padding(processor, mask))
    return least, kept


def _without_padding(processor: LogitsProcessor, mask: Tensor) -> LogitsProcessor:
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and ignored is not None:
        padding = (mask != 0).int().argmax(dim=1)
        if torch.equal(torch.as_tensor(ignored, device=mask.device).expand_as(padding), padding):
            return RepetitionPenaltyLogitsProcessor(processor.penalty)
    elif not isinstance(processor, COUNTS_PADDING):
        return processor
    raise SpecdecError(
        f"custom_generate: {type(processor).__name__} counts tokens with the padding, which specdec "
        "takes out; give it prompts of one length, or one prompt at a time."
    )


def _by_step(rows: list[list[Tensor]] | None, longest: int, pad_id: int) -> tuple[Tensor, ...]:
    """A tensor `[B, V]` for each step; a row that has ended is sure of its padding."""
    assert rows is not None
    ended = torch.full_like(rows[0][0], -torch.inf)
    ended[pad_id] = 0.0
    return tuple(
        torch.stack([row[step] if step < len(row) else ended for row in rows])
        for step in range(longest)
    )
