"""The hub where there is no network: its client retries for half a minute and prints each try, so it is asked once."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

__all__ = ["offline_if_unreachable", "reachable"]

SECONDS = 5.0
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


def offline_if_unreachable(name: str) -> None:
    """Put the hub's client into offline mode where it cannot reach its server; what is cached is still found.

    Args:
        name: what is about to be read; nothing is asked for a directory.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(name).expanduser().exists() or reachable(constants.ENDPOINT):
        return
    constants.HF_HUB_OFFLINE = True


@functools.cache
def reachable(address: str) -> bool:
    """Whether a server accepts connections; behind a proxy that is taken for granted."""
    if any(os.environ.get(name) for name in _PROXIES):
        return True
    parts = urlsplit(address)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=SECONDS).close()
    except OSError:
        return False
    return True
