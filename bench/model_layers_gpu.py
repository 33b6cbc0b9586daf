"""Attention layers of the families that recipes cut, on a GPU, at the sizes of the released
models: what the adapter of a family takes against the sum of its operators, each alone.

    python bench/model_layers_gpu.py build/dev --save bench/results/...md
    python bench/model_layers_gpu.py build/dev --parts 1 --profile

bfloat16, forward and backward, one rank's share of 8 of 65536 tokens, head-tail. The other
ranks are not there: what they would send lies ready, so there is no wire, and all else is
what a rank does. Norms, rotary positions and what came put beside the own count as the
adapter's. --profile prints the longest kernels of adapter and operators.

GLM-5.2: rank 0; the keys of others are random numbers. Operators are the linear layers, both
products of heads, select_keys and attend_selected.

DeepSeek-V4, Gemma 4: rank 3. Plans, halos, parts of pools and the steps of the ring are those
of a rank. What others send is what they would: the ranks are played one after another first;
but gradients that come home to the keys of Gemma 4 are zeros in the step that is timed.
Operators are timed by what a step gives them: the linear layers, pool_tokens, select_keys and
attend_selected; the linear layers and attend. What is called the answer is that of all ranks,
out and every gradient, against one rank that has all tokens, on a shorter stream.

Gemma 4 wants build/dev/bench/absent_ranks.so, as ring_share.py does: `ninja -C build/dev
absent_ranks`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import pathlib
import statistics
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import transformers
from harness import Part, Row, main
from model_layers import COMMON, V4
from ring_share import Shape, Whole, apart, homecomings
from ring_share import Share as Ring
from torch import Tensor, nn

import longspan
from longspan import Group, Ownership, Packing, Strategy, _models, dsa
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
FLASH = V4 | {
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "layer_types": ["compressed_sparse_attention"],
}
GEMMA = COMMON | {
    "vocab_size_per_layer_input": 64,
    "hidden_size": 2560,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 512,
    "global_head_dim": 512,
    "layer_types": ["full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
}
TOKENS, RANKS = 65536, 8
#: Between two bfloat16 answers, in the norm of each tensor. By itself bfloat16 takes such a layer
#: 0.8 (its output) to 2.1 per cent (a gradient) from float32; orders of adding differ by half a per
#: cent, and one exchange left out by 27 and more (tiny layers on a CPU).
TOLERANCE = 2e-2


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


def linear(module: nn.Linear, x: Tensor, weight: Tensor) -> Tensor:
    """What a linear layer of any class does, with this weight."""
    stand_in: Any = types.SimpleNamespace(**vars(module) | {"weight": weight, "bias": None})
    return type(module).forward(stand_in, x)


class Call:
    """A call that a step made: of the tensors it was given, those that want gradients do so
    here again."""

    def __init__(self, run: Callable[..., Any], given: dict[Any, Any]) -> None:
        self.run = run
        tensors = {key: t for key, t in given.items() if isinstance(t, Tensor)}
        self.learns = [
            key for key, t in tensors.items() if t.requires_grad and torch.is_grad_enabled()
        ]
        self.given = given | {key: t.detach() for key, t in tensors.items()}

    def __call__(self, *leaves: Tensor) -> Any:
        given = self.given | dict(zip(self.learns, leaves, strict=True))
        listed = [given.pop(i) for i in range(len(given)) if i in given]
        return self.run(*listed, **given)

    def alone(self) -> Callable[[], Any]:
        return both_ways(self, *(self.given[key] for key in self.learns)) if self.learns else self


def operators_of(
    layer: nn.Module, step: Callable[[], Any], functions: Sequence[tuple[Any, str]]
) -> dict[str, Callable[[], Any]]:
    """The linear layers and some functions, as (module, name), alone with what a step gives
    them; backward too where it goes back through them."""
    calls: dict[str, Call] = {}

    def keep(name: str, run: Callable[..., Any], given: dict[Any, Any]) -> None:
        name = name if torch.is_grad_enabled() else f"{name} forward"
        assert name not in calls, name
        calls[name] = Call(run, given)

    def before(name: str, module: nn.Linear, inputs: tuple[Tensor]) -> None:
        assert module.bias is None
        keep(name, functools.partial(linear, module), {0: inputs[0], 1: module.weight})

    def around(name: str, run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        keep(name, run, {**dict(enumerate(inputs)), **options})
        return run(*inputs, **options)

    with contextlib.ExitStack() as stack:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                hook = module.register_forward_pre_hook(functools.partial(before, name))
                stack.callback(hook.remove)
        for owner, name in functions:
            seen = functools.partial(around, name, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, seen))
        step()
    return {name: call.alone() for name, call in calls.items()}


def row_of(
    work: str, right: bool, step: Callable[[], Any], parts: dict[str, Callable[[], Any]],
    bar: float | None = None, beside: dict[str, Callable[[], Any]] | None = None,
) -> Row:  # fmt: skip
    """A step of the adapter against its operators."""
    took = {name: milliseconds(run) for name, run in parts.items()}
    total, ours = sum(took.values()), milliseconds(step)
    others = [f"; {name} {milliseconds(run):.1f} ms" for name, run in (beside or {}).items()]
    if PROFILE:
        print(kernels_of("adapter", step))
        print(kernels_of("operators", lambda: [run() for run in parts.values()]))
    main_parts = ", ".join(f"{n} {t:.1f}" for n, t in took.items() if t > 0.05 * total)
    return {
        "work": work,
        "right": right,
        "ours": f"{ours:.1f} ms, {total / ours:.0%} of the operators' rate{''.join(others)}",
        "other": f"operators: {total:.1f} ms ({main_parts})",
        "ratio": f"{ours / total:.3f}x",
        "bar": "" if bar is None else f"<= {bar:g}x",
        "met": bar is None or ours / total <= bar,
    }


def learned_in(attention: nn.Module) -> list[Tensor]:
    """Parameters with a gradient; an indexer learns by a loss of its own."""
    return [p for name, p in attention.named_parameters() if "indexer" not in name]


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
        return list(torch.autograd.grad(out, [self.hidden, *learned_in(layer)], self.dout))

    def right(self) -> bool:
        """Whether both ways give the same gradients, to what bfloat16 allows."""
        pairs = zip(self.step(self.layer), self.step(self.theirs), strict=True)
        return all(apart(a, b) <= TOLERANCE for a, b in pairs)

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
    return [
        row_of(
            f"GLM-5.2 attention (H 64, k 2048), rank's share of {RANKS} at {TOKENS} tokens",
            share.right(),
            lambda: share.step(share.layer),
            share.operators(),
            bar=1.1,
            beside={"around the family's own forward": lambda: share.step(share.theirs)},
        )
    ]


class Mail:
    """Ranks that are played one after another: what one sends lies ready when the turn of the
    others comes. Inside of a `with`, operators that exchange ask here, by groups that have no
    backend; plans, pools and all else are those of ranks.

    Always true: after n rounds what is sent in the first n exchanges of a step is right, since
    it hangs on earlier exchanges alone."""

    _names = itertools.count()

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.keeps = True  #: what is sent; no more once everything is there
        self._called: list[Any] = []  # exchanges since this was cleared
        self._letters: dict[Any, list[Tensor]] = {}
        self._process_groups: dict[str, Any] = {}  # by their names, which operators get
        self.groups: list[Group] = []
        for rank in range(ranks):
            name = f"longspan/bench/{next(self._names)}"
            self._process_groups[name] = torch.distributed.ProcessGroup(rank, ranks)
            register = torch._C._distributed_c10d._register_process_group
            register(name, self._process_groups[name])
            self.groups.append(Group(name))

    def __enter__(self) -> None:
        self._library = torch.library.Library("longspan", "IMPL")
        for name, does in {
            "exchange_needed": self._exchange_needed,
            "return_needed": self._return_needed,
            "all_gather_tokens": self._all_gather_tokens,
            "reduce_scatter_tokens": self._reduce_scatter_tokens,
        }.items():
            self._library.impl(name, does, DEVICE.upper())

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def play(self, step: Callable[[int], Any]) -> list[Any]:
        """The answers of all ranks; then everything that was sent is there, and right."""
        with self:
            for rank in range(self.ranks):
                self._called.clear()
                step(rank)
            exchanges = len(self._called)
            assert len(set(self._called)) == exchanges, "which letter is whose?"
            for _ in range(exchanges):
                answers = [step(rank) for rank in range(self.ranks)]
        return answers

    def _trade(
        self, what: tuple[Any, ...], x: Tensor, name: str, sent: dict[int, list[Tensor]],
        expected: dict[int, list[int]],
    ) -> dict[int, list[Tensor]]:  # fmt: skip
        """Parts of x for each rank, for parts of so many tokens from each."""
        me = self._process_groups[name].rank()
        what = (*what, tuple(x.shape[1:]), x.dtype)
        if self.keeps:
            self._called.append(what)
            for to, parts in sent.items():
                self._letters[what, me, to] = [part.clone() for part in parts]
        came: dict[int, list[Tensor]] = {}
        for peer in sorted(expected):
            ready = sent[peer] if peer == me else self._letters.get((what, peer, me))
            came[peer] = ready or [x.new_zeros(n, *x.shape[1:]) for n in expected[peer]]
        return came

    def _rows(self, sends: Tensor, name: str) -> tuple[Any, ...]:
        """A table as plain numbers, and this rank's rows in it: [begin, length] for each that
        it sends to and that it hears of."""
        me = self._process_groups[name].rank()
        table = tuple(tuple(row) for row in sends.tolist())
        sent: dict[int, list[tuple[int, int]]] = {}
        heard: dict[int, list[tuple[int, int]]] = {}
        for peer, to, begin, length in table:
            if peer == me:
                sent.setdefault(to, []).append((begin, length))
            if to == me:
                heard.setdefault(peer, []).append((begin, length))
        return table, sent, heard

    def _exchange_needed(self, x: Tensor, axis: int, sends: Any, received: int, name: str) -> Any:
        assert axis == 0
        table, sent, heard = self._rows(sends, name)
        came = self._trade(
            ("exchange", table), x, name,
            {to: [x.narrow(0, *row) for row in rows] for to, rows in sent.items()},
            {peer: [n for _, n in rows] for peer, rows in heard.items()},
        )  # fmt: skip
        return torch.cat([part for parts in came.values() for part in parts] or [x[:0]])

    def _return_needed(self, x: Tensor, axis: int, sends: Any, tokens: int, name: str) -> Any:
        assert axis == 0
        table, sent, heard = self._rows(sends, name)
        lengths = [n for peer in sorted(heard) for _, n in heard[peer]]
        parts = iter(x.split(lengths) if lengths else ())
        back = {peer: [next(parts) for _ in heard[peer]] for peer in sorted(heard)}
        came = self._trade(
            ("return", table), x, name, back,
            {to: [n for _, n in rows] for to, rows in sent.items()},
        )  # fmt: skip
        total = x.new_zeros(tokens, *x.shape[1:], dtype=sums_of(x))
        for to, parts_of in came.items():
            for row, part in zip(sent[to], parts_of, strict=True):
                total.narrow(0, *row).add_(part)
        return total.to(x.dtype)

    def _all_gather_tokens(self, x: Tensor, axis: int, sizes: Any, name: str) -> Tensor:
        assert axis == 0
        came = self._trade(
            ("gather", tuple(sizes)), x, name, {rank: [x] for rank in range(self.ranks)},
            {rank: [size] for rank, size in enumerate(sizes)},
        )  # fmt: skip
        return torch.cat([part for (part,) in came.values()])

    def _reduce_scatter_tokens(self, x: Tensor, axis: int, sizes: Any, name: str) -> Tensor:
        assert axis == 0
        mine = sizes[self._process_groups[name].rank()]
        came = self._trade(
            ("scatter", tuple(sizes)), x, name,
            {rank: [part] for rank, part in enumerate(x.split(list(sizes)))},
            {rank: [mine] for rank in range(self.ranks)},
        )  # fmt: skip
        first, *others = [part for (part,) in came.values()]
        total = first.to(sums_of(x), copy=True)
        for part in others:
            total += part
        return total.to(x.dtype)


def sums_of(x: Tensor) -> torch.dtype:
    return torch.float32 if x.itemsize < 4 else x.dtype


def attention_over(tokens: int, group: Group) -> LocalAttention:
    """One document over the ranks of a group, without asking them."""
    owners = Ownership.head_tail(tokens, group.size())
    cut: Any = types.SimpleNamespace(
        ownership=owners,
        packings=[Packing.single(tokens)],
        rank=group.rank(),
        local_tokens=owners.local_tokens(group.rank()),
    )
    return LocalAttention(cut, group, Strategy.of("ring"), ())


class Layer:
    """The attention of a model of one layer, by itself, and a stream for it."""

    def __init__(self, model: Any, tokens: int, dtype: torch.dtype) -> None:
        self.model = model.to(device=DEVICE, dtype=dtype)
        longspan.parallelize(self.model, proof=False)
        self.attention = self.model.layers[0].self_attn
        self.tokens = tokens
        sizes = (1, tokens, model.config.hidden_size)
        self.hidden, self.dout = (normal(*sizes, dtype=dtype) for _ in range(2))
        self._given: dict[tuple[int, int], Any] = {}

    def angles(self, hidden: Tensor, positions: Tensor) -> Any:
        raise NotImplementedError

    def forward(self, local: LocalAttention) -> tuple[Tensor, Tensor, Tensor]:
        """A share's input, output, and the gradient of that; the angles are those of all
        layers, and made once."""
        place = local.group.size(), local.group.rank()
        if place not in self._given:
            tokens = local.cut.ownership.tokens_of(local.group.rank()).to(DEVICE)
            hidden = self.hidden[:, tokens].requires_grad_()
            angles = self.angles(hidden.detach(), tokens[None])
            self._given[place] = hidden, self.dout[:, tokens], tokens[None], angles
        hidden, dout, positions, angles = self._given[place]
        out = self.attention(
            hidden, position_embeddings=angles, attention_mask=local, position_ids=positions,
            shared_kv_states={}, **{KEYWORD: local},
        )[0]  # fmt: skip
        return hidden, out, dout

    def step(self, local: LocalAttention) -> list[Tensor]:
        """The output, and the gradients of the input and of the parameters that learn."""
        hidden, out, dout = self.forward(local)
        learned = learned_in(self.attention)
        return [out.detach(), *torch.autograd.grad(out, [hidden, *learned], dout)]

    def apart(self, answers: list[list[Tensor]]) -> float:
        """How far the answers of all ranks are from that of one rank: in the norm, the worst
        of all tensors."""
        whole = self.step(attention_over(self.tokens, Group()))
        owners = Ownership.head_tail(self.tokens, len(answers))
        order = torch.cat([owners.tokens_of(rank) for rank in range(len(answers))]).to(DEVICE)
        worst = 0.0
        for i, (expected, *shares) in enumerate(zip(whole, *answers, strict=True)):
            if i < 2:  # of tokens
                found, truth = torch.cat(shares, 1), expected[:, order]
            else:
                found, truth = torch.stack(shares).sum(0, dtype=sums_of(expected)), expected
            worst = max(worst, apart(found, truth))
        return worst


class V4Layer(Layer):
    """Its ranks are played by mail."""

    FUNCTIONS = ((dsa, "pool_tokens"), (dsa, "select_keys"), (dsa, "attend_selected"))

    def __init__(
        self, config: dict[str, Any], tokens: int, ranks: int, dtype: torch.dtype = BF16
    ) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            made = transformers.DeepseekV4Model(transformers.DeepseekV4Config(**config))
        super().__init__(made, tokens, dtype)
        with torch.no_grad():
            for name, parameter in self.attention.named_parameters():
                if "sinks" in name or "position_bias" in name:  # zeros to begin with
                    parameter.normal_()
        self.mail = Mail(ranks)
        self.shares = [attention_over(tokens, group) for group in self.mail.groups]

    def angles(self, hidden: Tensor, positions: Tensor) -> Any:
        return {
            kind: self.model.rotary_emb(hidden, position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }

    def play(self) -> list[list[Tensor]]:
        return self.mail.play(lambda rank: self.step(self.shares[rank]))


def v4_rows(config: dict[str, Any] = FLASH, tokens: int = TOKENS, ranks: int = RANKS) -> list[Row]:
    # So few that every pool that ended is chosen, and no rounding decides between two.
    few, rank = 4 * config["index_topk"], ranks // 2 - 1
    layer = V4Layer(config, few, ranks)
    right = layer.apart(layer.play()) <= TOLERANCE
    layer = V4Layer(config, tokens, ranks)
    layer.play()
    layer.mail.keeps = False
    share = layer.shares[rank]
    heads, slots = config["num_attention_heads"], config["index_topk"]
    work = f"DeepSeek-V4-Flash attention (H {heads}, 512, pools of 4, k {slots})"
    with layer.mail:
        return [
            row_of(
                f"{work}, share of rank {rank} of {ranks} at {tokens} tokens; answer at {few}",
                right,
                lambda: layer.step(share),
                operators_of(layer.attention, lambda: layer.step(share), layer.FUNCTIONS),
            )
        ]


class GemmaLayer(Layer):
    """Its ranks are those of ring_share.py, whose keys lie ready."""

    FUNCTIONS = ((_models, "attend"),)

    def __init__(
        self, config: dict[str, Any], tokens: int, ranks: int, dtype: torch.dtype = BF16
    ) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            made = transformers.Gemma4TextModel(transformers.Gemma4TextConfig(**config))
        super().__init__(made, tokens, dtype)
        with torch.no_grad():
            # It does not scale scores, so queries that learned nothing see one key only.
            self.attention.q_norm.weight.fill_(self.attention.head_dim**-0.5)
            k, v = self._keys()
        heads = config["num_attention_heads"]
        self._shape = Shape(tokens, ranks, heads, k.shape[1], k.shape[2])
        self._whole = Whole(k[:, :0], k, v, k[:, :0])  # queries come from the layer

    def angles(self, hidden: Tensor, positions: Tensor) -> Any:
        return self.model.rotary_emb(hidden, positions, "full_attention")

    def _keys(self) -> list[Tensor]:
        """Keys and values of the stream, [tokens, heads, channels]."""
        taken: list[Tensor] = []

        def take(q: Tensor, *keys: Tensor, **_: Any) -> Tensor:
            taken.extend(t[0].transpose(0, 1) for t in keys)
            return q

        with mock.patch.object(_models, "attend", take):
            self.forward(attention_over(self.tokens, Group()))
        self._given.clear()
        return taken

    def share(self, rank: int, gradients: list[Tensor] | None = None) -> tuple[Ring, Any]:
        """A rank, and what comes home to it; zeros where that is not given."""
        ring = Ring(self._shape, self._whole, rank, gradients)
        return ring, attention_over(self.tokens, ring.group)

    def play(self) -> list[list[Tensor]]:
        """The answers of all ranks: once for the gradients that they send, once with them."""
        rings, sent = [], []
        for rank in range(self._shape.ranks):
            ring, local = self.share(rank)
            torch.ops.longspan_bench.sent_gradients(ring.name, self.hidden)
            self.step(local)
            sent.append(torch.ops.longspan_bench.sent_gradients(ring.name, self.hidden))
            rings.append(ring)
        return [
            self.step(self.share(rank, homecomings(rings, sent, rank))[1])
            for rank in range(self._shape.ranks)
        ]


def gemma_rows(
    build: pathlib.Path, config: dict[str, Any] = GEMMA, tokens: int = TOKENS, ranks: int = RANKS
) -> list[Row]:
    torch.ops.load_library(build / "bench" / "absent_ranks.so")
    few, rank = tokens // 8, ranks // 2 - 1
    layer = GemmaLayer(config, few, ranks)
    right = layer.apart(layer.play()) <= TOLERANCE
    layer = GemmaLayer(config, tokens, ranks)
    _, share = layer.share(rank)
    heads, keys, dim = (
        config[n] for n in ("num_attention_heads", "num_key_value_heads", "global_head_dim")
    )
    work = f"Gemma 4 full attention ({heads} heads of {dim}, {keys} of keys)"
    return [
        row_of(
            f"{work}, share of rank {rank} of {ranks} at {tokens} tokens; answer at {few}",
            right,
            lambda: layer.step(share),
            operators_of(layer.attention, lambda: layer.step(share), layer.FUNCTIONS),
        )
    ]


def parts(build: pathlib.Path) -> list[Part]:
    return [glm_rows, v4_rows, lambda: gemma_rows(build)]


PROFILE = False

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--profile", action="store_true")
    options, sys.argv[1:] = parser.parse_known_args()
    PROFILE = options.profile
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    sys.exit(main(__doc__ or "", "Layers of families with recipes on a GPU", name, parts))
