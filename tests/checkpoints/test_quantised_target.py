"""A quantised target: its modules are called, its weights never read."""

import copy

import modelopt.torch.quantization as mtq
import pytest
import torch
from torch import nn

from modelopt_spec.conversion import convert
from modelopt_spec.decoding.generate import generate
from modelopt_spec.targets.base import open_target
from tests.checkpoints.drafts import randomise
from tests.moe.blocks import batch, loss_of
from tests.tiny import tiny


class PackedLinear(nn.Module):
    """A projection as a packed quantizer leaves it: its ``weight`` is bytes in a column, useless without the module."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        scale = whole.weight.detach().abs().amax(1, keepdim=True) / 127
        codes = (whole.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes.view(torch.uint8).reshape(-1, 1), requires_grad=False)
        self.register_buffer("scale", scale)
        self.in_features, self.out_features, self.bias = whole.in_features, whole.out_features, None

    def forward(self, x):
        codes = self.weight.view(torch.int8).view(self.out_features, self.in_features)
        return nn.functional.linear(x, (codes.float() * self.scale).to(x.dtype))


def packed_target():
    model = tiny("llama")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, PackedLinear(module))
    return model


def fake_quantised_target():
    model = tiny("llama")
    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    config["quant_cfg"].append({"quantizer_name": "*lm_head*", "cfg": {"num_bits": (4, 3), "axis": None}})
    ids = torch.randint(3, 90, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mtq.quantize(model, config, forward_loop=lambda m: m(ids))
    return model


TARGETS = {"packed": packed_target, "modelopt": fake_quantised_target}


@pytest.mark.parametrize("kind", TARGETS)
def test_features_and_logits_are_the_quantised_models_own(kind):
    model = TARGETS[kind]()
    ids = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        answer = model(ids, output_hidden_states=True)
    target = open_target(model)
    assert target.output_weight() is None
    features = target.features(ids, [1, 3])
    assert torch.allclose(features.taps[..., :32], answer.hidden_states[2], atol=1e-5)
    assert torch.allclose(target.logits(features.last_hidden), answer.logits, atol=1e-5)
    whole = open_target(tiny("llama"))
    assert not torch.allclose(whole.features(ids, [1, 3]).taps, features.taps, atol=1e-3)


@pytest.mark.parametrize("kind", TARGETS)
def test_generation_is_lossless(kind):
    model = TARGETS[kind]()
    convert(model, ("dspark", {"mask_token_id": 96, "block_size": 4, "head": {"rank": 6}}), quiet=True)
    randomise(model.drafter)
    ids = torch.randint(3, 90, (1, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        plain = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    drafted = generate(model, ids, max_new_tokens=12)
    assert drafted.sequences[0].tolist() == plain[0].tolist()


@pytest.mark.parametrize("kind", TARGETS)
def test_training_reads_the_targets_distribution_from_its_modules(kind):
    """The loss is that of a whole target whose output projection is the matrix that the module stands for."""
    model = TARGETS[kind]()
    convert(model, ("dspark", {"mask_token_id": 96, "block_size": 4, "head": {"rank": 6}}), quiet=True)
    randomise(model.drafter)
    _, features, blocks = batch(model.drafter)
    loss = loss_of(model.drafter, features, blocks)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.drafter.named_parameters() if p.grad is not None}
    assert all(torch.isfinite(gradient).all() and gradient.abs().max() > 0 for gradient in gradients.values())
    assert not any(p.grad is not None for name, p in model.named_parameters() if not name.startswith("drafter."))
    model.drafter.zero_grad()
    with torch.no_grad():
        matrix = model.lm_head(torch.eye(32)).T.contiguous()
    whole = nn.Linear(32, 97, bias=False)
    whole.weight = nn.Parameter(matrix, requires_grad=False)
    model.lm_head = whole
    exact = loss_of(model.drafter, features, blocks)
    if kind == "packed":
        assert torch.allclose(loss, exact, atol=1e-5)
    else:
        assert not torch.allclose(loss, exact, atol=1e-6), "inputs are rounded too, which a matrix cannot show"
