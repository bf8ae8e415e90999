"""Writes the tables of parameters in docs/yaml-reference.md anew, from the declarations in the code.

    python tools/reference_tables.py

A test fails when the page and the code differ.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from specdec import builtin
from specdec.config import TargetConfig
from specdec.generation import GenerationSettings
from specdec.plugins import Registration
from specdec.schema import parameter_rows

PAGE = Path(__file__).parent.parent / "docs" / "yaml-reference.md"
BEGIN, END = "<!-- begin: {name} -->", "<!-- end -->"


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text()))


def with_tables(page: str) -> str:
    """The page with the text between each pair of marks made anew."""
    for name, table in tables().items():
        begin = BEGIN.format(name=name)
        if begin not in page:
            raise SystemExit(
                f"{PAGE.name} has no place for {name}: put `{begin}` and `{END}` there"
            )
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(END)}", re.DOTALL)
        page = pattern.sub((f"{begin}\n{table}\n{END}").replace("\\", "\\\\"), page)
    return page


def tables() -> dict[str, str]:
    """One table for each section and each built-in drafter and policy."""
    made = {"target": _table(TargetConfig), "generation": _table(GenerationSettings)}
    for kind, entries in (("drafter", builtin.DRAFTERS), ("policy", builtin.POLICIES)):
        for name, path in entries.items():
            cls = Registration(kind, name, path, "built in").load()
            made[f"{kind} {name}"] = _described(cls)
    return made


def _described(cls: Any) -> str:
    parts = [f"{cls.summary[:1].upper()}{cls.summary[1:]}.", _table(cls.Params)]
    if cls.source:
        parts.append(f"Source: {cls.source}.")
    return "\n\n".join(parts)


def _table(model: type) -> str:
    rows = [("parameter", "type", "default", "what it does"), ("---",) * 4]
    for name, kind, default, text in parameter_rows(model):
        shown = default if default == "required" else f"`{default}`"
        rows.append((f"`{name}`", f"`{kind}`".replace("|", "\\|"), shown, text))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    main()
