"""EAGLE-2: a one-layer head that continues the target's own features, and the tree it drafts.

Source: Li et al. 2024, EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache

from specdec import masks
from specdec.cache import SlotCache
from specdec.draft import ROOT, DraftStep, DraftTree, RoundOutcome
from specdec.drafters.base import Drafter
from specdec.drafters.checkpoint import check_tensors, read_json, read_weights
from specdec.drafters.vocab import DraftVocabulary, load_draft_vocab
from specdec.errors import SpecdecError
from specdec.host import send
from specdec.params import Params as ParamsBase
from specdec.params import validate
from specdec.plugins import resolve_model
from specdec.state import GenerationState
from specdec.target import Target, TargetPass


class Eagle2Drafter(Drafter):
    """Draft a tree with an EAGLE head; the tree's shape follows the head's confidence.

    A round begins with one pass of the head over the tokens committed last, with the target's true
    features. Its last output gives the first level: the `top_k` best tokens. Each further level
    runs the frontier (at most `top_k` nodes) through the head, takes the `top_k` best children of
    each node, scores them by path log-probability, and makes the best `top_k` of them the next
    frontier. Of all children of all levels the best `total_tokens - 1` become the draft tree. The
    names mean what they mean in the official code, so published settings carry over.

    What differs from the official code: every row of a batch grows its own tree; the length policy
    is asked at every level and what it stops is not run, so a short draft costs little and gives a
    small tree; a tie never separates a node from its parent; nothing is read back to the host.

    With `sample` and a temperature the children of a node are drawn from the head's own processed
    distribution, without replacement, instead of being its most probable tokens. How many children
    a node gets is settled before they are drawn, from the sorted probabilities alone: a drawn token
    that was dropped for being improbable would bias the output.

    With a policy other than `fixed` the branches stop one by one (see the policy); `depth` and
    `total_tokens` stay as limits. `fixed(length=depth + 1)` grows the official tree.

    Source: arXiv 2406.16858; the head, arXiv 2401.15077; `draft_vocab`, arXiv 2502.14856.
    """

    summary = "a head on the target's features that drafts a tree"
    source = "arXiv 2406.16858"
    needs_features = True

    class Params(ParamsBase):
        checkpoint: Any = Field(
            description="a head in the official layout: a registered name, a hub id, a folder, or "
            "a loaded EagleHead"
        )
        top_k: int = Field(10, ge=1, description="children of a node, and width of the frontier")
        depth: int = Field(5, ge=0, description="levels grown at most behind the first one")
        total_tokens: int = Field(60, ge=2, description="tokens of the tree at most, root included")
        chain: bool = Field(False, description="draft one branch only: the same as top_k 1")
        sample: bool = Field(
            False,
            description="at a temperature above 0 draw the children instead of taking the best",
        )
        draft_vocab: list[int] | str | Literal[False] | None = Field(
            None,
            description="token ids to draft from, or a JSON file with them; by default the "
            "checkpoint's draft_vocab.json where it has one, false for the whole vocabulary",
        )

    @property
    def proposes_chain(self) -> bool:
        return self.params.chain or self.params.top_k == 1

    def attach(self, target: Target) -> None:
        params, output = self.params, target.model.get_output_embeddings()
        checkpoint = params.checkpoint
        # A quantised layer may keep its weights where torch does not list them.
        weight = next(output.parameters(), None)
        self.device = target.device if weight is None else weight.device
        self.target_dtype = target.dtype
        if isinstance(checkpoint, EagleHead):
            where = None
            self.head = checkpoint.eval()
        else:
            where = resolve_model(str(checkpoint), "drafter.checkpoint")
            self.head = EagleHead.from_pretrained(where, dtype=target.dtype, device=self.device)
        _check_fit(self.head.config, target)
        self.embed = self._embedding(target)
        ids = load_draft_vocab(params.draft_vocab, where)
        vocab_size = target.vocab_size
        self.vocabulary = DraftVocabulary(vocab_size, vocab_size, ids).to(self.device)
        self.output = self.vocabulary.output(output, target.dtype)
        self.top_k = min(1 if params.chain else params.top_k, self.vocabulary.size)
        # A path cannot be longer than the tree is large.
        self.levels = min(params.depth + 1, params.total_tokens - 1)

    def start(self, state: GenerationState) -> None:
        batch = state.batch_size
        # Pair i (feature of token i, token i + 1) sits in slot i of both: its feature as soon as
        # the target has read token i, its keys and values once token i + 1 is known as well.
        self.features = SlotCache(batch)
        self.cache = SlotCache(batch)
        self.sampling = self.params.sample and state.sampler.do_sample
        dtype = self.head.fc.weight.dtype
        self.seed = torch.zeros(
            batch, self.head.config.hidden_size, dtype=dtype, device=self.device
        )

    def prefill(self, state: GenerationState, done: TargetPass) -> None:
        assert done.features is not None
        self._store(done.features, done.starts, done.counts)
        self._read(state)

    def commit(self, state: GenerationState, outcome: RoundOutcome, checked: TargetPass) -> None:
        assert checked.features is not None
        counts = [len(nodes) for nodes in outcome.path_nodes]
        path = outcome.path[:, : max(counts), None].expand(-1, -1, checked.features.shape[-1])
        self._store(checked.features.gather(1, path), checked.starts, counts)

    def rewind(self, lengths: list[int]) -> None:
        kept = zip(self.features.lengths, lengths, strict=True)
        self.features.lengths = [min(pair) for pair in kept]
        # The last pair that stays had a token that may change now: it is read again.
        read = zip(self.cache.lengths, lengths, strict=True)
        self.cache.lengths = [max(0, min(pairs, length - 1)) for pairs, length in read]

    def keep_rows(self, rows: list[int]) -> None:
        self.features.keep_rows(rows)
        self.cache.keep_rows(rows)
        self.seed = self.seed[send(rows, self.device)]

    # --- a round ---------------------------------------------------------------------------------

    def begin(self, state: GenerationState) -> None:
        self._read(state)
        self.state = state
        self.depth = 0
        self.slots = 0
        self.pool = Pool()
        self.drafting = [limit > 0 for limit in state.limits]
        self.sizes = [0] * state.batch_size
        batch = state.batch_size
        here = send(self.drafting, self.device)[:, None]
        none = torch.zeros(batch, 1, 0, dtype=torch.long, device=self.device)
        root = Frontier(
            tokens=state.roots.to(self.device)[:, None],
            scores=torch.zeros(batch, 1, device=self.device).masked_fill_(~here, -torch.inf),
            nodes=torch.full_like(here, ROOT, dtype=torch.long),
            features=self.seed[:, None],
            visible=none.bool(),
            path=none,
        )
        self._grow(root, self.seed[:, None], [int(drafting) for drafting in self.drafting])

    def step(self) -> DraftStep:
        return self.last_step

    def extend(self, go_on: list[list[bool]] | Literal[True]) -> bool:
        if self.depth == self.levels or self._room() == 0:
            return False
        running, counts = self._running(go_on)
        if not any(counts):
            return False
        self._grow(running, self._run(running), counts)
        return True

    def finish(self) -> DraftTree:
        size = min(self.params.total_tokens - 1, max(self.sizes))
        # Of drawn nodes nothing is left out: the pool stays within the limit while it grows.
        tokens, scores, parents = self.pool.best(size)
        valid = scores > -torch.inf
        proposals, proposal = self.pool.proposals() if self.sampling else (None, None)
        if self.top_k == 1:
            return DraftTree.chain(tokens, valid, proposals)
        return DraftTree(
            tokens,
            parents,
            valid,
            depth=min(self.depth, size),
            sampled=valid if self.sampling else None,
            proposals=proposals,
            proposal=proposal,
            max_sampled=self.top_k if self.sampling else 0,
        )

    # --- growing the tree ------------------------------------------------------------------------

    def _grow(self, parents: Frontier, outputs: Tensor, counts: list[int]) -> None:
        """One level: the children of `parents`, and the frontier among them.

        Args:
            outputs: `[B, P, H]` the head's output at each parent.
            counts: of each row, how many of the parents are real.
        """
        logits = self.output(outputs.to(self.target_dtype))
        grown = (self._draw if self.sampling else self._best)(parents, logits)
        first = self.pool.size
        self.pool.add(grown, parents)
        self.depth += 1
        self.sizes = [
            size + min(count * self.top_k, grown.tokens.shape[1])
            for size, count in zip(self.sizes, counts, strict=True)
        ]
        self.drafting = [count > 0 for count in counts]
        best = self._widest(grown.scores)
        source = grown.source.gather(1, best)
        tokens = grown.tokens.gather(1, best)
        self.frontier = Frontier(
            tokens=tokens,
            scores=grown.scores.gather(1, best),
            nodes=first + best,
            features=_pick(outputs, source),
            visible=_pick(parents.visible, source),
            path=self._paths(parents, source, tokens),
        )
        self.last_step = DraftStep(
            depth=self.depth,
            tokens=tokens,
            distributions=logits,
            path_log_prob=self.frontier.scores,
            rows=self.state.rows,
            active=self.frontier.scores > -torch.inf,
            source=source,
        )

    def _paths(self, parents: Frontier, source: Tensor, tokens: Tensor) -> Tensor:
        if not self.sampling:
            return tokens[..., None][..., :0]
        return torch.cat([_pick(parents.path, source), tokens[..., None]], dim=-1)

    def _best(self, parents: Frontier, logits: Tensor) -> Children:
        """The `top_k` most probable tokens behind each parent, parents in order."""
        top = logits.topk(self.top_k, dim=-1)
        log_probs = top.values.float() - logits.float().logsumexp(-1, keepdim=True)
        # Logits that overflowed have no order; such children are never drafted.
        scores = (parents.scores[..., None] + log_probs).nan_to_num(-torch.inf, neginf=-torch.inf)
        every = torch.arange(logits.shape[1], device=logits.device)[:, None]
        source = every.expand(-1, self.top_k).flatten().expand(len(logits), -1)
        return Children(
            self.vocabulary.to_target(top.indices.flatten(1)), scores.flatten(1), source
        )

    def _draw(self, parents: Frontier, logits: Tensor) -> Children:
        """Children drawn from the processed distributions, without replacement.

        Of each parent's draws the first few are kept. How many: child number r of a parent stands
        for the r-th largest probability there, whatever token was drawn, and of all parents'
        children the best by path score are kept. Nothing is dropped later.
        """
        full = self.vocabulary.expand(logits)
        probs = self._processed(parents, full)
        drawn = self.state.sampler.without_replacement(probs, self.top_k)
        ranked = probs.topk(self.top_k, dim=-1).values.log()
        standing = (parents.scores[..., None] + ranked).flatten(1)
        width = min(self.top_k, standing.shape[1], self._room())
        standing, kept = standing.sort(dim=1, descending=True, stable=True)
        standing, kept = standing[:, :width], kept[:, :width]
        source = kept // self.top_k
        log_probs = full.gather(-1, drawn).float() - logits.float().logsumexp(-1, keepdim=True)
        scores = (parents.scores[..., None] + log_probs).flatten(1).gather(1, kept)
        # Where the processors left fewer tokens than top_k, the rest of the draws are none.
        scores = scores.masked_fill(standing == -torch.inf, -torch.inf)
        return Children(drawn.flatten(1).gather(1, kept), scores, source, probs)

    def _processed(self, parents: Frontier, full: Tensor) -> Tensor:
        """`[B, P, V]` what the sampling rule makes of the logits `full [B, P, V]`."""
        batch, width = full.shape[:2]
        path = parents.path.flatten(0, 1)
        rows = torch.arange(batch).repeat_interleave(width)
        scores = self.state.sampler.scores(full.flatten(0, 1), self.state, path, rows)
        probs = torch.softmax(scores, dim=-1).unflatten(0, (batch, width))
        # A processor may leave no token at all of a reduced vocabulary: nothing is drawn then.
        return probs.masked_fill_(probs[..., :1].isnan(), 0.0)

    def _widest(self, scores: Tensor) -> Tensor:
        """`[B, W]` the children `[B, C]` that become the frontier, the best first.

        A stable order: of equal scores the earlier child.
        """
        if scores.shape[1] <= self.top_k:
            return torch.arange(scores.shape[1], device=self.device).expand(len(scores), -1)
        return scores.sort(dim=1, descending=True, stable=True).indices[:, : self.top_k]

    def _room(self) -> int:
        """Nodes that a drawn tree still takes; of top-k children the best are taken at the end."""
        return self.params.total_tokens - 1 - self.pool.size if self.sampling else self.top_k

    def _running(self, go_on: list[list[bool]] | Literal[True]) -> tuple[Frontier, list[int]]:
        """The part of the frontier that is extended, and how much of it each row has."""
        width = self.frontier.tokens.shape[1]
        if go_on is True:
            return self.frontier, [width if drafting else 0 for drafting in self.drafting]
        kept = [
            [place for place in range(width) if drafting and row[place]]
            for drafting, row in zip(self.drafting, go_on, strict=True)
        ]
        counts = [len(places) for places in kept]
        widest = max(counts)
        if min(counts) == width or not widest:
            return self.frontier, counts
        padded = [places + [0] * (widest - len(places)) for places in kept]
        running = self.frontier.pick(send(padded, self.device))
        if min(counts) < widest:
            real = send(counts, self.device)[:, None]
            empty = torch.arange(widest, device=self.device) >= real
            running.scores = running.scores.masked_fill(empty, -torch.inf)
        return running, counts

    def _run(self, running: Frontier) -> Tensor:
        """`[B, W, H]` the head's output at the frontier's nodes, which see themselves from here."""
        batch, width = running.tokens.shape
        base = self.cache.lengths
        own = torch.eye(width, dtype=torch.bool, device=self.device).expand(batch, -1, -1)
        running.visible = torch.cat([running.visible, own], dim=-1)
        self.cache.place([length + self.slots for length in base], width)
        self.slots += width
        allowed = masks.behind_prefix(base, running.visible, self.cache.used)
        level = send(base, self.device)[:, None] + (self.depth - 1)
        return self._head(running.tokens, running.features, level.expand(-1, width), allowed)

    # --- the committed text ----------------------------------------------------------------------

    def _store(self, features: Tensor, starts: list[int], counts: list[int]) -> None:
        """Keep the target's features `[B, T, H]` of the positions from `starts[b]` on."""
        rows = features.to(self.device, self.seed.dtype)[:, None]
        self.features.place(starts, features.shape[1])
        self.features.update(rows, rows[..., :0], 0)
        self.features.lengths = [start + count for start, count in zip(starts, counts, strict=True)]

    def _read(self, state: GenerationState) -> None:
        """Run the head over all pairs that are known and not in its cache yet."""
        starts = list(self.cache.lengths)
        ends = [
            min(known, length - 1)
            for known, length in zip(self.features.lengths, state.lengths, strict=True)
        ]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        longest = max(counts)
        if longest <= 0:
            return
        stored = self.features.committed(0)[0][:, 0]
        first = send(starts, self.device)[:, None]
        positions = first + torch.arange(longest, device=self.device)
        features = _pick(stored, positions.clamp_max(stored.shape[1] - 1))
        ids = state.ids.to(self.device)
        tokens = ids.gather(1, (positions + 1).clamp_max(ids.shape[1] - 1))
        self.cache.place(starts, longest)
        allowed = masks.causal(starts, longest, self.cache.used, self.device)
        outputs = self._head(tokens, features, positions, allowed)
        self.cache.lengths = ends
        last = send(counts, self.device)[:, None] - 1
        seed = _pick(outputs, last.clamp_min(0))[:, 0]
        self.seed = torch.where(last >= 0, seed, self.seed)

    def _embedding(self, target: Target) -> Callable[[Tensor], Tensor]:
        """Ids on the head's device to embeddings there: the head's own table, or the target's."""
        rows = self.head.config.vocab_size
        table = self.head.embed_tokens or target.model.get_input_embeddings()
        home = next(table.parameters()).device
        if home == self.device and rows >= target.vocab_size:
            return table
        # Ids of the target's padding have no row in a head without it.
        return lambda tokens: table(tokens.clamp_max(rows - 1).to(home)).to(self.device)

    def _head(self, tokens: Tensor, features: Tensor, positions: Tensor, allowed: Tensor) -> Tensor:
        embeds = self.embed(tokens).to(features.dtype)
        mask = masks.additive(allowed, features.dtype)
        return self.head(embeds, features, positions, mask, self.cache)


