"""Images and videos of Gemma 4 over ranks.

The pixels of a batch come whole to every rank. Each image belongs to one rank, whose tower
makes its features; they travel to the ranks that own its soft tokens, and gradients come back
the same way. An image may lie across shares, and its features may all be needed elsewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan import _C
from longspan._arguments import said
from longspan._group import Group
from longspan._local_batch import KEYWORD, LocalBatch
from longspan._walking import Named, modules_in, remembered, walked
from longspan.comm import exchange_needed


@dataclasses.dataclass(frozen=True)
class Pixels:
    """Where a batch has pictures of one kind."""

    kind: str  #: in the words of `mm_encoder_outputs`
    values: str  #: [pictures, patches, channels]
    positions: str  #: [pictures, patches, 2], -1 where there is no patch
    token: str  #: the configuration's name of the id that soft tokens have


_KINDS = (
    Pixels("image", "pixel_values", "image_position_ids", "image_token_id"),
    Pixels("video", "pixel_values_videos", "video_position_ids", "video_token_id"),
)
#: Of the frames of videos, which travel one by one.
_NOT_NEEDED = "num_frames_per_video"
#: Keys of pictures and sound that no rank's share has as they are.
KEYS = (*(key for one in _KINDS for key in (one.values, one.positions)), _NOT_NEEDED)
_SOUND = ("input_features", "input_features_mask")


@dataclasses.dataclass(frozen=True)
class _Eyes:
    """What looks at pictures in a family, for transformers 5.22."""

    #: Modules beside the decoder, by their names in the model that holds them.
    towers: frozenset[str]
    #: Patches of a soft token.
    patches: Callable[[Any], int]


#: By the type of the whole model's configuration.
_FAMILIES = {
    "gemma4": _Eyes(
        frozenset({"vision_tower", "embed_vision", "audio_tower", "embed_audio"}),
        lambda config: int(config.vision_config.pooling_kernel_size) ** 2,
    ),
    "gemma4_unified": _Eyes(frozenset({"embed_vision", "embed_audio"}), lambda _: 1),
}


def has_eyes(config: Any) -> bool:
    """Whether towers of this model are understood."""
    return getattr(config, "model_type", "") in _FAMILIES


def is_tower(module: nn.Module, name: str) -> bool:
    """Whether a child of a model makes features of pictures or sound."""
    eyes = _FAMILIES.get(getattr(vars(module).get("config"), "model_type", ""))
    return eyes is not None and name in eyes.towers


def beside_towers(model: nn.Module, some: Iterable[Named] | None = None) -> Iterable[Named]:
    """Every module once, by name, or those of `some`, but for towers and what is in them: those
    see whole pictures, and no tokens that could be cut."""
    every = walked(model) if some is None else some
    hidden = _in_towers(model)
    return [one for one in every if id(one[1]) not in hidden] if hidden else every


@remembered
def configured(model: nn.Module) -> list[Named]:
    """Those of them that keep a configuration."""
    return list(beside_towers(model, _configured(model)))


@remembered
def _configured(model: nn.Module) -> list[Named]:
    return [one for one in walked(model) if "config" in one[1].__dict__]


@remembered
def _in_towers(model: nn.Module) -> set[int]:
    """The numbers (id) of modules that are in towers alone."""
    holders = [module for _, module in _configured(model)]
    configs = {id(config): config for config in (vars(one)["config"] for one in holders)}
    eyes = {number for number, config in configs.items() if has_eyes(config)}
    towers = {
        child
        for module in holders
        if id(vars(module)["config"]) in eyes
        for name, child in module._modules.items()
        if child is not None and is_tower(module, name)
    }
    if not towers:
        return set()
    return {*map(id, modules_in(model))} - {id(module) for _, module in walked(model, towers)}


def without_towers(config: Any) -> Any:
    """The same configuration, as one of the decoder alone from now on."""
    if has_eyes(config):
        config.vision_config = config.audio_config = None
    return config


# ---- Who looks at what.


def dealt(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """The pictures of each rank: the largest first, to the rank with the fewest patches
    so far, the lower one of equals."""
    of: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for picture in sorted(range(len(patches)), key=lambda one: (-patches[one], one)):
        rank = min(range(ranks), key=lambda one: (work[one], one))
        of[rank].append(picture)
        work[rank] += patches[picture]
    return [sorted(own) for own in of]


@dataclasses.dataclass(frozen=True)
class Routes:
    """Which features go where. All ranks have the same table."""

    #: For `exchange_needed`.
    sends: Tensor
    #: Features that this rank gets, and where each belongs among its soft tokens.
    order: Tensor
    #: Features of the pictures that this rank looks at.
    made: int

    @staticmethod
    def of(
        counts: Sequence[int],
        deal: Sequence[Sequence[int]],
        owners: Tensor,
        places: Tensor,
        rank: int,
    ) -> Routes:
        """`counts` are the soft tokens of each picture; `owners` and `places` say for each
        of them, in the order of the batch, which rank has it (-1: nobody) and where."""
        first = torch.tensor([0, *counts]).cumsum(0)
        maker = torch.empty(int(first[-1]), dtype=torch.int64)
        index = torch.empty_like(maker)
        for source, own in enumerate(deal):
            begin = 0
            for picture in own:
                here = slice(int(first[picture]), int(first[picture + 1]))
                maker[here] = source
                index[here] = torch.arange(begin, begin + counts[picture])
                begin += counts[picture]
        # By receiver, then sender, as exchange_needed wants its rows.
        key = owners * len(deal) + maker
        way = torch.argsort(key * (len(maker) + 1) + index)
        way = way[owners[way] >= 0]
        key, index, places = key[way], index[way], places[way]
        begins = torch.ones(len(way), dtype=torch.bool)
        begins[1:] = (key[1:] != key[:-1]) | (index[1:] != index[:-1] + 1)
        at = begins.nonzero().flatten()
        lengths = torch.diff(at, append=torch.tensor([len(way)]))
        rows = [key[at] % len(deal), key[at] // len(deal), index[at], lengths]
        mine = torch.argsort(places[owners[way] == rank])
        made = sum(counts[picture] for picture in deal[rank])
        return Routes(torch.stack(rows, 1), mine, made)

    def bytes_sent(self, rank: int, row: int) -> int:
        """By a rank, where a feature has `row` bytes; as much comes back in backward."""
        out = (self.sends[:, 0] == rank) & (self.sends[:, 1] != rank)
        return int(self.sends[out, 3].sum()) * row

    def carry(self, features: Tensor, group: Group) -> Tensor:
        """From what this rank's pictures gave to what its soft tokens need."""
        features = features[: self.made]  # a stand-in gives some that nobody needs
        if group.size() > 1:
            received = len(self.order)
            features = exchange_needed(features, self.sends, axis=0, group=group, received=received)
        elif len(self.order) != len(features):
            features = features[self._kept(features)]
        return features[self.order.to(features.device)]

    def _kept(self, features: Tensor) -> Tensor:
        """On one rank: those that some token wants."""
        ranges = [torch.arange(b, b + n) for _, _, b, n in self.sends.tolist()]
        return torch.cat(ranges).to(features.device) if ranges else torch.empty(0).long()


