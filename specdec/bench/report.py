"""Reports: a table in the terminal, CSV, Markdown, one page of HTML, and a picture of the bars."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from specdec.bench.questions import column_order
from specdec.bench.summary import ALL
from specdec.errors import SpecdecError
from specdec.training.files import read_json, read_jsonl, write_atomically

if TYPE_CHECKING:
    from rich.table import Table

FILES = ("summary.json", "config.yaml", "machine.json", "results.jsonl", "examples.json")
COLUMN_NAMES = {
    "translation": "Transl.",
    "summarization": "Summ.",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
}
CSV_KEYS = (
    "run", "name", "method", "temperature", "batch_size", "category", "questions", "speedup_mean",
    "speedup_median", "speedup_low", "speedup_high", "speedup_mean_without_loops",
    "speedup_median_without_loops", "speedup_low_without_loops", "speedup_high_without_loops",
    "speedup_decode_mean", "tau", "alpha", "tokens_per_s", "equal_to_baseline", "loop_share",
    "mean_draft_length", "draft_ms", "verify_ms", "other_ms", "c", "predicted_speedup",
    "speedup_over_plain", "memory_mb", "diagnosis",
)  # fmt: skip


@dataclass
class Run:
    """One finished run.

    Attributes:
        name: of its folder.
        config, machine: how and on what it was measured.
        summary: the rows of `summary.json`; `results` the lines behind them.
        examples: one answer of every row that drafts, with its drafts.
    """

    name: str
    config: dict[str, Any]
    machine: dict[str, Any]
    summary: list[dict[str, Any]]
    results: list[dict[str, Any]]
    examples: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """
        Raises:
            SpecdecError: no such folder, or the run has not ended.
        """
        for file in FILES:
            if not (folder / file).is_file():
                raise SpecdecError(
                    f"{folder}: there is no {file}; a report needs the folder of a run that has "
                    "ended ('specdec bench CONFIG --out FOLDER' goes on with one that has not)."
                )
        return cls(
            name=folder.resolve().name,
            config=yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")),
            machine=read_json(folder / "machine.json"),
            summary=json.loads((folder / "summary.json").read_text(encoding="utf-8")),
            results=list(read_jsonl(folder / "results.jsonl")),
            examples=read_json(folder / "examples.json"),
        )

    @property
    def settings(self) -> list[tuple[float, int]]:
        """Temperatures and batch sizes that were measured."""
        return sorted({(e["temperature"], e["batch_size"]) for e in self.summary})

    def methods(self, setting: tuple[float, int]) -> list[str]:
        """The methods that were measured at a setting, in the grid's order."""
        found = (e["method"] for e in self.summary if self.is_at(e, setting))
        return list(dict.fromkeys(found))

    def entry(
        self, method: str, setting: tuple[float, int], category: str = ALL
    ) -> dict[str, Any] | None:
        for each in self.summary:
            if (each["method"], each["category"]) == (method, category) and self.is_at(
                each, setting
            ):
                return each
        return None

    def columns(self) -> list[str]:
        return column_order({e["category"] for e in self.summary} - {ALL})

    def row(self, method: str, setting: tuple[float, int]) -> dict[str, Any]:
        """The row's drafter, policy and peer, as configured."""
        for row in self.config["rows"]:
            if row["method"] == method and self.is_at(row, setting):
                found: dict[str, Any] = row
                return found
        raise KeyError(method)

    @staticmethod
    def is_at(entry: dict[str, Any], setting: tuple[float, int]) -> bool:
        return (entry["temperature"], entry["batch_size"]) == setting


def write_report(folders: Sequence[Path], out: Path) -> str:
    """Write `report.csv`, `report.md`, `report.html` and `speedup.svg` to `out`.

    Returns:
        The tables, for a terminal.

    Raises:
        SpecdecError: a folder that holds no finished run.
    """
    from specdec.bench.page import bars_picture, page

    runs = [Run.read(folder) for folder in folders]
    write_atomically(out / "report.csv", as_csv(runs))
    write_atomically(out / "report.md", as_markdown(runs))
    write_atomically(out / "report.html", page(runs))
    write_atomically(out / "speedup.svg", bars_picture(runs[0]))
    return as_text(runs)


def setting_name(setting: tuple[float, int]) -> str:
    """`greedy`, `temperature 1`, and the batch size where it is not 1."""
    temperature, size = setting
    name = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    return name if size == 1 else f"{name}, batch of {size}"


