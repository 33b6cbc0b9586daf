"""What trainers are compared by: cases that one process and many run alike."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from oracle.tiny_decoders import decoder, with_random_weights

#: Rows of a batch, over all replicas.
ROWS = 4
STEPS = 4
#: Arguments of every trainer.
COMMON: dict[str, Any] = {
    "use_cpu": True,
    "max_steps": STEPS,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 3,
}
LENGTHS = [19, 7, 24, 5, 12, 9, 17, 3, 21, 14, 6, 11, 8, 23, 10, 16]


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Documents of a seed; every fifth token is no target."""

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        draw = torch.Generator().manual_seed(7)
        self.rows = []
        for length in lengths:
            ids = torch.randint(3, 61, (length,), generator=draw)
            labels = ids.masked_fill(torch.arange(length) % 5 == 4, -100)
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """The same documents, again and again, of no known length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from Rows().rows


def padded(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Rows with pads on the right."""
    length = max(len(row["input_ids"]) for row in rows)

    def filled(key: str, value: int) -> torch.Tensor:
        return torch.stack(
            [
                torch.nn.functional.pad(row[key], (0, length - len(row[key])), value=value)
                for row in rows
            ]
        )

    mask = torch.arange(length) < torch.tensor([[len(row["input_ids"])] for row in rows])
    return {
        "input_ids": filled("input_ids", 0),
        "labels": filled("labels", -100),
        "attention_mask": mask.long(),
    }


def flattened(**options: Any) -> Callable[..., Any]:
    return transformers.DataCollatorWithFlattening(**options)


def llama() -> Any:
    return decoder("llama")


def experts() -> Any:
    return decoder("gpt_oss", output_router_logits=True, router_aux_loss_coef=0.3)


def adapted() -> Any:
    import peft

    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(decoder("llama"), config)


def in_float32() -> Any:
    return with_random_weights(decoder("llama"), torch.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    """One training, and how close ranks come to one process."""

    model: Callable[[], Any] = llama
    collator: Callable[..., Any] = padded
    dataset: Callable[[], Any] = Rows
    #: What one process trains with, where it would read the batch otherwise.
    alone: Callable[..., Any] | None = None
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-6


CASES = {
    "padded": Case(
        arguments={"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "non_padding"}
    ),
    "each its mean": Case(arguments={"average_tokens_across_devices": False}),
    "unclipped": Case(arguments={"max_grad_norm": 0.0}),
    "streamed": Case(dataset=Stream),
    "flattened": Case(collator=flattened()),
    "with offsets": Case(
        collator=flattened(return_flash_attn_kwargs=True, return_seq_idx=True), alone=flattened()
    ),
    "by seq_idx alone": Case(
        collator=flattened(return_seq_idx=True, return_position_ids=False), alone=flattened()
    ),
    "smoothed": Case(arguments={"label_smoothing_factor": 0.2}),
    "adapters": Case(model=adapted),
    "experts": Case(model=experts),
    "checkpointed": Case(
        arguments={
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        }
    ),
    "half": Case(model=in_float32, arguments={"bf16": True, "optim": "sgd"}, tolerance=3e-2),
}


def arguments(folder: pathlib.Path | str, replicas: int = 1, **options: Any) -> Any:
    usual: dict[str, Any] = {
        **COMMON,
        "output_dir": str(folder),
        "per_device_train_batch_size": ROWS // replicas,
        "per_device_eval_batch_size": ROWS // replicas,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
    }
    return transformers.TrainingArguments(**(usual | options))


def record(trainer: Any) -> dict[str, Any]:
    """What a training leaves: its logs, and the trained weights."""
    kept = ("loss", "grad_norm", "epoch", "num_input_tokens_seen", "train_loss", "learning_rate")
    logs = [
        {key: value for key, value in line.items() if key in kept}
        for line in trainer.state.log_history
        if "eval_loss" not in line
    ]
    weights = {
        name.replace("module.", ""): whole(parameter).detach().clone()
        for name, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    return {"logs": logs, "weights": weights}


def whole(tensor: Any) -> torch.Tensor:
    made: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return made


def run(name: str, kind: Any, folder: pathlib.Path | str, replicas: int = 1, **options: Any) -> Any:
    """Trains a case with this class of trainer; returns the trainer."""
    case = CASES[name]
    resume = options.pop("resume", None)
    collator = case.alone if case.alone and kind is transformers.Trainer else case.collator
    trainer = kind(
        model=case.model(),
        args=arguments(folder, replicas, **(case.arguments | options)),
        train_dataset=case.dataset(),
        data_collator=collator,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


HELD_OUT = [13, 6, 18, 4, 9, 15, 8, 11, 5]


def judged(trainer: Any, rows: int) -> dict[str, Any]:
    """What evaluation and prediction say about so many rows held out."""
    held_out = Rows(HELD_OUT[:rows])
    loss = trainer.evaluate(held_out)["eval_loss"]
    found = trainer.predict(held_out)
    return {"loss": loss, "logits": found.predictions, "labels": found.label_ids}


def loop(group: Any = None) -> dict[str, Any]:
    """The loop of docs/trainers.md with accelerate; plain torch without a group."""
    import accelerate

    import longspan

    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    if group is not None:
        longspan.parallelize(model, group)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, made)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=ROWS, collate_fn=padded)
    losses = []
    for batch in loader:
        if group is None:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            local = longspan.shard(batch, group, model=model)
            loss = model(**local).loss
            accelerator.backward(loss)
            longspan.sum_gradients(model, group)
            longspan.clip_grad_norm(model, 0.5, group)
            loss = longspan.total_loss(loss, group)
        optimizer.step()
        optimizer.zero_grad()
        losses.append({"loss": loss.item()})
    weights = {n.removeprefix("module."): p.detach() for n, p in model.named_parameters()}
    return {"logs": losses, "weights": weights}
