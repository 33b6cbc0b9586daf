"""The benchmark of layers on a GPU, which no machine without one runs: that its pieces
still fit together, on the CPU at small sizes."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import torch

from longspan import run_ranks

pytest.importorskip("transformers")

import oracle.tiny_decoders

BENCH = pathlib.Path(__file__).parents[2] / "bench"
BUILD = pathlib.Path(os.environ.get("LONGSPAN_BUILD", BENCH.parent / "build" / "dev"))
RANKS = 4


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH)
    import model_layers_gpu

    def once(run: Any, rounds: int = 1) -> float:
        run()
        return 1.0

    monkeypatch.setattr(model_layers_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(model_layers_gpu, "milliseconds", once)
    return model_layers_gpu


@pytest.fixture
def timed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operators of a row."""
    names: set[str] = set()
    row_of = bench.row_of

    def seen(*arguments: Any, **options: Any) -> Any:
        names.update(arguments[3])
        return row_of(*arguments, **options)

    monkeypatch.setattr(bench, "row_of", seen)
    return names


def test_a_share_of_glm(bench: Any) -> None:
    oracle.tiny_decoders.decoder("glm_moe_dsa")  # or skips
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


def flash(bench: Any) -> dict[str, Any]:
    """Windows longer than a run, and fewer chosen pools than there are."""
    oracle.tiny_decoders.decoder("deepseek_v4")  # or skips
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12}
    sizes |= {"o_groups": 2, "o_lora_rank": 8, "index_n_heads": 8, "index_head_dim": 24}
    return bench.FLASH | sizes | {"index_topk": 8, "sliding_window": 19}


def gemma(bench: Any) -> dict[str, Any]:
    library = BUILD / "bench" / "absent_ranks.so"
    if not library.exists():
        pytest.skip(f"there is no {library}, which `make test` builds")
    torch.ops.load_library(library)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return bench.GEMMA | sizes | {"head_dim": 16, "global_head_dim": 16}


def over_ranks(bench: Any, layer: Any) -> list[Any]:
    """The same layer with ranks that are there."""
    return run_ranks(RANKS, lambda g: layer.step(bench.attention_over(layer.tokens, g)))


@pytest.mark.parametrize("tokens", [64, 128, 144])
def test_shares_of_v4_are_those_of_ranks(bench: Any, tokens: int) -> None:
    """144: pieces of 18 tokens, which no pool of 4 fits."""
    layer = bench.V4Layer(flash(bench), tokens, RANKS, torch.float64)
    found = layer.play()
    assert layer.apart(found) <= 1e-5  # inside, the family computes in float32
    layer.mail.keeps = False
    with layer.mail:
        again = [layer.step(share) for share in layer.shares]
    for played, repeated, true in zip(found, again, over_ranks(bench, layer), strict=True):
        for a, b, c in zip(played, repeated, true, strict=True):
            assert torch.equal(a, b)
            torch.testing.assert_close(a, c, rtol=1e-12, atol=1e-12)


def test_shares_of_gemma_are_those_of_ranks(bench: Any) -> None:
    layer = bench.GemmaLayer(gemma(bench), 128, RANKS)
    found = layer.play()
    assert layer.apart(found) <= bench.TOLERANCE
    for played, true in zip(found, over_ranks(bench, layer), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(played, true, strict=True))


def test_rows_of_v4(bench: Any, timed: set[str]) -> None:
    (row,) = bench.v4_rows(flash(bench), 256, RANKS)
    assert row["right"]
    linear = {"q_a_proj", "q_b_proj", "kv_proj", "o_a_proj", "o_b_proj"}
    linear |= {f"compressor.{one}_proj" for one in ("kv", "gate")}
    indexer = {f"compressor.indexer.{one}_proj" for one in ("kv", "gate", "q_b")}
    without = {*indexer, "compressor.indexer.scorer.weights_proj", "pool_tokens", "select_keys"}
    pooled = {"pool_tokens", "attend_selected"}
    assert timed == linear | pooled | {f"{name} forward" for name in without}


def test_rows_of_gemma(bench: Any, timed: set[str]) -> None:
    (row,) = bench.gemma_rows(BUILD, gemma(bench), 512, RANKS)
    assert row["right"]
    assert timed == {"q_proj", "k_proj", "v_proj", "o_proj", "attend"}
