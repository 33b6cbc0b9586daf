"""Families whose layers do more than attend, and how each is cut."""

from __future__ import annotations

import functools
from typing import Any

import torch

from longspan._recipes import deepseek_v4, selected_keys, states
from longspan._recipes.recipe import Recipe, class_names
from longspan._walking import of_classes

__all__ = ["RECIPES", "Recipe", "recipe_for", "recipes_in"]

RECIPES: tuple[Recipe, ...] = (
    *selected_keys.RECIPES,
    *deepseek_v4.RECIPES,
    *states.RECIPES,
)
_BY_CLASS = {recipe.attention: recipe for recipe in RECIPES}


def recipe_for(module: torch.nn.Module) -> Recipe | None:
    """The recipe for an attention module, if its family has one."""
    kind: Any = type(module)
    return _recipe_of(kind)


@functools.cache  # every module of a model is asked for every batch
def _recipe_of(kind: Any) -> Recipe | None:
    return next((_BY_CLASS[name] for name in class_names(kind) if name in _BY_CLASS), None)


def recipes_in(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, Recipe]]:
    """Every module that a recipe answers for, by its name."""
    found = ((name, module, recipe_for(module)) for name, module in of_classes(model, _recipe_of))
    return [(name, module, recipe) for name, module, recipe in found if recipe is not None]
