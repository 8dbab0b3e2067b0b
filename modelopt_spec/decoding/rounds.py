"""Records of verification rounds: what was drafted, accepted and committed, one JSON line a round.

A file starts with a header object ``{"kind": "mtsp.rounds", "version": 1, "gamma": m, ...}``, where m is the number of
draft tokens of a full round; the scheduling room reads such files for calibration and simulation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelopt_spec.errors import DataError
from modelopt_spec.text_files import read_text

__all__ = ["ROUNDS_KIND", "ROUNDS_VERSION", "RoundRecord", "read_rounds", "rounds_header", "write_rounds"]

ROUNDS_KIND = "mtsp.rounds"
ROUNDS_VERSION = 1


@dataclass(frozen=True)
class RoundRecord:
    """One verification round of one row."""

    prompt: int
    """Index of the prompt: the row of the batch, or the prompt's number in an evaluation."""
    round: int
    """Number of the round within its output, from 0."""
    position: int
    """Position of the anchor."""
    drafted: tuple[int, ...]
    """Draft tokens made."""
    verified: int
    """Draft tokens sent to the target: fewer than drafted by a scheduler or near the length limit."""
    accepted: int
    """Draft tokens that stood; the bonus token is not counted."""
    committed: int
    """Tokens that the round added to the output: accepted, plus the bonus token, less what an end of text cut off."""
    temperature: float
    context_tokens: int
    """Tokens before the anchor: what a round attends to."""
    confidence_logits: tuple[float, ...] | None = None
    """One for each drafted token; None without a confidence head."""
    accept_prob: tuple[float, ...] | None = None
    """For each verified token ``sum_v min(p_v, q_v)``: the chance that a token drawn from the draft's q stands against
    the target's p, both at the round's temperature (greedy rounds: at temperature 1). None when not asked for."""
    draft_prob: tuple[float, ...] | None = None
    """The draft's own probability of each verified token under the same q. None when it was not asked for."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        values = dict(vars(self))
        for name in ("drafted", "confidence_logits", "accept_prob", "draft_prob"):
            values[name] = None if values[name] is None else list(values[name])
        return values

    @staticmethod
    def from_json(row: Mapping[str, Any]) -> RoundRecord:
        """The inverse of :meth:`to_json`; unknown keys are ignored, ``verified`` defaults to all drafted tokens."""

        def numbers(name: str) -> tuple[float, ...] | None:
            return None if row.get(name) is None else tuple(float(value) for value in row[name])

        drafted = tuple(int(token) for token in row["drafted"])
        return RoundRecord(
            prompt=int(row["prompt"]),
            round=int(row["round"]),
            position=int(row["position"]),
            drafted=drafted,
            verified=int(row.get("verified", len(drafted))),
            accepted=int(row["accepted"]),
            committed=int(row["committed"]),
            temperature=float(row["temperature"]),
            context_tokens=int(row["context_tokens"]),
            confidence_logits=numbers("confidence_logits"),
            accept_prob=numbers("accept_prob"),
            draft_prob=numbers("draft_prob"),
        )


def rounds_header(gamma: int, **identity: Any) -> dict[str, Any]:
    """The first line of a round file; ``identity`` says which model, drafter, dtype, temperature and prompts."""
    return {"kind": ROUNDS_KIND, "version": ROUNDS_VERSION, "gamma": gamma, **identity}


def write_rounds(path: str | Path, header: Mapping[str, Any], rounds: Iterable[RoundRecord]) -> Path:
    """Write a round file; a partly written one is never left under the name."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(dict(header)) + "\n")
        for record in rounds:
            stream.write(json.dumps(record.to_json()) + "\n")
    partial.replace(path)
    return path


def read_rounds(path: str | Path) -> tuple[dict[str, Any], list[RoundRecord]]:
    """Header and rounds of a file.

    Raises:
        DataError: no such file, another kind or version, or a line that is no round; names the line.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"rounds file {path} does not exist")
    header: dict[str, Any] | None = None
    rounds = []
    for number, line in enumerate(read_text(path, "a round file (JSON lines)").splitlines(), start=1):
        try:
            row = json.loads(line)
            if header is None:
                header = row
                if row.get("kind") != ROUNDS_KIND or row.get("version") != ROUNDS_VERSION:
                    raise DataError(
                        f"{path}:1 is of kind {row.get('kind')!r}, version {row.get('version')!r}; "
                        f"expected {ROUNDS_KIND!r}, version {ROUNDS_VERSION}"
                    )
            else:
                rounds.append(RoundRecord.from_json(row))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{number} is not a round record ({type(error).__name__}: {error})") from None
    if header is None:
        raise DataError(f"{path} is empty: a round file starts with a header object")
    return header, rounds
