"""Going over the modules of a model, which every batch does."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn


def walked(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """What `named_modules` gives, in the same order and sooner: its generators nest as deep as
    the modules do. Those of `but` are left out, with what is in them alone."""
    seen = set(but)
    stack: list[tuple[str, nn.Module | None]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        yield name, module
        children = module._modules
        if children:
            before = f"{name}." if name else ""
            stack += [(before + key, children[key]) for key in reversed(children)]
