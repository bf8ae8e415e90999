"""What one EAGLE-2 round costs here, next to a plain transcription of the official procedure.

    python benchmarks/eagle2.py [--model smollm2-135m] [--checkpoint FOLDER] [--rounds 40]

Both run the same head (random weights of the target's size, unless a checkpoint is named) on the
same target; rounds alternate in one process. `Transcription` takes the steps of the official loop as
they are; the target's own pass and its cache are ours in both, so what differs is drafting and
bookkeeping. With `--dtype float32` the two must grow the same trees and write the same tokens (in
bfloat16 roundings differ).

Counts are of one round: head passes, target passes, tensor operations of drafting (kernels, on an
accelerator), and host reads, that is calls that hand a tensor's values to Python. On an accelerator
each of them waits for the device. On a CPU, where looking is free, our loop also looks for drafted
ends of text and for the end of the accepted path; on an accelerator it makes one read a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList

from specdec.draft import DraftTree
from specdec.drafters.eagle2 import Eagle2Drafter, EagleConfig, EagleHead
from specdec.generation import StopRules
from specdec.loop import Generation, Request
from specdec.plugins import resolve_model
from specdec.policies.fixed import FixedPolicy
from specdec.state import GenerationState
from specdec.target import Target


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    target = Target.load(arguments.model, dtype=arguments.dtype)
    head = make_head(target, arguments.checkpoint)
    prompt = torch.randint(target.vocab_size, (arguments.context,)).tolist()
    sizes = {key: getattr(arguments, key) for key in ("top_k", "depth", "total_tokens")}
    # So much that no draft is cut short by the end of the text.
    most = (arguments.rounds + 2) * (arguments.depth + 2)
    reduced = list(range(min(8192, target.vocab_size)))
    contenders: dict[str, Contender] = {
        "official procedure": Transcription(target, head, prompt, **sizes),
        "specdec": Ours(target, head, prompt, most, **sizes),
        f"specdec, {len(reduced)} draft tokens": Ours(target, head, prompt, most, reduced, **sizes),
    }
    print(
        f"{arguments.model}, {arguments.dtype}, {torch.get_num_threads()} threads, a head of "
        f"{sum(weight.numel() for weight in head.parameters()) / 1e6:.1f} M parameters, "
        + ", ".join(f"{key} {value}" for key, value in sizes.items())
    )
    counts = {name: count(contender, head, target) for name, contender in contenders.items()}
    for _ in range(arguments.rounds):
        for contender in contenders.values():
            contender.round()
    official, ours, _ = contenders.values()
    same = official.written == ours.written and all(map(torch.equal, official.trees, ours.trees))
    if target.dtype == torch.float32 and not same:
        raise SystemExit("the two did not draft the same trees and write the same tokens")
    report(contenders, counts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="the target")
    parser.add_argument("--checkpoint", help="a trained head; random weights by default")
    parser.add_argument("--dtype", default="bfloat16", help="of the target and the head")
    parser.add_argument("--context", type=int, default=300, help="tokens of the prompt")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--total-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=40, help="rounds that are timed")
    return parser.parse_args()


def make_head(target: Target, checkpoint: str | None) -> EagleHead:
    if checkpoint is not None:
        return EagleHead.from_pretrained(resolve_model(checkpoint), target.dtype, target.device)
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "vocab_size", "rms_norm_eps",
    )  # fmt: skip
    config = EagleConfig(**{name: getattr(target.config, name) for name in names})
    return EagleHead(config).to(dtype=target.dtype, device=target.device).eval()


def report(contenders: dict[str, Contender], counts: dict[str, dict[str, int]]) -> None:
    columns = list(next(iter(counts.values())))
    print(f"{'':26}  {'a tree, ms':>19}  {'a round, ms':>19}  " + "  ".join(columns))
    print(f"{'':26}  {'median':>9} {'fastest':>9}  {'median':>9} {'fastest':>9}")
    for name, contender in contenders.items():
        print(
            f"{name:26}  {middle(contender.drafting)}  {middle(contender.rounds)}  "
            + "  ".join(f"{counts[name][column]:{len(column)}}" for column in columns)
        )


def middle(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):9.2f} {1000 * min(seconds):9.2f}"


def count(contender: Contender, head: EagleHead, target: Target) -> dict[str, int]:
    """Passes and host reads of one round."""
    found = {
        "head passes": 0, "target passes": 0, "ops, drafting": 0, "reads, drafting": 0,
        "reads, round": 0,
    }  # fmt: skip

    def add(name: str, *_: object) -> None:
        found[name] += 1

    def seen() -> None:
        add("reads, round")
        if contender.is_drafting():
            add("reads, drafting")

    hooks = [
        head.fc.register_forward_pre_hook(partial(add, "head passes")),
        target.model.register_forward_pre_hook(partial(add, "target passes")),
    ]

    def operation() -> None:
        if contender.is_drafting():
            add("ops, drafting")

    with host_reads(seen), Operations(operation):
        contender.round()
    for hook in hooks:
        hook.remove()
    return found


class Operations(TorchDispatchMode):
    """Calls `seen` for every tensor operation that is not a view."""

    def __init__(self, seen: Callable[[], None]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.seen()
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(seen: Callable[[], None]) -> Iterator[None]:
    """Call `seen` whenever Python gets the values of a tensor."""
    names = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__")
    kept = {name: getattr(Tensor, name) for name in names}

    def counted(name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            seen()
            return kept[name](*args, **kwargs)

        return call

    for name in names:
        setattr(Tensor, name, counted(name))
    try:
        yield
    finally:
        for name in names:
            setattr(Tensor, name, kept[name])


@dataclass
class Contender:
    """Writes one text round by round, and keeps what that took."""

    drafting: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    trees: list[Tensor] = field(default_factory=list)

    def round(self) -> None:
        raise NotImplementedError

    def is_drafting(self) -> bool:
        raise NotImplementedError


class Watched(Eagle2Drafter):
    """Says whether it is at work."""

    busy = False

    def begin(self, state: GenerationState) -> None:
        self.busy = True
        super().begin(state)
        self.busy = False

    def extend(self, go_on: list[list[bool]] | Literal[True]) -> bool:
        self.busy = True
        done = super().extend(go_on)
        self.busy = False
        return done

    def finish(self) -> DraftTree:
        self.busy = True
        tree = super().finish()
        self.busy = False
        self.tree = torch.stack([tree.tokens[0], tree.parents[0]])
        return tree


class Ours(Contender):
    def __init__(
        self, target: Target, head: EagleHead, prompt: list[int], most: int,
        draft_vocab: list[int] | None = None, **sizes: int,
    ) -> None:  # fmt: skip
        super().__init__()
        drafter = Watched(checkpoint=head, draft_vocab=draft_vocab, **sizes)
        drafter.attach(target)
        policy = FixedPolicy(length=sizes["depth"] + 1)
        request = Request([prompt], LogitsProcessorList(), False, StopRules([most]))
        self.generation = Generation(target, drafter, policy, request)
        self.run = self.generation.run()
        self.written = next(self.run)[0][1]

    def round(self) -> None:
        self.written += next(self.run)[0][1]
        record = self.generation.records[-1]
        self.drafting.append(record.draft_seconds)
        self.rounds.append(record.seconds)
        self.trees.append(self.drafter.tree)

    @property
    def drafter(self) -> Watched:
        assert isinstance(self.generation.drafter, Watched)
        return self.generation.drafter

    def is_drafting(self) -> bool:
        return self.drafter.busy


class Transcription(Contender):
    """The official procedure, for one text, greedily."""

    def __init__(
        self, target: Target, head: EagleHead, prompt: list[int],
        top_k: int, depth: int, total_tokens: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.target, self.head = target, head
        self.embedding = head.embed_tokens or target.model.get_input_embeddings()
        self.top_k, self.depth, self.total = top_k, depth, total_tokens
        self.layers = [PlainLayer(head, index) for index in range(len(head.layers))]
        self.cache = target.new_cache(1)
        self.keys: list[tuple[Tensor, Tensor] | None] = [None] * len(self.layers)
        self.ids = torch.tensor([prompt], device=target.device)
        with torch.no_grad():
            done = target.forward(self.ids, self.cache, [0], features=True)
        self.cache.lengths = [len(prompt)]
        assert done.features is not None
        self.features = done.features
        root = done.logits[:, -1].argmax(-1)
        self.ids = torch.cat([self.ids, root[:, None]], dim=1)
        self.written = root.tolist()

    @torch.no_grad()
    def round(self) -> None:
        begun = time.perf_counter()
        self.busy = True
        tokens, parents, visible, paths = self.draft()
        self.busy = False
        drafted = time.perf_counter()
        self.verify(tokens, parents, visible, paths)
        self.rounds.append(time.perf_counter() - begun)
        self.drafting.append(drafted - begun)
        self.trees.append(torch.stack([tokens[1:], tokens.new_tensor(parents[1:]) - 1]))

    def is_drafting(self) -> bool:
        return self.busy

    def draft(self) -> tuple[Tensor, list[int], Tensor, Tensor]:
        """Tokens `[N]` (the root first), parents, ancestors `[N, N]`, and the path to each leaf."""
        new = self.features.shape[1]
        out = self.run_head(self.ids[:, -new:], self.features, None)
        known = self.ids.shape[1] - 1
        log_probs = torch.log_softmax(self.target.model.get_output_embeddings()(out[:, -1]), dim=-1)
        top = log_probs.topk(self.top_k, dim=-1)
        scores, tokens = top.values[0], top.indices
        pool_scores, pool_tokens = [scores[None]], [tokens]
        pool_parents = [torch.zeros(1, dtype=torch.long, device=scores.device)]
        features = out[:, -1:].repeat(1, self.top_k, 1)
        seen = torch.eye(self.top_k, device=scores.device)[None, None]
        beam = torch.arange(self.top_k, device=scores.device)
        cached = list(self.keys)
        for level in range(self.depth):
            # The mask over prefix and beam is made anew, in float32, for every pass.
            out = self.run_head(tokens, features, seen, at=known + level)
            before = max(0, level - 1)
            offset = 1 + self.top_k**2 * before + (self.top_k if level > 0 else 0)
            pool_parents.append(beam + offset)
            logits = self.target.model.get_output_embeddings()(out[0])
            top = torch.log_softmax(logits, dim=-1).topk(self.top_k, dim=-1)
            children = top.values + scores[:, None]
            best = children.view(-1).topk(self.top_k, dim=-1)
            beam, scores = best.indices, best.values
            source = beam // self.top_k
            features = out[:, source]
            tokens = top.indices.view(-1)[beam][None]
            own = torch.eye(self.top_k, device=seen.device)[None, None]
            seen = torch.cat([seen[:, :, source], own], dim=3)
            pool_scores.append(children)
            pool_tokens.append(top.indices)
        self.keys = cached  # what the tree added is dropped
        return self.assemble(
            torch.cat(pool_scores).view(-1),
            torch.cat(pool_tokens).view(-1),
            torch.cat(pool_parents),
        )

    def assemble(
        self, scores: Tensor, tokens: Tensor, pool_parents: Tensor
    ) -> tuple[Tensor, list[int], Tensor, Tensor]:
        """The best of the pool as a tree; on the host, node by node."""
        kept = scores.topk(self.total - 1, dim=-1).indices.sort().values
        nodes = torch.cat([self.ids[0, -1:], tokens[kept]])
        above = pool_parents[kept // self.top_k]
        # The root's children have parent 0; others the place of pool node `above - 1`.
        place = torch.searchsorted(kept, above - 1, right=False)
        place[above == 0] = -1
        parents = [-1, *(place + 1).tolist()]
        visible = torch.eye(self.total).bool()
        visible[:, 0] = True
        for node in range(1, self.total):
            visible[node].add_(visible[parents[node]])
        depths = (visible.sum(1) - 1).tolist()
        inner = torch.unique(place).tolist()
        paths = []
        for node in range(1, self.total):
            if node - 1 not in inner:
                path, here = [], node
                while here != -1:
                    path.append(here)
                    here = parents[here]
                paths.append(path[::-1] + [-1] * (max(depths) + 1 - len(path)))
        return nodes, parents, visible.to(nodes.device), torch.tensor(paths, device=nodes.device)

    def verify(self, tokens: Tensor, parents: list[int], visible: Tensor, paths: Tensor) -> None:
        tree = DraftTree(
            tokens[None, 1:], torch.tensor([parents[1:]], device=tokens.device) - 1,
            torch.ones_like(tokens[None, 1:]).bool(), depth=int(paths.shape[1]) - 1,
        )  # fmt: skip
        positions = self.ids.shape[1] - 1 + tree.depths
        done = self.target.forward(
            tokens[None], self.cache, list(self.cache.lengths), visible=visible[None],
            positions=positions, features=True,
        )  # fmt: skip
        # All logits along all paths, as one tensor [leaves, depth + 1, V].
        along = done.logits[0, paths]
        padded = torch.cat([tokens, tokens.new_full((1,), -1)])
        candidates = padded[paths]
        hits = (candidates[:, 1:] == along[:, :-1].argmax(-1)).int()
        lengths = hits.cumprod(dim=1).sum(dim=1)
        accepted = lengths.max()
        best = torch.tensor(0) if accepted == 0 else lengths.argmax()
        chosen = paths[best, : accepted + 1]
        root = along[best, accepted].argmax()
        self.ids = torch.cat([self.ids[:, :-1], candidates[best, : accepted + 1][None]], dim=1)
        self.ids = torch.cat([self.ids, root[None, None]], dim=1)
        assert done.features is not None
        self.features = done.features[:, chosen]
        count = int(accepted) + 1
        # The end of the text is looked for in all that was written so far.
        everything = self.ids[0].tolist()
        self.cache.keep_path(chosen[None], [chosen.tolist()])
        self.written += everything[-count:]

    def run_head(
        self, tokens: Tensor, features: Tensor, seen: Tensor | None, at: int | None = None
    ) -> Tensor:  # fmt: skip
        """One pass; keys and values are joined to the old ones by a copy of both."""
        count = tokens.shape[1]
        first = self.keys[0]
        past = 0 if first is None else first[0].shape[2]
        mask = torch.full((1, 1, count, past + count), torch.finfo(torch.float32).min)
        mask = mask.to(tokens.device)
        mask.masked_fill_(
            torch.arange(past + count, device=tokens.device)
            < past + 1 + torch.arange(count, device=tokens.device)[:, None], 0.0
        )  # fmt: skip
        if seen is not None:
            width = seen.shape[3]
            mask[:, :, -count:, -width:][seen == 0] = torch.finfo(torch.float32).min
            mask[:, :, -count:, -width:][seen == 1] = 0.0
        start = past if at is None else at
        positions = torch.arange(start, start + count, device=tokens.device)
        if at is not None:
            positions = torch.full_like(positions, at)
        embeds = self.embedding(tokens)
        hidden = self.head.fc(torch.cat([embeds, features.to(embeds.dtype)], dim=-1))
        for index, layer in enumerate(self.layers):
            hidden, self.keys[index] = layer(hidden, positions, mask, self.keys[index])
        return hidden


class PlainLayer(nn.Module):
    """A head's layer written out: one product each for q, k, v, gate and up, attention step by step."""

    def __init__(self, head: EagleHead, index: int) -> None:
        super().__init__()
        self.config, self.own = head.config, head.layers[index]
        weights = head.official_state_dict()
        stem = f"layers.{index}."
        self.weights = {
            name.removeprefix(stem): tensor.contiguous()
            for name, tensor in weights.items()
            if name.startswith(stem)
        }
        frequencies = head.frequencies.abs()
        table = torch.arange(65536, device=frequencies.device)[:, None] * frequencies
        self.cos, self.sin = (
            table.cos().to(head.fc.weight.dtype),
            table.sin().to(head.fc.weight.dtype),
        )

    def forward(
        self, hidden: Tensor, positions: Tensor, mask: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        normed = hidden if self.own.input_norm is None else self.own.input_norm(hidden)
        query, key, value = (
            self.product(normed, f"self_attn.{name}_proj")
            .view(1, -1, heads, self.config.head_dim)
            .transpose(1, 2)
            for name, heads in (
                ("q", self.config.num_attention_heads),
                ("k", self.config.key_value_heads),
                ("v", self.config.key_value_heads),
            )
        )
        query, key = self.rotate(query, positions), self.rotate(key, positions)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        groups = self.config.num_attention_heads // self.config.key_value_heads
        scores = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3)
        scores = scores / self.config.head_dim**0.5 + mask
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        mixed = (weights @ value.repeat_interleave(groups, dim=1)).transpose(1, 2).flatten(2)
        hidden = hidden + self.product(mixed, "self_attn.o_proj")
        normed = self.own.mlp_norm(hidden)
        gate = functional.silu(self.product(normed, "mlp.gate_proj"))
        hidden = hidden + self.product(gate * self.product(normed, "mlp.up_proj"), "mlp.down_proj")
        return hidden, (key, value)

    def product(self, hidden: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        return functional.linear(hidden, weight, bias)

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        half = states.shape[-1] // 2
        turned = torch.cat([-states[..., half:], states[..., :half]], dim=-1)
        return states * self.cos[positions] + turned * self.sin[positions]


if __name__ == "__main__":
    main()
