"""Importing this refuses another torch than the one that the library was built with:
its C++ would fail later, by names of symbols or not at all."""

from __future__ import annotations

import torch

from longspan import _built_with


def why_not(built: str, here: str) -> str | None:
    """Why a library built with one version of torch does not run on another."""
    release, _, flavour = built.partition("+")
    found, _, found_flavour = here.partition("+")
    if release == found and not (flavour.startswith("cu") and found_flavour == "cpu"):
        return None
    return (
        f"longspan: built with torch {built}, but this interpreter has torch {here}; build it "
        f"again with this torch, or install torch {built}"
    )


_refusal = why_not(_built_with.TORCH, torch.__version__)
if _refusal is not None:
    raise ImportError(_refusal)
