"""GliDe against numbers of the official code, for every config in the folder of golden data.

The folder is the one that SPECDEC_GOLDEN names, `tests/golden` by default.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec import SpeculativeDecoder
from specdec.draft import DraftStep
from specdec.drafters.cape import CapeDrafter
from specdec.drafters.glide import GlideModel, block_mask, causal_mask
from specdec.policies import FixedPolicy

ROOT = Path(os.environ.get("SPECDEC_GOLDEN", Path(__file__).parent / "golden"))
CONFIGS = sorted(path.parent.parent for path in ROOT.rglob("glide/config.json"))
CASES = [
    pytest.param(folder, case, id=f"{folder.name}-{case}")
    for folder in CONFIGS
    for case in range(len(json.loads((folder / "golden.json").read_text())["cases"]))
]
configs = pytest.mark.parametrize("folder", CONFIGS, ids=lambda folder: folder.name)


def test_golden_data_is_there() -> None:
    assert CONFIGS, f"no GliDe configs under {ROOT}"


@configs
def test_training_forward(folder: Path) -> None:
    target = load_target(folder)
    model = GlideModel.from_pretrained(folder / "glide", target)
    golden = load_file(folder / "logits.safetensors")
    ids = golden["train.ids"]
    length = ids.shape[1]
    with torch.no_grad():
        cache = target(ids, use_cache=True).past_key_values
        keys_values = [(cache.layers[i].keys, cache.layers[i].values) for i in model.target_layers]
        positions = torch.arange(length).expand_as(ids)
        mask = block_mask(length, model.config.block_size)
        hidden = model(ids, positions, keys_values, causal_mask(length), mask)
        logits = model.output(hidden)
    expected = golden["train.block_masked_logits"]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_the_published_table_is_the_default() -> None:
    base = glide(CONFIGS[0])
    table = confidence_table([8, 8, 8, 6, 6, 6, 4, 4, 2, 2, 2, 2])
    assert CapeDrafter(base=base).params == CapeDrafter(base=base, **table).params


def glide(folder: Path) -> dict[str, str]:
    return {"name": "glide", "checkpoint": str(folder / "glide")}


def confidence_table(official: list[int]) -> dict[str, list]:
    """The official table, indexed by `int(10 p)`, as thresholds and candidates."""
    steps = [tenth for tenth in range(1, len(official)) if official[tenth] != official[tenth - 1]]
    return {
        "thresholds": [tenth / 10 for tenth in steps],
        "candidates": [official[0], *(official[tenth] for tenth in steps)],
    }


def load_target(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()


def load_golden(folder: Path) -> dict:
    return json.loads((folder / "golden.json").read_text())


@pytest.mark.parametrize(("folder", "case"), CASES)
def test_rounds(folder: Path, case: int) -> None:
    """GliDe with CaPE, round by round: every draft, every proposal, every verdict, the text."""
    golden = load_golden(folder)
    expected = golden["cases"][case]
    decoder = SpeculativeDecoder(
        load_target(folder),
        {"name": "cape", "base": glide(folder), **confidence_table(golden["cape_table"])},
        Watch(length=golden["gamma"]),
    )
    output = decoder.generate(
        expected["prompt"], max_new_tokens=80, eos_token_id=[], keep_trees=True
    )
    watched = output.generation.policy
    assert output.token_ids[0][: len(expected["new_tokens"])] == expected["new_tokens"]
    first = torch.stack(watched.logits[: golden["gamma"]])
    exact = load_file(folder / "logits.safetensors")[f"case{case}.first_round_logits"]
    torch.testing.assert_close(first, exact, rtol=0, atol=1e-5)
    written = output.token_ids[0][:1]
    for index, wanted in enumerate(expected["rounds"]):
        record = output.rounds[index]
        chain = slice(index * golden["gamma"], (index + 1) * golden["gamma"])
        assert written[-1] == wanted["root"]
        assert watched.tokens[chain] == wanted["drafted"]
        assert watched.top_probs[chain] == pytest.approx(wanted["top_prob"], abs=1e-5)
        assert candidates(record.tree, golden["gamma"]) == wanted["cape_candidates"]
        accepted = record.tree["accepted"][0]
        assert len(accepted) == record.accepted[0] == wanted["accepted_cape"]
        assert sum(node < golden["gamma"] for node in accepted) == wanted["accepted_chain"]
        written += record.tokens[0]


@configs
def test_the_chain_alone_writes_the_same(folder: Path) -> None:
    golden = load_golden(folder)
    target = load_target(folder)
    decoder = SpeculativeDecoder(target, glide(folder), FixedPolicy(length=golden["gamma"]))
    prompts = [case["prompt"] for case in golden["cases"]]
    wanted = [case["new_tokens"] for case in golden["cases"]]
    output = decoder.generate(prompts, max_new_tokens=40, eos_token_id=[])
    for row, (new, case) in enumerate(zip(output.token_ids, golden["cases"], strict=True)):
        assert new[: len(wanted[row])] == wanted[row]
        # The first round starts from the same text with and without CaPE.
        assert output.rounds[0].accepted[row] == case["rounds"][0]["accepted_chain"]


class Watch(FixedPolicy):
    """A fixed length that writes down what it sees."""

    def start(self, batch_size: int) -> None:
        self.tokens: list[int] = []
        self.top_probs: list[float] = []
        self.logits: list[torch.Tensor] = []

    def keep_drafting(self, step: DraftStep) -> bool:
        self.tokens.append(step.tokens.item())
        self.top_probs.append(step.top_prob.item())
        self.logits.append(step.logits[0, 0])
        return super().keep_drafting(step)


def candidates(tree: dict, gamma: int) -> list[list[int]]:
    """The candidates at each position, the chain's own first."""
    tokens, parents, valid = tree["tokens"][0], tree["parents"][0], tree["valid"][0]
    found: list[list[int]] = [[] for _ in range(gamma)]
    for token, parent, real in zip(tokens, parents, valid, strict=True):
        if real:
            found[parent + 1].append(token)
    return found
