"""What one GliDe drafting step costs, next to a step of an autoregressive drafter of the same layers.

    python benchmarks/glide.py [--model smollm2-135m] [--layers 1 2] [--contexts 100 1000 4000]

Both drafters have random weights: layers, embedding and output layer of the target's own sizes (the
time of a step does not depend on what they have learnt). The target's cache holds random numbers. A
GliDe step is measured a second time with its cross-attention taken out: the difference is what
reading the target costs. All variants of a context run in turn in one process; figures are medians.
On a CPU they are processor time of one thread, so that what else the machine does hardly counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from specdec.cache import SlotCache
from specdec.drafters.autoregressive import AutoregressiveDrafter
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.glide import GlideConfig, GlideDrafter, GlideModel
from specdec.sampling import Sampler
from specdec.state import GenerationState
from specdec.target import Target

DEPTH = 4
"""Drafted tokens of a round, the published number: a measured step is one of them."""


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = Target.load(arguments.model, dtype=arguments.dtype, device=device)
    print(f"{arguments.model}, {arguments.dtype}, {device}, ms a step")
    print("layers  context  autoregressive  glide  without cross-attention  cross-attention")
    for layers in arguments.layers:
        drafters = make_drafters(target, layers)
        for context in arguments.contexts:
            times = measure(target, drafters, context, arguments.repeats)
            added = times["glide"] - times["without cross-attention"]
            print(
                f"{layers:6}  {context:7}  {times['autoregressive']:14.2f}  {times['glide']:5.2f}"
                f"  {times['without cross-attention']:23.2f}"
                f"  {added:7.2f} ({added / times['glide']:4.0%})"
            )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="the target")
    parser.add_argument("--dtype", default="bfloat16", help="of the target and the drafters")
    parser.add_argument("--layers", type=int, nargs="+", default=[1], help="layers of a drafter")
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=40, help="rounds of each variant")
    return parser.parse_args()


def make_drafters(target: Target, layers: int) -> dict[str, ChainDrafter]:
    """The three variants, all with the target's embedding and output layer."""
    model = target.model
    vocabulary = {
        "embedding": model.get_input_embeddings(), "output": model.get_output_embeddings()
    }  # fmt: skip
    config = GlideConfig.for_target(model, num_hidden_layers=layers)
    with_cross, without = (GlideModel(config, model, **vocabulary) for _ in range(2))
    for layer in without.model.layers:
        layer.cross_attn = Nothing()
    small = LlamaForCausalLM(
        LlamaConfig(**(model.config.to_dict() | {"num_hidden_layers": layers}))
    )
    small.set_input_embeddings(vocabulary["embedding"])
    small.lm_head = vocabulary["output"]
    made: dict[str, ChainDrafter] = {
        "autoregressive": AutoregressiveDrafter(
            model=small.to(device=target.device, dtype=target.dtype).eval()
        ),
        "glide": GlideDrafter(checkpoint=with_cross.to(target.device, target.dtype)),
        "without cross-attention": GlideDrafter(checkpoint=without.to(target.device, target.dtype)),
    }
    for drafter in made.values():
        drafter.attach(target)
    return made


class Nothing(nn.Module):
    """In the place of a cross-attention: adds nothing."""

    def forward(self, hidden: Tensor, *others: object) -> Tensor:
        return torch.zeros_like(hidden)


@torch.no_grad()
def measure(
    target: Target, drafters: dict[str, ChainDrafter], context: int, repeats: int
) -> dict[str, float]:
    """Milliseconds of one drafting step of each drafter behind `context` tokens."""
    state = filled_state(target, context)
    for drafter in drafters.values():
        drafter.start(state)
    times: dict[str, list[float]] = {name: [] for name in drafters}
    for _ in range(repeats):
        for name, drafter in drafters.items():
            # The first pass of a round reads the root; what it costs is not a step's.
            drafter.rewind([context])
            drafter.begin(state)
            times[name] += [timed(drafter, target.device) for _ in range(DEPTH - 1)]
    return {name: 1000 * statistics.median(found) for name, found in times.items()}


def filled_state(target: Target, context: int) -> GenerationState:
    """A text of `context` tokens and a root; the target's cache full of random numbers."""
    config = target.config
    cache = SlotCache(1)
    cache.place([0], context)
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    shape = (1, config.num_key_value_heads, context, head_size)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, *shape, dtype=target.dtype, device=target.device)
        cache.update(keys, values, layer)
    cache.lengths = [context]
    text = torch.randint(config.vocab_size, (context + 1,)).tolist()
    sampler = Sampler(LogitsProcessorList(), do_sample=False)
    state = GenerationState([text], cache, sampler, [], target.device)
    state.limits = [DEPTH]
    return state


def timed(drafter: ChainDrafter, device: torch.device) -> float:
    """Seconds of one step."""
    if device.type == "cpu":
        started = time.thread_time()
        drafter.extend(True)
        return time.thread_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    drafter.extend(True)
    torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
