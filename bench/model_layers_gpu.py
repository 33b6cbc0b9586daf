"""Attention layers of the families that recipes cut, on a GPU, at the sizes of the released
models: what the adapter of a family takes against the sum of its operators, each alone.

    python bench/model_layers_gpu.py build/dev --save bench/results/...md
    python bench/model_layers_gpu.py build/dev --parts 1 --profile

bfloat16, forward and backward. The GLM-5.2 layer is one rank's share of 8 of 65536 tokens
(head-tail, the keys of the other ranks lie ready): its queries see the keys of all. Its
operators are the linear layers, both products of heads, select_keys and attend_selected;
norms, rotary positions and the keys of others put beside the own ones count as the adapter's.
--profile prints the longest kernels of both. DeepSeek-V4 and Gemma 4 run whole on one rank,
with their operators' share of the time.
"""

from __future__ import annotations

import argparse
import copy
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
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there a test looks whether it runs
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


def kernels_of(title: str, run: Callable[[], Any], rounds: int = 3, most: int = 25) -> str:
    """The longest kernels of a step: milliseconds, how often, and which."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    spent = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    spent = [e for e in spent if e.self_device_time_total > 0]
    lines = [
        f"{e.self_device_time_total / rounds / 1e3:8.3f} ms {e.count / rounds:5.0f} x {e.key[:110]}"
        for e in spent[:most]
    ]
    total = sum(e.self_device_time_total for e in spent) / rounds / 1e3
    return "\n".join([f"{title}: {total:.1f} ms in {len(spent)} kernels", *lines])


def normal(*sizes: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*sizes, device=DEVICE, dtype=dtype)


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
        others = tokens - 2 * piece
        self.other_keys, self.other_rows = normal(others, 128), normal(others, 576)
        mine = torch.cat([torch.arange(piece), torch.arange(tokens - piece, tokens)]).to(DEVICE)
        self.end = (mine + 1).int()
        self.start = torch.zeros_like(self.end)

    @staticmethod
    def in_stream(own: Tensor, others: Tensor) -> Tensor:
        head, tail = own.chunk(2)
        return torch.cat([head, others, tail])

    def select_keys(self, q: Tensor, k: Tensor, weights: Tensor, *, slots: int) -> Tensor:
        keys = self.in_stream(k.flatten(0, 1), self.other_keys)
        found = dsa.select_keys(
            q.flatten(0, 1), keys, weights.flatten(0, 1), slots=slots, start=self.start,
            end=self.end,
        )  # fmt: skip
        assert isinstance(found, Tensor)
        return found.unsqueeze(0)

    def attend_selected(self, q: Tensor, kv: Tensor, indices: Tensor, **options: Any) -> Tensor:
        # Views alone: the gradient of `q[0]` would be a copy of all queries into zeros.
        rows = self.in_stream(kv.flatten(0, 1), self.other_rows)
        out = dsa.attend_selected(q.flatten(0, 1), rows, indices.flatten(0, 1), **options)
        assert isinstance(out, Tensor)
        return out.unsqueeze(0)


def parallelized(model: Any, tokens: int) -> tuple[Any, Any]:
    """On the GPU over one rank, and a batch for it."""
    model = model.to(device=DEVICE, dtype=BF16)
    longspan.parallelize(model, proof=False)
    batch = {"input_ids": torch.randint(1, 64, (1, tokens), device=DEVICE)}
    return model, longspan.shard(batch, model=model)


class GlmShare:
    """The attention of GLM-5.2 on one rank's share: its step by the adapter, by the adapter
    around the family's own forward, and its operators alone."""

    def __init__(self, config: dict[str, Any], tokens: int, ranks: int) -> None:
        self.config, self.tokens, self.mine = config, tokens, tokens // ranks
        torch.manual_seed(0)
        with torch.device(DEVICE):
            made = transformers.GlmMoeDsaModel(transformers.GlmMoeDsaConfig(**config))
        theirs = copy.deepcopy(made)
        attention = theirs.layers[0].self_attn
        attention.forward = attention.forward  # as somebody's wrapper: it stays
        model, local = parallelized(made, self.mine)
        parallelized(theirs, self.mine)
        given = local[KEYWORD]
        self.share = Share(given.cut, given.group, given.strategy, ())
        self.share.ready(tokens, ranks)
        self.layer, self.theirs = model.layers[0].self_attn, attention
        self.positions = (self.share.end - 1).long()[None]
        self.hidden = normal(1, self.mine, config["hidden_size"]).requires_grad_()
        self.angles = model.rotary_emb(self.hidden.detach(), self.positions)
        self.dout = torch.randn_like(self.hidden)

    def step(self, layer: Any) -> list[Tensor]:
        out = layer(
            self.hidden, position_embeddings=self.angles, attention_mask=self.share,
            position_ids=self.positions, **{KEYWORD: self.share},
        )[0]  # fmt: skip
        learns = [p for n, p in layer.named_parameters() if "indexer" not in n]
        return list(torch.autograd.grad(out, [self.hidden, *learns], self.dout))

    def right(self) -> bool:
        """Whether both ways give the same gradients, to what bfloat16 allows."""
        pairs = zip(self.step(self.layer), self.step(self.theirs), strict=True)
        return all(bool((a - b).float().norm() <= 2e-2 * b.float().norm()) for a, b in pairs)

    def operators(self) -> dict[str, Callable[[], Any]]:
        config, mine, share = self.config, self.mine, self.share
        parts: dict[str, Callable[[], Any]] = {}
        for name, module in self.layer.named_modules():
            if isinstance(module, nn.Linear) and name != "kv_b_proj":
                x = normal(mine, module.in_features)
                weight = module.weight.detach().to(BF16)
                if "indexer" in name:
                    parts[name] = lambda x=x, w=weight: nn.functional.linear(x, w)
                else:
                    parts[name] = both_ways(nn.functional.linear, x, weight)
        heads, slots = config["num_attention_heads"], config["index_topk"]
        row, key, value = (config[n] for n in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"))
        parts["queries into rows"] = both_ways(
            torch.matmul, normal(heads, mine, key), normal(heads, key, row)
        )
        parts["answers to values"] = both_ways(
            torch.matmul, normal(heads, mine, row), normal(heads, row, value)
        )
        q, k = normal(mine, config["index_n_heads"], 128), normal(self.tokens, 128)
        w = normal(mine, config["index_n_heads"], dtype=torch.float32)

        def select() -> Any:
            return dsa.select_keys(q, k, w, slots=slots, start=share.start, end=share.end)

        lists = select()
        parts["select_keys"] = select
        parts["attend_selected"] = both_ways(
            lambda q, kv: dsa.attend_selected(q, kv, lists, scale=0.06, value_dim=row),
            normal(mine, heads, row + 64), normal(self.tokens, row + 64),
        )  # fmt: skip
        return parts


def glm_rows() -> list[Row]:
    share = GlmShare(GLM, TOKENS, RANKS)
    right, parts = share.right(), share.operators()
    took = {name: milliseconds(run) for name, run in parts.items()}
    total = sum(took.values())
    ours, theirs = (
        milliseconds(lambda layer=layer: share.step(layer))  # type: ignore[misc]
        for layer in (share.layer, share.theirs)
    )
    if PROFILE:
        print(kernels_of("adapter", lambda: share.step(share.layer)))
        print(kernels_of("operators", lambda: [run() for run in parts.values()]))
    main_parts = ", ".join(f"{n} {t:.1f}" for n, t in took.items() if t > 0.05 * total)
    return [
        {
            "work": f"GLM-5.2 attention (H 64, k 2048), rank's share of {RANKS} at {TOKENS} tokens",
            "right": right,
            "ours": f"{ours:.1f} ms; around the family's own forward {theirs:.1f} ms",
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


PROFILE = False

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--profile", action="store_true")
    options, sys.argv[1:] = parser.parse_known_args()
    PROFILE = options.profile
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    sys.exit(main(__doc__ or "", "Layers of families with recipes on a GPU", name, parts))
