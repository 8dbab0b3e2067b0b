"""Run vLLM in its own environment as a subprocess; read back what it generated and what its draft proposed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WORKER = Path(__file__).with_name("vllm_worker.py")
ENVIRONMENT_VARIABLE = "MTSP_VLLM"


@dataclass(frozen=True)
class VllmRequest:
    """What one engine start is asked to do."""

    target: str
    prompts: tuple[tuple[int, ...], ...]
    draft: str | None = None
    method: str = "dspark"
    """``dspark`` for anchor-first blocks, ``dflash`` for bonus-anchor blocks."""
    num_draft_tokens: int = 7
    max_tokens: int = 48
    ignore_eos: bool = False
    dtype: str = "float32"
    max_model_len: int = 1024
    threads: int = 1
    """Threads wait for each other by spinning: on a crowded machine one is faster than two."""


@dataclass(frozen=True)
class ProposedBlock:
    """One block as vLLM's speculator proposed it."""

    position: int
    """Position of the anchor, which is the number of context tokens."""
    anchor: int
    drafted: tuple[int, ...]
    confidence_logits: tuple[float, ...] | None


@dataclass(frozen=True)
class VllmGeneration:
    """One greedy answer."""

    tokens: tuple[int, ...]
    finish_reason: str
    seconds: float
    verified_rounds: int
    """Drafts that vLLM verified, by its own count."""
    accepted: int
    """Draft tokens that it accepted, by its own count."""
    blocks: tuple[ProposedBlock, ...]
    """Every proposed block; the last one may stand behind the last token and was never verified."""

    def tau(self) -> float:
        """Tokens committed per round; the first token comes from the prompt's own pass."""
        return (len(self.tokens) - 1) / self.verified_rounds


def vllm_python() -> Path | None:
    """Interpreter of vLLM's environment: ``$MTSP_VLLM``, else ``.venvs/vllm`` of this checkout; None without one."""
    root = Path(os.environ.get(ENVIRONMENT_VARIABLE) or Path(__file__).parents[2] / ".venvs" / "vllm")
    python = root / "bin" / "python"
    installed = any(root.glob("lib/python*/site-packages/vllm/__init__.py"))
    return python if python.is_file() and installed else None


@dataclass(frozen=True)
class VllmReply:
    """What one engine answered to one request."""

    version: str
    generations: tuple[VllmGeneration, ...]


def run_vllm(
    requests: Sequence[VllmRequest], python: Path, folder: Path, *, timeout_s: float = 1500.0
) -> list[VllmReply | RuntimeError]:
    """Run several requests, each with an engine of its own, in one process; ``folder`` gets requests, replies and log.

    An engine that ends the process (or takes longer than ``timeout_s`` for all of them) fails its own request, and the
    rest run in a new process. Returns in the order of the requests a reply, or an error with the log's last lines.
    """
    results: list[VllmReply | RuntimeError] = []
    while len(results) < len(requests):
        attempt = folder / f"from-{len(results)}"
        attempt.mkdir(parents=True)
        replies, failure = _run_once(requests[len(results) :], python, attempt, timeout_s)
        results += replies
        if len(results) < len(requests):
            results.append(RuntimeError(failure))
    return results


def reply_of(result: VllmReply | RuntimeError) -> VllmReply:
    """The reply.

    Raises:
        RuntimeError: that of a request that failed.
    """
    if isinstance(result, RuntimeError):
        raise result
    return result


def _run_once(
    requests: Sequence[VllmRequest], python: Path, folder: Path, timeout_s: float
) -> tuple[list[VllmReply], str]:
    """One process: the replies of the requests that it finished, and how it ended."""
    request_path, reply_path, log_path = (folder / name for name in ("requests.json", "replies.jsonl", "vllm.log"))
    request_path.write_text(json.dumps([asdict(request) for request in requests]), encoding="utf-8")
    reply_path.touch()
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(request.threads for request in requests))}
    environment.pop("PYTHONPATH", None)
    with log_path.open("wb") as log:
        worker = subprocess.Popen(
            [str(python), str(WORKER), str(request_path), str(reply_path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            status: int | str = worker.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            status = f"none after {timeout_s} s"
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    replies = [json.loads(line) for line in reply_path.read_text(encoding="utf-8").splitlines()]
    tail = "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-25:])
    return (
        [VllmReply(reply["vllm"], tuple(_generation(entry) for entry in reply["generations"])) for reply in replies],
        f"vLLM's exit status is {status}; log {log_path}, its last lines:\n{tail}",
    )


def _generation(entry: dict) -> VllmGeneration:
    blocks = tuple(
        ProposedBlock(
            block["position"],
            block["anchor"],
            tuple(block["drafted"]),
            None if block["confidence_logits"] is None else tuple(block["confidence_logits"]),
        )
        for block in entry["blocks"]
    )
    return VllmGeneration(**{**entry, "tokens": tuple(entry["tokens"]), "blocks": blocks})


def accepted_in(blocks: Sequence[ProposedBlock], row: Sequence[int]) -> list[int]:
    """Draft tokens of each block that stand in the final ``row`` of prompt and answer."""
    counts = []
    for block in blocks:
        truth = row[block.position + 1 :]
        wrong = (k for k, (drafted, true) in enumerate(zip(block.drafted, truth)) if drafted != true)
        counts.append(next(wrong, min(len(block.drafted), len(truth))))
    return counts
