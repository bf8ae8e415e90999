"""Autoregressive: any smaller transformers causal LM as drafter."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel

from specdec.cache import SlotCache
from specdec.draft import RoundOutcome
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.vocab import DraftVocabulary, load_draft_vocab
from specdec.errors import SpecdecError
from specdec.model import CachedModel
from specdec.params import Params as ParamsBase
from specdec.plugins import resolve_model
from specdec.state import GenerationState
from specdec.target import Target, TargetPass, load_pretrained


class AutoregressiveDrafter(ChainDrafter):
    """Draft with a small language model that shares the target's tokenizer.

    The drafter keeps its own cache of the committed text. A round begins with one pass over the
    tokens it has not read yet (the root; after full acceptance also the last drafted token), so no
    position is skipped or computed twice.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
    """

    summary = "a smaller causal LM with the target's tokenizer"
    source = "arXiv 2211.17192"

    class Params(ParamsBase):
        model: Any = Field(
            description="a registered name, a hub id, a folder, or a loaded transformers model"
        )
        dtype: str = Field("auto", description="dtype to load it in, e.g. bfloat16")
        device: str | None = Field(None, description="device; the target's by default")
        draft_vocab: list[int] | str | Literal[False] | None = Field(
            None,
            description="token ids to draft from, or a JSON file with them; by default the model's "
            "draft_vocab.json where it has one, false for the whole vocabulary",
        )

    def attach(self, target: Target) -> None:
        where: str | None = None
        if isinstance(self.params.model, PreTrainedModel):
            model, tokenizer = self.params.model.eval(), None
        else:
            where = resolve_model(self.params.model, "drafter.model")
            model, tokenizer = load_pretrained(
                self.params.model,
                role="drafter.model",
                dtype=self.params.dtype,
                device=self.params.device or str(target.device),
            )
        check_tokenizers(target.tokenizer, tokenizer)
        self.model = CachedModel(model, role="drafter.model")
        self.max_positions = self.model.max_positions
        ids = load_draft_vocab(self.params.draft_vocab, where)
        self.vocabulary = DraftVocabulary(target.vocab_size, self.model.vocab_size, ids)
        self.vocabulary.to(self.model.device)
        self.output = None
        if self.vocabulary.ids is not None:
            layer = model.get_output_embeddings()
            self.output = self.vocabulary.output(layer, self.model.dtype)

    def start(self, state: GenerationState) -> None:
        self.cache = SlotCache(state.batch_size)
        self.fed = 0

    def first(self, state: GenerationState) -> Tensor:
        self.fed = 0
        logits, self.cache.lengths = self.catch_up(
            state, list(self.cache.lengths), self.model.device, self._logits
        )
        return logits

    def following(self, tokens: Tensor, depth: int) -> Tensor:
        starts = [length + depth - 1 for length in self.cache.lengths]
        self.fed = depth
        return self._logits(tokens[:, None], starts, torch.zeros_like(tokens))

    def commit(self, state: GenerationState, outcome: RoundOutcome, checked: TargetPass) -> None:
        # What was fed sits in the slots where the accepted tokens belong. The last drafted token was
        # not fed, and neither was one that a wrapper put beside the chain; rows that did not draft
        # fed nothing and accepted nothing.
        for row, nodes in enumerate(outcome.path_nodes):
            own = sum(node == place for place, node in enumerate(nodes[1:], start=1))
            self.cache.lengths[row] += min(own, self.fed)

    def rewind(self, lengths: list[int]) -> None:
        self.cache.lengths = [min(pair) for pair in zip(self.cache.lengths, lengths, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        self.cache.keep_rows(rows)

    def _logits(self, tokens: Tensor, starts: list[int], last: Tensor) -> Tensor:
        """`[B, Vd]` behind token `last[b]` of each row of `tokens [B, T]`."""
        # An id that only the target has can only come from the prompt or from the target itself.
        tokens = tokens.clamp_max(self.model.vocab_size - 1)
        if self.output is None:
            done = self.model.forward(tokens, self.cache, starts, keep=last[:, None])
            return done.logits[:, 0, : self.vocabulary.shared]
        hidden = self.model.hidden(tokens, self.cache, starts)
        every = torch.arange(len(tokens), device=tokens.device)
        return self.output(hidden[every, last])


def check_tokenizers(target: Any, drafter: Any) -> None:
    """Refuse a drafter whose token ids mean something else.

    Vocabularies that differ only by padding of the embedding, or by ids that one of the two lacks,
    pass. Nothing is checked where one of the two came without a tokenizer.

    Raises:
        SpecdecError: names both tokenizers, and how many ids differ.
    """
    if target is None or drafter is None:
        return
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    differing = [token for token, index in theirs.items() if ours.get(token, index) != index]
    missing = [token for token in theirs if token not in ours]
    if differing or len(missing) > len(theirs) // 10:
        raise SpecdecError(
            f"drafter.model: its tokenizer ({drafter.name_or_path}, {len(theirs)} tokens) is not the "
            f"target's ({target.name_or_path}, {len(ours)} tokens): {len(differing)} tokens have "
            f"another id and {len(missing)} are unknown to the target. Use a drafter with the target's "
            "tokenizer."
        )
