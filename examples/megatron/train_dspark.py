"""Train a drafter on a Megatron-Core target, save it, and export it for the engines.

    torchrun --nproc-per-node 8 examples/megatron/train_dspark.py dspark/megatron_qwen3_8b
    torchrun --nproc-per-node 2 examples/megatron/train_dspark.py examples/megatron/tiny.yaml megatron.pipeline=2

A recipe without ``model.name_or_path`` trains on a tiny random Qwen3 and random tokens. The recipe's ``megatron``
section says how the ranks are used; ranks that it leaves over are data-parallel.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import AutoConfig, Qwen3Config

import modelopt_spec as mtsp
from modelopt_spec.data import load_datasets
from modelopt_spec.targets.load import load_tokenizer
from modelopt_spec.targets.megatron_export import export_drafter, save_drafter
from modelopt_spec.targets.megatron_model import build_gpt_model, transformer_config
from modelopt_spec.targets.megatron_weights import load_hf_weights
from modelopt_spec.targets.packaged import resolve_target
from modelopt_spec.training.megatron import StepReport
from modelopt_spec.training.megatron_run import run
from modelopt_spec.training.recipe import MegatronSection, Recipe, load_recipe

CPU_OPTIONS = {
    "use_cpu_initialization": True,
    "batch_p2p_comm": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
}


def start(section: MegatronSection, seed: int) -> None:
    """Process group, Megatron's groups and seeds."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=section.tensor,
        pipeline_model_parallel_size=section.pipeline,
        expert_model_parallel_size=section.expert,
        expert_tensor_parallel_size=1 if section.expert > 1 else None,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def tiny_config() -> Qwen3Config:
    """Eight layers, 251 tokens."""
    return Qwen3Config(
        vocab_size=251,
        hidden_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        max_position_embeddings=128,
    )


def build(recipe: Recipe, section: MegatronSection) -> Any:
    """Make this rank's part of the target and load its weights."""
    name = recipe.model.name_or_path
    path = resolve_target(name) if name else ""
    config = AutoConfig.from_pretrained(path) if name else tiny_config()
    on_gpu = torch.cuda.is_available()
    options = transformer_config(
        config,
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        sequence_parallel=section.sequence,
        **({} if on_gpu else CPU_OPTIONS),
    )
    model = build_gpt_model(config, options, vocab_multiple=section.vocab_multiple)
    if name:
        load_hf_weights(model, path, config)
    return model


def random_rows(count: int, length: int, vocab_size: int) -> list[dict[str, Any]]:
    """The same random token rows on every rank."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, vocab_size - 1, (count, length), generator=generator)
    return [{"input_ids": row, "loss_mask": torch.ones(length, dtype=torch.bool)} for row in rows]


def show(report: StepReport) -> None:
    """One line for a step."""
    terms = " ".join(f"{name} {value:.4f}" for name, value in report.terms.items())
    print(f"step {report.step}: loss {report.loss:.4f} ({terms}) tau {report.tau:.3f} grad norm {report.grad_norm:.3f}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name of a built-in recipe, or a YAML file")
    parser.add_argument("overrides", nargs="*", help="key.path=value")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in training.output_dir")
    args = parser.parse_intermixed_args(arguments)
    recipe = load_recipe(args.recipe, args.overrides)
    section = recipe.megatron or MegatronSection()
    settings = recipe.training.arguments()
    start(section, settings.get("seed", 0))

    model = build(recipe, section)
    name = recipe.model.name_or_path
    tokenizer = load_tokenizer(name) if name else None
    mtsp.convert(model, (recipe.mode, recipe.drafter_config), tokenizer=tokenizer)
    rows: Any = (
        load_datasets(recipe.data, tokenizer).train
        if name
        else random_rows(64, recipe.data.max_length, model.hf_config.vocab_size)
    )
    run(model, rows, recipe, resume=args.resume, log=show)

    output = settings.get("output_dir", "runs/megatron")
    save_drafter(model, f"{output}/drafter", overwrite=True)
    if recipe.export.engines:
        out = recipe.export.output_dir or f"{output}/export"
        export_drafter(model, out, engines=recipe.export.engines, overwrite=True)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
