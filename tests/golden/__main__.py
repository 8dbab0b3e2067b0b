"""`python -m tests.golden FILE.json ... [--dtype float32|float64]`: compare this package with golden cases.

Builds the drafter, layer or scheduler of each case from its own config and weights, prints one line for each compared
tensor and exits 1 if one is off.
"""

from __future__ import annotations

import argparse
import sys

from tests.golden.runner import check_file


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="golden case files (.json; the .safetensors stands beside it)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default=None, help="only this precision")
    arguments = parser.parse_args()
    failed = 0
    for file in arguments.files:
        rows = check_file(file, arguments.dtype)
        for row in rows:
            print(f"{'ok  ' if row.ok else 'OFF '} {row.difference:10.3e}  <= {row.tolerance:7.0e}  {row.name}")
        failed += sum(not row.ok for row in rows)
        print(f"{file}: {sum(row.ok for row in rows)} of {len(rows)} tensors equal")
        failed += not rows
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
