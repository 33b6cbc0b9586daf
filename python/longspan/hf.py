"""Trainers of Hugging Face over ranks: `transformers.Trainer`, TRL's `SFTTrainer`, and classes
derived from them.

    trainer = longspan.hf.trainer(Trainer, group=group)(model=model, args=args, ...)
    trainer.train()

What a script does with one process stays as it is; the ranks of `group` hold each sequence
together. See docs/trainers.md.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from longspan import _transformers
from longspan._arguments import check_kind, said, wrong
from longspan._batch import Reading, shard, unshard
from longspan._clipping import clip_grad_norm
from longspan._gradients import sum_gradients
from longspan._group import Group
from longspan._local_batch import LocalBatch
from longspan._losses import total_loss
from longspan._model_batch import (
    check_group,
    counted_from_zero,
    documents_of_seq_idx,
    with_targets,
)
from longspan._model_inputs import check_divisor
from longspan._models import find_state, parallelize
from longspan._prefill import prefill
from longspan._randomness import seed_ranks
from longspan._replicas import Replicas, mapped

__all__ = ["TrainerMixin", "prefill", "trainer"]

_WHO = "TrainerMixin"
#: Classes whose compute_loss is a sum over tokens that are scored one by one, divided by
#: the number of targets it is told.
_KNOWN_LOSSES = (("transformers.trainer", "Trainer"), ("trl.trainer.sft_trainer", "SFTTrainer"))
_STEPS_IN_BACKWARD = (
    "which steps inside backward, before gradients are summed over the ranks of a sequence; use "
    "one that steps after it, such as 'adamw_torch' or 'adafactor'"
)
_Behind: Any = object  # whatever trainer stands behind the mixin


def trainer(trainer_class: Any, group: Any = None, **options: Any) -> Any:
    """A class derived from a trainer's whose sequences lie on the ranks of `group`, all ranks
    by default; the rest of the world are replicas. `options` go to `parallelize`, which
    it calls itself."""
    if not isinstance(trainer_class, type) or not _is_trainer(trainer_class):
        raise wrong(
            "trainer", "trainer_class", trainer_class, "a class derived from transformers.Trainer"
        )
    over = None if group is None else Group.of(group)
    _check_options("trainer", options)
    body = {"_wish": over, "_options": options, "__doc__": trainer_class.__doc__}
    kinds = (
        (trainer_class,)
        if issubclass(trainer_class, TrainerMixin)
        else (
            TrainerMixin,
            trainer_class,
        )
    )
    return type(f"{trainer_class.__name__}OverRanks", kinds, body)


class TrainerMixin(_Behind):  # type: ignore[misc]
    """Before `transformers.Trainer` among the bases of a class, it trains with every sequence
    on the ranks of `group`: ``class Mine(longspan.hf.TrainerMixin, Trainer)``, made as
    ``Mine(..., group=group, parallelize={"strategy": "ring"})``. Without a group it is that of
    a model that is parallelized already, or all ranks."""

    #: Whether a `compute_loss` or `compute_loss_func` of one's own may be called: with this
    #: rank's share of the batch, for this rank's part of the loss.
    own_loss = False

    #: What stands in the trainer behind.
    label_smoother: Any
    _total_train_tokens: int

    _wish: Group | None = None
    _options: Mapping[str, Any] = {}

    def __init__(
        self,
        *arguments: Any,
        group: Any = None,
        parallelize: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> None:
        if not _is_trainer(type(self)):
            raise TypeError(
                f"{_WHO}: {type(self).__name__} has no transformers.Trainer among its bases; write "
                f"class Mine({_WHO}, Trainer)"
            )
        if group is not None:
            self._wish = Group.of(group)
        if parallelize is not None:
            check_kind(_WHO, "parallelize", parallelize, Mapping, "options of parallelize")
            _check_options(_WHO, parallelize)
            self._options = parallelize
        self._parallelized: Any = None
        self._goes_around = False
        self._check_loss(others.get("compute_loss_func"))
        super().__init__(*arguments, **others)
        self._check_loss(self.compute_loss_func)
        self._check_model()
        self._parallelize(self.model)
        if self.label_smoother is not None:
            self.label_smoother = _aligned(self.label_smoother)
        self.add_callback(_seeds(self.args.seed, self._replicas))

    # ---- Before training.

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._check_arguments()
        state = find_state(self.model) if isinstance(self.model, torch.nn.Module) else None
        group = self._wish
        if group is None:
            group = Group.from_environment() if state is None else state.group
        self._replicas = Replicas.around(_WHO, group)
        # Methods of this trainer's own accelerator: it knows ranks, and no replicas.
        self.accelerator.prepare_data_loader = self._prepare_data_loader
        self.accelerator.gather_for_metrics = self._gather_for_metrics
        self.gather_function = self._gather_for_metrics

    def _check_loss(self, function: Any) -> None:
        """Who makes the loss: of a rank's share nobody else may."""
        if self.own_loss:
            return
        own = [
            kind
            for kind in type(self).__mro__
            if "compute_loss" in vars(kind)
            and kind is not TrainerMixin
            and (kind.__module__, kind.__qualname__) not in _KNOWN_LOSSES
        ]
        if not own and function is None:
            return
        what = (
            f"compute_loss of {own[0].__name__} ({own[0].__module__})"
            if own
            else "`compute_loss_func`"
        )
        raise NotImplementedError(
            f"{_WHO}: {what} would get a rank's share of each sequence, and nobody knows whether "
            f"its values add up over ranks; losses of transformers.Trainer and trl.SFTTrainer do. "
            f"Where yours is a sum over tokens, divided by num_items_in_batch, of aligned "
            f"`shift_labels`, set own_loss = True in the class"
        )

    def _check_arguments(self) -> None:
        """What of a trainer's arguments cannot be right over ranks."""
        args, accelerator = self.args, self.accelerator
        config = getattr(accelerator, "parallelism_config", None)
        others = [
            name
            for name in ("tp_size", "cp_size", "sp_size")
            if config is not None and (getattr(config, name, 1) or 1) > 1
        ]
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        optim = str(getattr(args.optim, "value", args.optim))
        refusals = {
            "deepspeed, whose engine sums gradients by itself; use FSDP2 (fsdp=True)": (
                self.is_deepspeed_enabled
            ),
            "version 1 of FSDP, whose flat parameters hide the gradients; use version 2": (
                plugin is not None and getattr(plugin, "fsdp_version", 1) != 2
            ),
            f"ParallelismConfig with {', '.join(others)}; leave that to `group`": bool(others),
            "several GPUs in one process (DataParallel); start one process a GPU": args.n_gpu > 1,
            "dispatch_batches=True, by which one process deals batches out to all ranks; leave it "
            "out": bool(accelerator.dispatch_batches),
            "train_sampling_strategy='batch_rebalance', which deals out to ranks; use another": (
                getattr(args, "train_sampling_strategy", None) == "batch_rebalance"
            ),
            "neftune_noise_alpha, whose noise depends on the length of a rank's share; leave it "
            "out": args.neftune_noise_alpha is not None,
            "use_liger_kernel, which replaces forwards that were looked at; leave it out": bool(
                args.use_liger_kernel
            ),
            "eval_use_gather_object, which gathers every rank's copy; leave it out": bool(
                args.eval_use_gather_object
            ),
            f"optim='{optim}', {_STEPS_IN_BACKWARD}": (
                optim in ("lomo", "adalomo") or optim.endswith("layerwise")
            ),
        }
        for what, asked in refusals.items():
            if asked:
                raise NotImplementedError(f"{_WHO}: the arguments ask for {what}")

    def _check_model(self) -> None:
        name = type(self.model).__name__
        if not self.model_accepts_loss_kwargs:
            raise NotImplementedError(
                f"{_WHO}: {name} takes no num_items_in_batch (accepts_loss_kwargs is False), so "
                f"its loss would be that of a rank's share"
            )
        if getattr(self, "aux_loss_enabled", False):
            raise NotImplementedError(
                f"{_WHO}: {name} has experts, and {type(self).__name__} would make their router "
                f"loss from a rank's share; pass router_aux_loss_coef=0.0, or use "
                f"transformers.Trainer, where it is that of the whole batch"
            )

    def _parallelize(self, model: torch.nn.Module) -> None:
        """Unless it is; a forward that a trainer put into the whole model goes around it."""
        state = find_state(model)
        if state is not None and state is self._parallelized:
            return
        group = self._replicas.group
        if state is None:
            with _own_forwards_aside(model) as aside:
                self._check_tiles(aside)
                parallelize(model, group, **self._options)
        else:
            if self._options:
                raise ValueError(
                    f"{_WHO}: the model is parallelized already, so {', '.join(self._options)} "
                    f"would go unheard; leave them out, or give the plain model"
                )
            check_group(_WHO, state, group)
            try:
                _transformers.check_unchanged(state, model)
            except ValueError as error:
                raise ValueError(
                    f"{_WHO}: {type(self).__name__} changed a model that was parallelized before; "
                    f"give it the plain one, which it parallelizes itself ({error})"
                ) from None
        self._parallelized = find_state(model)

    def _check_tiles(self, aside: int) -> None:
        """Forwards that go around the model's leave out what it would do in its own."""
        self._goes_around = aside > 0
        for name, unheard in (("loss_tile", (None, "auto")), ("offload", (None,))):
            if aside and self._options.get(name) not in unheard:
                raise ValueError(
                    f"{_WHO}: {type(self).__name__} calls the layers of the model itself, and "
                    f"makes no whole logits, so `{name}` would go unheard; leave it out"
                )

    def _wrap_model(self, model: Any, *arguments: Any, **others: Any) -> Any:
        # A model_init has made another one meanwhile.
        self._parallelize(self.model)
        return super()._wrap_model(model, *arguments, **others)

    # ---- Batches.

    def _prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, **_: Any
    ) -> Any:
        given = self.accelerator.dataloader_config.data_seed
        seed = self.args.seed if given is None else given
        return self._replicas.loader(self.accelerator, seed, data_loader, device_placement)

    def _prepare_inputs(self, inputs: Any) -> Any:
        inputs = super()._prepare_inputs(inputs)
        return inputs if isinstance(inputs, LocalBatch) else self._share_of(inputs)

    def _share_of(self, inputs: Mapping[str, Any]) -> LocalBatch:
        local = shard(inputs, self._replicas.group, model=self.model)
        if "shift_labels" in local:
            local["labels"] = local["shift_labels"]  # for whoever would shift them again
        if self.label_smoother is not None or self.own_loss:
            self._ask_for_logits(local)
        return local

    def _ask_for_logits(self, local: LocalBatch) -> None:
        """Of a model that would make its loss in tiles."""
        tails = () if self._goes_around else getattr(self._parallelized.tiles, "tails", ())
        if any(not isinstance(tail, str) for tail in tails):
            local["output_logits"] = True

    def _get_num_items_in_batch(self, batch_samples: Sequence[Any], device: Any) -> Any:
        """The targets of these batches, as `shard` will find them."""
        first = self._parallelized.first_position
        counts = [_targets_of(batch, first) for batch in batch_samples]
        if not counts or any(count is None for count in counts):
            return None
        total = torch.stack([torch.as_tensor(count).to(device) for count in counts]).sum()
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            total = self.accelerator.gather(total).sum() // self._replicas.group.size()
        return total.clamp(min=1)

    def get_total_train_batch_size(self, args: Any) -> int:
        every: int = super().get_total_train_batch_size(args)
        return every // self._replicas.group.size()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self._replicas.group.size()

    def floating_point_ops(self, inputs: Any) -> Any:
        return super().floating_point_ops(inputs) / self._replicas.group.size()

    # ---- A step.

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **others: Any,
    ) -> Any:
        """This rank's part: summed over the ranks of a sequence, and averaged over replicas,
        the loss that one process has."""
        if not isinstance(inputs, LocalBatch):
            inputs = self._share_of(inputs)
        replicas = self._replicas
        # Trainers multiply by the number of ranks, over which wrappers take the mean.
        excess = replicas.group.size()
        if num_items_in_batch is None:
            num_items_in_batch = inputs.get("num_items_in_batch")
            excess *= replicas.count
        if num_items_in_batch is not None:
            check_divisor(_WHO, num_items_in_batch)
        tokens = getattr(self, "_total_train_tokens", None)
        answer = super().compute_loss(model, inputs, return_outputs, num_items_in_batch, **others)
        loss, outputs = answer if return_outputs else (answer, None)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss / excess
        if tokens is not None:
            self._count_tokens(tokens, inputs)
        return (loss, outputs) if return_outputs else loss

    def _count_tokens(self, before: int, local: LocalBatch) -> None:
        """TRL counts tokens by the shapes of what it is given."""
        if self._total_train_tokens == before:
            return  # in evaluation it does not
        own = sum(packing.real_tokens for packing in local.cut.packings)
        every = self.accelerator.gather(torch.tensor(own, device=self.args.device)).sum()
        self._total_train_tokens = before + int(every) // self._replicas.group.size()
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]

    def training_step(self, model: Any, *arguments: Any, **others: Any) -> Any:
        if getattr(self.accelerator, "has_lomo_optimizer", False):
            raise NotImplementedError(
                f"{_WHO}: the optimizer is one of lomo_optim, {_STEPS_IN_BACKWARD}"
            )
        loss = super().training_step(model, *arguments, **others)
        if self.accelerator.sync_gradients:
            sum_gradients(model, self._replicas.group)
        return total_loss(loss, self._replicas.group)

    def _clip_grad_norm(self, model: Any) -> Any:
        self.accelerator.unscale_gradients()
        return clip_grad_norm(model, self.args.max_grad_norm, self._replicas.group)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            self.accelerator.unscale_gradients()
            grad_norm = clip_grad_norm(model, float("inf"), self._replicas.group)
        return grad_norm

    # ---- Evaluation.

    def prediction_step(
        self,
        model: Any,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """The loss of the whole batch, and whole logits beside whole labels, on every rank."""
        whole = super()._prepare_inputs(inputs)
        local = whole if isinstance(whole, LocalBatch) else self._share_of(whole)
        if not prediction_loss_only:
            self._ask_for_logits(local)
        loss, logits, labels = super().prediction_step(
            model, local, prediction_loss_only, ignore_keys=ignore_keys
        )
        if loss is not None:
            loss = total_loss(loss, self._replicas.group)
        if logits is not None:
            logits = mapped(functools.partial(_whole, local=local), logits)
        if labels is not None:
            labels = whole["labels"] if "labels" in whole else whole["shift_labels"]
        return loss, logits, labels

    def _gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return self._replicas.gathered(self.accelerator, input_data)


def _is_trainer(kind: type) -> bool:
    return any(
        (base.__module__, base.__qualname__) == ("transformers.trainer", "Trainer")
        for base in kind.__mro__
    )


def _check_options(who: str, options: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(parallelize).parameters if name != "model"]
    known.remove("group")
    for name in options:
        if name not in known:
            raise TypeError(
                f"{who}: `{name}` is no option of parallelize, which has {', '.join(known)}"
            )


@contextlib.contextmanager
def _own_forwards_aside(model: torch.nn.Module) -> Iterator[int]:
    """TRL puts a head into the forward of the whole model, which scores tokens one by one, by
    `shift_labels`; what is proved and redirected is the model inside. Gives their number."""
    held = [
        (part, vars(part).pop("forward"))
        for part in _transformers.whole_models(model)
        if "forward" in vars(part)
    ]
    try:
        yield len(held)
    finally:
        for part, forward in held:
            vars(part)["forward"] = forward


def _targets_of(batch: Any, first_position: int) -> Any:
    """How many targets a batch holds; None where it has no labels."""
    if isinstance(batch, LocalBatch):
        return batch.get("num_items_in_batch")
    batch = documents_of_seq_idx(counted_from_zero(batch, first_position))
    rows, _ = Reading(who="shard").rows_of(batch)
    rows, found = with_targets(rows)
    return None if found is None else dict(rows.tokens)["shift_labels"].ne(-100).sum()


def _whole(tensor: torch.Tensor, local: LocalBatch) -> torch.Tensor:
    """An output of the model for all tokens; numbers, such as router losses, are parts."""
    if tensor.dim() == 0:
        return total_loss(tensor, local.group)
    rows = 1 if local.as_row else local.cut.rows
    if tensor.dim() < 2 or tuple(tensor.shape[:2]) != (rows, local.cut.local_tokens):
        raise ValueError(
            f"{_WHO}: the model answers with {said(tensor)} {list(tensor.shape)}, which has not "
            f"one entry for each of this rank's {rows} x {local.cut.local_tokens} tokens; name its "
            f"key in ignore_keys"
        )
    return unshard(tensor, local)


def _aligned(smoother: Any) -> Any:
    """A LabelSmoother for labels that were shifted before the cut."""

    class Aligned(type(smoother)):  # type: ignore[misc]
        def __call__(
            self, model_output: Any, labels: Any, shift_labels: bool = False, **others: Any
        ) -> Any:
            return super().__call__(model_output, labels, shift_labels=False, **others)

    return Aligned(epsilon=smoother.epsilon, ignore_index=smoother.ignore_index)


def _seeds(seed: int, replicas: Replicas) -> Any:
    """Lets every rank draw numbers of its own once parameters and loaders are there."""
    from transformers import TrainerCallback

    class Seeds(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            seed_ranks(seed, replicas.group, replicas.own)

    return Seeds()
