"""Tiny random decoders of Hugging Face transformers that know images, batches with images
in them, and what is right: the same model on each document alone."""

from __future__ import annotations

import dataclasses
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


#: Patches of a soft token, along each side.
POOLED = {"gemma4": 2, "gemma4_unified": 1}
_PATCH = 2


def with_eyes(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """The same with the tower that makes features of images."""
    name, _ = FAMILIES[family]
    sizes: dict[str, Any] = {"mm_embed_dim": 16, "mm_posemb_size": 16, "pooling_kernel_size": 1}
    sizes |= {"patch_size": _PATCH, "output_proj_dims": 16}
    if family == "gemma4":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
        sizes |= {"patch_size": _PATCH, "pooling_kernel_size": 2, "position_embedding_size": 16}
    config = whole(family).config
    config.vision_config = getattr(transformers, name + "VisionConfig")(**sizes)
    made = getattr(transformers, name + "ForConditionalGeneration")(config)
    return with_random_weights(made, dtype)


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


# ---- Pictures whose features towers make.


@dataclasses.dataclass(frozen=True)
class Pictures:
    """A batch with pixels, the same documents one by one, and where they lie."""

    batch: dict[str, Any]
    alone: tuple[dict[str, Any], ...]
    documents: tuple[Document, ...]


#: Text is a number of tokens; a picture so many soft tokens wide and high, and its kind.
Segment = int | tuple[int, int, str]
_KEYS = {
    "image": (1, _IMAGE, "pixel_values", "image_position_ids"),
    "video": (2, _IMAGE - 1, "pixel_values_videos", "video_position_ids"),
}


def pictured(family: str, *rows: list[list[Segment]]) -> Pictures:
    """Rows of documents, each of segments. Shorter pictures are padded with patches."""
    pooled = POOLED[family]
    most = pooled**2 * max(
        s[0] * s[1] for row in rows for document in row for s in document if isinstance(s, tuple)
    )
    random = torch.Generator().manual_seed(11)
    made, documents, alone = [], [], []
    for at, row in enumerate(rows):
        begin = 0
        for document in row:
            parts = [_segment(one, pooled, most, random) for one in document]
            one = {key: torch.cat([p[key] for p in parts if key in p], -1) for key in _TOKENS}
            for _, _, values, positions in _KEYS.values():
                found = [p for p in parts if values in p]
                if found:
                    one[values] = torch.stack([p[values] for p in found])
                    one[positions] = torch.stack([p[positions] for p in found])
            size = len(one["input_ids"])
            documents.append(Document(at, begin, begin + size))
            alone.append(one)
            begin += size
        made.append(alone[len(alone) - len(row) :])
    batch: dict[str, Any] = {
        key: torch.stack([torch.cat([d[key] for d in row]) for row in made]) for key in _TOKENS
    }
    batch["position_ids"] = torch.stack(
        [torch.cat([torch.arange(len(d["input_ids"])) for d in row]) for row in made]
    )
    for _, _, values, positions in _KEYS.values():
        for key in (values, positions):
            if any(key in d for d in alone):
                batch[key] = torch.cat([d[key] for d in alone if key in d])
    return Pictures(batch, tuple(alone), tuple(documents))


_TOKENS = ("input_ids", "labels", KINDS)


def _segment(
    segment: Segment, pooled: int, most: int, random: torch.Generator
) -> dict[str, Tensor]:
    if isinstance(segment, int):
        ids = torch.randint(3, _IMAGE - 2, (segment,), generator=random)
        return {"input_ids": ids, "labels": ids, KINDS: torch.zeros_like(ids)}
    width, height, kind = segment
    number, token, values, positions = _KEYS[kind]
    ids = torch.full((width * height,), token)
    grid = torch.cartesian_prod(torch.arange(height * pooled), torch.arange(width * pooled))
    places = torch.full((most, 2), -1)
    places[: len(grid)] = grid.flip(-1)
    pixels = torch.rand(most, 3 * _PATCH**2, generator=random, dtype=torch.float64)
    pixels[len(grid) :] = 0
    return {
        "input_ids": ids,
        "labels": torch.full_like(ids, IGNORED),
        KINDS: torch.full_like(ids, number),
        values: pixels,
        positions: places,
    }


def answer_of_pictures(model: Any, case: Pictures) -> Answer:
    """Every document alone with its own pictures, by transformers (SDPA). Features of videos
    are made beside, since its forward does not hand on how many frames a video has."""

    def shifted(labels: Tensor) -> Tensor:
        made = torch.full_like(labels, IGNORED)
        made[:-1] = labels[1:]
        return made

    whole_rows = [shifted(row) for row in case.batch["labels"]]
    targets = [whole_rows[d.row][d.begin : d.end] for d in case.documents]
    count = sum(int(one.ne(IGNORED).sum()) for one in targets)
    loss, logits = 0.0, []
    for one, target in zip(case.alone, targets, strict=True):
        given = {key: one[key][None] for key in ("input_ids", KINDS)}
        features = {}
        for kind, (_, _, values, positions) in _KEYS.items():
            if values in one:
                features[kind] = model.model.get_image_features(
                    one[values], one[positions], return_dict=True
                )
        out = model(
            **given,
            mm_encoder_outputs=features or None,
            labels=target[None],
            shift_labels=target[None],
            num_items_in_batch=count,
            use_cache=False,
        )
        out.loss.backward()
        loss += out.loss.item()
        logits.append(out.logits[0].detach())
    return Answer(loss, gradients_of(model), tuple(logits))
