"""Jobs of test_megatron_train.py: the same training on Megatron's side and on Hugging Face's, on every rank."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron_tiny import VOCAB, gpt_model, hf_config, hf_model, initialize

import modelopt_spec.conversion as mtsp
from modelopt_spec.config import LossConfig
from modelopt_spec.targets.megatron_vocab import load_whole_state_dict, whole_tensor
from modelopt_spec.training import megatron as training
from modelopt_spec.training.balance import ExpertBalance
from modelopt_spec.training.blocks import row_generators
from modelopt_spec.training.module import DraftTrainingModule, lambda_at

ROWS, LENGTH, ANCHORS, SEED, TOTAL = 2, 24, 5, 11, 6
ADAM = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-4}
EXPERTS: dict[str, Any] = {
    "num_layers": 2,
    "residual": "mhc",
    "mlp": "moe",
    "hyper_connection": {"streams": 2},
    "moe": {"num_experts": 4, "experts_per_token": 2},
}
MODES: dict[str, tuple[tuple[str, dict[str, Any]], LossConfig]] = {
    "vanilla": (
        ("dspark", {"head": {"rank": 6}, "block_size": 5}),
        LossConfig(ce=0.1, tv=0.9, confidence=1.0),
    ),
    "rnn": (
        ("dspark", {"head": {"type": "rnn", "rank": 6}, "block_size": 4}),
        LossConfig(ce=0.5, tv=0.5, confidence=1.0, kl=0.3),
    ),
    "gru": (
        ("domino", {"head": {"rank": 6}, "block_size": 5}),
        LossConfig(ce=1.0, base_ce_start=1.0, base_ce_decay_ratio=1.0),
    ),
    "moe": (
        ("dspark", {"head": {"rank": 6}, "block_size": 4, "backbone": EXPERTS}),
        LossConfig(ce=0.1, tv=0.9, confidence=1.0),
    ),
    "none": (("dflash", {"block_size": 5}), LossConfig(ce=1.0, position_weights="dpace")),
}


def batches_of(rank: int, step: int, count: int, length: int = LENGTH) -> list[dict[str, Any]]:
    """Micro-batches of one data-parallel rank; supervision has gaps and rows end in padding."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    result = []
    for index in range(count):
        ids = torch.randint(0, VOCAB - 1, (ROWS, length), generator=generator)
        mask = torch.rand(ROWS, length, generator=generator) < 0.85
        mask[0, length - 4 :] = False
        rows = [((rank * 100 + step) * count + index) * ROWS + i for i in range(ROWS)]
        result.append({"input_ids": ids, "loss_mask": mask, "rows": rows, "lengths": [length - 4, length]})
    return result


def both_sides(family: str, mode: str, layout: dict[str, Any]) -> tuple[Any, Any, LossConfig]:
    """A converted Megatron model and a converted Hugging Face one with the same weights, target and drafter."""
    tp, pp, ep = (layout.get(name, 1) for name in ("tp", "pp", "ep"))
    initialize(tp, pp, ep)
    config = hf_config(family, **layout.get("config", {}))
    reference = hf_model(config)
    model = gpt_model(reference, config, sp=layout.get("sp", False), **layout.get("options", {}))
    (name, settings), loss = MODES[mode]
    settings = {
        **settings,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": layout.get("taps", (-1, 1, 3, 6)),
        "backbone": settings.get("backbone", {"num_layers": 2}),
    }
    mtsp.convert(reference, (name, settings), quiet=True)
    mtsp.convert(model, (name, settings), quiet=True)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in reference.drafter.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + float(parameter.dim() == 1))
    if getattr(model, "drafter", None) is not None:
        load_whole_state_dict(model.drafter, reference.drafter.state_dict())
    return model, reference, loss


def reference_step(
    module: DraftTrainingModule, step: int, ranks: int, microbatches: int, balance: ExpertBalance | None = None
) -> tuple[float, dict[str, float]]:
    """Gradients of the mean over all ranks' micro-batches, in ``.grad``; the loss and its terms."""
    module.train()
    places = []
    for rank in range(ranks):
        for batch in batches_of(rank, step, microbatches):
            places.append((batch, module.blocks(batch, row_generators(SEED, step, batch["rows"]))))
    base_ce = lambda_at(step, TOTAL, module.loss_config)
    with torch.no_grad():
        results = [module(batch, blocks, divisor=1.0, base_ce=base_ce)[3] for batch, blocks in places]
    weight = sum(float(r.terms["ce"].weight) for r in results)
    loss = 0.0
    for batch, blocks in places:
        share = module(batch, blocks, divisor=weight, base_ce=base_ce)[0]
        share.backward()
        if balance is not None:
            balance.observe()
        loss += float(share)
    terms = {name: sum(float(r.terms[name].total) for r in results) / weight for name in results[0].terms}
    return loss, terms


def _adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    decayed, plain = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], **ADAM)


def _megatron_optimizer(wrapped: Any) -> tuple[Any, Any]:
    betas = {"adam_beta1": ADAM["betas"][0], "adam_beta2": ADAM["betas"][1], "adam_eps": ADAM["eps"]}
    return training.make_optimizer(
        wrapped, lr=ADAM["lr"], weight_decay=ADAM["weight_decay"], total_steps=TOTAL, decay_style="constant", **betas
    )


