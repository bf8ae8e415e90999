"""What others decode with today, in the same process, on the same weights, in the same dtype."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from specdec.params import Params as ParamsBase

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from specdec.bench.methods import Answer
    from specdec.generation import GenerationSettings
    from specdec.target import Target


class Peer:
    """transformers' `generate`; the subclasses give it something to draft with.

    Class attributes: `label` names the rows, `Params` are the peer's settings, and `needs_model`
    says that a model assists (the grid's own autoregressive drafters by default).
    """

    label = "transformers"
    Params: ClassVar[type[ParamsBase]] = ParamsBase
    needs_model = False

    @classmethod
    def lacking(cls) -> str | None:
        """What is left out of it because a package is not installed; None when all is there."""
        return None

    @classmethod
    def cannot(cls, batch_size: int) -> str | None:
        """Why it cannot decode a batch of this size; None when it can."""
        return None

    def __init__(
        self,
        target: Target,
        settings: GenerationSettings,
        params: Any,
        model: PreTrainedModel | None = None,
    ) -> None:
        self.target, self.settings, self.params, self.assistant = target, settings, params, model

    def answer(
        self, prompts: list[list[int]], seed: int, reference: list[list[int]] | None = None
    ) -> Answer:
        import torch

        from specdec.bench.methods import Answer, now, peak_memory

        device = self.target.device
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts], device=device)
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in prompts]
        config = self._config()
        arguments = self._arguments()
        torch.manual_seed(seed)
        generate: Any = self.target.model.generate
        with peak_memory(device) as memory:
            clock = _Clock(lambda: now(device))
            written = generate(
                ids,
                attention_mask=torch.tensor(mask, device=device),
                generation_config=config,
                streamer=clock,
                **arguments,
            )
            seconds = now(device) - clock.started
        new = self._without_padding(prompts, written[:, width:].tolist(), config)
        return Answer(
            token_ids=new,
            prefill_s=clock.marks[0][1],
            decode_s=seconds - clock.marks[0][1],
            marks=clock.marks,
            rounds=self._rounds(clock.counts, len(prompts)),
            memory_mb=memory.megabytes,
        )

    def _without_padding(
        self, prompts: list[list[int]], written: list[list[int]], config: GenerationConfig
    ) -> list[list[int]]:
        """What each row of a batch wrote before its end."""
        import torch

        from specdec.generation import StopRules, make_criteria

        criteria = make_criteria(self.settings, [], self.target.tokenizer)
        eos: Any = config.eos_token_id
        rules = StopRules([config.max_new_tokens] * len(written), eos, criteria)
        kept = []
        for row, (prompt, tokens) in enumerate(zip(prompts, written, strict=True)):
            prefix = torch.tensor(prompt, device=self.target.device)
            kept.append(tokens[: rules.cut(row, 0, prefix, tokens)[0]])
        return kept

    def _config(self) -> GenerationConfig:
        """Our settings in transformers' words; what they leave out is turned off, not inherited."""
        from transformers import GenerationConfig

        from specdec.generation import eos_ids

        settings = self.settings
        # An empty list would bring the model's own ids back; no model writes this one.
        eos = eos_ids(settings.eos_token_id, self.target.default_eos) or [self.target.vocab_size]
        pad = self.target.model.generation_config.pad_token_id
        sampling = {
            "temperature": settings.temperature,
            "top_k": settings.top_k or 0,
            "top_p": settings.top_p or 1.0,
            "min_p": settings.min_p,
        }
        stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop
        return GenerationConfig(
            max_new_tokens=settings.max_new_tokens,
            min_new_tokens=settings.min_new_tokens or None,
            do_sample=settings.temperature > 0,
            repetition_penalty=settings.repetition_penalty,
            no_repeat_ngram_size=settings.no_repeat_ngram_size,
            bad_words_ids=settings.bad_words_ids,
            suppress_tokens=settings.suppress_tokens,
            stop_strings=stop,
            eos_token_id=eos,
            pad_token_id=pad if pad is not None else 0,
            **(sampling if settings.temperature > 0 else {}),
        )

    def _arguments(self) -> dict[str, Any]:
        return {"tokenizer": self.target.tokenizer} if self.settings.stop else {}

    def _rounds(self, counts: list[int], rows: int) -> list[list[list[int | None]]]:
        """As in `Answer`, from the tokens that each step gave: nothing is drafted here."""
        return [[[0, 0, 1, 0] for _ in counts[1:]] for _ in range(rows)]


class Assisted(Peer):
    """transformers' assisted generation with a model that drafts."""

    label = "transformers assisted"
    needs_model = True

    class Params(ParamsBase):
        model: Any = Field(
            None, description="what assists; by default each autoregressive drafter of the grid"
        )
        tokens: int = Field(20, ge=1, description="drafted tokens at most")
        schedule: Literal["constant", "heuristic", "heuristic_transient"] = Field(
            "constant", description="how that number changes"
        )
        threshold: float = Field(
            0.4,
            ge=0,
            le=1,
            description="stop drafting below this probability (adapted where scikit-learn is "
            "installed), 0 for never",
        )

    @classmethod
    def lacking(cls) -> str | None:
        if importlib.util.find_spec("sklearn"):
            return None
        return "transformers adapts it only with scikit-learn, which is not installed"

    @classmethod
    def cannot(cls, batch_size: int) -> str | None:
        return None if batch_size == 1 else "transformers assists one prompt at a time"

    def _arguments(self) -> dict[str, Any]:
        assert self.assistant is not None
        config, params = self.assistant.generation_config, self.params
        config.num_assistant_tokens = params.tokens
        config.num_assistant_tokens_schedule = params.schedule
        config.assistant_confidence_threshold = params.threshold
        return {**super()._arguments(), "assistant_model": self.assistant}

    def _rounds(self, counts: list[int], rows: int) -> list[list[list[int | None]]]:
        # How much was drafted is not told; the last token of a step is the target's own.
        return [[[None, count - 1, count, None] for count in counts[1:]]]


class PromptLookup(Assisted):
    """transformers' prompt lookup: assisted generation from the text's own n-grams."""

    label = "transformers prompt lookup"
    needs_model = False

    @classmethod
    def lacking(cls) -> str | None:
        return None

    class Params(ParamsBase):
        tokens: int = Field(10, ge=1, description="drafted tokens at most")
        ngram: int = Field(2, ge=1, description="longest run to look up")

    def _config(self) -> GenerationConfig:
        config = super()._config()
        config.prompt_lookup_num_tokens = self.params.tokens
        config.max_matching_ngram_size = self.params.ngram
        return config

    def _arguments(self) -> dict[str, Any]:
        return Peer._arguments(self)


PEERS: dict[str, type[Peer]] = {
    "transformers": Peer,
    "assisted": Assisted,
    "prompt-lookup": PromptLookup,
}


class _Clock:
    """A streamer that notes when tokens came; the first thing it gets is the prompt."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.marks: list[tuple[int, float]] = []
        self.counts: list[int] = []
        self.tokens = -1
        self.started = now()

    def put(self, value: Any) -> None:
        if self.tokens < 0:
            self.tokens = 0
            return
        self.tokens += value.numel()
        self.marks.append((self.tokens, self.now() - self.started))
        self.counts.append(value.numel())

    def end(self) -> None:
        pass
