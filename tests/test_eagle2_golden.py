"""EAGLE-2 against numbers of the official code, for every config in the folder of golden data.

The folder is the one that SPECDEC_GOLDEN names, `tests/golden` by default. There are two
collections with formats of their own; `Case` says the same of both. One of them has more details.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec import SpeculativeDecoder
from specdec.draft import DraftStep, DraftTree
from specdec.drafters.eagle2 import Eagle2Drafter, EagleHead
from specdec.policies import FixedPolicy
from specdec.sampling import Sampler
from specdec.state import GenerationState
from specdec.target import Target

ROOT = Path(os.environ.get("SPECDEC_GOLDEN", Path(__file__).parent / "golden"))
CONFIGS = sorted(
    path.parent for path in ROOT.rglob("golden.json") if (path.parent / "head").is_dir()
)
DETAILED = [
    folder for folder in CONFIGS if "stochastic" in json.loads((folder / "golden.json").read_text())
]


def parametrize(folders: list[Path]) -> pytest.MarkDecorator:
    names = [f"{folder.parent.name}-{folder.name}" for folder in folders]
    return pytest.mark.parametrize("folder", folders, ids=names)


configs, detailed_configs = parametrize(CONFIGS), parametrize(DETAILED)
FEATURES = {"rtol": 0, "atol": 1e-5}
LOG_PROBS = {"rtol": 0, "atol": 5e-5}


@dataclass
class Case:
    """One prompt and its rounds; nodes count from 0 behind the root, whose index is -1."""

    prompt: list[int]
    options: dict[str, int]
    rounds: list[dict[str, Any]]
    new_tokens: list[int]
    prompt_features: torch.Tensor

    @classmethod
    def all_of(cls, folder: Path) -> list[Case]:
        golden = read(folder)
        made = []
        for index, case in enumerate(golden["cases"]):
            if "rounds" not in case:
                continue
            options = {key: (golden | case)[key] for key in ("top_k", "depth", "total_tokens")}
            rounds = case["rounds"]
            if "prefill_head_features" in rounds[0]:
                features = torch.tensor(rounds[0]["prefill_head_features"])
                rounds = [without_root(each) for each in rounds]
            else:
                stored = load_file(folder / "features.safetensors")
                features = stored[f"case{index}.prompt_head_features"]
            made.append(cls(case["prompt"], options, rounds, case["new_tokens"], features))
        return made


def without_root(given: dict[str, Any]) -> dict[str, Any]:
    """A round of the collection that counts the root as node 0, in the terms of the other one."""
    return given | {
        "root": given["tokens"][0],
        "tokens": given["tokens"][1:],
        "parents": [parent - 1 for parent in given["parents"][1:]],
        "accepted": given["accept_length"],
        "accepted_nodes": [node - 1 for node in given["accepted_nodes"][1:]],
        "bonus": given["next_root"],
    }


class Watched(Eagle2Drafter):
    """Keeps, of every round, the head's output that seeds the tree, the tree, and its scores."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.seen: list[tuple[torch.Tensor, DraftTree, torch.Tensor]] = []

    def finish(self) -> DraftTree:
        tree = super().finish()
        self.seen.append((self.seed[0].clone(), tree, self.pool.best(tree.size)[1][0]))
        return tree


class Watching(FixedPolicy):
    """Keeps every step of every round."""

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        self.rounds: list[list[DraftStep]] = []

    def keep_drafting(self, step: DraftStep) -> bool:
        if step.depth == 1:
            self.rounds.append([])
        self.rounds[-1].append(step)
        return super().keep_drafting(step)


def test_golden_data_is_there() -> None:
    assert CONFIGS, f"no EAGLE-2 configs under {ROOT}"


@configs
def test_the_heads_features_on_the_prompts(folder: Path) -> None:
    target, head = load_target(folder), EagleHead.from_pretrained(folder / "head")
    embed = head.embed_tokens or target.get_input_embeddings()
    for case in Case.all_of(folder):
        ids = torch.tensor([case.prompt])
        following = torch.tensor([[*case.prompt[1:], case.rounds[0]["root"]]])
        with torch.no_grad():
            features = target.model(ids).last_hidden_state
            positions = torch.arange(len(case.prompt))[None]
            found = head(embed(following), features, positions)
        torch.testing.assert_close(found[0], case.prompt_features, **FEATURES)


@configs
def test_every_round(folder: Path) -> None:
    """The same tree in the same order, the same path accepted, the same text."""
    for case in Case.all_of(folder):
        drafter, _, output = run(folder, case)
        records = output.rounds[: len(case.rounds)]
        assert output.token_ids[0][: len(case.new_tokens)] == case.new_tokens
        for expected, record, seen in zip(case.rounds, records, drafter.seen, strict=False):
            assert record.tree["tokens"][0] == expected["tokens"]
            assert record.tree["parents"][0] == expected["parents"]
            assert all(record.tree["valid"][0])
            assert record.tree["accepted"][0] == expected["accepted_nodes"]
            assert record.accepted[0] == expected["accepted"]
            assert record.tokens[0][-1] == expected["bonus"]
            check_scores(expected, *seen)


def check_scores(
    expected: dict[str, Any], seed: torch.Tensor, tree: DraftTree, scores: torch.Tensor
) -> None:
    """What only one of the collections holds."""
    if "head_feature_last" not in expected:
        return
    torch.testing.assert_close(seed, torch.tensor(expected["head_feature_last"]), **FEATURES)
    torch.testing.assert_close(scores, torch.tensor(expected["scores"][1:]), **LOG_PROBS)
    assert tree.depths[0].tolist() == expected["depths"]


