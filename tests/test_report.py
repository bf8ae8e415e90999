"""The report: the same figures in every form, and a page that works on a phone."""

from __future__ import annotations

import csv
import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from specdec.bench import charts
from specdec.bench.charts import Bar, Series
from specdec.bench.report import write_report
from specdec.cli import make_app
from specdec.errors import SpecdecError
from tests.browser import chromium

PHONE = 390
VOID = {"meta"}


@pytest.fixture(scope="module")
def report(bench_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that a report consists of, and `text` for the terminal."""
    out = tmp_path_factory.mktemp("report")
    (out / "text").write_text(write_report([bench_run], out))
    return out


def summary_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())
    return found


def test_the_command_prints_tables_and_writes_files(bench_run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(make_app(), ["report", str(bench_run), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "greedy: speed-up over transformers" in result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "report.html", "report.md", "report.csv", "speedup.svg"
    }  # fmt: skip


def test_a_run_that_has_not_ended_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match=r"there is no summary.json; a report needs the folder"):
        write_report([tmp_path], tmp_path)


def test_the_csv_holds_the_summary(bench_run: Path, report: Path) -> None:
    summary = summary_of(bench_run)
    with (report / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(summary)
    for row, entry in zip(rows, summary, strict=True):
        assert (row["name"], row["category"]) == (entry["name"], entry["category"])
        assert float(row["speedup_mean"]) == pytest.approx(entry["speedup_mean"])
        assert float(row["speedup_high"]) == pytest.approx(entry["speedup_ci95"][1])


def test_every_form_shows_every_row_with_its_speed_up(bench_run: Path, report: Path) -> None:
    markdown = (report / "report.md").read_text()
    page = (report / "report.html").read_text()
    text = (report / "text").read_text()
    for entry in summary_of(bench_run):
        if entry["category"] != "all":
            continue
        mean = f"{entry['speedup_mean']:.2f}"
        lines = [
            line for line in markdown.splitlines() if line.startswith(f"| {entry['method']} |")
        ]
        assert any(f"| {mean} |" in line for line in lines)
        row = re.search(rf"<tr><th>{re.escape(entry['method'])}</th>.*?</tr>", page)
        assert row is not None
        assert f">{mean}<" in page
        assert entry["method"] in text
        assert mean in text
        if entry["diagnosis"]:
            assert entry["diagnosis"] in page
    for form in (markdown, page, text):
        assert "of specdec's rows" in form.replace("&#x27;", "'").replace("Of", "of")
        assert "of the others transformers" in form
        assert "Not measured: " in form


def test_every_form_gives_the_speed_up_by_length(bench_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(bench_run, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "lengths": [8, 16]}))
    summary = summary_of(run)
    nothing = {"speedup_mean": None, "speedup_median": None, "speedup_ci95": None}
    measured = {"speedup_mean": 3.21, "speedup_median": 3.3, "speedup_ci95": [3.01, 3.41]}
    for entry in summary:
        entry["speedup_by_length"] = {"8": measured, "16": nothing}
        entry["without_loops"]["speedup_by_length"] = {"8": nothing, "16": nothing}
    (run / "summary.json").write_text(json.dumps(summary))
    text = write_report([run], tmp_path)
    markdown = (tmp_path / "report.md").read_text()
    assert "| plain | 3.21 (3.01–3.41) | – |" in markdown
    assert "Speed-up by length, without answers that loop:" in markdown
    page = (tmp_path / "report.html").read_text()
    assert "<tr><th>plain</th><td>3.21 (3.01–3.41)</td><td>–</td></tr>" in page
    assert "3.21 (3.01–3.41)" in text
    with (tmp_path / "report.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["speedup_mean_to_8"], row["speedup_mean_to_16"]) for row in rows} == {("3.21", "")}


def test_drafters_of_one_kind_have_charts_of_their_own(bench_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(bench_run, run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    for row in config["rows"]:
        if row["method"] == "autoregressive + svip":
            row["drafter"]["model"] = "some/larger"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    write_report([run], tmp_path)
    page = (tmp_path / "report.html").read_text()
    for title in ("Entropy against acceptance, ", "Acceptance by position, "):
        for model in ("drafter", "larger"):
            found = f"{title}autoregressive (model={model}), greedy" in page
            assert found == (model == "larger" or title.startswith("Acceptance"))


def test_the_page_needs_nothing_from_elsewhere(report: Path) -> None:
    page = (report / "report.html").read_text()
    assert "<script" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert not re.findall(r"""(?:src|href)\s*=""", page)
    assert set(re.findall(r"https?://[^\"'<\s]+", page)) == {"http://www.w3.org/2000/svg"}


def test_the_page_is_well_formed(report: Path) -> None:
    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in VOID:
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    tags = Tags()
    tags.feed((report / "report.html").read_text())
    assert tags.open == []


def test_the_page_has_every_chart(report: Path) -> None:
    page = (report / "report.html").read_text()
    for title in (
        "Speed-up, greedy", "Time of a round, temperature 1", "Draft length along the answer",
        "Accepted against drafted", "Acceptance by position", "Draft lengths",
        "Entropy against acceptance",
    ):  # fmt: skip
        assert f'aria-label="{title}' in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ET.fromstring(svg)


def test_drafted_tokens_are_coloured_by_what_became_of_them(bench_run: Path, report: Path) -> None:
    page = (report / "report.html").read_text()
    rows = json.loads((bench_run / "examples.json").read_text())["rows"]
    for kind, css in (("accepted", "yes"), ("rejected", "no")):
        number = sum(len(each[kind]) for rounds in rows.values() for each in rounds)
        assert number > 0
        assert page.count(f"<span class='{css}'>") == number + 1  # and one in the words above


def test_the_picture_stands_alone(report: Path) -> None:
    root = ET.fromstring((report / "speedup.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.find("{http://www.w3.org/2000/svg}style") is not None
    bars = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(bars) >= 10


def test_texts_are_escaped(bench_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "<b>run"
    folder.mkdir()
    for path in bench_run.iterdir():
        text = path.read_text()
        (folder / path.name).write_text(text.replace("ngram + fixed", "<i>ngram</i> & fixed"))
    write_report([folder], folder)
    page = (folder / "report.html").read_text()
    assert "<i>" not in page
    assert "<b>" not in page
    assert "&lt;i&gt;ngram&lt;/i&gt; &amp; fixed" in page


def test_bars_are_as_long_as_their_values() -> None:
    svg = charts.bars("t", [Bar("one", 1.0), Bar("two", 2.0, low=1.5, high=2.5)], reference=1.0)
    widths = [float(w) for w in re.findall(r'<rect[^>]* width="([\d.]+)"', svg)]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)
    ends = re.search(r'class="whisker" x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)"', svg)
    assert ends is not None
    assert float(ends[1]) == pytest.approx(1.5 * widths[0], abs=0.2)
    assert float(ends[2]) == pytest.approx(2.5 * widths[0], abs=0.2)


def test_points_stand_where_the_axes_say() -> None:
    svg = charts.lines("t", [Series("s", [(0, 0), (5, 1)])], "x", "y", y_most=2.0)
    points = re.search(r'points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"', svg)
    assert points is not None
    x0, y0, x1, y1 = map(float, points.groups())
    assert (x0, y0) == (charts.LEFT, charts.HEIGHT - charts.BOTTOM)
    assert x1 == pytest.approx(charts.WIDTH - charts.RIGHT)
    assert y1 == pytest.approx((y0 + charts.TOP) / 2)  # 1 of 2


@pytest.mark.parametrize("most", [0.03, 1.0, 7.0, 40.0, 2048.0])
def test_ticks_are_few_round_and_inside(most: float) -> None:
    ticks = charts.ticks(most)
    assert 2 <= len(ticks) <= 6
    assert ticks[0] == 0
    assert ticks[-1] <= most


def test_the_page_works_in_a_browser(report: Path) -> None:
    with chromium() as page:
        for width, dark in ((PHONE, False), (PHONE, True), (1280, False), (1280, True)):
            page.open(report / "report.html", width, dark=dark)
            assert page.errors == []
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.evaluate("document.body.innerText.length") > 2000
            light = page.evaluate(
                "getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'"
            )
            assert light is not dark
            # Wide tables scroll in their own frame; nothing else sticks out of the page.
            outside = page.evaluate(
                "[...document.querySelectorAll('body *')].filter(each => !each.closest('.scroll') "
                "&& each.getBoundingClientRect().right > innerWidth + 1).map(each => each.tagName)"
            )
            assert outside == []
            # Letters of the charts stay readable, at the phone's own scale.
            smallest = page.evaluate(
                "Math.min(...[...document.querySelectorAll('svg')].map(svg => 11 * "
                "svg.getBoundingClientRect().width / svg.viewBox.baseVal.width))"
            )
            assert smallest >= 9
