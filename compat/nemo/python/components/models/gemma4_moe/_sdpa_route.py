"""Sends the attention calls of one module elsewhere while it runs.

Nothing global is replaced: a mode of the calling thread sees every call of torch's
scaled_dot_product_attention, whatever name it was imported under.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as _FLEX
from torch.overrides import TorchFunctionMode

from longspan.compat.nemo._ranks import refused_flex

_SDPA: Any = torch._C._nn.scaled_dot_product_attention

#: Gets the module and the arguments of scaled_dot_product_attention by name.
Attention = Callable[[Any, dict[str, Any]], Tensor]

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class _Route(TorchFunctionMode):
    def __init__(self, module: Any, metadata: dict[str, Any], attention: Attention) -> None:
        super().__init__()
        self.module = module
        self.metadata = metadata
        self._attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is _FLEX:
            return refused_flex(*args, **kwargs)
        if func is not _SDPA:
            return func(*args, **kwargs)
        return self._attention(self.module, dict(zip(_ARGUMENTS, args, strict=False)) | {**kwargs})


class _Routes(threading.local):
    def __init__(self) -> None:
        self.entered: list[_Route] = []


_routes = _Routes()


def metadata_of(module: Any) -> Mapping[str, Any]:
    """What came with the call of the module that this thread is in; outside of one,
    what lies on the module."""
    for route in reversed(_routes.entered):
        if route.module is module:
            return route.metadata
    return getattr(module, "_cp_manual_metadata", None) or {}


def as_autocast(tensor: Tensor) -> Tensor:
    """As torch's own attention takes it inside of torch.autocast."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def install(module: torch.nn.Module, attention: Attention) -> None:
    """Hooks that capture metadata, drop the mask, ask for causal attention and route
    it. A second call takes the place of the first."""
    takes = _keywords_of(module.forward)
    keys: tuple[str, ...] = getattr(module, "_cp_manual_metadata_keys", ())

    def enter(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        metadata = {key: kwargs.pop(key, None) for key in keys}
        # Models that do not pass metadata down leave it here for the whole step, so
        # that recomputation in backward finds it too.
        stash = getattr(module, "_cp_dense_metadata", None) or {}
        for key in keys:
            if metadata[key] is None:
                metadata[key] = stash.get(key)
        kwargs |= {name: value for name, value in _FORCED.items() if takes(name)}
        route = _Route(module, metadata, attention)
        module._cp_manual_metadata = metadata
        route.__enter__()  # type: ignore[no-untyped-call]
        _routes.entered.append(route)
        return args, kwargs

    def leave(module: Any, args: Any, output: Any) -> None:
        module._cp_manual_metadata = {}
        # Called also when another hook failed before ours ran.
        if _routes.entered and _routes.entered[-1].module is module:
            route = _routes.entered.pop()
            route.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    for handle in getattr(module, "_gemma4_cp_hooks", ()):
        handle.remove()
    module._gemma4_cp_hooks = (  # type: ignore[assignment]
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave, always_call=True),
    )


_FORCED = {"attention_mask": None, "is_causal": True}


def _keywords_of(forward: Callable[..., Any]) -> Callable[[str], bool]:
    parameters = inspect.signature(forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return lambda name: anything or name in parameters
