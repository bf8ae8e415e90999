"""What the loop costs beside the models: specdec against transformers, on one real target.

All methods decode the same prompts greedily, in one process, interleaved in random order; ratios are
taken prompt by prompt and reported as medians. The row "vocab" drafts from the reduced vocabulary
that comes with the drafter, for which transformers has no counterpart; the row above it from all of it.

    python benchmarks/overhead.py [--target smollm2-135m] [--drafter smollm2-135m-ar] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from specdec import SpeculativeDecoder, Target
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.metrics import Statistics
from specdec.policies import FixedPolicy
from specdec.target import load_pretrained

QUESTIONS = [
    "Explain step by step how a rainbow forms.",
    "Write a short letter that asks a landlord to repair a broken window.",
    "Summarise in three sentences why forests matter for the climate.",
    "List five questions a reporter could ask a beekeeper, and answer the first one.",
    "A shop sells pens at 3 dollars each. How much do 14 pens cost? Show your work.",
    "Translate into French: The train leaves at nine, and we must not be late.",
    "Describe how to boil an egg to someone who has never cooked.",
    "What is the difference between a virus and a bacterium?",
]


@dataclass
class Timing:
    """Seconds and tokens of one method, prompt by prompt."""

    seconds: dict[int, list[float]] = field(default_factory=dict)
    tokens: int = 0
    statistics: list[Statistics] = field(default_factory=list)

    def median(self, prompt: int) -> float:
        return statistics.median(self.seconds[prompt])


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    target = Target.load(options.target, dtype="bfloat16")
    drafter, _ = load_pretrained(options.drafter, role="drafter", dtype="bfloat16")
    prompts = [_chat(target, question) for question in QUESTIONS[: options.prompts]]
    methods = _methods(target, options.drafter, drafter, options.length, options.tokens)
    timings = _measure(methods, prompts, options.rounds)
    _print_table(timings, len(prompts))
    _print_batch(target, prompts, options.tokens)
    if options.json:
        print(json.dumps({name: timing.seconds for name, timing in timings.items()}))


def _methods(
    target: Target, name: str, drafter: Any, length: int, tokens: int
) -> dict[str, Callable[[list[int]], tuple[int, Statistics | None]]]:
    model = target.model
    assistant = drafter.generation_config
    assistant.num_assistant_tokens, assistant.assistant_confidence_threshold = length, 0.0
    assistant.num_assistant_tokens_schedule = "constant"

    def theirs(**arguments: Any) -> Callable[[list[int]], tuple[int, None]]:
        def run(prompt: list[int]) -> tuple[int, None]:
            ids = torch.tensor([prompt])
            done = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                **arguments,
            )  # fmt: skip
            return done.shape[1] - len(prompt), None

        return run

    def ours(drafter: Any) -> Callable[[list[int]], tuple[int, Statistics]]:
        decoder = SpeculativeDecoder(target, drafter, FixedPolicy(length=length))

        def run(prompt: list[int]) -> tuple[int, Statistics]:
            output = decoder.generate(prompt, max_new_tokens=tokens)
            return len(output.token_ids[0]), output.statistics

        return run

    return {
        "transformers greedy": theirs(),
        "transformers assisted": theirs(assistant_model=drafter),
        "transformers prompt lookup": theirs(prompt_lookup_num_tokens=length),
        "specdec plain": ours(None),
        "specdec autoregressive": ours(AutoregressiveDrafter(model=drafter)),
        "specdec autoregressive, vocab": ours(AutoregressiveDrafter(model=name, dtype="bfloat16")),
        "specdec ngram": ours(NgramDrafter(num_tokens=length)),
    }


def _measure(methods: dict[str, Any], prompts: list[list[int]], rounds: int) -> dict[str, Timing]:
    timings = {name: Timing() for name in methods}
    for run in methods.values():
        run(prompts[0])  # warm-up
    order = list(methods)
    for _ in range(rounds):
        for index, prompt in enumerate(prompts):
            random.shuffle(order)
            for name in order:
                begun = time.perf_counter()
                tokens, statistic = methods[name](prompt)
                timing = timings[name]
                timing.seconds.setdefault(index, []).append(time.perf_counter() - begun)
                timing.tokens += tokens
                if statistic is not None:
                    timing.statistics.append(statistic)
    return timings


def _print_table(timings: dict[str, Timing], prompts: int) -> None:
    base = timings["transformers greedy"]
    columns = f"{'draft':>8} {'target':>8} {'else':>8} {'else %':>7}"
    print(f"{'method':30} {'tok/s':>7} {'speed-up':>9} {columns}")
    for name, timing in timings.items():
        total = sum(sum(times) for times in timing.seconds.values())
        ratio = statistics.median(base.median(i) / timing.median(i) for i in range(prompts))
        print(
            f"{name:30} {timing.tokens / total:7.1f} {ratio:9.2f} {_per_round(timing.statistics)}"
        )
    for ours, theirs in (
        ("specdec autoregressive", "transformers assisted"),
        ("specdec autoregressive, vocab", "transformers assisted"),
        ("specdec ngram", "transformers prompt lookup"),
    ):
        ratios = [timings[theirs].median(i) / timings[ours].median(i) for i in range(prompts)]
        print(f"{ours} is {statistics.median(ratios):.2f} x {theirs}")


def _per_round(runs: list[Statistics]) -> str:
    """Median milliseconds a round: drafting, target pass, everything else, and its share."""
    if not runs or not runs[0].rounds:
        return ""
    parts = [
        [1000 * getattr(run, f"{part}_s") / run.rounds for run in runs]
        for part in ("draft", "verify", "other")
    ]
    draft, target, other = (statistics.median(part) for part in parts)
    return f"{draft:8.2f} {target:8.2f} {other:8.2f} {100 * other / (draft + target + other):6.1f}%"


def _print_batch(target: Target, prompts: list[list[int]], tokens: int) -> None:
    """Tokens/s of all prompts together, and one after the other."""
    decoder = SpeculativeDecoder(target, NgramDrafter(), FixedPolicy(length=3))
    begun = time.perf_counter()
    alone = sum(
        len(decoder.generate(prompt, max_new_tokens=tokens).token_ids[0]) for prompt in prompts
    )
    middle = time.perf_counter()
    together = sum(map(len, decoder.generate(prompts, max_new_tokens=tokens).token_ids))
    ratio = (together / (time.perf_counter() - middle)) / (alone / (middle - begun))
    print(f"a batch of {len(prompts)} has {ratio:.2f} x the tokens/s of batch 1")


def _chat(target: Target, question: str) -> list[int]:
    return target.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="smollm2-135m-ar")
    parser.add_argument("--length", type=int, default=5, help="draft length of every method")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=3, help="repetitions of everything")
    parser.add_argument("--json", action="store_true", help="print all times as well")
    return parser.parse_args()


if __name__ == "__main__":
    main()