def column_name(column: str) -> str:
    return COLUMN_NAMES.get(column, column)


# --- tables ---------------------------------------------------------------------------------------


def table_head(run: Run) -> list[str]:
    columns = [column_name(column) for column in run.columns()]
    return ["", *columns, "mean", "median", "95 %", "τ", "tokens/s", "loops"]


def table_rows(
    run: Run, setting: tuple[float, int], without_loops: bool = False
) -> list[list[str]]:
    """The papers' table: a method a line, a category a column, speed-ups over the baseline."""
    rows = []
    for method in run.methods(setting):
        whole = run.entry(method, setting)
        assert whole is not None
        cells = [method + mark(whole)]
        for column in [*run.columns(), ALL]:
            entry = run.entry(method, setting, column)
            if entry is not None and without_loops:
                entry = entry["without_loops"]
            cells.append(times(None if entry is None else entry["speedup_mean"]))
        part = whole["without_loops"] if without_loops else whole
        cells += [
            times(part["speedup_median"]),
            interval(part) or "–",
            times(part["tau"]),
            "–" if part["tokens_per_s"] is None else f"{part['tokens_per_s']:.1f}",
            f"{whole['loop_share']:.0%}",
        ]
        rows.append(cells)
    return rows


def interval(figures: dict[str, Any]) -> str:
    """The median's 95 % interval, `1.10–1.30`; nothing where there is none."""
    low, high = figures["speedup_ci95"] or (None, None)
    return "" if low is None else f"{low:.2f}–{high:.2f}"


def length_head(run: Run) -> list[str]:
    return ["first tokens", *map(str, run.config["lengths"] or [])]


def length_rows(
    run: Run, setting: tuple[float, int], without_loops: bool = False
) -> list[list[str]]:
    """A method a line, a length a column: the mean, and the median's interval in brackets."""
    rows = []
    for method in run.methods(setting) if run.config["lengths"] else []:
        entry = run.entry(method, setting)
        assert entry is not None
        part = entry["without_loops"] if without_loops else entry
        cells = [method]
        for figures in part["speedup_by_length"].values():
            around = interval(figures)
            cells.append(times(figures["speedup_mean"]) + (f" ({around})" if around else ""))
        rows.append(cells)
    return rows


def mark(entry: dict[str, Any]) -> str:
    """Says that a greedy text is not the baseline's: ≈ where only ties were settled differently."""
    if entry["equal_to_baseline"] is not False:
        return ""
    return " ≈" if entry["only_ties"] else " ≠"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def legend_of_marks() -> str:
    return (
        "≈: some greedy texts leave the baseline's where two logits tie within rounding; "
        "≠: some leave it elsewhere, which lossless decoding cannot."
    )


def headline(run: Run, setting: tuple[float, int]) -> str:
    """The fastest row of our own and the fastest of the others, in a sentence."""
    own = [m for m in run.methods(setting) if not run.row(m, setting)["peer"]]
    own = [m for m in own if run.row(m, setting)["policy"]["name"] != "oracle"]
    best = _fastest(run, own, setting)
    if best is None:
        return f"{setting_name(setting)}: nothing was measured."
    low, high = best["speedup_ci95"]
    calm = best["without_loops"]["speedup_mean"]
    without = "" if calm is None else f"; {calm:.2f} without answers that loop"
    peers = [m for m in run.methods(setting) if run.row(m, setting)["peer"]]
    peer = _fastest(run, [m for m in peers if m != run.config["baseline"]], setting)
    others = f"; of the others {peer['method']}, {peer['speedup_mean']:.2f}" if peer else ""
    return (
        f"{setting_name(setting)}: of specdec's rows {best['method']} is the fastest, "
        f"{best['speedup_mean']:.2f} times {run.config['baseline']} (median "
        f"{best['speedup_median']:.2f}, 95 % interval {low:.2f} to {high:.2f}, "
        f"{best['questions']} questions{without}){others}"
    )


def _fastest(run: Run, methods: list[str], setting: tuple[float, int]) -> dict[str, Any] | None:
    """The entry of the largest mean speed-up; None if there is none."""
    entries = [entry for m in methods if (entry := run.entry(m, setting)) and entry["speedup_mean"]]
    return max(entries, key=lambda entry: entry["speedup_mean"], default=None)


