"""Batches and contexts for context parallelism: the dispatcher and the TE path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed
import torch.distributed.tensor.parallel
from torch import Tensor, nn

import longspan
from longspan.compat.nemo import _nemo
from longspan.compat.nemo._batch import (
    Batch,
    Mesh,
    check_axis,
    check_rank,
    check_rows,
    integer,
    mesh_size,
    pad_axis,
    pads_of_attention_mask,
    positions_into,
    primary_of,
    rank_in,
    required,
    shape_of,
    submesh,
    tensor_at,
    unchanged_on_error,
)
from longspan.compat.nemo._context import TokenShardContext
from longspan.compat.nemo._edge import public
from longspan.compat.nemo._gather import gather
from longspan.compat.nemo._ranks import STRATEGIES, attach, group_of, inside
from longspan.compat.nemo._stream import streams_of
from longspan.compat.nemo._strict import is_strict
from longspan.compat.nemo._te import (
    carried_loss_mask,
    carrying_loss_mask,
    offsets_on_host,
    share_stream,
    share_streams,
)

__all__ = [
    "attach_context_parallel_hooks",
    "attach_cp_sdpa_hooks",
    "create_context_parallel_ctx",
    "gather_cp_seq",
    "get_train_context",
    "make_cp_batch_and_ctx",
    "make_cp_batch_for_te",
    "make_target_cp_ctx",
]

ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]

# What the default path appends to tensors that are not floating; those get 0.
_PAD_VALUES = {
    "input_ids": 0,
    "labels": -100,
    "position_ids": 0,
    "loss_mask": 0,
    "padding_mask": True,
}


@public
def _build_position_ids(batch: Batch, device: torch.device | str | None) -> Batch:
    """Adds `position_ids` [1, S] that count from 0, if there are none."""
    if "position_ids" not in batch:
        who = "_build_position_ids"
        ids = tensor_at(who, "input_ids", required(who, batch, "input_ids"))
        if ids.dim() < 2:
            raise ValueError(f"{who}: `input_ids` is {shape_of(ids)}; expected [rows, tokens]")
        counted = torch.arange(ids.shape[1], device=device)
        batch["position_ids"] = counted.unsqueeze(0)
    return batch


def attach_context_parallel_hooks(model: nn.Module) -> None:
    """Makes every `self_attn` causal instead of masked.

    A full-length mask does not fit sharded queries and keys, so a mask passed by
    keyword becomes None and `is_causal` becomes True.
    """

    def causal_instead_of_masked(
        module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if "attention_mask" in kwargs:
            kwargs["attention_mask"] = None
            kwargs["is_causal"] = True
        return args, kwargs

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(
                causal_instead_of_masked, prepend=True, with_kwargs=True
            )


@public
def attach_cp_sdpa_hooks(model: nn.Module, cp_mesh: Mesh) -> None:
    """Runs the attention of every `self_attn` over the ranks, compiled or not.

    Inside a context the context's own layout and pads hold. Elsewhere inputs are
    head-tail shards, causal. Attaching again replaces the mesh, which is asked for its
    group when a module first attends outside of a context.
    """
    if mesh_size(cp_mesh) <= 1:
        return
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            # Inside an activation checkpoint, so that recomputation is covered too.
            inner = getattr(module, "_checkpoint_wrapped_module", module)
            attach("attach_cp_sdpa_hooks", inner, cp_mesh)


@public
def create_context_parallel_ctx(
    cp_mesh: Mesh,
    cp_buffers: list[Tensor],
    cp_seq_dims: list[int],
    cp_no_restore_buffers: set[Tensor],
    cp_rotate_method: str | None = None,
) -> contextlib.AbstractContextManager[Any]:
    """The context in which buffers are head-tail shards and attention is over ranks.

    Entering turns the very tensor objects into shards. Leaving, also by an error,
    gives all but `cp_no_restore_buffers` their full tokens back.
    """
    who = "create_context_parallel_ctx"
    buffers = [] if cp_buffers is None else list(cp_buffers)
    dims = [] if cp_seq_dims is None else list(cp_seq_dims)
    kept_local = set() if cp_no_restore_buffers is None else cp_no_restore_buffers
    if len(buffers) != len(dims):
        raise ValueError(
            f"{who}: {len(buffers)} buffers but {len(dims)} sequence axes; "
            "give one axis for each buffer"
        )
    for buffer, axis in zip(buffers, dims, strict=True):
        check_axis(who, tensor_at(who, "cp_buffers", buffer), axis)
    known = {id(buffer) for buffer in buffers}
    for buffer in kept_local:
        if id(buffer) not in known:
            raise ValueError(
                f"{who}: cp_no_restore_buffers holds a tensor that is not one of "
                "the buffers; pass the very same objects"
            )
    if cp_rotate_method not in STRATEGIES:
        raise NotImplementedError(
            f"{who}: rotate method {cp_rotate_method!r}; there are "
            f"{' and '.join(repr(name) for name in STRATEGIES if name)}"
        )
    return TokenShardContext(
        who, cp_mesh, buffers, dims, set(kept_local), cp_rotate_method, "head-tail"
    )


@public
def gather_cp_seq(
    cp_mesh: Mesh, tensors: Sequence[Tensor], seq_dim: int, orig_len: int
) -> list[Tensor]:
    """Shards back to full length, trimmed to `orig_len` tokens, without gradient.

    Inside a context shards are in its layout, elsewhere contiguous.
    """
    who = "gather_cp_seq"
    orig_len = integer(who, "orig_len", orig_len)
    ranks = max(mesh_size(cp_mesh), 1)
    locals_ = []
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        axis = check_axis(who, tensor_at(who, "tensors", local), seq_dim)
        if not 0 <= orig_len <= ranks * local.shape[axis]:
            raise ValueError(
                f"{who}: cannot keep {orig_len} tokens of {shape_of(local)} on axis {axis}"
                + (f" and {ranks} ranks" if ranks > 1 else "")
            )
        locals_.append((local.detach(), axis))
    context = inside() if ranks > 1 else None
    order = None
    if context is not None and context.head_tail:
        for local, axis in locals_:
            if local.shape[axis] != context.local_tokens:
                raise ValueError(
                    f"{who}: {shape_of(local)} has {local.shape[axis]} tokens on axis {axis}, "
                    f"but shards of the context have {context.local_tokens}"
                )
        owned = [context.ownership.tokens_of(rank) for rank in range(ranks)]
        order = torch.cat(owned).argsort()
    whole = []
    for local, axis in locals_:
        group = group_of(who, cp_mesh) if ranks > 1 else longspan.Group()
        full = gather(who, local, axis, group)
        if order is not None:
            full = full.index_select(axis, order.to(full.device))
        whole.append(full.narrow(axis, 0, orig_len).contiguous())
    return whole


def get_train_context(
    enable_loss_parallel: bool,
    enable_compiled_autograd: bool,
    cp_context: contextlib.AbstractContextManager[Any] | None = None,
) -> ContextFactory:
    """A factory of the contexts of a training step, entered in order."""

    @contextlib.contextmanager
    def train_context() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if enable_loss_parallel:
                stack.enter_context(torch.distributed.tensor.parallel.loss_parallel())
            if enable_compiled_autograd:
                import torch._dynamo.utils as dynamo

                stack.enter_context(dynamo.maybe_enable_compiled_autograd(True))
            if cp_context is not None:
                if is_strict() or not isinstance(cp_context, TokenShardContext):
                    from torch.nn.attention import SDPBackend, sdpa_kernel

                    # torch's own context needs it, since the plain-math kernel cannot
                    # run on distributed tensors. Ours does not, and the switch holds
                    # for the whole process, other threads included.
                    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
                    stack.enter_context(sdpa_kernel(fused))
                stack.enter_context(cp_context)
            yield

    return train_context


@public
def make_cp_batch_and_ctx(
    device_mesh: Any,
    batch: Batch,
    loss_mask: Tensor | None = None,
    use_te: bool = False,
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
) -> tuple[ContextFactory, Batch]:
    """Prepares a batch for CP; a context factory and the batch.

    Dispatches to the model's own function, to the TE path, to nothing with one
    rank, or to the head-tail path, which pads to a multiple of twice the ranks.
    The head-tail and TE paths return a loss mask as `batch["loss_mask"]`; with one
    rank and without TE the batch stays as it is, and the caller's mask fits it.

    The head-tail batch is sharded when the factory's context is entered: its tensors
    become shards in place. An entry that requires gradients is replaced in the
    returned batch by its differentiable share, so read the batch inside the context.
    Attention there hides the batch's pads.
    """
    cp_mesh = submesh(device_mesh, "cp")
    tp_mesh = submesh(device_mesh, "tp")
    with unchanged_on_error("make_cp_batch_and_ctx", batch):
        make_batch = batch.pop("_cp_make_batch_fn", None)
        ranks = mesh_size(cp_mesh)
        if make_batch is not None and ranks > 1:
            made: tuple[ContextFactory, Batch] = make_batch(
                cp_mesh,
                tp_mesh,
                batch,
                loss_mask=loss_mask,
                padding_token_id=padding_token_id,
            )
            return made
        if use_te:
            with carrying_loss_mask(batch, None if is_strict() else loss_mask):
                return contextlib.nullcontext, make_cp_batch_for_te(
                    cp_mesh,
                    batch,
                    qkv_format="thd",
                    padding_token_id=padding_token_id,
                    num_chunks=num_chunks,
                    seq_lens_padding_value=seq_lens_padding_value,
                )
        if ranks <= 1:
            return contextlib.nullcontext, batch
        return _make_head_tail_batch(cp_mesh, ranks, batch, loss_mask), batch


def _make_head_tail_batch(
    cp_mesh: Mesh, ranks: int, batch: Batch, loss_mask: Tensor | None
) -> ContextFactory:
    """The default path: normalise, pad, write back, describe the buffers."""
    who = "make_cp_batch_and_ctx"
    strict = is_strict()
    mask = batch.pop("attention_mask", None)
    primary_key, primary = primary_of(who, batch)
    rows, length = primary.shape[:2]
    # A mask that is no tensor has no one meaning; like the reference, drop it.
    if isinstance(mask, Tensor) and not strict and batch.get("padding_mask") is None:
        pads, any_pad = pads_of_attention_mask(who, mask, look=True)
        check_rows(who, "attention_mask", pads, rows, length)
        if any_pad:
            batch["padding_mask"] = pads
    positions, axis = positions_into(who, batch, primary, expand=True)
    labels = check_rows(who, "labels", required(who, batch, "labels"), rows, length)
    buffers = [(primary_key, primary, 1), ("labels", labels, 1)]
    buffers.append(("position_ids", positions, axis))
    if loss_mask is not None:
        check_rows(who, "loss_mask", loss_mask, rows, length)
        buffers.append(("loss_mask", loss_mask, 1))
    padding = batch.get("padding_mask")
    if padding is not None:
        check_rows(who, "padding_mask", padding, rows, length)
        buffers.append(("padding_mask", padding, 1))

    count = _nemo.pads_for("head-tail", length, ranks)
    padded = [
        pad_axis(
            who,
            tensor,
            axis,
            count,
            0 if tensor.is_floating_point() else _PAD_VALUES.get(key, 0),
        )
        for key, tensor, axis in buffers
    ]
    for (key, _, _), tensor in zip(buffers, padded, strict=True):
        if key != "loss_mask" or not strict:
            batch[key] = tensor
    cp_ctx = create_context_parallel_ctx(
        cp_mesh=cp_mesh,
        cp_buffers=padded,
        cp_seq_dims=[axis for _, _, axis in buffers],
        cp_no_restore_buffers={
            tensor
            for (key, _, _), tensor in zip(buffers, padded, strict=True)
            if key != "position_ids"
        },
        cp_rotate_method="allgather",
    )
    if isinstance(cp_ctx, TokenShardContext) and not strict:
        cp_ctx.hide(batch.get("padding_mask"), length=length)
        cp_ctx.replace_in(batch)
    return get_train_context(False, False, cp_ctx)


@public
def make_cp_batch_for_te(
    cp_mesh: Mesh | None,
    batch: Batch,
    qkv_format: str = "thd",
    padding_token_id: int = 0,
    num_chunks: int = 1,
    seq_lens_padding_value: int = -1000,
) -> Batch:
    """Rows become a stream; each rank gets the head and tail of every document.

    The partition is this library's own: Transformer Engine need not be there.
    """
    who = "make_cp_batch_for_te"
    if qkv_format != "thd":
        raise ValueError(f"{who}: Currently only 'thd' format is supported, got {qkv_format!r}")
    streams = streams_of(
        who,
        batch,
        num_chunks,
        seq_lens_padding_value,
        padding_token_id,
        carried_loss_mask(batch),
    )
    ranks = mesh_size(cp_mesh)
    if cp_mesh is None or ranks <= 1:
        return streams.as_map()
    return share_streams(
        who,
        streams,
        ranks,
        _te_rank(who, cp_mesh),
        qkv_format=qkv_format,
        padding_token_id=padding_token_id,
    )


def _te_rank(who: str, cp_mesh: Mesh) -> int:
    rank = rank_in(cp_mesh.get_group(), torch.distributed)
    return check_rank(who, rank, mesh_size(cp_mesh))


@public
def _shard_thd_chunk_for_te(
    batch: Batch,
    cp_mesh: Mesh,
    qkv_format: str,
    seq_lens_padding_value: int,
    padding_token_id: int,
) -> Batch:
    """One stream's share of this rank; the given map's tensors become shares."""
    who = "_shard_thd_chunk_for_te"
    with unchanged_on_error(who, batch):
        cu = required(who, batch, "cu_seqlens")
        if cu is None:
            raise ValueError(
                f"{who}: BSHD format is not supported: `cu_seqlens` is null; "
                "convert the batch with process_input_for_thd first"
            )
        sentinel = integer(who, "seq_lens_padding_value", seq_lens_padding_value)
        lengths, offsets = offsets_on_host(who, cu, batch.get("cu_seqlens_padded"), sentinel)
        return share_stream(
            who,
            batch,
            mesh_size(cp_mesh),
            _te_rank(who, cp_mesh),
            qkv_format=qkv_format,
            offsets=offsets,
            padding_token_id=padding_token_id,
            lengths=lengths,
        )


@public
def make_target_cp_ctx(
    cp_mesh: Mesh, input_ids: Tensor, position_ids: Tensor | None = None
) -> tuple[contextlib.AbstractContextManager[Any], Tensor, Tensor, int]:
    """For a frozen target model: (context, ids, positions, original length).

    Both tensors are new, padded with 0 to a multiple of the ranks; the context
    shards them contiguously and, outside of strict, hides those pads. It knows no
    others unless told: `context.hide(padding_mask)` before entering.
    """
    who = "make_target_cp_ctx"
    tensor_at(who, "input_ids", input_ids)
    _, ids = primary_of(who, {"input_ids": input_ids})
    length = ids.shape[1]
    fields: Batch = {"position_ids": position_ids}
    positions, axis = positions_into(who, fields, ids, expand=True)
    if axis != 1:
        raise ValueError(
            f"{who}: `position_ids` is {shape_of(positions)}; expected {shape_of(ids)}"
        )
    positions = positions.to(ids.device)
    ranks = mesh_size(cp_mesh)
    count = _nemo.pads_for("contiguous", length, ranks) if ranks > 1 else 0
    if count > 0:
        ids = pad_axis(who, ids, 1, count, 0).contiguous()
        positions = pad_axis(who, positions, 1, count, 0).contiguous()
    else:
        ids = ids.clone(memory_format=torch.contiguous_format)
        positions = positions.clone(memory_format=torch.contiguous_format)
    context = TokenShardContext(
        who, cp_mesh, [ids, positions], [1, 1], {ids, positions}, None, "contiguous"
    )
    if not is_strict():
        context.hide(length=length)
    return context, ids, positions, length