# ---- Batches.


def check_pictures(who: str, parts: Iterable[Any], batch: Mapping[str, Any]) -> None:
    """Refuses pictures and soft tokens that do not belong together, and sound."""
    whole = _whole(parts)
    if whole is None:
        return
    name, config = type(whole).__name__, whole.config
    for key in _SOUND:
        if batch.get(key) is not None:
            raise NotImplementedError(
                f"{who}: got `{key}`: the tower of {name} for sound mixes frames of a whole "
                f"recording and is not dealt out over ranks; make its features outside and give "
                f"`inputs_embeds`"
            )
    if batch.get("mm_encoder_outputs") is not None:
        raise NotImplementedError(
            f"{who}: got `mm_encoder_outputs`, whose features are not cut; give the pixels, or "
            f"put the features into `inputs_embeds`"
        )
    for pixels in _KINDS:
        _check_kind(who, name, config, pixels, batch)


def _check_kind(who: str, name: str, config: Any, pixels: Pixels, batch: Mapping[str, Any]) -> None:
    values, positions = batch.get(pixels.values), batch.get(pixels.positions)
    ids, token = batch.get("input_ids"), getattr(config, pixels.token, None)
    wants = 0
    if isinstance(ids, Tensor) and token is not None and config.vision_config is not None:
        wants = int((ids == token).sum())
    if values is None:
        if wants:
            raise ValueError(
                f"{who}: `input_ids` has {wants} soft tokens of {pixels.kind}s ({token}) and the "
                f"batch no `{pixels.values}`; give the pixels, or `inputs_embeds` that have the "
                f"features"
            )
        return
    if config.vision_config is None:
        raise ValueError(f"{who}: got `{pixels.values}`, and this {name} has no tower for images")
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"{who}: `{pixels.values}` goes with `input_ids`, which say where the soft tokens are"
        )
    if not isinstance(values, Tensor) or values.dim() != 3 or not values.is_floating_point():
        raise ValueError(
            f"{who}: `{pixels.values}` is {said(values)}; expected a floating tensor "
            f"[pictures, patches, channels], as the processor of {name} gives it"
        )
    if (
        not isinstance(positions, Tensor)
        or positions.is_floating_point()
        or positions.shape != (*values.shape[:2], 2)
    ):
        raise ValueError(
            f"{who}: `{pixels.positions}` is {said(positions)}; expected whole numbers "
            f"{[*values.shape[:2], 2]}, a place for each patch of `{pixels.values}`"
        )
    made = sum(_counts(config, positions))
    if made != wants:
        raise ValueError(
            f"{who}: `{pixels.values}` makes {made} features for {len(values)} {pixels.kind}s, and "
            f"`input_ids` has {wants} soft tokens ({token}); give every picture the tokens that "
            f"its patches ask for"
        )


