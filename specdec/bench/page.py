"""The report as one page of HTML: complete in itself, without a script, light and dark."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from specdec.bench import charts
from specdec.bench.charts import Bar, Series
from specdec.bench.config import PLAIN, drafter_labels
from specdec.bench.report import (
    Run,
    about,
    headline,
    legend_of_marks,
    length_head,
    length_rows,
    mark,
    not_measured,
    setting_name,
    table_head,
    table_rows,
    times,
)
from specdec.policies.svip import SVIPPolicy

STYLE = Path(__file__).with_name("report.css")
POSITION_BIN = 16
"""Tokens of an answer that are one point in the chart of draft lengths."""
LEAST_ROUNDS = 5
"""Fewer rounds than this make no point in a chart."""
ENTROPY_BINS = 12
PARTS = ("draft", "verify", "other")
PART_NAMES = ("drafting", "the target's pass", "everything else")

Setting = tuple[float, int]


def page(runs: Sequence[Run]) -> str:
    """All of `runs`, one after the other."""
    title = f"specdec bench: {', '.join(run.name for run in runs)}"
    body = "".join(_run(run) for run in runs)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE.read_text(encoding='utf-8')}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def bars_picture(run: Run) -> str:
    """The bars of every setting as one SVG file that carries its own style."""
    style = STYLE.read_text(encoding="utf-8")
    drawn = [_bars(run, setting) for setting in run.settings]
    height = sum(_height(svg) + 24 for svg in drawn)
    parts, y = [], 14.0
    for setting, svg in zip(run.settings, drawn, strict=True):
        parts.append(f'<text x="0" y="{y:.0f}" font-weight="bold">{setting_name(setting)}</text>')
        inner = f'<svg y="{y + 8:.0f}" width="{charts.WIDTH}" height="{_height(svg):.0f}"'
        parts.append(svg.replace("<svg", inner, 1))
        y += _height(svg) + 24
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 0 {charts.WIDTH + 16} {height:.0f}">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def _height(svg: str) -> float:
    return float(svg.split('viewBox="', 1)[1].split('"', 1)[0].split()[3])


def _run(run: Run) -> str:
    parts = [
        f"<h1>{escape(run.name)}</h1><p class='soft'>{escape(about(run))}</p>",
        *(f"<p><strong>{escape(_sentence(headline(run, s)))}</strong></p>" for s in run.settings),
        *(f"<p>{escape(sentence)}</p>" for sentence in not_measured(run)),
        "<h2>Speed-up</h2>",
        f"<p>Tokens a second, prefill included, over those of {escape(run.config['baseline'])} on "
        "the same question: the mean of each category, the mean of the categories, the median of "
        "all questions with its bootstrap 95 % interval. Loops: answers with less than 70 % "
        f"distinct 8-grams, which flatter every drafter. {legend_of_marks()}</p>",
        _table(run, without_loops=False),
        "<h3>Without answers that loop</h3>",
        _table(run, without_loops=True),
        _cards(_speedup_cards(run)),
        "<h2>Where the time goes</h2>",
        "<p>Drafted: tokens of a round, levels on a tree. c: a drafting step, and check: the pass "
        "over a draft, in target passes over one token. Predicted: τ / (drafted · c + 1); measured: "
        "decoding alone; both over our own loop without a drafter. Memory: beyond what was loaded. "
        "Equal: answers that are the baseline's token by token.</p>",
        *(_costs(run, setting) for setting in run.settings),
        _cards(_round_cards(run)),
        "<h2>How drafts end</h2>",
        _cards(_draft_cards(run)),
        "<h2>Entropy and acceptance</h2>",
        "<p>SVIP stops on the entropy H of the drafter's distribution, by the bound 1 − √(s·H) on "
        "the chance of acceptance (dashed). Points are the share of accepted tokens among "
        "those that the target judged, with 95 % intervals. Entropies are kept where a policy looks "
        "at them, on chains.</p>",
        _cards(_entropy_cards(run)),
        _lengths(run),
        _example(run),
    ]
    return "".join(parts)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


# --- tables ---------------------------------------------------------------------------------------


def _table(run: Run, without_loops: bool) -> str:
    """One table, the settings one under the other: the best of each column is bold."""
    head = table_head(run)
    body = []
    for setting in run.settings:
        rows = table_rows(run, setting, without_loops)
        body.append(
            f"<tr><th colspan='{len(head)}'>{escape(_sentence(setting_name(setting))[:-1])}</th></tr>"
        )
        best = _best(rows, [not run.row(m, setting)["peer"] and not _oracle(run, m, setting)
                            for m in run.methods(setting)])  # fmt: skip
        for number, row in enumerate(rows):
            cells = "".join(
                f"<td class='best'>{cell}</td>" if (number, place) in best else f"<td>{cell}</td>"
                for place, cell in enumerate(row[1:], 1)
            )
            body.append(f"<tr><th>{_marked(row[0])}</th>{cells}</tr>")
    return _html_table(head, body)


def _best(rows: list[list[str]], own: list[bool]) -> set[tuple[int, int]]:
    """The places of the largest speed-up of our own rows in each column."""
    best = set()
    for place in range(1, len(rows[0]) - 4 if rows else 1):
        values = [
            (float(row[place]), number)
            for number, row in enumerate(rows)
            if own[number] and row[place] != "–"
        ]
        if values:
            best.add((max(values)[1], place))
    return best


def _oracle(run: Run, method: str, setting: Setting) -> bool:
    policy = run.row(method, setting)["policy"]
    return policy is not None and policy["name"] == "oracle"


def _marked(name: str) -> str:
    for sign in ("≠", "≈"):
        if name.endswith(f" {sign}"):
            return f"{escape(name[:-1])}<span class='mark'>{sign}</span>"
    return escape(name)


def _html_table(head: Sequence[str], body: Sequence[str]) -> str:
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f"<div class='scroll' tabindex='0'><table><thead><tr>{heads}</tr></thead>"
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _html_row(name: str, cells: Sequence[str]) -> str:
    return f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _costs(run: Run, setting: Setting) -> str:
    """Rounds, costs, and the speed-up over plain decoding that they predict."""
    head = ["", "τ", "α", "drafted", "c", "check", "draft ms", "target ms", "other ms", "predicted",
            "measured", "memory MB", "equal"]  # fmt: skip
    body, slow = [], []
    for method in run.methods(setting):
        entry = run.entry(method, setting)
        assert entry is not None
        ms = entry["round_ms"] or {}
        cells = [
            times(entry["tau"]), times(entry["alpha"]), times(entry["mean_draft_length"]),
            times(entry["c"]), times(entry["check"]), *(_ms(ms.get(part)) for part in PARTS),
            times(entry["predicted_speedup"]), times(entry["speedup_over_plain"]),
            "–" if entry["memory_mb"] is None else f"{entry['memory_mb']:.0f}",
            "–" if entry["equal_share"] is None else f"{entry['equal_share']:.0%}",
        ]  # fmt: skip
        name = _marked(method + mark(entry))
        body.append(_html_row(name, cells))
        if entry["diagnosis"]:
            slow.append(f"<li><strong>{escape(method)}</strong>: {escape(entry['diagnosis'])}</li>")
    title = escape(_sentence(setting_name(setting))[:-1])
    return f"<h3>{title}</h3>{_html_table(head, body)}<ul>{''.join(slow)}</ul>"


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _lengths(run: Run) -> str:
    """The speed-up of the first so many tokens, where it was asked for."""
    if not run.config["lengths"]:
        return ""
    parts = ["<h2>Speed-up by length</h2>"]
    for setting in run.settings:
        for without_loops in (False, True):
            which = ", without answers that loop" if without_loops else ""
            parts.append(f"<h3>{escape(_sentence(setting_name(setting))[:-1] + which)}</h3>")
            rows = length_rows(run, setting, without_loops)
            body = [_html_row(escape(name), cells) for name, *cells in rows]
            parts.append(_html_table(length_head(run), body))
    return "".join(parts)


# --- charts ---------------------------------------------------------------------------------------


def _cards(cards: Sequence[tuple[str, str]]) -> str:
    if not cards:
        return "<p class='soft'>No row gave such data.</p>"
    figures = (f"<figure><h3>{escape(title)}</h3>{content}</figure>" for title, content in cards)
    return f"<div class='cards'>{''.join(figures)}</div>"


def _speedup_cards(run: Run) -> list[tuple[str, str]]:
    return [
        (
            f"Speed-up, {setting_name(setting)}",
            _bars(run, setting)
            + "<figcaption>mean over categories, with the 95 % interval of the median</figcaption>",
        )
        for setting in run.settings
    ]


def _bars(run: Run, setting: Setting) -> str:
    items = []
    for method in run.methods(setting):
        entry = run.entry(method, setting)
        if entry is None or entry["speedup_mean"] is None:
            continue
        low, high = entry["speedup_ci95"]
        row = run.row(method, setting)
        colour = 7 if row["peer"] or method == PLAIN else 1 if _oracle(run, method, setting) else 0
        label = method + mark(entry)
        items.append(Bar(label, entry["speedup_mean"], low, high, colour))
    return charts.bars(f"Speed-up, {setting_name(setting)}", items, reference=1.0)


def _round_cards(run: Run) -> list[tuple[str, str]]:
    cards = []
    for setting in run.settings:
        items = []
        for method in run.methods(setting):
            entry = run.entry(method, setting)
            if entry is None or not entry["round_ms"]:
                continue
            parts = [
                (name, entry["round_ms"][part])
                for part, name in zip(PARTS, PART_NAMES, strict=True)
            ]
            whole = sum(value for _, value in parts)
            text = f"{whole:.0f} ms / {entry['tau']:.2f} tokens"
            # The text stands behind the bar: leave it room.
            items.append(Bar(method, whole * 1.5, parts=parts, text=text))
        legend = charts.legend([(name, place) for place, name in enumerate(PART_NAMES)])
        title = f"Time of a round, {setting_name(setting)}"
        cards.append((title, charts.bars(title, items) + legend))
    return cards


def _draft_cards(run: Run) -> list[tuple[str, str]]:
    cards = []
    for setting, drafter, methods in _panels(run):
        lines = {method: _lines(run, method, setting) for method in methods}
        colours = {method: place for place, method in enumerate(methods)}
        where = f"{drafter}, {setting_name(setting)}"
        legend = charts.legend([(_policy_label(m, drafter), c) for m, c in colours.items()])
        for title, points, x, y, options in DRAFT_CHARTS:
            series = [
                Series(method, found, colours[method])
                for method in methods
                if (found := points(lines[method]))
            ]
            if series:
                chart = charts.lines(f"{title}, {where}", series, x, y, **options)
                cards.append((f"{title}: {where}", chart + legend))
    return cards


def _panels(run: Run) -> Iterator[tuple[Setting, str, list[str]]]:
    """For each setting and drafter the methods that use it."""
    for setting in run.settings:
        by_drafter: dict[str, list[str]] = defaultdict(list)
        for method in run.methods(setting):
            row = run.row(method, setting)
            if row["drafter"] and method != PLAIN:
                by_drafter[json.dumps(row["drafter"], sort_keys=True)].append(method)
        labels = drafter_labels([json.loads(drafter) for drafter in by_drafter])
        for label, methods in zip(labels, by_drafter.values(), strict=True):
            yield setting, label, methods


def _policy_label(method: str, drafter: str) -> str:
    return method.removeprefix(f"{drafter} + ")


def _lines(run: Run, method: str, setting: Setting) -> list[dict[str, Any]]:
    return [line for line in run.results if line["method"] == method and Run.is_at(line, setting)]


def _rounds(lines: list[dict[str, Any]]) -> Iterator[list[list[int]]]:
    for line in lines:
        for turn in line["turns"]:
            yield turn["rounds"]


def _length_by_position(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    lengths = defaultdict(list)
    for rounds in _rounds(lines):
        position = 1
        for length, _, committed, _ in rounds:
            lengths[position // POSITION_BIN].append(length)
            position += committed
    return [
        ((place + 0.5) * POSITION_BIN, float(np.mean(found)))
        for place, found in sorted(lengths.items())
        if len(found) >= LEAST_ROUNDS
    ]


def _accepted_by_length(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    accepted = defaultdict(list)
    for rounds in _rounds(lines):
        for length, taken, _, _ in rounds:
            accepted[length].append(taken)
    return [
        (length, float(np.mean(found)))
        for length, found in sorted(accepted.items())
        if length and len(found) >= LEAST_ROUNDS
    ]


def _alpha_by_position(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """The chance of acceptance where everything before it was accepted."""
    tried: dict[int, list[int]] = defaultdict(list)
    for rounds in _rounds(lines):
        for length, accepted, committed, _ in rounds:
            judged = accepted if committed == accepted else min(length, accepted + 1)
            for place in range(judged):
                tried[place + 1].append(int(place < accepted))
    return [
        (place, float(np.mean(found)))
        for place, found in sorted(tried.items())
        if len(found) >= LEAST_ROUNDS
    ]


def _length_shares(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    lengths = [length for rounds in _rounds(lines) for length, *_ in rounds]
    if not lengths:
        return []
    return [(n, lengths.count(n) / len(lengths)) for n in range(max(lengths) + 1)]


DRAFT_CHARTS: list[tuple[str, Callable[..., Any], str, str, dict[str, Any]]] = [
    ("Draft length along the answer", _length_by_position, "token of the answer", "drafted", {}),
    ("Accepted against drafted", _accepted_by_length, "drafted", "accepted", {"diagonal": True}),
    ("Acceptance by position", _alpha_by_position, "position in the draft", "α", {"y_most": 1.0}),
    ("Draft lengths", _length_shares, "drafted in a round", "share of rounds", {}),
]


def _entropy_cards(run: Run) -> list[tuple[str, str]]:
    cards = []
    for setting, drafter, methods in _panels(run):
        svip = _svip_of(run, methods, setting)
        by_method = [
            [pair for line in _lines(run, method, setting) for pair in line["entropy"]]
            for method in methods
        ]
        pairs = [pair for some in by_method for pair in some]
        if len(pairs) < LEAST_ROUNDS:
            continue
        points, spread = _binned(np.asarray(pairs))
        most = max(x for x, _ in points) * 1.05 + 0.01
        grid = np.linspace(0, min(most, 1 / svip.scale), 40)
        bound = [(float(h), float(1 - np.sqrt(svip.scale * h))) for h in grid]
        stop = svip.threshold**2 / svip.scale
        title = f"{drafter}, {setting_name(setting)}"
        chart = charts.lines(
            f"Entropy against acceptance, {title}",
            [
                Series("accepted", points, 0, spread, marks=True),
                Series("the bound of SVIP", bound, 1, dashed=True),
            ],
            "entropy of the drafter (nats)",
            "share accepted",
            y_most=1.0,
            at=(stop, f"threshold {svip.threshold:g}"),
        )
        rows = sum(map(bool, by_method))
        caption = f"<figcaption>{len(pairs)} judged tokens of {rows} rows</figcaption>"
        cards.append((title, chart + caption))
    return cards


def _svip_of(run: Run, methods: list[str], setting: Setting) -> SVIPPolicy.Params:
    """The parameters of the first SVIP row among `methods`, or the defaults if there is none."""
    policies = [run.row(method, setting)["policy"] for method in methods]
    for policy in policies:
        if policy["name"] == "svip":
            return SVIPPolicy(**{k: v for k, v in policy.items() if k != "name"}).params
    return SVIPPolicy().params


def _binned(pairs: np.ndarray) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Mean acceptance in bins of equally many tokens, and its interval (Wilson, 95 %)."""
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    points, spread = [], []
    for some in np.array_split(ordered, min(ENTROPY_BINS, max(1, len(ordered) // LEAST_ROUNDS))):
        entropy, share = some.mean(axis=0)
        points.append((float(entropy), float(share)))
        z2, n = 1.96**2, len(some)
        middle = (share + z2 / (2 * n)) / (1 + z2 / n)
        half = np.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        spread.append((float(middle - half), float(middle + half)))
    return points, spread


# --- an answer to look at -------------------------------------------------------------------------


def _example(run: Run) -> str:
    examples = run.examples
    if not examples["rows"]:
        return ""
    names = list(examples["rows"])
    cards = [_answer(name, examples["rows"][name]) for name in names]
    rest = (
        f"<details><summary>{len(cards) - 2} more</summary><div class='cards'>"
        f"{''.join(cards[2:])}</div></details>"
    )
    return (
        "<h2>One answer</h2><p>Drafted tokens that were <span class='answer'><span class='yes'>"
        "accepted</span></span> and <span class='answer'><span class='no'>rejected</span></span>; "
        "the others are the target's own. On a tree the most probable rejected path is shown, and "
        "the number of other nodes behind it.</p>"
        f"<p class='soft'>{escape(_cut(examples['question']))}</p>"
        f"<div class='cards'>{''.join(cards[:2])}</div>{rest if len(cards) > 2 else ''}"
    )


def _answer(name: str, rounds: list[dict[str, Any]]) -> str:
    pieces = []
    for each in rounds:
        pieces += [f"<span class='yes'>{escape(token)}</span>" for token in each["accepted"]]
        pieces += [f"<span class='no'>{escape(token)}</span>" for token in each["rejected"]]
        if each["others"]:
            pieces.append(f"<span class='more'>+{each['others']}</span>")
        pieces += [escape(token) for token in each["bonus"]]
    return f"<div class='card'><h3>{escape(name)}</h3><div class='answer'>{''.join(pieces)}</div></div>"


def _cut(text: str, most: int = 600) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
