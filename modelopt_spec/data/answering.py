"""Two ways to let a target answer: an OpenAI-compatible server with many requests in flight, or this process."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import requests
import torch
from transformers import PreTrainedTokenizerBase

from modelopt_spec.data.chat import ChatRenderer
from modelopt_spec.data.config import SamplingConfig, ServerConfig
from modelopt_spec.errors import DataError

__all__ = ["Answer", "AnswerError", "Dialogue", "LocalModel", "Server", "answer_seed"]

_FATAL = {401: "the API key was refused", 403: "the API key was refused", 404: "no such model or address"}


class AnswerError(ValueError):
    """One prompt that the target cannot answer (too long, refused); the run goes on without it."""


@dataclass(frozen=True)
class Answer:
    """One turn that the target wrote."""

    content: str
    reasoning: str = ""
    finish_reason: str = "stop"
    tokens: int | None = None


@dataclass(frozen=True)
class Dialogue:
    """A conversation that is being written: the user messages that wait and what has been said."""

    id: str
    waiting: tuple[dict[str, Any], ...]
    """Messages still to come; the target speaks after each user message or tool result among them."""
    messages: tuple[dict[str, Any], ...] = ()
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    finish_reason: str = "stop"
    tokens: int = 0
    error: str = ""

    @property
    def done(self) -> bool:
        """Whether nothing is left to be said."""
        return bool(self.error) or not self.waiting

    def next_prompt(self) -> Dialogue:
        """Take messages over up to where the target speaks next."""
        count = 1 + next(
            (i for i, message in enumerate(self.waiting) if message.get("answer_next")), len(self.waiting) - 1
        )
        said = tuple({k: v for k, v in message.items() if k != "answer_next"} for message in self.waiting[:count])
        return replace(self, messages=self.messages + said, waiting=self.waiting[count:])

    def with_answer(self, answer: Answer) -> Dialogue:
        """The dialogue after the target has spoken; one that ran into the length limit ends there."""
        if not answer.content.strip() and not answer.reasoning.strip():
            return replace(self, error="empty_answer")
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        return replace(
            self,
            messages=(*self.messages, message),
            waiting=() if answer.finish_reason == "length" else self.waiting,
            finish_reason=answer.finish_reason,
            tokens=self.tokens + (answer.tokens or 0),
        )


def answer_seed(dialogue_id: str, turn: int) -> int:
    """The sampling seed of one turn: the same whenever and in whatever order it is asked for."""
    digest = hashlib.blake2b(f"{dialogue_id}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


class Server:
    """Answers through ``POST {base_url}/chat/completions`` with up to ``concurrency`` dialogues in flight."""

    def __init__(self, config: ServerConfig, sampling: SamplingConfig) -> None:
        self.config = config
        self.sampling = sampling
        self.retries = 0
        self._local = threading.local()
        self._stop = threading.Event()

    def describe(self) -> dict[str, Any]:
        """The server's own name for its model, for the record. Raises DataError if it does not answer."""
        try:
            response = self._session().get(f"{self.config.base_url.rstrip('/')}/models", timeout=self.config.timeout)
            models = response.json().get("data", []) if response.ok else []
        except (requests.RequestException, ValueError) as error:
            raise DataError(
                f"server.base_url {self.config.base_url!r} does not answer ({_brief(error)}): start the server first, "
                "the address ends in /v1"
            ) from None
        return {"models": [str(model.get("id")) for model in models if isinstance(model, dict)]}

    def answers(self, dialogues: Iterable[Dialogue]) -> Iterator[Dialogue]:
        """Finish dialogues, in the order in which they end.

        Raises:
            DataError: the server refuses every request, or stays away for longer than all retries.
        """
        source = iter(dialogues)
        with ThreadPoolExecutor(self.config.concurrency, thread_name_prefix="mtsp-answer") as pool:
            running: set[Future[Dialogue]] = {
                pool.submit(self._finish, item) for item in islice(source, self.config.concurrency)
            }
            try:
                while running:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        result = future.result()
                        running.update(pool.submit(self._finish, item) for item in islice(source, 1))
                        yield result
            finally:
                self._stop.set()
                for future in running:
                    future.cancel()

    def _finish(self, dialogue: Dialogue) -> Dialogue:
        while not dialogue.done:
            dialogue = dialogue.next_prompt()
            try:
                dialogue = dialogue.with_answer(self._ask(dialogue))
            except AnswerError as error:
                return replace(dialogue, error=str(error))
        return dialogue

    def _ask(self, dialogue: Dialogue) -> Answer:
        body = {
            "model": self.config.model,
            "messages": list(dialogue.messages),
            "seed": answer_seed(dialogue.id, len(dialogue.messages)),
            **self.sampling.request(),
            **self.config.extra_body,
        }
        if dialogue.template_kwargs:
            body["chat_template_kwargs"] = dialogue.template_kwargs
        if dialogue.tools:
            body["tools"] = dialogue.tools
        url = f"{self.config.base_url.rstrip('/')}/chat/completions"
        problem = ""
        for attempt in range(self.config.retries + 1):
            if self._stop.is_set():
                raise AnswerError("stopped")
            wanted = 0.0
            try:
                response = self._session().post(url, json=body, timeout=self.config.timeout)
            except requests.RequestException as error:
                problem = _brief(error)
            else:
                if response.ok:
                    try:
                        return _parse(response.json())
                    except (ValueError, KeyError, IndexError, TypeError) as error:
                        problem = f"not a chat completion ({_brief(error)})"
                elif response.status_code in _FATAL:
                    raise DataError(
                        f"{url} answered {response.status_code}: {_FATAL[response.status_code]} (model "
                        f"{self.config.model!r}, key from ${self.config.api_key_env}): {response.text[:200]}"
                    )
                elif response.status_code < 500 and response.status_code not in (408, 409, 425, 429):
                    raise AnswerError(f"http_{response.status_code}: {response.text[:200]}")
                else:
                    problem = f"status {response.status_code}: {response.text[:100]}"
                    wanted = _retry_after(response)
            if attempt < self.config.retries:
                self.retries += 1
                jitter = 0.5 + body["seed"] / 2**32
                self._stop.wait(max(wanted, min(self.config.max_backoff, self.config.backoff * 2**attempt) * jitter))
        raise DataError(
            f"{url} failed {self.config.retries + 1} times, last with {problem}: look at the server, run again"
        )

    def _session(self) -> requests.Session:
        session = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            key = os.environ.get(self.config.api_key_env, "")
            if key:
                session.headers["Authorization"] = f"Bearer {key}"
        return session


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:160]


