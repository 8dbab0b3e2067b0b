"""Ask a server with an OpenAI-compatible API (vLLM, SGLang, TensorRT-LLM, llama.cpp) and say how fast it answered.

python examples/serving/ask.py http://localhost:8000/v1 "What is speculative decoding?"
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from typing import Any


def ask(base_url: str, prompt: str, *, model: str = "", max_tokens: int = 256) -> dict[str, Any]:
    """One greedy chat completion, with ``seconds`` added; the server's first model if none is named."""
    if not model:
        with urllib.request.urlopen(f"{base_url}/models") as reply:
            model = json.load(reply)["data"][0]["id"]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request) as reply:
        answer = json.load(reply)
    return {**answer, "seconds": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base_url")
    parser.add_argument("prompt")
    parser.add_argument("--model", default="")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    answer = ask(options.base_url.rstrip("/"), options.prompt, model=options.model, max_tokens=options.max_tokens)
    tokens = answer["usage"]["completion_tokens"]
    print(answer["choices"][0]["message"]["content"])
    print(f"{tokens} tokens in {answer['seconds']:.2f} s, {tokens / answer['seconds']:.1f} tokens/s")
    timings = answer.get("timings") or {}
    if timings.get("draft_n"):
        print(f"llama.cpp: {timings['draft_n_accepted']} of {timings['draft_n']} draft tokens accepted")


if __name__ == "__main__":
    main()
