"""What TRL's SFTTrainer is compared by: cases that one process and many run alike."""

from __future__ import annotations

import os
import pathlib
import random
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import tokenizers
import transformers
import trl
from trainer_cases import COMMON, ROWS, adapted, llama, whole

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()


def tokenizer() -> Any:
    """A word is a token."""
    names = ["<pad>", "<bos>", "<eos>", *(f"w{number}" for number in range(3, 61))]
    model = tokenizers.models.WordLevel(
        {name: number for number, name in enumerate(names)}, unk_token="<pad>"
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        chat_template=_TALK,
    )


#: What the assistant says learns.
_TALK = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% endgeneration %} "
    "{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
)


def talks(count: int = 16) -> Any:
    """Conversations of two turns each."""
    turns = [(one["prompt"], one["completion"]) for one in rows(2 * count)]
    messages = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said.strip()}]
        for asked, said in turns
    ]
    return datasets.Dataset.from_list(
        [{"messages": messages[2 * at] + messages[2 * at + 1]} for at in range(count)]
    )


def rows(count: int = 16) -> Any:
    draw = random.Random(7)

    def words(length: int) -> str:
        return " ".join(f"w{draw.randrange(3, 61)}" for _ in range(length))

    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(draw.randrange(2, 9)),
                "completion": " " + words(draw.randrange(3, 14)),
            }
            for _ in range(count)
        ]
    )


CASES: dict[str, dict[str, Any]] = {
    "completions": {"gradient_accumulation_steps": 2},
    "padding free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": 24, "eval_packing": False},
    "dft": {"loss_type": "dft"},
    "assistant only": {"assistant_only_loss": True, "gradient_accumulation_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.2},
    "adapters": {},
}


def run(name: str, kind: Any, folder: pathlib.Path, replicas: int = 1) -> dict[str, Any]:
    """The logs, weights and evaluation of one training."""
    usual: dict[str, Any] = {
        **COMMON,
        "output_dir": str(folder / name.replace(" ", "_")),
        "bf16": False,
        "optim": "sgd",
        "per_device_train_batch_size": (1 if name == "packed" else ROWS) // replicas or 1,
        "per_device_eval_batch_size": ROWS // replicas,
        "learning_rate": 0.1,
    }
    data = talks if name == "assistant only" else rows
    trainer = kind(
        model=adapted() if name == "adapters" else llama(),
        args=trl.SFTConfig(**(usual | CASES[name])),
        train_dataset=data(),
        eval_dataset=data(8),
        processing_class=tokenizer(),
    )
    trainer.train()
    judged = trainer.evaluate()
    timed = ("runtime", "per_second", "total_flos", "preparation")
    logs = [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for line in [*trainer.state.log_history, judged]
    ]
    weights = {
        key: whole(parameter).detach().clone()
        for key, parameter in trainer.model.named_parameters()
        if parameter.requires_grad
    }
    return {"logs": logs, "weights": weights}
