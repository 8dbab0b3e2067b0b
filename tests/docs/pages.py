"""The documentation's pages as tests see them: code blocks, commands and links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = "generated"

_FENCE = re.compile(r"^(?P<indent> *)(?P<mark>```+|~~~+)(?P<info>.*)$")
_SKIP = re.compile(r"^% not run: (?P<reason>.+)$")
_LINK = re.compile(r"!?\[(?:[^\]\\]|\\.)*\]\((?P<target>[^)\s]+)(?:\s+\"[^\"]*\")?\)")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    code: str
    not_run: str | None
    """The reason why it is not executed, if the page gives one."""


def pages() -> list[Path]:
    """All pages that are written by hand."""
    found = [path for path in DOCS.rglob("*.md") if not {"_build", GENERATED} & set(path.relative_to(DOCS).parts)]
    return sorted(found)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    found: list[Block] = []
    reason: str | None = None
    lines = page.read_text(encoding="utf-8").splitlines()
    i = 0
    while i < len(lines):
        skip, fence = _SKIP.match(lines[i]), _FENCE.match(lines[i])
        if skip:
            reason = skip["reason"]
        elif fence:
            start, mark = i, fence["mark"]
            i += 1
            while i < len(lines) and not re.match(rf"^ *{mark}\s*$", lines[i]):
                i += 1
            code = "\n".join(line.removeprefix(fence["indent"]) for line in lines[start + 1 : i])
            found.append(Block(page, start + 1, fence["info"].strip(), code, reason))
            reason = None
        elif lines[i].strip():
            reason = None
        i += 1
    return found


def text_without_code(page: Path) -> str:
    """The page without its fenced blocks and inline code."""
    kept, inside = [], ""
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = _FENCE.match(line)
        if inside:
            inside = "" if fence and fence["mark"].startswith(inside) and not fence["info"] else inside
        elif fence:
            inside = fence["mark"]
        else:
            kept.append(re.sub(r"`[^`]*`", "", line))
    return "\n".join(kept)


def links(page: Path) -> list[str]:
    """Targets of the links and images of a page."""
    return [match["target"] for match in _LINK.finditer(text_without_code(page))]


def commands(text: str) -> list[list[str]]:
    """The command lines of a shell block: continuation lines joined, comments left out."""
    found = []
    for line in _joined(text).splitlines():
        parts = shlex.split(line, comments=True)
        if parts:
            found.append(parts)
    return found


def mtsp_lines(page: Path) -> list[list[str]]:
    """Every `mtsp` line in the code of a page; ones with `...` or `[optional]` parts are not command lines."""
    found = []
    text = page.read_text(encoding="utf-8")
    indented = [line.split("  ", 1)[0] for line in map(_after_indent, _joined(text).splitlines()) if line]
    fenced = [line for block in blocks(page) for line in _joined(block.code).splitlines()]
    for line in map(str.strip, [*indented, *fenced]):
        if line.startswith("mtsp ") and "..." not in line and " [" not in line:
            found.append(shlex.split(line, comments=True))
    return found


def _joined(text: str) -> str:
    """Continuation lines joined."""
    return re.sub(r"\\\n\s*", " ", text)


def _after_indent(line: str) -> str:
    """The rest of a line that is indented as code, else nothing."""
    return line[4:].strip() if line.startswith("    ") else ""
