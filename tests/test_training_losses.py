"""The fused distillation loss against autograd on the plain formulas."""

from __future__ import annotations

import pytest
import torch

from specdec.training import losses
from specdec.training.losses import Distance, OutputRows, distill, feature_loss


@pytest.mark.parametrize("by", ["kl", "tv"])
@pytest.mark.parametrize("reduced", [False, True])
def test_distill(by: Distance, reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "CHUNK", 7)  # several chunks, the last one not full
    torch.manual_seed(0)
    steps, count, hidden, vocabulary = 3, 30, 16, 50
    layer = torch.nn.Linear(hidden, vocabulary).requires_grad_(False)
    ids = torch.randperm(vocabulary)[:20].sort().values if reduced else None
    rows = slice(None) if ids is None else ids
    teacher = 2 * torch.randn(count, hidden)
    students = (2 * torch.randn(steps, count, hidden)).requires_grad_()
    weights = torch.tensor([1.0, 0.5, 0.25])

    logits = layer(teacher)
    output = OutputRows.of(layer, ids, torch.float32)
    done = distill(students, teacher, logits.logsumexp(-1), logits.argmax(-1), output, by)
    (done.loss * weights).sum().backward()
    slope, students.grad = students.grad, None

    p = logits.softmax(-1)[:, rows]
    student_logits = layer(students)[..., rows]
    q = student_logits.softmax(-1)
    accepted = torch.minimum(p, q).sum(-1)
    plain = (1 - accepted).sum(-1) if by == "tv" else -(p * q.log()).sum((-1, -2))
    (plain * weights).sum().backward()
    torch.testing.assert_close(done.loss, plain, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(slope, students.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(done.acceptance, accepted)
    chosen = student_logits.argmax(-1)
    chosen = chosen if ids is None else ids[chosen]
    assert torch.equal(done.agreed, chosen == logits.argmax(-1))


def test_feature_loss_is_a_sum_over_positions_of_means() -> None:
    predicted, features = torch.zeros(4, 8), torch.full((4, 8), 3.0)
    assert feature_loss(predicted, features).item() == pytest.approx(4 * 2.5)
