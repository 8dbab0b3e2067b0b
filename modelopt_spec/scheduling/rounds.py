"""Recorded verification rounds as arrays: what calibration is fitted on and what the simulation replays.

Legend: N rounds, G slots that a full block drafts (gamma).

The file is JSON lines: one header object ``{"kind": "mtsp.rounds", "version": 1, "gamma": G, ...}``, then one object a
round with ``prompt``, ``round``, ``position`` (of the anchor), ``drafted`` (token ids), ``accepted`` (draft tokens,
bonus not counted), ``committed`` (tokens, bonus included, after end-of-sequence and length cuts),
``confidence_logits`` (one a drafted slot, or null), ``context_tokens`` and optionally ``verified`` (draft tokens that
were sent to the target; all drafted ones where the key is absent).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelopt_spec.errors import DataError

__all__ = ["ROUNDS_KIND", "ROUNDS_VERSION", "RoundTable", "join_rounds", "read_rounds", "rounds_from_records"]

ROUNDS_KIND = "mtsp.rounds"
ROUNDS_VERSION = 1

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class RoundTable:
    """Rounds of one drafter, sorted by prompt and round."""

    gamma: int
    """Slots that a full block drafts."""
    prompt: IntArray
    """[N] index of the prompt."""
    position: IntArray
    """[N] position of the anchor in its conversation."""
    drafted: IntArray
    """[N] draft tokens made, at most gamma."""
    verified: IntArray
    """[N] draft tokens sent to the target, at most ``drafted``."""
    accepted: IntArray
    """[N] draft tokens accepted, bonus not counted."""
    committed: IntArray
    """[N] tokens committed, bonus included, after cuts."""
    context_tokens: IntArray
    """[N] tokens of context that the round attended to."""
    confidence_logits: FloatArray | None
    """[N, G], NaN where the slot or its confidence is missing; None when no round has confidences."""
    header: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt)

    def select(self, keep: Any) -> RoundTable:
        """Rows by boolean mask [N] or index array."""
        logits = None if self.confidence_logits is None else self.confidence_logits[keep]
        return RoundTable(
            self.gamma,
            self.prompt[keep],
            self.position[keep],
            self.drafted[keep],
            self.verified[keep],
            self.accepted[keep],
            self.committed[keep],
            self.context_tokens[keep],
            logits,
            self.header,
        )

    def full_blocks(self) -> RoundTable:
        """Only the rounds whose whole block was drafted and verified: labels of the others are censored."""
        return self.select((self.drafted == self.gamma) & (self.verified == self.gamma))

    def calibration_rounds(self) -> RoundTable:
        """Full blocks with a confidence at every slot; DataError when there is none."""
        if not self.drafted.any():
            raise DataError(f"no token was drafted in {len(self)} rounds: collect rounds with longer answers")
        if self.confidence_logits is None:
            raise DataError(
                "confidence_logits is null in every round: the drafter has no confidence head, so there is nothing to "
                "calibrate. Train with the confidence term, or schedule with a fixed length"
            )
        full = self.full_blocks()
        assert full.confidence_logits is not None
        usable = full.select(~np.isnan(full.confidence_logits).any(axis=1))
        if not len(usable):
            raise DataError(
                f"none of {len(self)} rounds verified a full block of {self.gamma} draft tokens with confidences: "
                "collect rounds without a scheduler and with outputs longer than a block"
            )
        return usable

    def accept_prefix(self) -> NDArray[np.bool_]:
        """[N, G] true where the first k+1 draft tokens were all accepted."""
        return np.arange(self.gamma)[None, :] < self.accepted[:, None]

    def accepted_length(self) -> float:
        """Mean tokens committed a full-block round before cuts, bonus included (tau)."""
        full = self.full_blocks()
        return float(full.accepted.mean() + 1.0) if len(full) else float("nan")


def read_rounds(path: str | Path) -> RoundTable:
    """Read a JSON-lines round file; DataError names the line and field that is wrong."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"rounds file {path} does not exist: write it with `mtsp evaluate --rounds FILE`")
    records: list[dict[str, Any]] = []
    header: dict[str, Any] | None = None
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path}:{number} is not JSON ({error}): the file may be cut off") from error
            if header is None:
                if not isinstance(row, dict) or row.get("kind") != ROUNDS_KIND:
                    raise DataError(
                        f"{path}:{number} is no round header (kind {ROUNDS_KIND!r}): a round file starts with one"
                    )
                header = row
            else:
                records.append(row)
    if header is None:
        raise DataError(f"{path} is empty: a round file starts with a header object")
    return rounds_from_records(header, records, where=str(path))


