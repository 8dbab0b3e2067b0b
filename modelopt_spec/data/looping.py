"""Text that repeats itself: loops are easy to draft, so they flatter acceptance."""

from __future__ import annotations

__all__ = ["LOOP_COUNT", "LOOP_WORDS", "looping"]

LOOP_WORDS = 6
LOOP_COUNT = 4


def looping(text: str, words: int = LOOP_WORDS, count: int = LOOP_COUNT) -> bool:
    """Whether some phrase of ``words`` consecutive words (split at white space) occurs ``count`` times or more."""
    tokens = text.split()
    # count overlapping occurrences need at least this many words
    if len(tokens) < words + count - 1:
        return False
    windows = len(tokens) - words + 1
    phrases = list(zip(*(tokens[i : i + windows] for i in range(words)), strict=True))
    if windows - len(set(phrases)) < count - 1:
        return False
    seen: dict[tuple[str, ...], int] = {}
    for phrase in phrases:
        seen[phrase] = number = seen.get(phrase, 0) + 1
        if number >= count:
            return True
    return False
