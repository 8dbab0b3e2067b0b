"""Run targets in vLLM on a CPU, with or without a draft, and record every block that a draft proposes.

Executed by :mod:`vllm_runner` inside vLLM's own environment: ``python vllm_worker.py REQUESTS.json REPLIES.jsonl``.
Each request is a ``VllmRequest`` of that module and starts an engine of its own in this process; its reply is appended
as one line as soon as it is there, so that an engine that kills the process loses no earlier reply.
"""

import gc
import json
import os
import sys
import time

os.environ.update(
    {
        "TRITON_INTERPRET": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
)


def register_interpreted_cpu_driver():
    """Give Triton an active driver: vLLM's V2 runner launches its kernels on a CPU only through the interpreter."""
    from triton.backends import Backend, backends
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class InterpretedCpuDriver(DriverBase):
        def __init__(self):
            super().__init__()

        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget("cpu", 0, 0)

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_benchmarker(self):
            raise NotImplementedError("interpreted kernels are not autotuned")

    backends["cpu"] = Backend(compiler=None, driver=InterpretedCpuDriver)


def use_every_layers_key_norm():
    """Normalise the context keys of each draft layer with that layer's weight.

    vLLM stacks the weights to [L, head_dim] for one grouped kernel. The CPU build of 0.32 has no such kernel: its plain
    RMS norm reads the first row for every layer, so a draft of several layers silently sees wrong context keys.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize_context_k(model, all_k):
        normed = torch.empty_like(all_k)
        for layer, weight in enumerate(model._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight, model._rms_norm_eps)
        return normed

    DFlashQwen3Model._normalize_context_k = normalize_context_k


class BlockRecorder:
    """Wraps the DFlash family's speculator and keeps what each call proposed for the only request."""

    def __init__(self):
        self.blocks = []
        self._hidden = None

    def install(self):
        import torch
        from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

        run_model, propose = DFlashSpeculator._run_model, DFlashSpeculator.propose
        recorder = self

        def recording_run_model(speculator, *args, **kwargs):
            recorder._hidden = run_model(speculator, *args, **kwargs)
            return recorder._hidden

        def recording_propose(speculator, *args, **kwargs):
            drafts = propose(speculator, *args, **kwargs)
            if not kwargs.get("dummy_run") and not kwargs.get("is_profile"):
                with torch.inference_mode():
                    recorder._record(speculator, drafts)
            return drafts

        DFlashSpeculator._run_model = recording_run_model
        DFlashSpeculator.propose = recording_propose

    def _record(self, speculator, drafts):
        import torch

        drafted = drafts[0].clone()
        anchor = speculator.input_buffers.input_ids[:1].clone()
        block = {
            "position": int(speculator.input_buffers.positions[0]),
            "anchor": int(anchor),
            "drafted": drafted.tolist(),
            "confidence_logits": None,
        }
        head = getattr(speculator.model.model, "confidence_head", None)
        if head is not None:
            hidden = self._hidden[speculator.sample_indices[: drafted.numel()]]
            previous = torch.cat([anchor.to(drafted.dtype), drafted[:-1]])
            block["confidence_logits"] = head(hidden, speculator.model.markov_embed(previous)).tolist()
        self.blocks.append(block)


def main(requests_path, replies_path):
    with open(requests_path, encoding="utf-8") as file:
        requests = json.load(file)
    register_interpreted_cpu_driver()
    recorder = BlockRecorder()

    import torch
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    recorder.install()
    use_every_layers_key_norm()
    for request in requests:
        torch.set_num_threads(request["threads"])
        # DSpark needs the V2 runner; without a draft, the default runner on a CPU needs no interpreted kernels.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0" if request["draft"] is None else "1"
        generations = answer(request, recorder)
        reply = {"vllm": vllm.__version__, "torch": torch.__version__, "generations": generations}
        with open(replies_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(reply) + "\n")
        gc.collect()
        cleanup_dist_env_and_memory()


def answer(request, recorder):
    """Start an engine, answer the prompts of one request, and stop it."""
    import vllm

    options = {}
    if request["draft"] is not None:
        options["speculative_config"] = {
            "model": request["draft"],
            "method": request["method"],
            "num_speculative_tokens": request["num_draft_tokens"],
        }
    llm = vllm.LLM(
        model=request["target"],
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **options,
    )
    generations = []
    for prompt in request["prompts"]:
        recorder.blocks = []
        before = spec_counters(llm)
        started = time.perf_counter()
        output = llm.generate(
            [{"prompt_token_ids": prompt}],
            vllm.SamplingParams(
                temperature=0.0,
                max_tokens=request["max_tokens"],
                ignore_eos=request["ignore_eos"],
                detokenize=False,
            ),
            use_tqdm=False,
        )[0].outputs[0]
        seconds = time.perf_counter() - started
        after = spec_counters(llm)
        generations.append(
            {
                "tokens": list(output.token_ids),
                "finish_reason": output.finish_reason,
                "seconds": seconds,
                "verified_rounds": after["num_drafts"] - before["num_drafts"],
                "accepted": after["num_accepted_tokens"] - before["num_accepted_tokens"],
                "blocks": recorder.blocks,
            }
        )
    llm.llm_engine.engine_core.shutdown()
    return generations


def spec_counters(llm):
    """Totals of verified drafts and accepted draft tokens that vLLM itself counted since the process started."""
    totals = {"num_drafts": 0, "num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_").removesuffix("_total")
        if name in totals and metric.name.startswith("vllm:spec_decode_"):
            totals[name] += int(metric.value)
    return totals


if __name__ == "__main__":
    main(*sys.argv[1:])
