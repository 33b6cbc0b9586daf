"""Multi-token prediction: layers behind a model that foretell the tokens after the next one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from longspan import _C, _transformers
from longspan._agreement import Agreement
from longspan._arguments import check_kind, said
from longspan._local_batch import KEYWORD, LocalBatch
from longspan._models import state_of
from longspan._recipes import recipes_in
from longspan._rulers import IGNORED, loss_of

_WHO = "mtp_losses"


class MtpLosses(NamedTuple):
    """This rank's parts: summed over the group they are the losses of the whole batch."""

    loss: torch.Tensor  #: of the model itself
    depths: list[torch.Tensor]  #: of each layer of multi-token prediction


def mtp_losses(model: Any, mtp: Any, local: LocalBatch) -> MtpLosses:
    """The loss of a parallelized model and of each layer of its `MtpModel` of transformers, for
    a batch that `shard` cut with labels.

    Layer k takes the states of the one before (of the model, for k = 0) at each token, the id of
    the token k + 1 ahead, and that token's position, and foretells the token k + 2 ahead: all
    in the same document, wherever the ranks' shares end. Make the MtpModel from the parallelized
    model, so that its layers attend over the same ranks. Ends with an error where no document
    is long enough for a layer.
    """
    check_kind(_WHO, "model", model, torch.nn.Module, "a torch.nn.Module")
    state = state_of(_WHO, model)
    with Agreement(_WHO, state.group) as agreement:
        _check_mtp(mtp)
        attention = _attention_of(local)
        depths = len(mtp.layers)
        rows, counts = _looking_ahead(attention.whole.rows, depths)
        agreement.compare({"depths": depths})
    mine = attention.whole.cut(rows)
    if local.as_row:
        mine = {key: tensor.unsqueeze(0) for key, tensor in mine.items()}
    last = model.config.get_text_config().num_hidden_layers - 1
    out = model(**local, output_hidden_states=[last])
    states, losses = out.hidden_states[-1], []
    for depth in range(depths):
        states = mtp.forward_layer(
            depth,
            states,
            local["position_ids"] + depth + 1,
            None,
            input_ids=mine[f"ids_{depth}"].to(states.device),
            **{KEYWORD: attention},
        )
        logits = mtp._project_to_logits(states)
        targets = mine[f"labels_{depth}"].to(logits.device)
        losses.append(loss_of(logits, targets, counts[depth]))
    return MtpLosses(out.loss, losses)


def _attention_of(local: Any) -> Any:
    if not isinstance(local, LocalBatch) or KEYWORD not in local or "shift_labels" not in local:
        raise ValueError(
            f"{_WHO}: `local` is {said(local)}; expected what shard(batch, group, model=model) "
            f"made of a batch with labels"
        )
    if "input_ids" not in local:
        raise ValueError(
            f"{_WHO}: layers look up the ids of tokens ahead; give input_ids and not embeddings"
        )
    return local[KEYWORD]


def _check_mtp(mtp: Any) -> None:
    if not isinstance(mtp, torch.nn.Module) or not callable(getattr(mtp, "forward_layer", None)):
        raise TypeError(
            f"{_WHO}: `mtp` is {said(mtp)}; expected a transformers.modeling_layers.MtpModel"
        )
    for name, _, recipe in recipes_in(mtp):
        raise NotImplementedError(
            f"{_WHO}: '{name}' is a layer of {recipe.family}, and transformers runs plain "
            f"attention alone behind a model; where the family has it, set mtp_layer_types to "
            f"'full_attention' before the MtpModel is made"
        )
    for name, module in mtp.named_modules():
        if _transformers.is_attention(module) and not _transformers.is_redirected(module):
            raise ValueError(
                f"{_WHO}: '{name}' of the MtpModel attends to this rank's tokens alone; make the "
                f"MtpModel after longspan.parallelize(model, group), from that model"
            )


def _looking_ahead(rows: _C.RowBatch, depths: int) -> tuple[_C.RowBatch, list[int]]:
    """Rows with the ids and labels of every depth, and how many targets each has."""
    longest = max((real.end - real.begin for _, real, _ in rows.documents), default=0)
    if longest < depths + 1:
        raise ValueError(
            f"{_WHO}: layer {depths - 1} foretells the token {depths + 1} ahead, and the longest "
            f"document has {longest} tokens; give longer documents or fewer layers"
        )
    unshifted = "labels" in dict(rows.tokens)
    if unshifted:  # those of pads between documents are nobody's
        rows = _C.clear_pads(rows, "labels")
    counts = []
    for depth in range(depths):
        ids, labels = f"ids_{depth}", f"labels_{depth}"
        rows = _C.shift_left(rows, "input_ids", ids, depth + 1, True)
        key, steps = ("labels", depth + 2) if unshifted else ("shift_labels", depth + 1)
        rows = _C.clear_pads(_C.shift_left(rows, key, labels, steps, True), labels)
        targets = dict(rows.tokens)[labels].ne(IGNORED).sum()
        counts.append(max(int(targets), 1))
    return rows, counts