def _retry_after(response: requests.Response) -> float:
    try:
        return min(float(response.headers.get("Retry-After", 0)), 600.0)
    except ValueError:
        return 0.0


def _parse(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    message = choice["message"]
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    tokens = (body.get("usage") or {}).get("completion_tokens")
    return Answer(message.get("content") or "", reasoning, choice.get("finish_reason") or "stop", tokens)


class LocalModel:
    """Answers in this process with ``model.generate``, a batch of dialogues at a time."""

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingConfig,
        batch_size: int = 8,
        renderer: ChatRenderer | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.batch_size = batch_size
        self.renderer = renderer or ChatRenderer(tokenizer)
        ends = model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or ())
        own = tokenizer.eos_token_id
        self.stop_ids = sorted({int(i) for i in (*ends, *([] if own is None else [own]))})

    def describe(self) -> dict[str, Any]:
        """For the record."""
        return {"model": getattr(self.model.config, "_name_or_path", ""), "dtype": str(self.model.dtype)}

    def answers(self, dialogues: Iterable[Dialogue]) -> Iterator[Dialogue]:
        """Finish dialogues in batches, turn by turn."""
        source = iter(dialogues)
        while batch := list(islice(source, self.batch_size)):
            while open_ones := [i for i, dialogue in enumerate(batch) if not dialogue.done]:
                asked = [batch[i].next_prompt() for i in open_ones]
                for i, dialogue, answer in zip(open_ones, asked, self._generate(asked), strict=True):
                    batch[i] = dialogue.with_answer(answer)
            yield from batch

    @torch.no_grad()
    def _generate(self, dialogues: Sequence[Dialogue]) -> list[Answer]:
        prompts = [
            self.renderer.prompt(dialogue.messages, dialogue.tools, dialogue.template_kwargs) for dialogue in dialogues
        ]
        size = max(map(len, prompts))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else (self.stop_ids or [0])[0]
        ids = torch.tensor([[pad] * (size - len(prompt)) + prompt for prompt in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (size - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        torch.manual_seed(answer_seed(dialogues[0].id, len(dialogues[0].messages)))
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            pad_token_id=pad,
            eos_token_id=self.stop_ids or None,
            **self.sampling.generate_arguments(),
        )
        return [self._answer(row[size:].tolist()) for row in output]

    def _answer(self, ids: list[int]) -> Answer:
        stops = [place for place, token in enumerate(ids) if token in self.stop_ids]
        kept = ids[: stops[0]] if stops else ids
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        return Answer(str(text), "", "stop" if stops else "length", len(kept) + bool(stops))
