"""Families with recurrent and convolutional layers: gated delta rules, Mamba 2, and short
convolutions.

Their layers call functions of their module by name: a causal convolution, a scan. Each layer
gets its class's own forward with those names bound to what is here, which calls the same
functions, kernels of a hub included, on runs of documents:

- A convolution of K tokens looks K - 1 tokens back. The first tokens of each run are done
  again with the rows that come over the border.
- A scan is linear in the state that comes in. Every run begins with nothing and says what it
  would make of a state; states are carried over the ranks (`comm.carry_states`), and what
  they add to the answer of each token is added.

Documents begin anew in both, also on one rank, where functions without kernels would let them
run into each other.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from longspan._agreement import in_layer_of
from longspan._local_batch import KEYWORD
from longspan._models import AttentionLayer, LocalAttention, Pair, Parallelized, Recurrence
from longspan._rebinding import CannotRebind, named_in, rebound
from longspan._recipes.recipe import Recipe, not_sharded
from longspan._scans import Scans
from longspan._states import carry_states
from longspan._twins import kind_of

Function = Callable[..., Any]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What states are computed in."""
    return torch.promote_types(dtype, torch.float32)


# ---- Convolutions.


def _convolve(
    own: Function,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """In place of `causal_conv1d_fn`: [B, C, L] of this rank's tokens."""
    local: LocalAttention = options[KEYWORD]
    count = weight.shape[-1] - 1
    plain: torch.Tensor = own(hidden_states, weight, bias, activation=activation)
    if count == 0:
        return plain
    borders = local.borders(count)
    x = hidden_states.transpose(1, 2)
    before = local.tokens_before(x, count)
    device = x.device
    heads = x.flatten(0, 1).index_select(0, borders.places.on(device))
    heads = torch.where(borders.there.on(device).unsqueeze(1), heads, 0)
    runs = len(borders.halo.runs)
    if runs:
        pairs = torch.cat([rows.view(runs, count, -1) for rows in (before, heads)], dim=1)
        again = own(pairs.transpose(1, 2), weight, bias, activation=activation)
        heads = again[:, :, count:].transpose(1, 2).flatten(0, 1)
        heads = heads.index_select(0, borders.written.on(device))
    else:
        heads = heads + before  # both are empty
    out = plain.transpose(1, 2).flatten(0, 1)
    out = out.index_copy(0, borders.targets.on(device), heads.to(out.dtype))
    out = out.view(*x.shape[:2], -1)
    if borders.real is not None:
        out = torch.where(borders.real.on(device).unsqueeze(2), out, 0)
    return out.transpose(1, 2)


# ---- Scans.


def _carried(
    local: LocalAttention,
    scans: Scans,
    transitions: list[torch.Tensor],
    states: list[torch.Tensor],
) -> list[torch.Tensor]:
    """For each group the states that come into its chained runs, from what its runs make of
    one; both lists have an entry for each group, with a row for each chained run, and one
    more without rows, which says what rows look like."""
    transition, state = torch.cat(transitions), torch.cat(states)
    if len(scans.groups) > 1:
        order = scans.order.on(state.device)
        transition, state = transition.index_select(0, order), state.index_select(0, order)
    incoming = carry_states(transition, state, scans.plan, group=local.group)
    return [
        incoming.index_select(0, group.getting.on(incoming.device)) for group in scans.groups
    ] + [incoming]


def _with_tie(out: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """The same, and `used` has a gradient, if only of zeros: ranks that need nothing of what
    came, or have nothing but pads, take part in its way back too."""
    return out + used.reshape(-1)[:0].sum().to(out.dtype)


def _delta_rule(
    own: Function,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    is_kernel: bool = False,
    pair: Pair = (0, 0, 1),
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """In place of `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: [B, L, H, D]
    of this rank's tokens.

    A state [K, V] passes through a run as a matrix [K, K], and each token reads it as a row
    of K numbers. A run that goes on with a document learns both beside its own answer:
    K more channels of values, all zero, over the identity as the state that comes in."""
    local: LocalAttention = options[KEYWORD]
    scans = local.scans(chunk_size, pair)
    dtype, heads = query.dtype, value.shape[2]
    keys, values = key.shape[-1], value.shape[-1]
    if not is_kernel:
        # It computes in float32 and gives the query's type back, too narrow to add up.
        query = query.to(_wide(dtype))
    unit = torch.eye(keys, dtype=torch.float32, device=key.device)
    answers, transitions, states = [], [], []
    for group in scans.groups:
        q, k, v, decay, b = (group.take(x) for x in (query, key, value, g, beta))
        start = None
        if group.continues:
            v = torch.cat([v, v.new_zeros(*v.shape[:3], keys)], dim=-1)
            start = torch.cat([unit.new_zeros(keys, values), unit], dim=-1)
            start = start.expand(group.size, heads, keys, values + keys)
        out, end = own(
            q,
            k,
            v,
            g=decay,
            beta=b,
            chunk_size=group.chunk,
            initial_state=start,
            output_final_state=bool(group.chained),
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )
        answers.append(out)
        if group.chained:
            end = end.index_select(0, group.handing.on(end.device))
            states.append(end[..., :values])
            passed = end[..., values:]
            transitions.append(passed if group.continues else end.new_zeros(*end.shape[:3], keys))
    if scans.carries:
        nothing = value.reshape(-1)[:0].to(torch.float32)
        states.append(nothing.view(0, heads, keys, values))
        transitions.append(nothing.view(0, heads, keys, keys))
        *came, incoming = _carried(local, scans, transitions, states)
        for i, group in enumerate(scans.groups):
            if group.continues:
                mine, reads = answers[i].split([values, keys], dim=-1)
                more = reads.transpose(1, 2).to(incoming.dtype) @ came[i]
                answers[i] = mine + more.transpose(1, 2)
    out = scans.together([answer.to(dtype) for answer in answers], value.to(dtype))
    return _with_tie(out, incoming if scans.carries else value), None


def _is_kernel(function: Any) -> bool:
    """Whether a function of transformers found a kernel to call in place of its own code."""
    while function is not None:
        if inspect.isfunction(function):
            found = inspect.getclosurevars(function).nonlocals
            if "is_new_implementation" in found:
                return bool(found["is_new_implementation"])
        function = getattr(function, "__wrapped__", None)
    return False


def _mamba2_scan(
    own: Function,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    pair: Pair = (0, 0, 1),
    **options: Any,
) -> torch.Tensor:
    """In place of `mamba2_chunk_scan`: [B, L, H, P] of this rank's tokens.

    A state [P, N] shrinks by one number a head on its way, and a token reads what is left
    of it by its row of C."""
    local: LocalAttention = options[KEYWORD]
    scans = local.scans(chunk_size, pair)
    # Steps of time as the function makes them, so that pads can have none.
    steps = dt.to(_wide(dt.dtype))
    if dt_bias is not None:
        steps = steps + dt_bias.to(steps.dtype)
    if dt_softplus:
        steps = F.softplus(steps)
    steps = steps.clamp(*dt_limit)
    heads, channels = hidden_states.shape[2:]
    answers, decays, states, transitions = [], [], [], []
    for group in scans.groups:
        x, step, b, c = (group.take(t) for t in (hidden_states, steps, B, C))
        out = own(
            x,
            step,
            A,
            b,
            c,
            chunk_size=group.chunk,
            D=D,
            z=None,
            return_final_states=bool(group.chained),
            dt_bias=None,
            dt_softplus=False,
            initial_states=None,
            dt_limit=(0.0, float("inf")),
        )
        decay = None
        if group.chained:
            out, end = out
            handing = group.handing.on(end.device)
            decay = (step.index_select(0, handing).to(end.dtype) * A.to(end.dtype)).cumsum(1)
            states.append(end.index_select(0, handing))
            transitions.append(decay[:, -1].exp())
        answers.append(out)
        decays.append(decay)
    if scans.carries:
        nothing = hidden_states.reshape(-1)[:0].to(torch.float32)
        states.append(nothing.view(0, heads, channels, B.shape[-1]))
        transitions.append(nothing.view(0, heads))
        *came, incoming = _carried(local, scans, transitions, states)
        for i, group in enumerate(scans.groups):
            if group.continues:
                c, decay = group.take(C), decays[i]
                assert decay is not None
                # [n, G, T, N] x [n, G, N, heads of a group * P]
                state = came[i].reshape(group.size, c.shape[2], -1, c.shape[3])
                read = c.transpose(1, 2).to(state.dtype) @ state.transpose(2, 3)
                read = read.transpose(1, 2).reshape(*c.shape[:2], heads, channels)
                more = read * decay.exp().unsqueeze(-1)
                answers[i] = (answers[i] + more).to(answers[i].dtype)
    out = scans.together(answers, answers[0] if answers else hidden_states)
    if z is not None:
        out = out * F.silu(z)
    return _with_tie(out, incoming if scans.carries else hidden_states)


def _selective_scan(
    own: Function,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    is_kernel: bool = False,
    pair: Pair = (0, 0, 1),
    **options: Any,
) -> torch.Tensor:
    """In place of `mamba_selective_scan`: [B, C, L] of this rank's tokens.

    A state has N numbers for each channel, which shrink one by one."""
    local: LocalAttention = options.pop(KEYWORD)
    scans = local.scans(_SELECTIVE_CHUNK, pair)
    steps = dt.to(_wide(dt.dtype))
    if delta_bias is not None:
        steps = steps + delta_bias.to(steps.dtype).unsqueeze(-1)
    if delta_softplus:
        steps = F.softplus(steps)
    if is_kernel:
        steps = steps.to(dt.dtype)
    answers, decays, states, transitions = [], [], [], []
    for group in scans.groups:
        x, step, b, c = (
            group.take(t.transpose(1, 2)).transpose(1, 2) for t in (hidden_states, steps, B, C)
        )
        out = own(x, step, A, b, c, D=D, z=None, return_last_state=bool(group.chained), **options)
        past = None
        if group.chained:
            out, end = out
            handing = group.handing.on(end.device)
            end = end.index_select(0, handing)
            past = step.index_select(0, handing).to(_wide(end.dtype)).cumsum(2)
            states.append(end.unsqueeze(-1).to(past.dtype))
            transitions.append((past[:, :, -1:] * A.to(past.dtype)).exp())
        answers.append(out.transpose(1, 2))
        decays.append(past)
    if scans.carries:
        nothing = hidden_states.reshape(-1)[:0].to(_wide(hidden_states.dtype))
        states.append(nothing.view(0, *A.shape, 1))
        transitions.append(nothing.view(0, *A.shape))
        *came, incoming = _carried(local, scans, transitions, states)
        for i, group in enumerate(scans.groups):
            if group.continues:
                past = decays[i]
                assert past is not None
                c = group.take(C.transpose(1, 2)).to(past.dtype)
                left = (past.transpose(1, 2).unsqueeze(-1) * A.to(past.dtype)).exp()
                more = (left * came[i].squeeze(-1).unsqueeze(1)) @ c.unsqueeze(-1)
                answers[i] = (answers[i] + more.squeeze(-1)).to(answers[i].dtype)
    like = answers[0] if answers else hidden_states.transpose(1, 2)
    out = scans.together(answers, like).transpose(1, 2)
    if z is not None:
        out = out * F.silu(z)
    return _with_tie(out, incoming if scans.carries else hidden_states)


#: Runs that differ by less are scanned side by side, a token of each at a time.
_SELECTIVE_CHUNK = 64


def _not_fused(*_: Any, **__: Any) -> None:
    """In place of kernels that do convolution and scan in one, and hide both."""
    return None


# ---- Layers.


@dataclass(frozen=True)
class _Form:
    """How a family's layers are made: names that their forward calls, and what they
    compute."""

    table: dict[str, Any]  #: functions of the module, and what stands in for each
    recurrence: Callable[[Any], Recurrence]
    #: Called where the layer is trained, if there is a kernel; kept off.
    fused: tuple[str, ...] = ()
    #: Whether the forward hands its keyword arguments on to those functions.
    hands_on: bool = True
    by_token: bool = False  #: see `Recipe`


def _forward(module: Any, own: Function, *arguments: Any, **options: Any) -> Any:
    """In place of a layer's `forward`, which is `own`."""
    if not isinstance(options.get(KEYWORD), LocalAttention):
        raise not_sharded(module)
    for name in ("cache_params", "past_key_values"):
        if options.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__}: got a cache, which would hold this rank's tokens "
                f"alone; pass use_cache=False, as shard does"
            )
    with in_layer_of(module):
        return own(module, *arguments, **options)


class _Handing:
    """A forward that does not hand its keyword arguments on to the functions that it calls:
    while it runs, those find our batch here. One for each layer, so for each rank, and for
    each copy of a layer."""

    def __init__(self, forward: Function, table: dict[str, Function]) -> None:
        self._forward, self._table = forward, table
        self._local: LocalAttention | None = None
        names = {name: functools.partial(self._given, ours) for name, ours in table.items()}
        self._own = rebound(forward, names)

    def __call__(self, module: Any, *arguments: Any, **options: Any) -> Any:
        before, self._local = self._local, options[KEYWORD]
        try:
            return self._own(module, *arguments, **options)
        finally:
            self._local = before

    def _given(self, ours: Function, *arguments: Any, **options: Any) -> Any:
        return ours(*arguments, **{**options, KEYWORD: self._local})

    def __deepcopy__(self, _: Any) -> _Handing:
        return _Handing(self._forward, self._table)


def _named(function: Any, kind: Any) -> Any:
    """A forward that says whose it is, as every method does."""
    function.__name__, function.__qualname__ = "forward", kind.forward.__qualname__
    return function


class _StandIn:
    """A module, but for a child that is handed one keyword argument more."""

    def __init__(self, module: Any, name: str, child: Any) -> None:
        self.__dict__[name] = child
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def _hand_on(module: Any, child: str, *arguments: Any, **options: Any) -> Any:
    """In place of the forward of a module that drops keyword arguments on the way."""
    local, own = options.get(KEYWORD), kind_of(module).forward
    if local is None:
        return own(module, *arguments, **options)
    held = getattr(module, child)
    given = {KEYWORD: local}
    if isinstance(held, torch.nn.ModuleList):
        partial: Any = [functools.partial(one, **given) for one in held]
    else:
        partial = functools.partial(held, **given)
    return own(_StandIn(module, child, partial), *arguments, **options)


def _redirect_on(child: str, name: str, module: Any, state: Parallelized) -> None:
    if "forward" in vars(module):
        raise NotImplementedError(
            f"parallelize: `forward` of '{name or type(module).__name__}' was replaced already, so "
            f"what it does is not known; put the family's own back first"
        )
    forward = functools.partial(_hand_on, module, child)
    state.replace(module, "forward", _named(forward, kind_of(module)))


def _redirect(form: _Form, name: str, module: Any, state: Parallelized) -> None:
    if "forward" in vars(module):
        raise NotImplementedError(
            f"parallelize: `forward` of '{name}' was replaced already, so what it does is not "
            f"known; put the family's own back first"
        )
    kind = kind_of(module)
    pair = form.recurrence(module).pair
    try:
        table: dict[str, Function] = {
            seam: functools.partial(ours, own, is_kernel=_is_kernel(own), pair=pair)
            for seam, ours, own in (
                (seam, ours, named_in(kind.forward, seam)) for seam, ours in form.table.items()
            )
        }
        table |= dict.fromkeys(form.fused, _not_fused)
        made = (rebound if form.hands_on else _Handing)(kind.forward, table)
    except CannotRebind as error:
        import transformers

        raise NotImplementedError(
            f"parallelize: the forward of '{name}' ({kind.__name__}) of transformers "
            f"{transformers.__version__} {error}, so its states cannot be carried over ranks"
        ) from error
    state.replace(module, "forward", _named(functools.partial(_forward, module, made), kind))


def _layer(form: _Form, name: str, module: Any) -> AttentionLayer:
    made = form.recurrence(module)
    return AttentionLayer(
        name=name,
        heads=made.heads,
        key_heads=made.heads,
        head_dim=made.rows,
        value_dim=made.columns,
        recurrence=made,
    )


def _short_convolution(module: Any) -> Recurrence:
    return Recurrence(module.conv_kernel_size, module.conv.in_channels)


def _delta(heads: str, keys: str, values: str) -> Callable[[Any], Recurrence]:
    """Of delta rules, whose modules have their numbers under these names."""

    def made(module: Any) -> Recurrence:
        return Recurrence(
            module.conv_kernel_size,
            module.conv_dim,
            transition="matrix",
            heads=getattr(module, heads),
            rows=getattr(module, keys),
            columns=getattr(module, values),
            chunk=64,
        )

    return made


def _mamba2(module: Any) -> Recurrence:
    return Recurrence(
        module.conv_kernel_size,
        module.conv_dim,
        transition="number",
        heads=module.num_heads,
        rows=module.head_dim,
        columns=module.ssm_state_size,
        chunk=module.chunk_size,
    )


def _selective(module: Any) -> Recurrence:
    return Recurrence(
        module.conv_kernel_size,
        module.conv1d.in_channels,
        transition="vector",
        heads=module.intermediate_size,
        rows=module.ssm_state_size,
        chunk=_SELECTIVE_CHUNK,
        doubles=True,
    )


_CONV = {"causal_conv1d_fn": _convolve}
_SHORT = _Form(_CONV, recurrence=_short_convolution)
_GATED = _Form(
    {**_CONV, "torch_chunk_gated_delta_rule": _delta_rule},
    recurrence=_delta("num_v_heads", "head_k_dim", "head_v_dim"),
)
_KIMI = _Form(
    {**_CONV, "chunk_kimi_delta_attention": _delta_rule},
    recurrence=_delta("num_heads", "head_dim", "head_dim"),
)
_MAMBA2 = _Form(
    {**_CONV, "mamba2_chunk_scan": _mamba2_scan},
    fused=("mamba2_split_conv1d_scan_combined",),
    recurrence=_mamba2,
)
_MAMBA = _Form(
    {**_CONV, "mamba_selective_scan": _selective_scan},
    fused=("mamba_inner_fn",),
    recurrence=_selective,
    hands_on=False,
    by_token=True,
)
_UNFUSED = dataclasses.replace(_MAMBA, fused=())
_LINEAR = frozenset({"linear_attention", "full_attention"})


def _recipe(
    family: str, folder: str, kind: str, form: _Form, kinds: frozenset[str] = _LINEAR
) -> Recipe:
    return Recipe(
        family=family,
        attention=f"transformers.models.{folder}.modeling_{folder}.{kind}",
        layer_kinds=kinds,
        layer=functools.partial(_layer, form),
        redirect=functools.partial(_redirect, form),
        carries=True,
        by_token=form.by_token,
    )


def _way(folder: str, kind: str, child: str) -> Recipe:
    """For modules on the way to layers."""
    return Recipe(
        family=f"{folder} {kind}",
        attention=f"transformers.models.{folder}.modeling_{folder}.{kind}",
        layer_kinds=frozenset(),
        layer=None,
        redirect=functools.partial(_redirect_on, child),
    )


RECIPES = (
    _recipe("LFM2", "lfm2", "Lfm2ShortConv", _SHORT, frozenset({"conv", "full_attention"})),
    _recipe("LFM2-MoE", "lfm2_moe", "Lfm2MoeShortConv", _SHORT, frozenset({"conv"})),
    _recipe("Qwen3-Next", "qwen3_next", "Qwen3NextGatedDeltaNet", _GATED),
    _recipe("Qwen3.5", "qwen3_5", "Qwen3_5GatedDeltaNet", _GATED),
    _recipe("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5MoeGatedDeltaNet", _GATED),
    _recipe("OLMo hybrid", "olmo_hybrid", "OlmoHybridGatedDeltaNet", _GATED),
    _recipe("Kimi-Linear", "kimi_linear", "KimiLinearDeltaAttention", _KIMI),
    _recipe("Bailing hybrid", "bailing_hybrid", "BailingHybridDeltaAttention", _KIMI),
    _recipe("Mamba 2", "mamba2", "Mamba2Mixer", _MAMBA2),
    _recipe("Bamba", "bamba", "BambaMixer", _MAMBA2),
    _recipe("Falcon-H1", "falcon_h1", "FalconH1Mixer", _MAMBA2, frozenset({"hybrid"})),
    _recipe("Granite hybrid", "granitemoehybrid", "GraniteMoeHybridMambaLayer", _MAMBA2),
    _recipe(
        "Nemotron-H",
        "nemotron_h",
        "NemotronHMamba2Mixer",
        _MAMBA2,
        frozenset({"linear_attention", "moe", "mlp"}),
    ),
    _recipe(
        "Zamba 2", "zamba2", "Zamba2MambaMixer", _MAMBA2, frozenset({"linear_attention", "hybrid"})
    ),
    _way("mamba2", "Mamba2ForCausalLM", "backbone"),
    _recipe("Mamba", "mamba", "MambaMixer", _MAMBA),
    _way("mamba", "MambaForCausalLM", "backbone"),
    _way("mamba", "MambaModel", "layers"),
    _way("mamba", "MambaBlock", "mixer"),
    _recipe("Falcon-Mamba", "falcon_mamba", "FalconMambaMixer", _MAMBA),
    _way("falcon_mamba", "FalconMambaForCausalLM", "backbone"),
    _way("falcon_mamba", "FalconMambaModel", "layers"),
    _way("falcon_mamba", "FalconMambaBlock", "mixer"),
    _recipe("Jamba", "jamba", "JambaMambaMixer", _UNFUSED),
    _way("jamba", "JambaMambaDecoderLayer", "mamba"),
    _recipe(
        "Zamba", "zamba", "ZambaMambaMixer", _UNFUSED, frozenset({"linear_attention", "hybrid"})
    ),
)
