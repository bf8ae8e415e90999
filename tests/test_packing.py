"""Packed weights: the same text from the same weights, and a model that is left as it was."""

import pytest
import torch

import specdec
from specdec import SpecdecError, Target, packing

PROMPT = [5, 9, 2, 14, 3, 8]

needs_packing = pytest.mark.skipif(packing.lacking() is not None, reason=str(packing.lacking()))


@pytest.fixture
def packed(tiny_target_folder):
    return Target.load(str(tiny_target_folder), dtype="bfloat16", pack=True)


@pytest.fixture
def stock(tiny_target_folder):
    return Target.load(str(tiny_target_folder), dtype="bfloat16")


@needs_packing
def test_every_linear_layer_is_packed_and_gives_the_stock_logits(packed, stock):
    layers = [layer for layer in packed.model.modules() if type(layer) is torch.nn.Linear]
    assert len(packed.packed) == len(layers) > 1
    tokens = torch.tensor([PROMPT])
    got = packed.forward(tokens, packed.new_cache(1), [0]).logits
    want = stock.forward(tokens, stock.new_cache(1), [0]).logits
    # One rounding of bfloat16 is 0.8 %: both sum in float32, in another order.
    torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)


@needs_packing
def test_passes_use_the_packed_weights_and_only_they(packed):
    model = packed.model
    with torch.no_grad():
        before = packed.forward(torch.tensor([PROMPT]), packed.new_cache(1), [0]).logits
        model.get_output_embeddings().weight.mul_(2)
        after = packed.forward(torch.tensor([PROMPT]), packed.new_cache(1), [0]).logits
        outside = model(torch.tensor([PROMPT])).logits
    assert torch.equal(before, after)  # a copy, as documented
    assert not torch.allclose(outside, after, rtol=0.2)
    assert not any("forward" in layer.__dict__ for layer in model.modules())


@needs_packing
def test_a_failed_pass_leaves_the_model_as_it_was(packed):
    with pytest.raises(IndexError):
        packed.forward(torch.tensor([[10**6]]), packed.new_cache(1), [0])
    assert not any("forward" in layer.__dict__ for layer in packed.model.modules())


@needs_packing
@pytest.mark.parametrize("policy", ["fixed", "svip"])
def test_drafting_on_packed_weights_writes_what_packed_decoding_writes(packed, policy):
    plain = specdec.load(target=packed, drafter=None).generate(PROMPT, max_new_tokens=24)
    drafted = specdec.load(target=packed, drafter="ngram", policy=policy).generate(
        PROMPT, max_new_tokens=24
    )
    assert drafted.token_ids == plain.token_ids


@needs_packing
def test_a_model_that_is_there_already_can_be_packed(stock):
    assert len(Target(stock.model, pack=True).packed) > 1
    assert not any("forward" in layer.__dict__ for layer in stock.model.modules())


@needs_packing
def test_layers_that_somebody_replaced_are_left_alone(stock):
    head = stock.model.get_output_embeddings()
    head.forward = lambda hidden: torch.nn.functional.linear(hidden, head.weight) * 3
    weights = packing.PackedWeights(stock.model)
    with weights:
        assert head(torch.ones(1, head.in_features, dtype=torch.bfloat16)).shape[-1] > 1
        assert "forward" in head.__dict__
    assert "forward" in head.__dict__


def test_other_dtypes_are_refused(tiny_target_folder, monkeypatch):
    monkeypatch.setattr(packing, "lacking", lambda: None)
    with pytest.raises(SpecdecError, match=r"target\.pack: .*bfloat16, and the model has float32"):
        specdec.load(
            target={"model": str(tiny_target_folder), "dtype": "float32", "pack": True},
            drafter="ngram",
        )


def test_a_machine_that_cannot_is_named(stock, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(SpecdecError, match="without oneDNN"):
        packing.PackedWeights(stock.model)