def rounds_from_records(
    header: Mapping[str, Any], records: Iterable[Mapping[str, Any]], *, where: str = "rounds"
) -> RoundTable:
    """Build the table from the header and the round objects (see the module's docstring)."""
    if header.get("version") != ROUNDS_VERSION:
        raise DataError(f"{where}: version is {header.get('version')!r}, this program reads {ROUNDS_VERSION}")
    gamma = header.get("gamma")
    if not isinstance(gamma, int) or gamma < 1:
        raise DataError(f"{where}: gamma is {gamma!r}, it must be the number of draft tokens of a full block")
    columns: dict[str, list[int]] = {name: [] for name in _COLUMNS}
    logits: list[list[float]] = []
    any_confidence = False
    for number, row in enumerate(records, start=1):
        values, confidence = _parse(row, gamma, f"{where}: round {number}")
        for name, value in values.items():
            columns[name].append(value)
        any_confidence |= confidence is not None
        known = confidence or []
        logits.append(known + [float("nan")] * (gamma - len(known)))
    if not logits:
        raise DataError(f"{where} holds no round")
    arrays = {name: np.asarray(values, dtype=np.int64) for name, values in columns.items()}
    order = np.lexsort((arrays["round"], arrays["prompt"]))
    return RoundTable(
        gamma=gamma,
        confidence_logits=np.asarray(logits, dtype=np.float64)[order] if any_confidence else None,
        header=dict(header),
        **{name: array[order] for name, array in arrays.items() if name != "round"},
    )


def join_rounds(tables: Sequence[RoundTable]) -> RoundTable:
    """Rounds of one drafter on different prompts as one table; prompts are numbered on, the first header stays.

    Raises:
        DataError: nothing to join, or another drafter, gamma or sampling temperature.
    """
    if not tables:
        raise DataError("no rounds to join: give at least one table")
    first = tables[0]
    for table in tables[1:]:
        for name in ("gamma", "drafter_fingerprint", "temperature", "dtype"):
            if table.header.get(name) != first.header.get(name):
                raise DataError(
                    f"rounds with {name} {first.header.get(name)!r} and {table.header.get(name)!r} cannot be joined"
                )
        if (table.confidence_logits is None) != (first.confidence_logits is None):
            raise DataError("some rounds have confidences and others have none: record them with one drafter")
    starts = np.cumsum([0, *(int(table.prompt.max()) + 1 for table in tables[:-1])])
    columns = ("position", "drafted", "verified", "accepted", "committed", "context_tokens")
    logits = [table.confidence_logits for table in tables if table.confidence_logits is not None]
    return RoundTable(
        gamma=first.gamma,
        prompt=np.concatenate([table.prompt + start for table, start in zip(tables, starts)]),
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in columns},
        confidence_logits=np.concatenate(logits) if logits else None,
        header=first.header,
    )


_COLUMNS = ("prompt", "round", "position", "drafted", "verified", "accepted", "committed", "context_tokens")


def _parse(row: Mapping[str, Any], gamma: int, where: str) -> tuple[dict[str, int], list[float] | None]:
    missing = [name for name in ("prompt", "round", "drafted", "accepted") if name not in row]
    if missing:
        raise DataError(f"{where} lacks {missing}: it is no round of this format")
    drafted = len(row["drafted"])
    verified = int(row.get("verified", drafted))
    accepted = int(row["accepted"])
    if drafted > gamma:
        raise DataError(f"{where} drafts {drafted} tokens, but the header's gamma is {gamma}")
    if not 0 <= accepted <= verified <= drafted:
        raise DataError(f"{where}: accepted {accepted}, verified {verified}, drafted {drafted} must ascend from 0")
    confidence = row.get("confidence_logits")
    if confidence is not None:
        if len(confidence) != drafted:
            raise DataError(f"{where} has {len(confidence)} confidence_logits for {drafted} drafted tokens")
        confidence = [float(value) for value in confidence]
        if any(value != value for value in confidence):
            raise DataError(f"{where}: confidence_logits holds NaN; the drafter's confidence head is broken")
    values = {
        "prompt": int(row["prompt"]),
        "round": int(row["round"]),
        "position": int(row.get("position", -1)),
        "drafted": drafted,
        "verified": verified,
        "accepted": accepted,
        "committed": int(row.get("committed", accepted + 1)),
        "context_tokens": int(row.get("context_tokens", 0)),
    }
    return values, confidence
