"""Execute the notebooks of examples/notebooks and store their outputs.

python tools/notebooks.py [NAME ...]          # all, or those whose name contains NAME
python tools/notebooks.py --into DIR ...      # execute copies there and leave the stored ones alone
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
LIMIT_S = 900
QUIET = {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def execute(notebook: Path, directory: Path) -> nbformat.NotebookNode:
    """Run a notebook in a directory that holds ``tiny.py``; the notebook with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    node = nbformat.read(notebook, as_version=4)
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    NotebookClient(
        node, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(directory)}}
    ).execute()
    return clean(node, directory)


def clean(node: nbformat.NotebookNode, directory: Path) -> nbformat.NotebookNode:
    """What changes from run to run without meaning anything: timings of cells, paths of this machine, warnings."""
    node.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in node.cells:
        cell.metadata = {}
        kept = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                continue
            if output.output_type == "stream":
                output.text = re.sub(re.escape(str(directory)) + "/?", "", output.text)
            kept.append(output)
        if cell.cell_type == "code":
            cell.outputs = kept
    return node


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    place = options.into or Path(os.environ.get("TMPDIR", "/tmp")) / "mtsp-notebooks"
    place.mkdir(parents=True, exist_ok=True)
    shutil.copy(NOTEBOOKS / "tiny.py", place)
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        if options.names and not any(name in notebook.name for name in options.names):
            continue
        started = time.time()
        node = execute(notebook, place)
        nbformat.write(node, (place if options.into else NOTEBOOKS) / notebook.name)
        print(f"{notebook.name}: {time.time() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
