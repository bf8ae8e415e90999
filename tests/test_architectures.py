"""Every causal language model of the installed transformers: refused with a reason, or exact.

A model that neither takes what a slot cache hands it nor is refused would write wrong text in
silence. What this finds belongs in the checks of `specdec/model.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec import SpecdecError, SpeculativeDecoder, Target
from tests.drafters import random_trees
from tests.tiny import plain

LARGEST = 3_000_000
"""Parameters. What cannot be made as small as this is left out."""
WIDTH, HEADS, LAYERS = 32, 4, 2
SIZES: dict[str, Any] = (
    dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), WIDTH)
    | dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS
    )
    | dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), HEADS
    )
    | dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim"), 48)
    | dict.fromkeys(
        ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"), 128
    )
    | dict.fromkeys(("sliding_window", "window_size"), 7)
    | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
    | dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16)
    | dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "query_pre_attn_scalar", "rotary_dim"), 8)
    | dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1)
    | {
        "vocab_size": 96, "head_dim": 8, "qk_rope_head_dim": 4, "num_key_value_heads": 2,
        "num_experts_per_tok": 2, "rotary_pct": 0.5, "encoder_layers": 1,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
        "is_encoder_decoder": False,
    }
)  # fmt: skip
MORE = {"gpt_neo": {"attention_types": [[["global", "local"], 1]]}}
UNSETTABLE = {"falcon": "head_dim"}


def tiny(model_type: str, is_decoder: bool) -> PreTrainedModel | None:
    """A random model of this type; None where these sizes do not make one."""
    try:
        blank = CONFIG_MAPPING[model_type]()
        known = {name: value for name, value in SIZES.items() if hasattr(blank, name)}
        if hasattr(blank, "kv_lora_rank"):
            known["num_key_value_heads"] = HEADS
        if is_decoder and not hasattr(blank, "is_decoder"):
            return None
        known |= {"is_decoder": True} if is_decoder else {}
        known.pop(UNSETTABLE.get(model_type, ""), None)
        config = type(blank)(**known, **MORE.get(model_type, {}))
        with torch.device("meta"):
            blank_model = AutoModelForCausalLM.from_config(config)
        if sum(weight.numel() for weight in blank_model.parameters()) > LARGEST:
            return None
        model = AutoModelForCausalLM.from_config(config).eval()
    except Exception:
        return None
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("is_decoder", [False, True], ids=["default", "is_decoder"])
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_refused_or_exact(model_type, is_decoder):
    model = tiny(model_type, is_decoder)
    if model is None:
        pytest.skip("no tiny model of this type")
    refusal = None
    try:
        target = Target(model)
    except SpecdecError as error:
        refusal = str(error)
    if refusal is not None:
        assert type(model).__name__ in refusal
        return
    prompts = [[5, 9, 14, 5, 9, 23, 40, 11, 60, 61, 62, 7], [7], [9, 9, 8, 31]]
    try:
        right = [plain(model, prompt, 20) for prompt in prompts]
    except Exception as error:
        pytest.skip(f"transformers itself cannot run it: {error}")
    texts = [prompt + new for prompt, new in zip(prompts, right, strict=True)]
    decoder = SpeculativeDecoder(target, random_trees(texts, vocab_size=96))
    output = decoder.generate(prompts, max_new_tokens=20, eos_token_id=[])
    assert output.token_ids == right
