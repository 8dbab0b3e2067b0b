"""Target features from a vLLM server that runs the target, handed over by the ``hs-connectors`` package.

The server is started with vLLM's ``extract_hidden_states`` method (:func:`launch_arguments` gives its arguments): it
answers a prompt of token ids with one token and leaves the hidden states of the prompt where the connector says. This
process holds only what a drafter needs of its target: embedding, final norm and output projection.

vLLM's layer ids are ours plus one, and the last one, number L, is what the final norm is applied to.

Legend: B batch, S sequence, T taps, D hidden, L target layers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import torch
from torch import Tensor

from modelopt_spec.conventions import aux_layer_id
from modelopt_spec.errors import DataError, UnsupportedError
from modelopt_spec.records import TargetFeatures

__all__ = ["RemoteFeatures", "file_transfer", "launch_arguments"]

_REFUSED = frozenset({400, 401, 403, 404, 413, 422})


def file_transfer(directory: str = "/tmp/hidden_states", fp8: bool = False) -> Any:
    """The connector's reader for a directory that server and trainer share.

    Raises:
        UnsupportedError: ``hs-connectors`` is not installed.
    """
    from pathlib import Path

    try:
        import hs_connectors
    except ImportError:
        raise UnsupportedError(
            "remote features need the package hs-connectors (pip install hs-connectors): it carries the hidden states "
            "from vLLM to this process"
        ) from None
    kind = hs_connectors.FP8Transfer if fp8 else hs_connectors.FileTransfer
    return kind(Path(directory))


def launch_arguments(
    target: str, layer_ids: Sequence[int], num_layers: int, directory: str = "/tmp/hidden_states", fp8: bool = False
) -> list[str]:
    """Command line of a server whose features fit taps ``layer_ids`` of a target with ``num_layers`` layers."""
    aux = [*(aux_layer_id(i) for i in layer_ids), num_layers]
    speculative = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": aux}},
    }
    transfer: dict[str, Any] = {
        "kv_connector": "FP8HiddenStatesConnector" if fp8 else "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }
    if fp8:
        transfer["kv_connector_module_path"] = "hs_connectors.fp8_hidden_states_connector"
    return [
        "vllm",
        "serve",
        target,
        "--speculative-config",
        json.dumps(speculative),
        "--kv-transfer-config",
        json.dumps(transfer),
    ]


class RemoteFeatures:
    """Asks a server for the features of each batch, one request a conversation.

    Args:
        base_url: address of the server up to and including /v1.
        model: name that the server knows the target by.
        layer_ids: taps; the server must have been started for them.
        final_norm: the target's final norm, [..., D] -> [..., D]; it makes the last hidden state from the last layer.
        transfer: ``get_generated(params)`` and ``delete(handle)`` of an hs-connectors transfer.
        dtype: of the features that are given back.
        concurrency: requests in flight.
        timeout: seconds for one request.
        retries: further tries of a request, with pauses of ``backoff`` seconds that double.
        backoff: see ``retries``.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        layer_ids: Sequence[int],
        final_norm: Callable[[Tensor], Tensor],
        transfer: Any,
        *,
        dtype: torch.dtype = torch.bfloat16,
        concurrency: int = 16,
        timeout: float = 120.0,
        retries: int = 3,
        backoff: float = 1.0,
    ) -> None:
        self.url = f"{base_url.rstrip('/')}/completions"
        self.model = model
        self.layer_ids = tuple(layer_ids)
        self.final_norm = final_norm
        self.transfer = transfer
        self.dtype = dtype
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="mtsp-remote")
        self._local = threading.local()

    @torch.no_grad()
    def features(
        self, input_ids: Tensor, lengths: Sequence[int], rows: Sequence[int], position_ids: Tensor | None
    ) -> TargetFeatures:
        """Features of right-padded [B, S] ids; padding is zeros.

        Args:
            input_ids: [B, S] token ids.
            lengths: tokens of each row without its padding.
            rows: index of each row in the data set, for messages.
            position_ids: [B, S] where packed rows restart them: each conversation is asked for by itself, so none sees
                another.

        Raises:
            DataError: the server stays away, refuses a row, or was started for other taps.
        """
        parts: list[tuple[int, int, int]] = []
        for b, length in enumerate(lengths):
            starts = [0] if position_ids is None else torch.nonzero(position_ids[b, :length] == 0).flatten().tolist()
            parts += [(b, start, end) for start, end in zip(starts, [*starts[1:], length], strict=True)]
        ids = input_ids.cpu()
        wanted = [self._pool.submit(self._ask, ids[b, start:end].tolist(), rows[b]) for b, start, end in parts]
        found = [future.result() for future in wanted]
        width = found[0].shape[-1]
        device = input_ids.device
        taps = torch.zeros((*input_ids.shape, width * len(self.layer_ids)), dtype=self.dtype, device=device)
        last = torch.zeros((*input_ids.shape, width), dtype=self.dtype, device=device)
        for (b, start, end), states in zip(parts, found, strict=True):
            states = states.to(device=device, dtype=self.dtype)
            taps[b, start:end] = states[:, :-1].flatten(1)
            last[b, start:end] = self.final_norm(states[:, -1]).to(self.dtype)
        return TargetFeatures(taps=taps, last_hidden=last)

    def _ask(self, ids: list[int], row: int) -> Tensor:
        """[S, T + 1, D] of one conversation."""
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff * 2 ** (attempt - 1))
            try:
                response = self._session().post(self.url, json=self._body(ids), timeout=self.timeout)
                answer = response.json() if response.ok else {}
            except (requests.RequestException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"[:200]
                continue
            if response.status_code in _REFUSED:
                raise DataError(f"row {row}: {self.url} answered {response.status_code}: {response.text[:200]}")
            if not response.ok:
                problem = f"status {response.status_code}"
                continue
            states = self._take(answer, ids, row)
            if states is not None:
                return states
            problem = "the hidden states of the answer are not where the connector says"
        raise DataError(f"row {row}: {self.url} gave no features after {self.retries + 1} tries ({problem})")

    def _body(self, ids: list[int]) -> dict[str, Any]:
        return {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "return_token_ids": True}

    def _take(self, answer: dict[str, Any], ids: list[int], row: int) -> Tensor | None:
        """Read and remove what the connector wrote, and check that it is what was asked for."""
        params = answer.get("kv_transfer_params") or {}
        handle = params.get("hidden_states_path") or params.get("handle")
        if handle is None:
            raise DataError(
                f"{self.url} returns no hidden states: start vLLM with the arguments of "
                "modelopt_spec.targets.remote.launch_arguments"
            )
        try:
            sample = self.transfer.get_generated(params)
            if sample is not None:
                self.transfer.delete(handle)
        except (OSError, TimeoutError):
            return None
        if sample is None:
            return None
        states: Tensor = sample["hidden_states"]
        if sample["token_ids"].tolist() != ids:
            raise DataError(f"row {row}: the server's hidden states belong to other tokens than were sent")
        shape = (len(ids), len(self.layer_ids) + 1)
        if states.ndim != 3 or states.shape[:2] != shape:
            raise DataError(
                f"row {row}: the server gives hidden states of shape {tuple(states.shape)}, taps "
                f"{list(self.layer_ids)} and the last layer of {len(ids)} tokens are {shape}"
                ": start it with the arguments of modelopt_spec.targets.remote.launch_arguments"
            )
        return states

    def _session(self) -> requests.Session:
        session = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
        return session