@dataclass
class Frontier:
    """Nodes of one level, `[B, W]` each; where a score is -inf there is no node.

    Attributes:
        tokens: token ids.
        scores: log-probability of each path.
        nodes: index of each node in the pool.
        features: `[B, W, H]` the head's output at each node's parent.
        visible: `[B, W, slots]` which of the tree's slots in the head's cache each node reads.
        path: `[B, W, d]` drafted tokens down to the node, itself included; empty where nothing is
            drawn and no distribution depends on it.
    """

    tokens: Tensor
    scores: Tensor
    nodes: Tensor
    features: Tensor
    visible: Tensor
    path: Tensor

    def pick(self, index: Tensor) -> Frontier:
        """The nodes `index [B, W']` of each row."""
        return Frontier(*(_pick(getattr(self, part.name), index) for part in fields(self)))


@dataclass
class Children:
    """Children of the nodes that were just run, `[B, C]` each.

    Attributes:
        source: index of each child's parent among those nodes.
        probs: `[B, P, V]` what they were drawn from; None for the best.
    """

    tokens: Tensor
    scores: Tensor
    source: Tensor
    probs: Tensor | None = None


class Pool:
    """All children of a round, level by level: what the tree is chosen from."""

    def __init__(self) -> None:
        self.size = 0
        self.levels: list[tuple[Tensor, Tensor, Tensor]] = []
        self.probs: list[Tensor] = []
        self.sources: list[Tensor] = []

    def add(self, children: Children, parents: Frontier) -> None:
        self.size += children.tokens.shape[1]
        above = parents.nodes.gather(1, children.source)
        self.levels.append((children.tokens, children.scores, above))
        if children.probs is not None:
            self.sources.append(children.source + sum(probs.shape[1] for probs in self.probs))
            self.probs.append(children.probs)

    def best(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, scores and parents of the `size` nodes with the best scores, in pool order.

        A child's score is at most its parent's and it comes later in the pool, so with a stable
        order every chosen node's parent is chosen too, also where scores are equal.
        """
        tokens, scores, parents = (
            torch.cat(parts, dim=1) for parts in zip(*self.levels, strict=True)
        )
        if size >= self.size:
            return tokens, scores, parents
        chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :size].sort().values
        # Where each pool node went, the root (-1) in front.
        place = torch.full((len(tokens), self.size + 1), ROOT, device=tokens.device)
        place.scatter_(1, chosen + 1, torch.arange(size, device=tokens.device).expand_as(chosen))
        parents = place.gather(1, parents.gather(1, chosen) + 1)
        return tokens.gather(1, chosen), scores.gather(1, chosen), parents

    def proposals(self) -> tuple[Tensor, Tensor]:
        """The distributions that the nodes were drawn from, `[B, M, V]`, and which one `[B, N]`."""
        return torch.cat(self.probs, dim=1), torch.cat(self.sources, dim=1)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """`values [B, P, ...]` at `index [B, W]`: `[B, W, ...]`."""
    shape = index.shape + values.shape[2:]
    return values.gather(1, index.reshape(index.shape + (1,) * (values.dim() - 2)).expand(shape))


def _check_fit(config: EagleConfig, target: Target) -> None:
    """Refuse a head that was made for another target."""
    output = target.model.get_output_embeddings()
    width = getattr(output, "in_features", target.config.hidden_size)
    if config.hidden_size != width:
        raise SpecdecError(
            f"drafter.checkpoint: the head was made for hidden size {config.hidden_size}, and this "
            f"target has {width}; use a head made for this target."
        )
    ours, theirs = target.vocab_size, config.vocab_size
    tokens = max(ours, theirs) if target.tokenizer is None else len(target.tokenizer)
    # Vocabularies may differ by the padding of the embedding alone.
    if ours != theirs and min(ours, theirs) < tokens:
        raise SpecdecError(
            f"drafter.checkpoint: the head was made for a vocabulary of {theirs} tokens, and this "
            f"target has {ours}; use a head made for this target."
        )


class EagleConfig(BaseModel):
    """`config.json` of a head, in the official form. Keys not named here are kept as they are.

    The defaults are those of the official code: an absent `rope_theta` is 10,000 whatever the
    target has, an absent `bias` is true.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int | None = Field(None, gt=0)
    num_hidden_layers: int = Field(1, gt=0)
    vocab_size: int = Field(gt=0)
    rms_norm_eps: float = 1e-6
    hidden_act: Literal["silu"] = "silu"
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    bias: bool = True
    qkv_bias: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def official(self) -> dict[str, Any]:
        """What `config.json` holds: the official code reads it as a Llama configuration."""
        fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return fixed | self.model_dump(mode="json")


class EagleHead(nn.Module):
    """From the feature at a position and the next token, the feature at the next position.

    A *feature* is what the target's output layer reads: its last hidden state, behind the final
    norm. The pair at position i is (feature of token i, embedding of token i + 1); the head's
    output there predicts the feature of token i + 1, and the target's own output layer turns it
    into the distribution of token i + 2. RoPE position of the pair: i.

    The same forward serves training (whole sequences, no cache) and drafting (a cache).

    Args:
        config: sizes; `EagleConfig(**json)`.
        own_embedding: the head keeps an embedding of its own (`embed_tokens`); otherwise whoever
            calls it embeds the tokens with the target's.
    """

    frequencies: Tensor

    def __init__(self, config: EagleConfig, own_embedding: bool = False) -> None:
        super().__init__()
        size = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if own_embedding else None
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList(
            EagleLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.register_buffer("frequencies", _rope_frequencies(config), persistent=False)

    def forward(
        self, embeds: Tensor, features: Tensor, positions: Tensor,
        mask: Tensor | None = None, cache: Cache | None = None,
    ) -> Tensor:  # fmt: skip
        """Predict the next feature for each pair.

        Args:
            embeds: `[B, T, H]` embedding of token i + 1 of each pair.
            features: `[B, T, H]` feature of token i: the target's, or the head's own output while
                it drafts ahead.
            positions: `[B or 1, T]` the i of each pair.
            mask: `[B or 1, 1, T, S]`, added to the attention scores; S counts the keys that `cache`
                returns, T of them without one. None: causal over the T pairs, without a cache.
            cache: takes each layer's new keys and values, returns all that the pairs may attend to.

        Returns:
            `[B, T, H]` predicted features, to be read by the target's output layer.
        """
        hidden = self.fc(torch.cat([embeds, features], dim=-1))
        rotation = self._rotation(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotation, mask, cache)
        return hidden

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine, `[B, T, 1, head_dim]`: rotated = x * cos + roll(x) * sin."""
        angles = positions[..., None, None].float() * self.frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    # --- checkpoints -----------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, checkpoint: str | Path, dtype: torch.dtype | None = None, device: Any = None
    ) -> EagleHead:
        """Load a head in the official layout, from a folder or a hub id.

        Raises:
            SpecdecError: files are missing, a tensor is missing, unexpected or of another shape, or
                the checkpoint is an EAGLE-3 head.
        """
        config = validate(EagleConfig, read_json(checkpoint), f"{checkpoint}/config.json")
        state = read_weights(checkpoint)
        _refuse_eagle3(state, config, checkpoint)
        head = cls(config, own_embedding="embed_tokens.weight" in state)
        check_tensors(state, head.official_state_dict(), checkpoint, "an EAGLE head")
        head.load_official_state_dict(state)
        return head.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` in the official layout."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            name: tensor.contiguous().cpu() for name, tensor in self.official_state_dict().items()
        }
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        config = self.config.official() | {"torch_dtype": dtype}
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    def official_state_dict(self) -> dict[str, Tensor]:
        """The weights under the official names."""
        heads = self.config.num_attention_heads, self.config.key_value_heads
        return _split(self.state_dict(), *(count * self.config.head_dim for count in heads))

    def load_official_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over weights under the official names."""
        self.load_state_dict(_fuse(state))


class EagleLayer(nn.Module):
    """A Llama decoder layer; the first one of a head has no norm before its attention.

    Queries, keys and values come from one matrix product, and so do the two halves of the MLP: at
    the few tokens of a drafting step the calls cost more than the arithmetic.
    """

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        size, dim = config.hidden_size, config.head_dim
        self.index = index
        self.dim = dim
        self.heads = config.num_attention_heads
        self.key_value_heads = config.key_value_heads
        rotated = self.heads + self.key_value_heads
        self.input_norm = None if index == 0 else RMSNorm(size, config.rms_norm_eps)
        self.qkv = nn.Linear(size, (rotated + self.key_value_heads) * dim, bias=config.qkv_bias)
        self.out = nn.Linear(self.heads * dim, size, bias=False)
        self.mlp_norm = RMSNorm(size, config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor],
        mask: Tensor | None, cache: Cache | None,
    ) -> Tensor:  # fmt: skip
        """`[B, T, H]` -> `[B, T, H]`; `rotation`, `mask` and `cache` as in `EagleHead`."""
        normed = hidden if self.input_norm is None else self.input_norm(hidden)
        hidden = hidden + self._attention(normed, rotation, mask, cache)
        gate, up = self.gate_up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(functional.silu(gate) * up)

    def _attention(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor],
        mask: Tensor | None, cache: Cache | None,
    ) -> Tensor:  # fmt: skip
        cos, sin = rotation
        joined = self.qkv(hidden).unflatten(-1, (-1, self.dim))
        rotated, value = joined.split(
            [self.heads + self.key_value_heads, self.key_value_heads], dim=2
        )
        rotated = rotated * cos + rotated.roll(self.dim // 2, dims=-1) * sin
        query, key = rotated.split([self.heads, self.key_value_heads], dim=2)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.index)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None,
            enable_gqa=self.heads != self.key_value_heads,
        )  # fmt: skip
        return self.out(mixed.transpose(1, 2).flatten(2))


