"""The benchmark of layers on a GPU, which no machine without one runs: that its pieces
still fit together, on the CPU at small sizes."""

from __future__ import annotations

import pathlib

import pytest
import torch

pytest.importorskip("transformers")

import oracle.tiny_decoders

BENCH = pathlib.Path(__file__).parents[2] / "bench"


def test_a_share_of_glm(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle.tiny_decoders.decoder("glm_moe_dsa")  # or skips
    monkeypatch.syspath_prepend(BENCH)
    import model_layers_gpu as bench

    monkeypatch.setattr(bench, "DEVICE", "cpu")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"q_lora_rank": 32, "qk_nope_head_dim": 24, "v_head_dim": 16, "index_topk": 16}
    share = bench.GlmShare(bench.GLM | sizes, 64, 4)
    assert "forward" in vars(share.layer) and "expand_kv" in vars(share.theirs)
    assert share.right()
    gradients = share.step(share.layer)
    assert gradients[0].shape == (1, 16, 64) and all(g.isfinite().all() for g in gradients)
    parts = share.operators()
    linear = [n for n, m in share.layer.named_modules() if isinstance(m, torch.nn.Linear)]
    assert len(parts) == len(linear) - 1 + 4
    for run in parts.values():
        run()
