"""Start of `mtsp`: Ctrl-C ends it with one line and status 130, from the first moment on.

Only the standard library is imported before that holds.
"""

from __future__ import annotations

import sys

from modelopt_spec import interrupts

__all__ = ["main"]


def main() -> None:
    """Entry point of the command."""
    interrupts.install()
    try:
        from modelopt_spec import cli

        cli.main()
    except SystemExit:
        raise
    except BaseException:
        if not interrupts.pressed():
            raise
        interrupts.tell()
        sys.exit(interrupts.STATUS)


if __name__ == "__main__":
    main()