class RMSNorm(nn.Module):
    """Root-mean-square norm as in Llama: computed in float32, cast back, then scaled."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(hidden.dtype)


def _rope_frequencies(config: EagleConfig) -> Tensor:
    """`[head_dim]` radians a position, the first half negative: its sine is subtracted.

    With scaling the official head's base stays 10,000.
    """
    exponents = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    if not config.rope_scaling:
        return _both_halves(config.rope_theta**-exponents)
    kind = config.rope_scaling.get("type", config.rope_scaling.get("rope_type"))
    if kind != "linear":
        raise SpecdecError(
            f"config.json: rope_scaling of type {kind!r} is not supported in an EAGLE head; "
            "the official code knows null and 'linear'."
        )
    return _both_halves(10_000.0**-exponents / float(config.rope_scaling["factor"]))


def _both_halves(frequencies: Tensor) -> Tensor:
    return torch.cat([-frequencies, frequencies])


# --- the official checkpoint layout --------------------------------------------------------------

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
}
_RENAMED = {
    "out": "self_attn.o_proj",
    "down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
    "input_norm": "input_layernorm",
}


def _split(state: dict[str, Tensor], query_rows: int, key_rows: int) -> dict[str, Tensor]:
    """From this module's names to the official ones."""
    official = {}
    for name, tensor in state.items():
        stem, module, kind = _parts(name)
        if module == "qkv":
            parts = tensor.split([query_rows, key_rows, key_rows])
        elif module == "gate_up":
            parts = tensor.chunk(2)
        else:
            official[f"{stem}{_RENAMED.get(module, module)}.{kind}"] = tensor
            continue
        for part, target in zip(parts, _FUSED[module], strict=True):
            official[f"{stem}{target}.{kind}"] = part
    return official


