"""Draft trees as people see them: the tokens of each branch, the accepted path marked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text
from rich.tree import Tree

if TYPE_CHECKING:
    from specdec.decoder import GenerationOutput
    from specdec.metrics import RoundRecord

ROOT = -1


def draw_rounds(output: GenerationOutput, tokenizer: Any) -> Iterator[Tree]:
    """One tree for each round and row of a generation that kept its trees."""
    # The first token comes from the prompt's pass, before any round.
    written = [1 if tokens else 0 for tokens in output.token_ids]
    for record in output.rounds:
        for place, row in enumerate(record.rows):
            root = output.token_ids[row][written[row] - 1]
            written[row] += record.committed[place]
            title = f"round {record.index + 1}"
            if len(output.token_ids) > 1:
                title += f", prompt {row + 1}"
            counts = f"{record.drafted[place]} drafted, {record.accepted[place]} accepted"
            drawing = Tree(f"{title}: {counts}")
            nodes = _Nodes(record, place, tokenizer)
            branch = drawing.add(Text("behind ") + nodes.label(root, accepted=False))
            nodes.draw_under(branch, ROOT)
            bonus = record.tokens[place][record.accepted[place] :]
            for token in bonus:
                drawing.add(Text("bonus ") + nodes.label(token, accepted=False))
            yield drawing


class _Nodes:
    """The nodes of one row's tree."""

    def __init__(self, record: RoundRecord, place: int, tokenizer: Any) -> None:
        assert record.tree is not None
        self.tokens: list[int] = record.tree["tokens"][place]
        self.tokenizer = tokenizer
        self.children: dict[int, list[int]] = {}
        parents, valid = record.tree["parents"][place], record.tree["valid"][place]
        for node, parent in enumerate(parents):
            if valid[node]:
                self.children.setdefault(parent, []).append(node)
        self.accepted: set[int] = set()
        node = ROOT
        for token in record.tokens[place][: record.accepted[place]]:
            node = next(child for child in self.children[node] if self.tokens[child] == token)
            self.accepted.add(node)

    def draw_under(self, branch: Tree, node: int) -> None:
        """Add what hangs from `node`; a run of only children stays on one line."""
        for child in self.children.get(node, []):
            run = [child]
            while len(behind := self.children.get(run[-1], [])) == 1:
                run += behind
            labels = [self.label(self.tokens[each], each in self.accepted) for each in run]
            self.draw_under(branch.add(Text(" ").join(labels)), run[-1])

    def label(self, token: int, accepted: bool) -> Text:
        """The token as it reads, quoted; accepted ones carry a mark that needs no colour."""
        shown = repr(self.tokenizer.decode([token]))
        return Text(f"✓{shown}", "bold green") if accepted else Text(shown)