def not_measured(run: Run) -> list[str]:
    """A sentence for each row that could not be measured."""
    return [f"Not measured: {name}: {why}." for name, why in run.config["skipped"].items()]


def as_text(runs: Sequence[Run]) -> str:
    """The tables for a terminal."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, width=150, highlight=False)
    for run in runs:
        for setting in run.settings:
            title = f"{run.name}, {setting_name(setting)}: speed-up over {run.config['baseline']}"
            console.print(_terminal_table(title, table_head(run), table_rows(run, setting)))
            console.print(headline(run, setting), markup=False)
            lengths = length_rows(run, setting)
            if lengths:
                console.print(_terminal_table("Speed-up by length", length_head(run), lengths))
        for sentence in not_measured(run):
            console.print(sentence, markup=False)
            for method in run.methods(setting):
                entry = run.entry(method, setting)
                if entry and entry["diagnosis"]:
                    console.print(f"{method}: {entry['diagnosis']}", markup=False)
            console.print()
    return buffer.getvalue().rstrip()


def _terminal_table(title: str, head: list[str], rows: list[list[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*row)
    return table


def as_markdown(runs: Sequence[Run]) -> str:
    """The tables, and what they were measured on."""
    parts = []
    for run in runs:
        parts.append(f"# {run.name}\n")
        parts.append(f"{about(run)}\n")
        parts += [f"{sentence}\n" for sentence in not_measured(run)]
        for setting in run.settings:
            parts.append(f"## {setting_name(setting).capitalize()}\n")
            parts.append(f"Speed-up over {run.config['baseline']}. {headline(run, setting)}.\n")
            parts.append(_markdown_table(table_head(run), table_rows(run, setting)))
            parts.append("Without answers that loop:\n")
            parts.append(_markdown_table(table_head(run), table_rows(run, setting, True)))
            for without_loops in (False, True) if run.config["lengths"] else ():
                which = ", without answers that loop" if without_loops else ""
                parts.append(f"Speed-up by length{which}:\n")
                rows = length_rows(run, setting, without_loops)
                parts.append(_markdown_table(length_head(run), rows))
            parts.extend(_diagnoses(run, setting))
        parts.append(f"{legend_of_marks()}\n")
    return "\n".join(parts)


def about(run: Run) -> str:
    """What was measured, and on what."""
    machine, config = run.machine, run.config
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    devices = (
        ", ".join(machine["devices"]) or f"{machine['processor']}, {machine['threads']} threads"
    )
    target = config["target"]
    named = target
    if isinstance(target, dict):
        packed = ", packed in specdec's rows" if target.get("pack") else ""
        named = f"{target['model']} ({target['dtype']}{packed})"
    return (
        f"{config['questions']['number']} questions of {config['questions']['source']}, "
        f"at most {config['generation']['max_new_tokens']} new tokens; target {named}; "
        f"{devices}; {versions}; code {machine['code']}."
    )


def _diagnoses(run: Run, setting: tuple[float, int]) -> list[str]:
    lines = []
    for method in run.methods(setting):
        entry = run.entry(method, setting)
        if entry and entry["diagnosis"]:
            lines.append(f"- {method}: {entry['diagnosis']}\n")
    return lines


def _markdown_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def as_csv(runs: Sequence[Run]) -> str:
    """Every row of every run's summary, flat."""
    buffer = io.StringIO()
    lengths = dict.fromkeys(length for run in runs for length in run.config["lengths"] or [])
    keys = [*CSV_KEYS, *(f"speedup_mean_to_{length}" for length in lengths)]
    writer = csv.DictWriter(buffer, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for run in runs:
        for entry in run.summary:
            low, high = entry["speedup_ci95"] or (None, None)
            calm = entry["without_loops"]
            calm_low, calm_high = calm["speedup_ci95"] or (None, None)
            round_ms = entry["round_ms"] or {}
            by_length = entry["speedup_by_length"].items()
            writer.writerow(
                {
                    **entry,
                    "run": run.name,
                    "speedup_low": low,
                    "speedup_high": high,
                    "speedup_mean_without_loops": calm["speedup_mean"],
                    "speedup_median_without_loops": calm["speedup_median"],
                    "speedup_low_without_loops": calm_low,
                    "speedup_high_without_loops": calm_high,
                    **{f"speedup_mean_to_{n}": part["speedup_mean"] for n, part in by_length},
                    **{f"{part}_ms": ms for part, ms in round_ms.items()},
                }
            )
    return buffer.getvalue()