def _fuse(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """From the official names to this module's."""
    own = {old: new for new, old in _RENAMED.items()}
    joins = {old: new for new, olds in _FUSED.items() for old in olds}
    state: dict[str, Tensor] = {}
    for name, tensor in official.items():
        stem, module, kind = _parts(name)
        if module not in joins:
            state[f"{stem}{own.get(module, module)}.{kind}"] = tensor
            continue
        olds = _FUSED[joins[module]]
        if module == olds[0]:
            parts = [official[f"{stem}{old}.{kind}"] for old in olds]
            state[f"{stem}{joins[module]}.{kind}"] = torch.cat(parts)
    return state


def _parts(name: str) -> tuple[str, str, str]:
    """`layers.0.mlp.up_proj.weight` -> `layers.0.`, `mlp.up_proj`, `weight`."""
    body, kind = name.rsplit(".", 1)
    if not body.startswith("layers."):
        return "", body, kind
    _, index, module = body.split(".", 2)
    return f"layers.{index}.", module, kind


def _refuse_eagle3(state: dict[str, Tensor], config: EagleConfig, checkpoint: str | Path) -> None:
    signs = [name for name in state if name in ("d2t", "t2d") or name.startswith("midlayer.")]
    joined = state["fc.weight"].shape[-1] if "fc.weight" in state else 0
    if joined == 3 * config.hidden_size:
        signs.append(f"fc.weight over {joined} = 3 x {config.hidden_size} features")
    if signs:
        raise SpecdecError(
            f"'{checkpoint}' is an EAGLE-3 head ({', '.join(sorted(signs)[:3])}); "
            "eagle2 runs EAGLE-1 and EAGLE-2 heads. Use the EAGLE-2 head for this target."
        )