def _counts(config: Any, positions: Tensor) -> list[int]:
    """The soft tokens of each picture."""
    each = _FAMILIES[config.model_type].patches(config)
    found: list[int] = (_patches(positions) // each).tolist()
    return found


def _patches(positions: Tensor) -> Tensor:
    return (positions != -1).all(-1).sum(-1)


def without_pictures(batch: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """A batch of tokens alone, and the pictures in it."""
    found = {key: batch[key] for key in KEYS if batch.get(key) is not None}
    if not found:
        return batch, {}
    return {key: value for key, value in batch.items() if key not in KEYS}, found


def add_pictures(
    local: LocalBatch, ids: Tensor, pictures: Mapping[str, Any], config: Any
) -> dict[str, Routes]:
    """Puts this rank's pictures into its share; returns where their features go."""
    cut, ranks = local.cut, local.cut.ranks
    sizes = [cut.ownership.local_tokens(rank) for rank in range(ranks)]
    rows = cut.rows if cut.form == "rows" else 1

    def of_tokens(make: Callable[[int, int], Tensor]) -> Tensor:
        """A number for every token of the batch, from those of each rank's share."""
        shares = [make(rank, rows * size) for rank, size in enumerate(sizes)]
        if cut.form == "rows":
            shares = [share.reshape(rows, -1) for share in shares]
        return _C.unshard(shares, cut, True, -1, None).flatten()

    owners = of_tokens(lambda rank, count: torch.full((count,), rank))
    places = of_tokens(lambda _, count: torch.arange(count))
    routes = {}
    for pixels in _KINDS:
        if pixels.values not in pictures:
            continue
        values, positions = pictures[pixels.values], pictures[pixels.positions]
        here = (ids == getattr(config, pixels.token)).flatten().cpu()
        deal = dealt(_patches(positions).tolist(), ranks)
        counts = _counts(config, positions)
        routes[pixels.kind] = Routes.of(counts, deal, owners[here], places[here], cut.rank)
        own = torch.tensor(deal[cut.rank], dtype=torch.int64, device=values.device)
        if len(own):
            local[pixels.values], local[pixels.positions] = values[own], positions[own]
        else:
            # Towers run on every rank, since their parameters may be sharded: over nothing.
            local[pixels.values] = torch.zeros_like(values[:1])
            local[pixels.positions] = positions[:1]
    return routes


# ---- Models.


def _whole(parts: Iterable[Any]) -> Any:
    """Of the models of transformers in one, that which holds the towers and the decoder."""
    for part in parts:
        if has_eyes(part.config) and hasattr(part, "get_placeholder_mask"):
            return part
    return None


def redirect(parts: Iterable[Any], state: Any) -> None:
    """Lets the features of the whole group's pictures enter where a model takes features
    that are ready."""
    whole = _whole(parts)
    if whole is not None and whole.config.vision_config is not None:
        state.eyes = whole.config
        state.look_before(whole, _enter)


def _enter(
    module: Any, in_order: tuple[Any, ...], arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    local = arguments.get(KEYWORD)
    routes: Mapping[str, Routes] = getattr(local, "routes", None) or {}
    if local is None or not routes:
        return None
    given = dict(arguments)
    features = {}
    for pixels in _KINDS:
        values, positions = given.pop(pixels.values, None), given.pop(pixels.positions, None)
        if pixels.kind not in routes:
            continue
        if values is None:
            raise ValueError(
                f"{type(module).__name__}: the batch was sharded with `{pixels.values}`, which is "
                f"gone; call model(**local) with all that shard gave"
            )
        found = module.get_image_features(values, positions, return_dict=True)
        ready = routes[pixels.kind].carry(torch.cat(found.pooler_output), local.group)
        features[pixels.kind] = _ready(ready)
    given["mm_encoder_outputs"] = features
    return in_order, given


def _ready(features: Tensor) -> Any:
    """In the form of what a tower gives."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    made: Any = BaseModelOutputWithPooling
    return made(pooler_output=(features,))
