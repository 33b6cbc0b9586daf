"""Tiny random decoders of Hugging Face transformers that know images, batches with images
in them, and what is right: the same model on each document alone."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from oracle.tiny_decoders import (
    _BOTH_KINDS,
    _COMMON,
    IGNORED,
    WINDOW,
    Answer,
    Case,
    Document,
    gradients_of,
    packed,
    padded,
    with_random_weights,
)
from torch import Tensor

KINDS = "mm_token_type_ids"
_IMAGE = 60
_TEXT: dict[str, Any] = _COMMON | {
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": _BOTH_KINDS * 2,
    "global_head_dim": 16,
    "use_bidirectional_attention": "vision",
}
_IDS = {f"{kind}_token_id": _IMAGE - at for at, kind in enumerate(("image", "video", "audio"))}
_NO_TOWERS: dict[str, Any] = {"vision_config": None, "audio_config": None, **_IDS}

#: How each family is called, and what its text configuration adds.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "Gemma4",
        {
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": _COMMON["vocab_size"],
        },
    ),
    "gemma4_unified": ("Gemma4Unified", {}),
}


def whole(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A model that reads images, without the towers that would make their features: by
    itself it masks groups, which its text decoder alone does not."""
    name, more = FAMILIES[family]
    torch.manual_seed(0)
    text = getattr(transformers, name + "TextConfig")(**(_TEXT | more | options))
    config = getattr(transformers, name + "Config")(text_config=text, **_NO_TOWERS)
    model = getattr(transformers, name + "ForConditionalGeneration")(config)
    return with_random_weights(model, dtype)


def with_eyes(family: str) -> Any:
    """The same with the tower that makes features of images."""
    name, _ = FAMILIES[family]
    sizes: dict[str, Any] = {"mm_embed_dim": 16, "mm_posemb_size": 4}
    if family == "gemma4":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    config = whole(family).config
    config.vision_config = getattr(transformers, name + "VisionConfig")(**sizes)
    return getattr(transformers, name + "ForConditionalGeneration")(config)


def masks_of(model: Any, kinds: Tensor) -> list[Tensor]:
    """[S, S] of the first layer and the second for one document, as transformers makes them:
    it hands them to the text decoder."""
    made: list[Any] = []

    def keep(_: Any, __: Any, arguments: dict[str, Any]) -> None:
        made.append(arguments["attention_mask"])

    hook = model.model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.ones_like(kinds), mm_token_type_ids=kinds, use_cache=False)
    hook.remove()
    causal = torch.ones(kinds.shape[1], kinds.shape[1], dtype=torch.bool).tril()
    masks = (made[0][kind] for kind in _BOTH_KINDS)
    # None is causal: SDPA needs no mask for that.
    return [causal if mask is None else mask[0, 0] for mask in masks]


def text_of(model: Any) -> Any:
    """Its decoder with the head, as users are told to take it."""
    name = type(model).__name__.replace("ForConditionalGeneration", "ForCausalLM")
    with torch.device("meta"):
        decoder = getattr(transformers, name)(model.config.text_config)
    decoder.model, decoder.lm_head = model.model.language_model, model.lm_head
    return decoder


def with_images(case: Case, kinds: list[list[int]]) -> Case:
    return Case({**case.batch, KINDS: torch.tensor(kinds)}, case.documents)


#: An image longer than the window alone in its document and beside one that the next
#: document begins with, images of one token, two at once, at the end, and sound (3).
def rows() -> Case:
    first = [0, 1, 1, 1, 0, 0] + [1] * 8 + [1, 1, 0, 0, 2, 2, 1, 0, 1]
    second = [0] * 3 + [1] * 12 + [3, 0] + [2] * 4 + [1, 1]
    return with_images(packed([6, 8, 9], [21, 2]), [first, second])


def one() -> Case:
    return with_images(packed([19]), [[0, 0] + [1] * 14 + [0] * 3])


def left() -> Case:
    kinds = torch.zeros(3, 17, dtype=torch.long)
    kinds[0, 6:15], kinds[1, 12:], kinds[2, 2:16] = 1, 1, 2
    return with_images(padded([13, 5, 17], 17, "left"), kinds.tolist())


def short() -> Case:
    """Documents of one token, and shorter than the window, with images to their ends."""
    kinds = [1, 0, 1, 1, 1, 1, 1, 0, 2, 0, 1, 1]
    return with_images(packed([1, 4, 2, 1, 3, 1]), [kinds])


CASES = {"one": one, "rows": rows, "left": left, "short": short}


def embedded(model: Any, case: Case) -> dict[str, Any]:
    """The batch with features of images among the embeddings of words, and what words
    look up for each layer."""
    text = model.model.language_model
    kinds = case.batch[KINDS]
    ids = torch.where(kinds > 0, model.config.text_config.pad_token_id, case.ids)
    batch = {key: value for key, value in case.batch.items() if key != "input_ids"}
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        embeds = text.embed_tokens(ids)
        features = torch.randn(embeds.shape, generator=random, dtype=torch.float64)
        seen = (kinds > 0).unsqueeze(-1)
        batch["inputs_embeds"] = torch.where(seen, features.to(embeds.dtype), embeds)
        if getattr(text.config, "hidden_size_per_layer_input", None):
            batch["per_layer_inputs"] = text.get_per_layer_inputs(ids, None)
    return batch


def answer_of(model: Any, case: Case) -> Answer:
    """Every document alone with its own kinds of tokens, by transformers (SDPA)."""
    batch, targets = embedded(model, case), case.targets()
    count = targets.ne(IGNORED).sum()
    loss, logits = 0.0, []
    for d in case.documents:

        def alone(tensor: Tensor, d: Document = d) -> Tensor:
            return tensor[d.row : d.row + 1, d.begin : d.end]

        names = {"inputs_embeds", "per_layer_inputs", KINDS} & batch.keys()
        out = model(
            **{key: alone(batch[key]) for key in names},
            labels=alone(targets),
            shift_labels=alone(targets),
            num_items_in_batch=count,
            use_cache=False,
        )
        out.loss.backward()
        loss += out.loss.item()
        logits.append(out.logits[0].detach())
    return Answer(loss, gradients_of(model), tuple(logits))
