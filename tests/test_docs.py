"""The documentation says what the code says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from specdec import builtin, config, plugins
from specdec.plugins import Registry

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
EXAMPLE = ROOT / "plugins" / "specdec-example"


def code_blocks(page: Path, language: str) -> list[tuple[str, str]]:
    """`(title, text)` of each fenced block."""
    pattern = rf'^```{language}(?: title="(.*?)")?\n(.*?)^```$'
    return re.findall(pattern, page.read_text(), re.DOTALL | re.MULTILINE)


def test_the_tables_of_parameters_are_those_of_the_code() -> None:
    """`python tools/reference_tables.py` writes them anew."""
    path = ROOT / "tools" / "reference_tables.py"
    spec = importlib.util.spec_from_file_location("reference_tables", path)
    assert spec is not None
    assert spec.loader is not None
    tables: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.PAGE.read_text()
    assert tables.with_tables(page) == page


def test_the_example_configuration_is_one(tiny_target_folder: Path) -> None:
    _, text = code_blocks(DOCS / "yaml-reference.md", "yaml")[0]
    example = yaml.safe_load(text)
    assert set(example) == set(config.KEYS)
    example["target"]["model"] = str(tiny_target_folder)
    config.read(example)


def test_the_page_on_plugins_shows_the_template_as_it_is() -> None:
    shown = {title: text for title, text in code_blocks(DOCS / "plugins.md", "python") if title}
    for path in sorted((EXAMPLE / "src" / "specdec_example").glob("*.py")):
        assert shown[f"src/specdec_example/{path.name}"] == path.read_text()
    [(title, text)] = code_blocks(DOCS / "plugins.md", "toml")
    assert text in (EXAMPLE / title).read_text()


def test_the_policy_on_the_page_works(
    tmp_path: Path, tiny_target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = Registry()
    fresh.add(builtin, "builtin", "built in")
    monkeypatch.setattr(plugins, "registry", lambda: fresh)
    shown = dict(code_blocks(DOCS / "plugins.md", "python"))
    (tmp_path / "my_policy.py").write_text(dedent(shown["my_policy.py"]))
    monkeypatch.chdir(tmp_path)
    settings = ["plugins=[my_policy.py]", "policy.name=patient", f"target={tiny_target_folder}"]
    decoder = config.read(None, settings).build()
    assert len(decoder.generate("the cat", max_new_tokens=5).token_ids[0]) == 5
