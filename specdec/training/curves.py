"""The curves of a run as a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError
from specdec.training.files import read_jsonl, write_atomically


def draw_curves(run: Path) -> Path:
    """Write `curves.png` from `metrics.jsonl`: loss, agreement and acceptance by step ahead.

    Raises:
        SpecdecError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SpecdecError(
            "the curves need matplotlib: pip install 'specdec-torch[train]'"
        ) from None
    rows = list(read_jsonl(run / "metrics.jsonl"))
    training = [row for row in rows if not row.get("held_out")]
    held_out = [row for row in rows if row.get("held_out")]
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    loss, agreement, acceptance = figure.subplots(1, 3)
    loss.set_title("loss")
    for axes, name, title in (
        (agreement, "agreement", "top-1 agreement with the target, by step ahead"),
        (acceptance, "acceptance", "expected acceptance Σ min(p, q), by step ahead"),
    ):
        axes.set_title(title, fontsize=9)
        _by_step(axes, training, name, alpha=0.3)
        _by_step(axes, held_out, name, marker="o", markersize=3)
        axes.set_ylim(0, 1)
    for rows, label, style in ((training, "training", {"alpha": 0.5}), (held_out, "held out", {})):
        loss.plot([r["step"] for r in rows], [r["loss"] for r in rows], label=label, **style)
    loss.set_yscale("log")
    loss.legend()
    if held_out:
        agreement.legend(fontsize=7, title="held out (dots), training (pale)", title_fontsize=7)
    for axes in (loss, agreement, acceptance):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=110)
    path = run / "curves.png"
    write_atomically(path, picture.getvalue())
    return path


def _by_step(axes: Any, rows: list[dict[str, Any]], name: str, **style: Any) -> None:
    """One line for each step ahead, in the same colours for training and held-out text."""
    ahead = max((len(row[name]) for row in rows), default=0)
    for index in range(ahead):
        points = [(row["step"], row[name][index]) for row in rows if index < len(row[name])]
        label = f"{index + 1}" if "marker" in style else None
        axes.plot(*zip(*points, strict=True), color=f"C{index}", label=label, **style)
