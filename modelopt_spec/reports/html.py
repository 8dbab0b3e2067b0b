"""Pieces of an HTML page: figures inside the file, tables, notes, and numbers in words."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["count", "duration", "figure", "markdown", "note", "table", "text"]


def figure(alternative: str, draw: Callable[[Any, Path], Any], content: Mapping[str, Any]) -> str:
    """A figure as an image inside the page."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "figure.svg"
        draw(content, path)
        data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(alternative)}" src="data:image/svg+xml;base64,{data}">'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; columns that hold numbers stand right."""
    body = [[text(cell) for cell in row] for row in rows]
    numeric = [all(_is_number(row[i]) for row in body) and bool(body) for i in range(len(head))]
    mark = [' class="n"' if right else "" for right in numeric]
    lines = ["<tr>" + "".join(f"<th{mark[i]}>{escape(cell)}</th>" for i, cell in enumerate(head)) + "</tr>"]
    lines += [
        "<tr>" + "".join(f"<td{mark[i]}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in body
    ]
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>"


def markdown(source: str) -> str:
    """One of the markdown tables of the other reports."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in source.strip().splitlines()]
    return table(head, rows)


def note(message: str, *, bad: bool = False) -> str:
    """A line that stands out."""
    return f'<div class="warn{" bad" if bad else ""}">{escape(message)}</div>'


def text(value: Any) -> str:
    """What a cell shows; nothing for None."""
    return "" if value is None else str(value)


def _is_number(shown: str) -> bool:
    cleaned = shown.replace(",", "").replace("%", "").replace(" to ", "").strip()
    if cleaned in ("", "-"):
        return True
    try:
        float(cleaned.replace(" ", ""))
    except ValueError:
        return False
    return True


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def count(number: int) -> str:
    """A large number, shortened: ``1.23M``."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
