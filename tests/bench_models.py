"""A tiny target with a tokenizer and a chat template, and a drafter for it, in folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.tiny import llama, noisy
from tests.tiny_tokenizers import byte_level

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_models(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    """Folders of a `target` and of a `drafter` that is right most of the time."""
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    target = llama(
        seed=10, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id,
        max_position_embeddings=1024,
    ).to(dtype)  # fmt: skip
    places = {}
    for name, model in (("target", target), ("drafter", noisy(target, 0.05))):
        places[name] = str(folder / name)
        model.save_pretrained(places[name])
        tokenizer.save_pretrained(places[name])
    return places


def write_questions(path: Path, per_category: int = 2) -> Path:
    """Spec-Bench's form: two MT-Bench categories with two turns, and two others."""
    rows: list[dict[str, Any]] = []
    for category, turns in (("writing", 2), ("coding", 2), ("qa", 1), ("rag", 1)):
        for number in range(per_category):
            text = f"{category} {number}: what is {number} and {number}?"
            rows.append(
                {"question_id": len(rows), "category": category, "turns": [text, "Why?"][:turns]}
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GRID = """
target: {{model: {target}, dtype: float32}}
questions: {{source: {questions}, categories: [writing, qa, rag]}}
generation: {{max_new_tokens: 16, top_p: 0.95}}
temperature: [0, 1]
peers: [transformers, assisted, prompt-lookup]
rows:
  - drafter: {{name: autoregressive, model: {drafter}}}
    policy: [{{name: fixed, length: [3, 5]}}, svip, oracle]
  - {{drafter: ngram, policy: fixed, temperature: 0}}
  - drafter: {{name: autoregressive, model: {drafter}}}
    policy: svip
    name: pairs
    batch_size: 2
    temperature: 0
"""


def write_grid(folder: Path, text: str = GRID, **names: str) -> Path:
    """A benchmark's configuration with the tiny models and questions, all in `folder`."""
    places = save_models(folder)
    questions = write_questions(folder / "questions.jsonl", per_category=2)
    path = folder / "grid.yaml"
    path.write_text(text.format(**places, questions=questions, **names))
    return path
