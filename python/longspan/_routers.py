"""Models with experts: router losses and counts of the whole batch.

A router loss is no sum over tokens: it multiplies how often each expert was chosen by how
likely it was, each a mean over the tokens at hand. Of a rank's own tokens that is
another number. Here the choices are counted over all ranks, and each rank adds the
product with the probabilities of its own tokens: these parts sum to the loss of the
whole batch, and their gradients to its gradient. Pads, of the batch and of the cut, count
for nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan._arguments import check_kind, said
from longspan._group import Group
from longspan._hooks import names_in
from longspan._local_batch import KEYWORD, LocalBatch, real_tokens
from longspan._models import LocalAttention, Parallelized
from longspan._walking import classes_in, walked
from longspan.comm import all_gather_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: What a call or a configuration asks for them by.
ASKED = "output_router_logits"
#: Where an answer keeps the experts that were chosen, for `expert_counts`.
_CHOSEN = "_longspan_experts"
#: What PhiMoE chooses experts with: in training it draws them, and the number that configurations
#: call router_jitter_noise is a threshold of it.
_DRAWS, _THRESHOLD = "sparsemixer", "router_jitter_noise"


def balance_loss(
    logits: Sequence[Tensor], top_k: int, real: Tensor, tokens: int, group: Group
) -> Tensor:
    """This rank's part of the load balancing loss of Switch Transformer (equations 4 to
    6), over `tokens` real ones of all ranks; `real` [B, L] says which of the rank's own
    are. `logits` [B * L, E] of every layer."""
    experts = logits[0].shape[-1]
    kept = real.reshape(-1).to(logits[0].device)
    counts = torch.zeros(experts, dtype=torch.int64, device=kept.device)
    likely: Any = 0.0
    for one in logits:
        weights = one.reshape(-1, experts).softmax(-1)[kept]
        chosen = weights.detach().topk(top_k, dim=-1).indices
        counts += torch.bincount(chosen.reshape(-1), minlength=experts)
        wide = torch.float64 if weights.dtype == torch.float64 else torch.float32
        likely = likely + weights.sum(0, dtype=wide)
    rows = len(logits) * max(tokens, 1)
    share = _over_ranks(counts, group).to(likely.dtype) / rows
    part: Tensor = (share * likely / rows).sum() * experts
    return part


def expert_counts(outputs: Any, local: LocalBatch) -> Tensor:
    """How many tokens of the whole batch each expert got: int64 [layers, experts], equal on
    all ranks, pads left out. For trainers that adjust routing biases by the load.

    `outputs` is what a parallelized model answered with ``output_router_logits=True``;
    all ranks must call it."""
    check_kind("expert_counts", "local", local, LocalBatch, "what shard returned")
    chosen = vars(outputs).get(_CHOSEN) if hasattr(outputs, "__dict__") else None
    if chosen is None:
        raise ValueError(
            f"expert_counts: {said(outputs)} does not say which experts were chosen; call the "
            f"parallelized model with output_router_logits=True and give its answer"
        )
    group = local.group if local.group is not None else Group.solo()
    real = real_tokens(local.cut).reshape(-1)
    counts = []
    for experts, indices in chosen:
        mine = indices.reshape(real.numel(), -1)[real.to(indices.device)].reshape(-1)
        counts.append(torch.bincount(mine, minlength=experts))
    return _over_ranks(torch.stack(counts), group)


def _over_ranks(counts: Tensor, group: Group) -> Tensor:
    """Their sum over the ranks; whole numbers, so the order does not matter."""
    if group.size() == 1:
        return counts
    every = all_gather_tokens(counts.unsqueeze(0), axis=0, sizes=[1] * group.size(), group=group)
    return every.sum(0)


@dataclass
class _Router:
    """A module whose output holds the logits of its experts at `index`."""

    module: nn.Module
    index: int


@dataclass
class _Seen:
    """What the routers gave in one call of the model."""

    logits: list[Tensor] = field(default_factory=list)
    #: (number of experts, indices) of each router that says whom it chose.
    chosen: list[tuple[int, Tensor]] = field(default_factory=list)


def redirect(part: PreTrainedModel, state: Parallelized) -> None:
    """Lets a causal model with routers answer with losses of the whole batch."""
    routers = _routers(part)
    if not routers:
        return
    noise = _noise_in(part, routers)
    state.look_before(part, functools.partial(_look_for_noise, noise))
    if not _makes_loss(part):
        return
    original = part.forward

    @functools.wraps(original)
    def forward(*arguments: Any, **options: Any) -> Any:
        local = options.get(KEYWORD)
        asked = options.get(ASKED)
        wanted = getattr(part.config, ASKED, False) if asked is None else asked
        if not wanted or not isinstance(local, LocalAttention):
            return original(*arguments, **options)
        options[ASKED] = False
        with _watched(routers) as seen:
            out = original(*arguments, **options)
        return _completed(part, out, seen, local)

    state.replace(part, "forward", forward)


@contextlib.contextmanager
def _watched(routers: Sequence[_Router]) -> Iterator[_Seen]:
    seen = _Seen()

    def look(index: int, module: nn.Module, _: Any, output: Any) -> None:
        logits = output[index] if isinstance(output, (tuple, list)) else output
        seen.logits.append(logits)
        parts = output if isinstance(output, (tuple, list)) else ()
        for one in parts:
            if isinstance(one, Tensor) and one.dtype in (torch.int64, torch.int32):
                seen.chosen.append((logits.shape[-1], one.detach()))

    hooks = [r.module.register_forward_hook(functools.partial(look, r.index)) for r in routers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _completed(part: Any, out: Any, seen: _Seen, local: LocalAttention) -> Any:
    name = type(part).__name__
    if isinstance(out, tuple):
        raise ValueError(
            f"{name}: {ASKED} with return_dict=False; leave return_dict out, so that the answer "
            f"has names"
        )
    _check_gradients(name, part, seen)
    out.router_logits = tuple(seen.logits)
    if len(seen.chosen) == len(seen.logits):
        vars(out)[_CHOSEN] = tuple(seen.chosen)
    if _loss_function(part) is None:
        return out
    loss = balance_loss(
        seen.logits,
        part.num_experts_per_tok,
        real_tokens(local.cut),
        sum(packing.real_tokens for packing in local.cut.packings),
        local.group,
    )
    out.aux_loss = loss
    if out.loss is not None:
        out.loss = out.loss + loss_of_routers(part, out).to(out.loss.device)
    return out


def loss_of_routers(part: Any, out: Any) -> Tensor:
    """What the routers add to the loss of an answer."""
    known = "router_aux_loss_coef" if hasattr(part, "router_aux_loss_coef") else "aux_loss_coef"
    loss = getattr(out, "aux_loss", None)
    return torch.zeros(()) if loss is None else getattr(part, known) * loss


def _check_gradients(name: str, part: nn.Module, seen: _Seen) -> None:
    """Reentrant checkpoints run without a graph, and what was seen inside has none."""
    learns = torch.is_grad_enabled() and part.training
    learns = learns and any(parameter.requires_grad for parameter in part.parameters())
    if learns and not seen.logits[0].requires_grad:
        raise ValueError(
            f"{name}: router logits carry no gradient, so the router loss would train nothing; "
            f"checkpoint with use_reentrant=False, or set {ASKED} to False"
        )


def check_batch(model: nn.Module, parts: Sequence[PreTrainedModel], batch: Any) -> None:
    """What a batch asks of routers, and what cannot be answered."""
    asked = batch.get(ASKED)
    routed = has_routers(model)
    for part in parts:
        if routed and part.training and (routers := _routers(part)):
            _check_noise("shard", part, _noise_in(part, routers))
        wanted = getattr(part.config, ASKED, False) if asked is None else asked
        if wanted and _makes_loss(part):
            if not _routers(part):
                raise ValueError(
                    f"shard: {ASKED} is set, but {type(part).__name__} has no experts; leave it out"
                )
            _check_loss(part)


def describe(part: PreTrainedModel, ranks: int) -> str | None:
    """What a router loss sends, in words; None where there is none that is understood."""
    routers = _routers(part)
    experts = getattr(part, "num_experts", None)
    if not routers or not _makes_loss(part) or not isinstance(experts, int):
        return None
    try:
        _check_loss(part)
    except NotImplementedError:
        return None
    if _loss_function(part) is None:
        return None
    sent = (ranks - 1) * experts * torch.int64.itemsize
    return (
        f"router loss, with {ASKED}=True: counts of {experts} experts, of {len(routers)} layers "
        f"together, are summed over ranks in forward, {sent} B from this one"
    )


def check_model(part: PreTrainedModel) -> None:
    """Refuses a family whose router loss is not the one that is made here."""
    if getattr(part.config, ASKED, False) and _makes_loss(part) and _routers(part):
        _check_loss(part)


class _Noise(NamedTuple):
    """Where it may be."""

    #: Names and values of the configuration, of those in it, and of modules, which keep them from
    #: the configuration that they were made with: one that says 0 now does not switch it off.
    jitters: list[tuple[str, dict[str, Any], str]]
    #: Routers that draw whom they choose.
    drawing: list[tuple[str, nn.Module]]


def _noise_in(part: PreTrainedModel, routers: Sequence[_Router]) -> _Noise:
    inside = [value for value in vars(part.config).values() if hasattr(value, "to_dict")]
    holders: list[tuple[str, Any]] = [("", part.config), *(("", config) for config in inside)]
    mine = {id(router.module) for router in routers}
    drawing = []
    for name, module in walked(part):
        holders.append((f"of '{name}' ", module))
        if id(module) in mine and _DRAWS in names_in(type(module).forward):
            drawing.append((name, module))
    found = [
        (where, vars(one), key) for where, one in holders for key in vars(one) if "jitter" in key
    ]
    return _Noise(found, drawing)


def _look_for_noise(
    noise: _Noise, part: PreTrainedModel, _: tuple[Any, ...], arguments: dict[str, Any]
) -> None:
    if part.training and isinstance(arguments.get(KEYWORD), LocalAttention):
        _check_noise(type(part).__name__, part, noise)


def _check_noise(who: str, part: PreTrainedModel, noise: _Noise) -> None:
    """Refuses in training what would be another with other ranks: draws of whom routers choose,
    and noise on what they see."""
    for name, module in noise.drawing:
        if module.training:
            raise NotImplementedError(
                f"{who}: '{name}' ({type(module).__name__}) draws its experts at random in "
                f"training ({_DRAWS}), which would depend on the ranks; put every router of "
                f"{type(part).__name__} in eval mode, where it chooses the likeliest"
            )
    for where, own, key in noise.jitters:
        value = own.get(key)
        if not isinstance(value, (int, float)) or value <= 0:
            continue
        if noise.drawing and key == _THRESHOLD:
            continue
        raise NotImplementedError(
            f"{who}: {type(part).__name__} multiplies what its routers see by noise in "
            f"training ({key} {where}is {value:g}), which would depend on the ranks; set it "
            f"to 0{', in every module' if where else ''}"
        )


def _makes_loss(part: PreTrainedModel) -> bool:
    return "ForCausalLM" in type(part).__name__


def _routers(part: PreTrainedModel) -> list[_Router]:
    """The modules that record router logits, in the order of the model."""
    recorded = _recorder(part)
    if recorded is None:
        return []
    found = []
    for name, module in walked(part):
        for one in recorded if isinstance(recorded, list) else [recorded]:
            target: Any = getattr(one, "target_class", one)
            if isinstance(module, target) and (getattr(one, "layer_name", None) or "") in name:
                found.append(_Router(module, getattr(one, "index", 0)))
    return found


def has_routers(model: nn.Module) -> bool:
    """Whether any model in it may record their logits: soon said, for one walk of it all."""
    return _recorder(model) is not None


def _recorder(model: nn.Module) -> Any:
    """Where its classes say that router logits are recorded; None where they have none."""
    every = (getattr(kind, "_can_record_outputs", None) or {} for kind in classes_in(model))
    return next((found for one in every if (found := one.get("router_logits"))), None)


def router_modules(part: PreTrainedModel) -> list[nn.Module]:
    """Those that choose experts."""
    return [router.module for router in _routers(part)]


def _loss_function(part: PreTrainedModel) -> Callable[..., Any] | None:
    """The family's own, which its forward finds by this name; None: it has no such loss."""
    function = type(part).forward
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    made: Callable[..., Any] | None = function.__globals__.get("load_balancing_loss_func")
    return made


def _check_loss(part: PreTrainedModel) -> None:
    function = _loss_function(part)
    if function is None:
        return
    known = hasattr(part, "router_aux_loss_coef") or hasattr(part, "aux_loss_coef")
    if not known or not hasattr(part, "num_experts_per_tok") or not _is_balance_loss(function):
        raise NotImplementedError(
            f"{type(part).__name__} has a router loss of its own, which is not understood; set "
            f"{ASKED} to False"
        )


@functools.cache
def _is_balance_loss(function: Callable[..., Any]) -> bool:
    """Tried on numbers: the family's function with a mask, and ours without the masked."""
    random = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 5, generator=random) for _ in range(3))
    real = torch.tensor([[1, 1, 0], [1, 0, 1]])
    try:
        theirs = function(logits, 5, 2, real)
    except Exception:  # other arguments
        return False
    ours = balance_loss(logits, 2, real.bool(), 4, Group.solo())
    return isinstance(theirs, Tensor) and bool((theirs - ours).abs() < 1e-5 * ours.abs())
