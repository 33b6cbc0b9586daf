"""Ways in which one rank of a group can differ from the others, and what every rank must
then say. Run by disagreeing_ranks.py; test_disagreement.py looks at the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import longspan
from longspan import Mask, Ownership, Packing, comm, dsa

Act = Callable[[longspan.Group], Any]
LOCAL = 8  # tokens of a rank


@dataclass
class Way:
    """Rank 1 does `odd`, the others `usual`; all of them must raise these words."""

    name: str
    usual: Act
    odd: Act
    words: tuple[str, ...] = field(default=("do different things in call",))


def owners(group: longspan.Group, kind: str = "head_tail") -> Ownership:
    tokens = LOCAL * group.size()
    if kind == "swapped":
        ranges = [[(rank * LOCAL, (rank + 1) * LOCAL)] for rank in range(group.size())]
        return Ownership.of_ranges(ranges[::-1])
    return getattr(Ownership, kind)(tokens, group.size())


def stream(group: longspan.Group, documents: int = 1) -> Packing:
    tokens = LOCAL * group.size()
    return Packing.of([tokens // documents] * documents)


def attend(
    *,
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    key_heads: int = 4,
    dim: int = 8,
    value_dim: int = 8,
    rows: int | None = 1,
    gradients: bool = True,
    backward: bool = True,
    owned: str = "head_tail",
    documents: int = 1,
    mask: Callable[[Packing], Mask] = Mask.causal,
    sink: bool = False,
    local: int = LOCAL,
    **options: Any,
) -> Act:
    def act(group: longspan.Group) -> None:
        def made(heads: int, dim: int) -> torch.Tensor:
            shape = (local, heads, dim) if rows is None else (rows, heads, local, dim)
            return torch.ones(shape, dtype=dtype, requires_grad=gradients)

        out = longspan.attend(
            made(heads, dim),
            made(key_heads, dim),
            made(key_heads, value_dim),
            mask=mask(stream(group, documents)),
            layout=owners(group, owned),
            sink=torch.zeros(heads, dtype=dtype) if sink else None,
            group=group,
            **options,
        )
        if gradients and backward:
            out.sum().backward()

    return act


def selected(
    *,
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    dim: int = 8,
    index_heads: int = 2,
    index_dim: int = 4,
    gradients: bool = True,
    owned: str = "head_tail",
    documents: int = 1,
    **options: Any,
) -> Act:
    def act(group: longspan.Group) -> None:
        def made(*shape: int) -> torch.Tensor:
            return torch.ones(LOCAL, *shape, dtype=dtype, requires_grad=gradients)

        answer = dsa.select_and_attend(
            made(heads, dim),
            made(dim),
            made(index_heads, index_dim),
            made(index_dim),
            made(index_heads),
            mask=Mask.causal(stream(group, documents)),
            layout=owners(group, owned),
            group=group,
            **{"slots": 4, "scale": 0.5} | options,
        )
        if gradients:
            answer.out.sum().backward()

    return act


def select(**options: Any) -> Act:
    def act(group: longspan.Group) -> None:
        ones = [torch.ones(LOCAL, 2, 4), torch.ones(LOCAL, 4), torch.ones(LOCAL, 2)]
        dsa.select_keys(
            *ones,
            mask=Mask.causal(stream(group)),
            layout=owners(group),
            group=group,
            **{"slots": 4} | options,
        )

    return act


def listed(**options: Any) -> Act:
    def act(group: longspan.Group) -> None:
        q, kv = torch.ones(LOCAL, 2, 8), torch.ones(LOCAL, 8)
        lists = torch.zeros(LOCAL, 3, dtype=torch.int32)
        dsa.attend_selected(
            q, kv, lists, layout=owners(group), group=group, **{"scale": 0.5} | options
        )

    return act


def score(**options: Any) -> Act:
    def act(group: longspan.Group) -> None:
        ones = [torch.ones(LOCAL, 2, 4), torch.ones(LOCAL, 4), torch.ones(LOCAL, 2)]
        lists = torch.zeros(LOCAL, 3, dtype=torch.int32)
        dsa.score_selected(*ones, lists, layout=owners(group), group=group, **options)

    return act


def gather(shape: tuple[int, ...] = (3, 2), **options: Any) -> Act:
    dtype = options.pop("dtype", torch.float32)

    def act(group: longspan.Group) -> None:
        sizes = options.get("sizes", [shape[0]] * group.size())
        comm.all_gather_tokens(torch.ones(shape, dtype=dtype), axis=0, sizes=sizes, group=group)

    return act


def scatter(group: longspan.Group) -> None:
    sizes = [3] * group.size()
    comm.reduce_scatter_tokens(torch.ones(3 * group.size(), 2), axis=0, sizes=sizes, group=group)


def rotate(hops: int = 1, shape: tuple[int, ...] = (3, 2), dtype: Any = torch.float32) -> Act:
    return lambda group: comm.rotate(torch.ones(shape, dtype=dtype), hops, group=group)


def roll(shift: int = 1) -> Act:
    return lambda group: comm.roll(
        torch.ones(3, 2), shift, axis=0, sizes=[3] * group.size(), group=group
    )


def to_heads(heads: int = 6) -> Act:
    def act(group: longspan.Group) -> None:
        each = heads // group.size()
        comm.all_to_all_heads(
            torch.ones(3, heads, 2),
            token_axis=0,
            head_axis=1,
            token_sizes=[3] * group.size(),
            head_sizes=[each] * (group.size() - 1) + [heads - each * (group.size() - 1)],
            group=group,
        )

    return act


def needed(length: int = 1) -> Act:
    def act(group: longspan.Group) -> None:
        rows = [(r, (r + 1) % group.size(), 0, length) for r in range(group.size())]
        table = torch.tensor(rows, dtype=torch.int64)
        comm.exchange_needed(torch.ones(3, 2), table, axis=0, group=group)

    return act


def mean(**options: Any) -> Act:
    value = options.get("value", torch.ones(()))
    return lambda group: longspan.reduce_loss(value, 3, group)


def both(*acts: Act) -> Act:
    def act(group: longspan.Group) -> None:
        for one in acts:
            one(group)

    return act


def nothing(group: longspan.Group) -> None:
    """This rank leaves the call out."""


def batch(**changes: Any) -> Act:
    options = changes.pop("options", {})

    def act(group: longspan.Group) -> None:
        ids = torch.arange(16).view(1, 16)
        made: dict[str, Any] = {"input_ids": ids, "labels": ids, **changes}
        longspan.shard(made, group, **options)

    return act


class Lazy(dict[str, Any]):
    """A batch whose column fails when it is read."""

    def __init__(self, error: BaseException) -> None:
        super().__init__({"input_ids": torch.arange(16).view(1, 16)})
        self._error = error

    def __getitem__(self, key: str) -> Any:
        raise self._error

    def items(self) -> Any:
        raise self._error


def lazy(error: BaseException) -> Act:
    return lambda group: longspan.shard(Lazy(error), group)


def sums(*sizes: int) -> Act:
    def act(group: longspan.Group) -> None:
        model = torch.nn.Linear(*sizes)
        model(torch.ones(1, sizes[0])).sum().backward()
        longspan.sum_gradients(model, group)

    return act


def layer(index: int) -> Act:
    def act(group: longspan.Group) -> None:
        with comm.in_layer(f"layer {index}"):
            attend(backward=False)(group)

    return act


TWICE = both(attend(), attend())


def ways() -> list[Way]:
    """All of them. The words of a way are what tells the ranks apart."""
    found: list[Way] = []

    def add(name: str, usual: Act, odd: Act, *words: str) -> None:
        found.append(Way(name, usual, odd, ("do different things in call", *words)))

    def heard(name: str, usual: Act, odd: Act, *words: str) -> None:
        found.append(Way(name, usual, odd, words))

    for strategy in ("ring", "gathered", "needed", "head_parallel"):
        usual = attend(strategy=strategy)
        at = {"strategy": strategy}
        add(f"{strategy}_float16", usual, attend(dtype=torch.float16, **at), "float16", "float32")
        add(f"{strategy}_bfloat16", usual, attend(dtype=torch.bfloat16, **at), "bfloat16")
        add(
            f"{strategy}_8_heads_of_4",
            usual,
            attend(heads=8, key_heads=8, dim=4, value_dim=4, scale=8**-0.5, **at),
            "[1, 8, _, 4]",
        )
        add(f"{strategy}_another_scale", usual, attend(scale=0.1, **at), "scale 0.1")
        add(f"{strategy}_another_softcap", usual, attend(softcap=20.0, **at), "softcap 20")
        add(f"{strategy}_another_mask", usual, attend(documents=2, **at), "2 documents")
        add(f"{strategy}_other_owners", usual, attend(owned="contiguous", **at), "contiguous")
        add(f"{strategy}_no_gradients", usual, attend(gradients=False, **at), "without gradients")
        add(f"{strategy}_left_out", both(usual, gather()), gather(), "attend", "all_gather_tokens")
        other = "gathered" if strategy == "ring" else "ring"
        add(f"{strategy}_against_{other}", usual, attend(strategy=other), strategy, other)
        heard(
            f"{strategy}_too_many_tokens",
            both(usual),
            attend(local=LOCAL + 1, **at),
            f"holds {LOCAL} tokens",
        )
    add(
        "half_against_half",
        attend(dtype=torch.float16),
        attend(dtype=torch.bfloat16),
        "float16",
        "bfloat16",
    )
    add("fewer_key_heads", attend(), attend(key_heads=2), "[1, 2, _, 8]")
    add("other_value_channels", attend(), attend(value_dim=4), "v float32 [1, 4, _, 4]")
    add("more_rows", attend(), attend(rows=2), "[2, 4, _, 8]")
    add("packed_against_rows", attend(), attend(rows=None), "[_, 4, 8]")
    add("a_sink", attend(), attend(sink=True), "sink float32", "no sink")
    add("full_against_causal", attend(), attend(mask=Mask.full), "full", "causal")
    add(
        "another_window",
        attend(mask=lambda p: Mask.sliding(p, 3)),
        attend(mask=lambda p: Mask.sliding(p, 4)),
        "sliding",
    )
    add(
        "owners_the_other_way_round",
        attend(owned="contiguous"),
        attend(owned="swapped"),
        "contiguous",
        "ranges",
    )
    add(
        "scales_that_print_alike",
        attend(scale=0.35),
        attend(scale=0.35 + 1e-12),
        "0.35000000000099996",
    )
    add(
        "no_backward",
        both(attend(), gather()),
        both(attend(backward=False), gather()),
        "attend backward",
        "all_gather_tokens",
    )
    add("one_layer_less", both(TWICE, gather()), both(attend(), gather()), "call 3")
    add("one_layer_more", both(attend(), gather()), both(TWICE, gather()), "call 3")
    add(
        "layers_reordered",
        both(attend(), attend(dim=4)),
        both(attend(dim=4), attend()),
        "[1, 4, _, 4]",
    )
    add(
        "named_layer_left_out",
        both(layer(1), layer(2), layer(3)),
        both(layer(1), layer(3)),
        "call 2",
        "in layer 2",
        "in layer 3",
    )
    add(
        "named_layers_reordered",
        both(layer(1), layer(2)),
        both(layer(2), layer(1)),
        "call 1",
        "in layer 1",
        "in layer 2",
    )
    add(
        "forward_twice_first",
        both(attend(backward=False), attend(backward=False)),
        TWICE,
        "attend backward",
    )

    usual = selected()
    heard("selected_bfloat16", usual, selected(dtype=torch.bfloat16), "bfloat16")
    add("selected_heads", usual, selected(heads=4), "[_, 4, 8]")
    add("selected_channels", usual, selected(dim=4), "[_, 2, 4]")
    add("selected_index_heads", usual, selected(index_heads=4), "[_, 4, 4]")
    add("selected_index_channels", usual, selected(index_dim=8), "[_, 2, 8]")
    add("selected_slots", usual, selected(slots=5), "4", "5")
    add("selected_scale", usual, selected(scale=0.25), "0.25")
    add("selected_value_dim", usual, selected(value_dim=4), "4")
    add("selected_balanced", usual, selected(balanced=True))
    add("selected_scores", usual, selected(scores=True))
    add("selected_target", usual, selected(target=True))
    add("selected_needed", usual, selected(fetch="needed"), "gathered", "needed")
    add("selected_mask", usual, selected(documents=2), "2 documents")
    add("selected_owners", usual, selected(owned="contiguous"), "contiguous")
    add("selected_no_gradients", usual, selected(gradients=False), "without gradients")
    add(
        "selected_needed_balanced",
        selected(fetch="needed"),
        selected(fetch="needed", balanced=True),
    )
    add("selected_against_dense", usual, attend(), "attend", "select_and_attend")
    add("selection_slots", select(), select(slots=2), "4", "2")
    add("selection_balanced", select(), select(balanced=True))
    add("selection_scores", select(), select(scores=True))
    add("selection_left_out", both(select(), listed()), listed(), "select_keys")
    add("lists_scale", listed(), listed(scale=1.0), "0.5")
    add("lists_fetch", listed(), listed(fetch="needed"), "needed")
    add("lists_value_dim", listed(), listed(value_dim=4))
    add("scores_fetch", score(), score(fetch="needed"), "needed")
    add("scores_against_lists", score(), listed(), "score_selected", "attend_selected")
    heard("slots_of_nothing", usual, selected(slots=-1), "select_and_attend")

    add("gather_against_rotate", gather(), rotate(), "all_gather_tokens", "rotate")
    add("gather_against_scatter", gather(), scatter, "reduce_scatter_tokens")
    add("gather_against_roll", gather(), roll(), "roll")
    add("gather_against_heads", gather(), to_heads(), "all_to_all_heads")
    add("gather_against_needed", gather(), needed(), "exchange_needed")
    add("gather_against_agree", gather(), lambda group: comm.agree(group, {"x": 1}), "agree")
    add("gather_against_loss_of_it", gather(), mean(), "float64")
    add("gather_int32", gather(), gather(dtype=torch.int32), "int32", "float32")
    add("gather_float64", gather(), gather(dtype=torch.float64), "float64")
    add("gather_channels", gather(), gather((3, 4)), "[_, 4]")
    add("gather_axes", gather(), gather((3, 2, 1)), "[_, 2, 1]")
    add("gather_sizes", gather(), gather((4, 2)), "sizes [4, 4")
    heard("gather_wrong_sizes", gather(), gather(sizes=[3]), "`sizes` has 1 entries")
    add("gather_left_out", both(gather(), scatter), scatter, "all_gather_tokens")
    add("gather_twice", both(gather(), scatter), both(gather(), gather(), scatter), "call 2")
    add("rotate_hops", both(rotate(0), gather()), both(rotate(), gather()), "hops 1")
    add("rotate_shape", rotate(), rotate(shape=(2, 3)), "[_, 3]")
    add("rotate_type", rotate(), rotate(dtype=torch.int64), "int64")
    add("roll_shift", roll(), roll(2), "shift 2")
    add("roll_against_rotate", roll(), rotate(), "roll", "rotate")
    add("heads_of_another_model", to_heads(), to_heads(12), "all_to_all_heads, sizes")
    add("needed_lengths", needed(), needed(2), "table")
    heard("loss_of_a_list", mean(), mean(value=torch.ones(2)), "reduce_loss")
    heard(
        "agree_on_other_names",
        lambda g: comm.agree(g, {"x": 1}),
        lambda g: comm.agree(g, {"y": 1}),
        "compare different fields",
    )
    heard(
        "agree_on_other_values",
        lambda g: comm.agree(g, {"x": 1}),
        lambda g: comm.agree(g, {"x": 2}),
        "`x` (rank 1 differs",
    )

    heard(
        "shard_other_ids",
        batch(),
        batch(input_ids=torch.zeros(1, 16, dtype=torch.int64)),
        "`input_ids`",
    )
    heard(
        "shard_other_labels",
        batch(),
        batch(labels=torch.zeros(1, 16, dtype=torch.int64)),
        "`labels`",
    )
    heard(
        "shard_other_length",
        batch(),
        batch(
            input_ids=torch.ones(1, 8, dtype=torch.int64),
            labels=torch.ones(1, 8, dtype=torch.int64),
        ),
        "`input_ids`",
    )
    heard(
        "shard_pixels",
        batch(pixel_values=torch.zeros(2, 3)),
        batch(pixel_values=torch.ones(2, 3)),
        "`pixel_values`",
    )
    heard("shard_pixels_missing", batch(pixel_values=torch.zeros(2, 3)), batch(), "different keys")
    heard("shard_other_layout", batch(), batch(options={"layout": "contiguous-rows"}), "`layout`")
    heard("shard_other_multiple", batch(), batch(options={"multiple": 16}), "`ownership`")
    heard("shard_unknown_layout", batch(), batch(options={"layout": "spiral"}), "spiral")
    heard("shard_key_error", batch(), lazy(KeyError("column")), "KeyError", "column")
    heard("shard_memory_error", batch(), lazy(MemoryError("no room")), "MemoryError", "no room")
    heard("shard_value_error", batch(), lazy(ValueError("bad row")), "bad row")
    heard("shard_os_error", batch(), lazy(OSError("stale handle")), "stale handle")
    heard("shard_no_ids", batch(), lambda g: longspan.shard({}, g), "neither is there")
    add("shard_left_out", both(batch(), attend()), attend(), "agree", "attend")
    heard("dropout", attend(), attend(dropout_p=0.1), "dropout_p")
    heard(
        "no_layout",
        attend(),
        lambda g: longspan.attend(*[torch.ones(1, 1, 8, 8)] * 3, group=g),
        "need a layout",
    )
    heard("unknown_strategy", attend(), attend(strategy="spiral"), "spiral")
    heard(
        "mask_of_another_length",
        attend(),
        attend(mask=lambda p: Mask.causal(Packing.single(7))),
        "same tokens",
    )
    heard("integers", attend(), attend(dtype=torch.int64, gradients=False), "int64")
    heard("sums_of_another_model", sums(3, 2), sums(3, 4), "sum_gradients")
    heard("sums_against_attention", sums(3, 2), attend(), "do different things in call")
    heard("sums_of_no_module", sums(3, 2), lambda g: longspan.sum_gradients(None, g), "NoneType")
    heard(
        "unshard_of_nothing", gather(), lambda g: longspan.unshard(None, None, group=g), "unshard"
    )
    return found
