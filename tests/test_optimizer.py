"""The training optimizer: two optimizers that must behave as one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from specdec.errors import SpecdecError
from specdec.training.optimizer import make_optimizer


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        optimizer.step()
        optimizer.zero_grad()


def test_every_parameter_is_trained_and_no_other_is_made() -> None:
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = make_optimizer(model.parameters(), "muon", 0.01, 0.0)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in held} == {id(p) for p in model.parameters()}
    train(model, optimizer, 1)
    moved = [name for name, value in model.state_dict().items() if not value.equal(before[name])]
    assert moved == list(before)


def test_the_update_of_a_matrix_is_orthogonal() -> None:
    matrix = nn.Parameter(torch.zeros(4, 6))
    left, right = torch.linalg.qr(torch.randn(4, 4))[0], torch.linalg.qr(torch.randn(6, 4))[0]
    matrix.grad = left @ torch.diag(torch.tensor([1.0, 0.5, 0.2, 0.1])) @ right.T
    make_optimizer([matrix], "muon", 0.01, 0.0).step()
    sizes = torch.linalg.svdvals(matrix.detach())
    # Five Newton-Schulz steps bring the singular values (1 to 10 apart) near each other.
    assert sizes.max() / sizes.min() < 2


def test_a_loaded_optimizer_goes_on_as_the_saved_one() -> None:
    straight, stopped = small_model(), small_model()
    train(straight, make_optimizer(straight.parameters(), "muon", 0.01, 0.1), 6)
    first = make_optimizer(stopped.parameters(), "muon", 0.01, 0.1)
    train(stopped, first, 3)
    second = make_optimizer(stopped.parameters(), "muon", 0.01, 0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(stopped, second, 3, first=3)
    for name, value in straight.state_dict().items():
        assert value.equal(stopped.state_dict()[name]), name


def test_a_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(SpecdecError, match=r"muon comes with torch 2\.9.*or use adamw"):
        make_optimizer(small_model().parameters(), "muon", 0.01, 0.0)
    make_optimizer(small_model().parameters(), "adamw", 0.01, 0.0)
