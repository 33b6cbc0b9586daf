"""Attention layers of the families that recipes cut, on a GPU, at the sizes of the released
models: what the adapter of a family takes against the sum of its operators, each alone.

    python bench/model_layers_gpu.py build/dev --save bench/results/...md

bfloat16, forward and backward. The GLM-5.2 layer is one rank's share of 8 of 65536 tokens
(head-tail, the keys of the other ranks lie ready): its queries see the keys of all. DeepSeek-V4
and Gemma 4 run whole on one rank, with their operators' share of the time.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from harness import Part, Row, main
from model_layers import COMMON, V4
from torch import Tensor, nn

import longspan
from longspan import dsa
from longspan._local_batch import KEYWORD
from longspan._models import LocalAttention

BF16 = torch.bfloat16
GLM = COMMON | {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense"],
}
TOKENS, RANKS = 65536, 8


def milliseconds(run: Callable[[], Any], rounds: int = 7) -> float:
    times = []
    for i in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        if i > 1:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def normal(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*sizes, device="cuda", dtype=dtype)


def both_ways(run: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    dout = torch.randn_like(run(*leaves))

    def step() -> None:
        torch.autograd.grad(run(*leaves), leaves, dout)

    return step


class Share(LocalAttention):
    """A rank that owns the first and the last piece of the stream."""

    def ready(self, tokens: int, ranks: int) -> None:
        """Keys of the others; windows of the rank's own queries."""
        piece = tokens // ranks // 2
        self.keys, self.rows = normal(tokens - 2 * piece, 128), normal(tokens - 2 * piece, 576)
        mine = torch.cat([torch.arange(piece), torch.arange(tokens - piece, tokens)]).cuda()
        self.end = (mine + 1).int()
        self.start = torch.zeros_like(self.end)

    @staticmethod
    def whole(own: Tensor, others: Tensor) -> Tensor:
        head, tail = own.chunk(2)
        return torch.cat([head, others, tail])

    def select_keys(self, q: Tensor, k: Tensor, weights: Tensor, *, slots: int) -> Tensor:
        found = dsa.select_keys(
            q[0], self.whole(k[0], self.keys), weights[0], slots=slots, start=self.start,
            end=self.end,
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found[None]

    def attend_selected(self, q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> Tensor:
        out = dsa.attend_selected(q[0], self.whole(kv[0], self.rows), indices[0], **options)
        assert isinstance(out, Tensor)
        return out[None]


def parallelized(model: Any, tokens: int) -> tuple[Any, Any]:
    """On the GPU over one rank, and a batch for it."""
    model = model.to(device="cuda", dtype=BF16)
    longspan.parallelize(model, proof=False)
    batch = {"input_ids": torch.randint(1, 64, (1, tokens), device="cuda")}
    return model, longspan.shard(batch, model=model)


def glm_rows() -> list[Row]:
    mine = TOKENS // RANKS
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = transformers.GlmMoeDsaModel(transformers.GlmMoeDsaConfig(**GLM))
    model, local = parallelized(made, mine)
    given = local[KEYWORD]
    share = Share(given.cut, given.group, given.strategy, ())
    share.ready(TOKENS, RANKS)
    layer = model.layers[0].self_attn
    positions = (share.end - 1).long()[None]
    hidden = normal(1, mine, GLM["hidden_size"])
    angles = model.rotary_emb(hidden, positions)
    parameters = [p for n, p in layer.named_parameters() if "indexer" not in n]
    leaf = hidden.requires_grad_()
    dout = torch.randn_like(hidden)

    def adapter() -> Any:
        out = layer(
            leaf, position_embeddings=angles, attention_mask=share, position_ids=positions,
            **{KEYWORD: share},
        )[0]  # fmt: skip
        return torch.autograd.grad(out, [leaf, *parameters], dout, allow_unused=True)

    parts: dict[str, Callable[[], Any]] = {}
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and name != "kv_b_proj":
            x = normal(mine, module.in_features)
            weight = module.weight.detach().to(BF16)
            if "indexer" in name:
                parts[name] = lambda x=x, w=weight: nn.functional.linear(x, w)
            else:
                parts[name] = both_ways(nn.functional.linear, x, weight)
    heads, slots = GLM["num_attention_heads"], GLM["index_topk"]
    parts["queries into rows"] = both_ways(
        torch.matmul, normal(heads, mine, 192), normal(heads, 192, 512)
    )
    parts["answers to values"] = both_ways(
        torch.matmul, normal(heads, mine, 512), normal(heads, 512, 256)
    )
    q, k, w = normal(mine, 32, 128), normal(TOKENS, 128), normal(mine, 32, dtype=torch.float32)

    def select() -> Any:
        return dsa.select_keys(q, k, w, slots=slots, start=share.start, end=share.end)

    lists = select()
    parts["select_keys"] = select
    parts["attend_selected"] = both_ways(
        lambda q, kv: dsa.attend_selected(q, kv, lists, scale=0.06, value_dim=512),
        normal(mine, heads, 576), normal(TOKENS, 576),
    )  # fmt: skip
    took = {name: milliseconds(run) for name, run in parts.items()}
    total, ours = sum(took.values()), milliseconds(adapter)
    main_parts = ", ".join(f"{n} {t:.1f}" for n, t in took.items() if t > 0.05 * total)
    return [
        {
            "work": f"GLM-5.2 attention (H 64, k 2048), rank's share of {RANKS} at {TOKENS} tokens",
            "right": bool(
                torch.stack([g.isfinite().all() for g in adapter() if g is not None]).all()
            ),
            "ours": f"{ours:.1f} ms",
            "other": f"operators: {total:.1f} ms ({main_parts})",
            "ratio": f"{ours / total:.3f}x",
            "bar": "<= 1.1x",
            "met": ours / total <= 1.1,
        }
    ]


def whole_row(work: str, model: Any, tokens: int, names: tuple[str, ...]) -> list[Row]:
    """A model of one layer, and the share of the time that kernels of these names take."""
    model, local = parallelized(model, tokens)

    def step() -> Any:
        model.zero_grad()
        model(**local).last_hidden_state.float().square().mean().backward()

    ours = milliseconds(step, 5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    spent = {e.key: e.self_device_time_total / 1e3 for e in profile.key_averages()}
    attention = sum(t for key, t in spent.items() if any(n in key for n in names))
    finite = all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    return [
        {
            "work": f"{work}, {tokens} tokens on one rank, a decoder of one layer",
            "right": bool(finite),
            "ours": f"{ours:.1f} ms, an eighth of it {ours / 8:.1f}",
            "other": f"kernels: {sum(spent.values()):.1f} ms, of attention {attention:.1f}",
            "ratio": f"{attention / ours:.2f}",
            "bar": "",
            "met": True,
        }
    ]


def v4_rows() -> list[Row]:
    flash = V4 | {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "hc_mult": 4,
        "layer_types": ["compressed_sparse_attention"],
    }
    with torch.device("cuda"):
        model = transformers.DeepseekV4Model(transformers.DeepseekV4Config(**flash))
    return whole_row("DeepSeek-V4-Flash layer, pools of 4", model, TOKENS, ("longspan::",))


def gemma_rows() -> list[Row]:
    config = transformers.Gemma4TextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, num_hidden_layers=1, hidden_size=2560,
        intermediate_size=64, num_attention_heads=16, num_key_value_heads=4, head_dim=512,
        global_head_dim=512, layer_types=["full_attention"], num_kv_shared_layers=0,
        hidden_size_per_layer_input=0, max_position_embeddings=1 << 17, pad_token_id=0,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.Gemma4TextModel(config)
    return whole_row(
        "Gemma 4 full layer (16 heads of 512)",
        model,
        16384,
        ("gemm", "softmax", "fold", "attend", "flash", "cudnn"),
    )


def parts(_: pathlib.Path) -> list[Part]:
    return [glm_rows, v4_rows, gemma_rows]


if __name__ == "__main__":
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    sys.exit(main(__doc__ or "", "Layers of families with recipes on a GPU", name, parts))
