"""What became of the rows of a data set: the part of every training report that says what was learned from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FILTERED", "DataReport"]

FILTERED = frozenset(
    {"looping", "duplicate", "held_out_prompt", "excluded_prompt", "over_limit", "too_long", "prompts_only"}
)
"""Reasons that leave out a good row on purpose; every other reason makes it a bad row."""


@dataclass(frozen=True)
class DataReport:
    """Counts over one split. Rows are conversations as they were read; samples are token rows."""

    rows_read: int = 0
    rows_kept: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows left out, by reason."""
    samples: int = 0
    """Token rows: more than kept rows where templates rewrite turns, fewer where rows are packed."""
    tokens: int = 0
    supervised_tokens: int = 0
    truncated: int = 0
    """Samples that the length limit cut; they lost ``lost_tokens``, of which ``lost_supervised`` were supervised."""
    lost_tokens: int = 0
    lost_supervised: int = 0
    straddling_tokens: int = 0
    looping_rows: int = 0
    """Kept rows whose answers loop."""
    longest: int = 0
    fingerprint: str = ""
    """sha256 over ids and masks of all samples in order."""
    rows_by_source: dict[str, int] = field(default_factory=dict)
    """Rows kept of each file."""
    examples: dict[str, str] = field(default_factory=dict)
    """One rejected row for each reason: where it stands and what is wrong."""

    @property
    def bad(self) -> int:
        """Rows that could not be used (left out on purpose not counted)."""
        return sum(count for reason, count in self.skipped.items() if reason not in FILTERED)

    @property
    def bad_share(self) -> float:
        """Share of unusable rows among those read."""
        return self.bad / self.rows_read if self.rows_read else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataReport:
        """Read what :meth:`to_dict` wrote."""
        return cls(**values)

    def summary(self) -> str:
        """One line for logs: ``3,165 of 4,170 rows, 1,234,567 tokens (50% supervised); skipped looping 1,005``."""
        share = self.supervised_tokens / self.tokens if self.tokens else 0.0
        text = (
            f"{self.rows_kept:,} of {self.rows_read:,} rows, {self.samples:,} samples, {self.tokens:,} tokens "
            f"({share:.0%} supervised)"
        )
        if self.skipped:
            text += "; skipped " + ", ".join(f"{k} {n:,}" for k, n in Counter(self.skipped).most_common())
        return text
