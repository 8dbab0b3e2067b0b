"""Versions of what a result depends on."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__", "versions"]

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Installed versions of this package, its foundations and Python."""
    found = {"modelopt_spec": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "nvidia-modelopt", "accelerate", "safetensors", "megatron-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
