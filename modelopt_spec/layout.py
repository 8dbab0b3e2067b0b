"""How the slots of a block relate to tokens: the two layouts. What follows from them stands in conventions.py."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["BlockLayout"]


class BlockLayout(StrEnum):
    """How the K slots of a block map to the tokens that they predict."""

    ANCHOR_FIRST = "anchor_first"
    BONUS_ANCHOR = "bonus_anchor"