def train(family: str, mode: str, steps: int = 3, microbatches: int = 2, **layout: Any) -> dict[str, float]:
    """Largest differences over the steps: loss, terms, gradients of the first step, weights after the last."""
    model, reference, loss = both_sides(family, mode, layout)
    step = training.MegatronForwardStep(model, loss, ANCHORS, seed=SEED, total_steps=TOTAL)
    wrapped = training.wrap_for_training(model, step, DistributedDataParallelConfig(**layout.get("ddp", {})))
    optimizer, scheduler = _megatron_optimizer(wrapped)
    module = DraftTrainingModule(reference, loss, ANCHORS)
    adam = _adam(module.drafter)
    balance = ExpertBalance.of(module.drafter, lambda values: values)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    worst = {"loss": 0.0, "terms": 0.0, "norm": 0.0, "later_norm": 0.0, "gradients": 0.0, "weights": 0.0}
    hosts = getattr(model, "drafter", None) is not None
    for number in range(steps):
        adam.zero_grad()
        expected, terms = reference_step(module, number, ranks, microbatches, balance)
        if number == 0:
            model.train()
            wrapped.zero_grad_buffer()
            training._run(step, wrapped, batches_of(rank, number, microbatches), forward_only=False)
            if hosts:
                worst["gradients"] = _gradient_difference(model.drafter, reference.drafter)
        report = training.train_step(step, wrapped, optimizer, batches_of(rank, number, microbatches), scheduler)
        norm = torch.nn.utils.clip_grad_norm_(module.drafter.parameters(), 1.0)
        adam.step()
        if balance is not None:
            balance.on_optimizer_step(None, None, None)
        assert report.terms.keys() == terms.keys()
        worst["loss"] = max(worst["loss"], abs(report.loss - expected))
        worst["terms"] = max([worst["terms"], *(abs(report.terms[name] - terms[name]) for name in terms)])
        # |p_d - p_t| has a kink, so from the second step on one rounding may turn the sign of one token's gradient.
        kind = "norm" if number == 0 else "later_norm"
        worst[kind] = max(worst[kind], abs(float(norm) - report.grad_norm) / float(norm))
    if hosts:
        ours = {name: whole_tensor(model.drafter, name, p) for name, p in model.drafter.named_parameters()}
        ours |= dict(model.drafter.named_buffers())
        for name, tensor in (*reference.drafter.named_parameters(), *reference.drafter.named_buffers()):
            worst["weights"] = max(worst["weights"], float((ours[name] - tensor).abs().max()))
    worst["evaluation"] = _evaluation_difference(step, wrapped, module, rank)
    return worst


def _evaluation_difference(step: Any, wrapped: Any, module: DraftTrainingModule, rank: int) -> float:
    """Loss of held-out batches, whose anchors the rows decide; every data-parallel rank evaluates the same ones."""
    batches = batches_of(0, 99, 2)
    ours = training.evaluate_step(step, wrapped, batches)
    outcomes = []
    with torch.no_grad():
        for batch in batches:
            blocks = module.blocks(batch, row_generators(SEED, "eval", batch["rows"]))
            base_ce = lambda_at(step.step, TOTAL, module.loss_config)
            outcomes.append(module(batch, blocks, divisor=1.0, base_ce=base_ce))
    weight = sum(float(result.terms["ce"].weight) for _, _, _, result in outcomes)
    return abs(ours.loss - sum(float(total) for total, _, _, _ in outcomes) / weight)


def bf16_step(tp: int, pp: int) -> dict[str, float]:
    """A mixed-precision step as on GPUs: finite, and with every copy of the drafter equal afterwards."""
    initialize(tp, pp)
    config = hf_config("qwen3")
    model = gpt_model(hf_model(config), config, dtype=torch.bfloat16)
    (name, settings), loss = MODES["vanilla"]
    mtsp.convert(model, (name, {**settings, "mask_token_id": VOCAB - 1}), quiet=True)
    step = training.MegatronForwardStep(model, loss, ANCHORS, seed=SEED, total_steps=TOTAL)
    wrapped = training.wrap_for_training(model, step)
    optimizer, scheduler = training.make_optimizer(wrapped, lr=1e-2, total_steps=TOTAL, warmup_steps=1)
    reports = [training.train_step(step, wrapped, optimizer, batches_of(0, 0, 2), scheduler) for _ in range(4)]
    drafter = getattr(model, "drafter", None)
    copies = 0.0
    if drafter is not None:
        assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
        group = drafter.target.tp_group
        for parameter in drafter.parameters():
            if not getattr(parameter, "tensor_model_parallel", False):
                low, high = parameter.detach().clone(), parameter.detach().clone()
                torch.distributed.all_reduce(low, op=torch.distributed.ReduceOp.MIN, group=group)
                torch.distributed.all_reduce(high, op=torch.distributed.ReduceOp.MAX, group=group)
                copies = max(copies, float((high - low).abs().max()))
    return {"first": reports[1].loss, "last": reports[-1].loss, "copies": copies, "norm": reports[-1].grad_norm or 0.0}


def _gradient_difference(ours: Any, theirs: Any) -> float:
    worst = 0.0
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        got = whole_tensor(ours, name, parameter.main_grad)
        want = expected[name].grad
        if want is None:
            want = torch.zeros_like(expected[name])
        worst = max(worst, float((got - want).abs().max() / max(1.0, float(want.abs().max()))))
    return worst
