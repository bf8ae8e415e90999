"""Draw one draft tree of EAGLE-2 as an SVG: the figure of docs/eagle2.md.

    python docs/figures/eagle2_tree.py --checkpoint smollm2-135m-eagle2 [--prompt TEXT] [--out FILE]

Writes text with the head until a round accepts `--accepted` drafted tokens, and draws that round.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from specdec import SpeculativeDecoder, Target
from specdec.drafters.eagle2 import Eagle2Drafter
from specdec.loop import Generation
from specdec.metrics import RoundRecord

WIDTH, HEIGHT, GAP = 148, 24, 30
"""Width of a level, height of a node, distance of rows; pixels."""
STYLE = """
  rect.page { fill: #fcfcfd } text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #24292f }
  text.p { font-size: 10px; fill: #6e7781 } rect.node { fill: #eef1f5; stroke: #c4ccd6 }
  rect.kept { fill: #d3ecdb; stroke: #2d8a4e } rect.bonus { fill: #fff3d6; stroke: #c28a17 }
  path { fill: none; stroke: #c4ccd6; stroke-width: 1.3 } path.kept { stroke: #2d8a4e; stroke-width: 2 }
"""


@dataclass
class Node:
    """A box of the drawing."""

    text: str
    parent: int
    depth: int
    kind: str
    note: str = ""
    row: float = 0.0


def main() -> None:
    arguments = parse()
    target = Target.load(arguments.model)
    drafter = Eagle2Drafter(
        checkpoint=arguments.checkpoint, top_k=4, depth=4, total_tokens=arguments.total_tokens
    )
    decoder = SpeculativeDecoder(target, drafter, {"name": "fixed", "length": 5})
    ids = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": arguments.prompt}],
        add_generation_prompt=True,
        return_dict=False,
    )
    request = decoder.request([ids], max_new_tokens=200, keep_trees=True)
    generation = Generation(target, decoder.drafter, decoder.policy, request)
    for _ in generation.run():
        if generation.records and generation.records[-1].accepted[0] >= arguments.accepted:
            break
    else:
        raise SystemExit(f"no round accepted {arguments.accepted} tokens; try another prompt")
    nodes = boxes(generation, generation.records[-1], target.tokenizer)
    arguments.out.write_text(svg(nodes))
    print(f"{arguments.out}: round {len(generation.records)}, {len(nodes) - 2} drafted tokens")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="a head for the target")
    parser.add_argument("--model", default="smollm2-135m", help="the target")
    parser.add_argument("--prompt", default="How does a bicycle stay upright?")
    parser.add_argument("--total-tokens", type=int, default=18)
    parser.add_argument("--accepted", type=int, default=3, help="draw the first round with so many")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".svg"))
    return parser.parse_args()


def boxes(generation: Generation, record: RoundRecord, tokenizer: Any) -> list[Node]:
    """The root, the drafted nodes in tree order, and the bonus token, placed in rows."""
    assert record.tree is not None
    assert isinstance(generation.drafter, Eagle2Drafter)
    tokens, parents = record.tree["tokens"][0], record.tree["parents"][0]
    scores = generation.drafter.pool.best(len(tokens))[1][0].exp().tolist()
    accepted = record.tree["accepted"][0]
    root = generation.texts[0][-len(record.tokens[0]) - 1]
    nodes = [Node(show(tokenizer, root), -1, 0, "kept", "root")]
    for index, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        kind = "kept" if index in accepted else "node"
        depth = nodes[parent + 1].depth + 1
        note = f"{scores[index]:.2f}"
        nodes.append(Node(show(tokenizer, token), parent + 1, depth, kind, note))
    last = accepted[-1] + 1 if accepted else 0
    bonus = show(tokenizer, record.tokens[0][-1])
    nodes.append(Node(bonus, last, nodes[last].depth + 1, "bonus", "bonus"))
    place(nodes, 0, 0)
    return nodes


def show(tokenizer: Any, token: int) -> str:
    """The token's text; a space in front is drawn as a dot."""
    text = tokenizer.decode([token]).replace("\n", "↵")
    return "·" + text[1:] if text.startswith(" ") else text


def place(nodes: list[Node], index: int, row: float) -> float:
    """Give rows to a node and what hangs from it; returns the next free row."""
    children = [child for child, node in enumerate(nodes) if node.parent == index]
    # The accepted path runs straight on.
    children.sort(key=lambda child: nodes[child].kind == "node")
    nodes[index].row = row
    for child in children:
        row = place(nodes, child, row)
    return row if children else row + 1


def svg(nodes: list[Node]) -> str:
    width = (max(node.depth for node in nodes) + 1) * WIDTH + 12
    height = (max(node.row for node in nodes) + 1) * GAP + 14
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" '
        f'width="{width}" height="{height:g}" role="img" aria-label="A draft tree">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height:g}" rx="8"/>',
    ]
    for node in nodes[1:]:
        parent = nodes[node.parent]
        x, y = corner(parent)
        to_x, to_y = corner(node)
        x, y, to_y = x + WIDTH - 28, y + HEIGHT / 2, to_y + HEIGHT / 2
        kind = "kept" if node.kind == "kept" else ""
        middle = (x + to_x) / 2
        curve = f"M{x:g} {y:g} C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"
        lines.append(f'<path class="{kind}" d="{curve}"/>')
    for node in nodes:
        x, y = corner(node)
        box = f'x="{x}" y="{y:g}" width="{WIDTH - 28}" height="{HEIGHT}" rx="5"'
        lines += [
            f'<rect class="node {node.kind}" {box}/>',
            f'<text x="{x + 8}" y="{y + 16:g}">{escape(node.text)}</text>',
            f'<text class="p" x="{x + WIDTH - 34}" y="{y + 16:g}" text-anchor="end">{node.note}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def corner(node: Node) -> tuple[int, float]:
    return 10 + node.depth * WIDTH, 10 + node.row * GAP


if __name__ == "__main__":
    main()