@detailed_configs
def test_every_level(folder: Path) -> None:
    """The frontier of each level, its score, and the children of each of its nodes."""
    for case in Case.all_of(folder):
        _, policy, _ = run(folder, case)
        for expected, steps in zip(case.rounds[:2], policy.rounds, strict=False):
            levels = expected["levels"]
            assert len(levels) == len(steps)
            for level, following, step in zip(levels, [*levels[1:], None], steps, strict=True):
                children = step.log_probs.topk(case.options["top_k"], dim=-1)
                given = torch.tensor([level["topk_logprobs"]])
                torch.testing.assert_close(children.values, given, **LOG_PROBS)
                assert children.indices[0].tolist() == level["topk_tokens"]
                if following is not None:
                    assert step.tokens[0].tolist() == following["beam_tokens"]
                if "next_beam_scores" in level:
                    given = torch.tensor([level["next_beam_scores"]])
                    torch.testing.assert_close(step.path_log_prob, given, **LOG_PROBS)


@detailed_configs
@torch.no_grad()
def test_acceptance_at_a_temperature(folder: Path) -> None:
    """The official walk with the official random numbers, over what we compute at the nodes.

    Children are fixed: each is accepted with its probability, a rejected one is taken out.
    """
    golden = read(folder)
    target = Target(load_target(folder))
    for given in golden["stochastic"]:
        case = golden["cases"][given["case"]]
        before = case["rounds"][: given["round"]]
        expected = without_root(case["rounds"][given["round"]])
        text = case["prompt"] + [token for each in before for token in each["committed_tokens"]]
        tree = fixed_tree(expected)
        processors = official_order(given["temperature"], given["top_p"], given["top_k"])
        state = GenerationState(
            [[*text, expected["root"]]], target.new_cache(1), Sampler(processors, do_sample=True),
            eos=[], device=target.device,
        )  # fmt: skip
        target.forward(torch.tensor([text]), state.cache, [0])
        state.cache.lengths = [len(text)]
        logits = target.verify(tree, state, features=False).logits[0]
        none = torch.zeros(len(logits), 0, dtype=torch.long)
        owners = torch.zeros(len(logits), dtype=torch.long)
        p = torch.softmax(state.sampler.scores(logits, state, none, owners), dim=-1)
        accepted, bonus = official_walk(tree, p, given["uniforms_used"])
        assert accepted == given["accepted_nodes"]
        wanted = torch.tensor(given["bonus_distribution"])
        torch.testing.assert_close(bonus, wanted, rtol=0, atol=1e-5)


@detailed_configs
def test_where_a_text_ends(folder: Path) -> None:
    """The official loop overshoots; the same text ends here where it was asked to."""
    golden = read(folder)
    for case in golden["cases"]:
        if "rounds" in case:
            continue
        options = {key: case[key] for key in ("top_k", "depth", "total_tokens")}
        decoder = SpeculativeDecoder(
            load_target(folder),
            Eagle2Drafter(checkpoint=str(folder / "head"), **options),
            FixedPolicy(length=case["depth"] + 1),
        )
        eos, most = case.get("eos_token_id", []), case.get("max_new_tokens", 64)
        output = decoder.generate([case["prompt"]], max_new_tokens=most, eos_token_id=eos)
        written = case["new_tokens"]
        end = written.index(eos) + 1 if eos else most
        assert output.token_ids[0] == written[:end]
        assert output.finish_reasons == ["eos" if eos else "length"]


def run(folder: Path, case: Case) -> tuple[Watched, Watching, Any]:
    """Write some more than the golden rounds did, so that none of them is cut short."""
    drafter = Watched(checkpoint=str(folder / "head"), **case.options)
    policy = Watching(length=case.options["depth"] + 1)
    decoder = SpeculativeDecoder(load_target(folder), drafter, policy)
    more = 2 * (case.options["depth"] + 2)
    output = decoder.generate(
        [case.prompt], max_new_tokens=len(case.new_tokens) + more, eos_token_id=[], keep_trees=True
    )
    assert len(output.rounds) >= len(case.rounds)
    return drafter, policy, output


def official_walk(
    tree: DraftTree, p: torch.Tensor, uniforms: list[float]
) -> tuple[list[int], torch.Tensor]:
    """Accepted nodes, the root (0) first, and the distribution of the token behind them."""
    parents, tokens = tree.parents[0].tolist(), tree.tokens[0].tolist()
    left = list(uniforms)
    node, path = 0, [0]
    while True:
        here = p[node].clone()
        for child in [i for i, parent in enumerate(parents) if parent == node - 1]:
            if left.pop(0) <= here[tokens[child]]:
                node = child + 1
                path.append(node)
                break
            here[tokens[child]] = 0
            here /= here.sum()
        else:
            assert not left
            return path, here


def official_order(temperature: float, top_p: float, top_k: int) -> LogitsProcessorList:
    """Top-p before top-k, the other way round than in transformers."""
    made = LogitsProcessorList()
    if temperature != 1.0:
        made.append(TemperatureLogitsWarper(temperature))
    if top_p:
        made.append(TopPLogitsWarper(top_p))
    if top_k:
        made.append(TopKLogitsWarper(top_k))
    return made


def fixed_tree(given: dict[str, Any]) -> DraftTree:
    tokens = torch.tensor([given["tokens"]])
    return DraftTree(
        tokens,
        torch.tensor([given["parents"]]),
        torch.ones_like(tokens, dtype=torch.bool),
        depth=max(given["depths"]),
    )


@cache
def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "golden.json").read_text())


@cache
def load_target(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
