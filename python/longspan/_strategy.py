"""How attention runs over the ranks, as a value."""

from __future__ import annotations

from typing import Any

from longspan import _C
from longspan._arguments import as_text, check_whole, wrong


class Strategy(_C.Strategy):
    """How attention runs over the ranks: "ring" (Ring Attention), "gathered" (all-gather),
    "needed", "head_parallel" (DeepSpeed-Ulysses) or "head_parallel_ring" (USP). A name
    is taken wherever a strategy is. All give the same result.

    "head_parallel_ring" has teams of `head_ranks` ranks, by default of as many as divide
    the ranks and the key heads; the other names fix their teams.
    """

    def __init__(self, name: str, head_ranks: int | None = None) -> None:
        if not isinstance(name, str):
            raise wrong("Strategy", "name", name, f"one of {', '.join(_C.Strategy.names())}")
        if head_ranks is not None:
            check_whole("Strategy", "head_ranks", head_ranks)
        super().__init__(name, head_ranks)
        # Plain attributes, so that torch.compile can look through properties.
        self._name = super().name
        self._head_ranks = super().head_ranks

    @staticmethod
    def of(strategy: str | _C.Strategy) -> Strategy:
        """From a name, or a strategy."""
        if isinstance(strategy, Strategy):
            return strategy
        if isinstance(strategy, str):
            return Strategy(strategy)
        if isinstance(strategy, _C.Strategy):
            return Strategy(strategy.name, strategy.head_ranks)
        raise _no_strategy(strategy)

    def __getattr__(self, attribute: str) -> Any:
        # Only for what is missing: all of it where __new__ alone made the object.
        if attribute in ("_name", "_head_ranks"):
            raise TypeError("Strategy: this object was made by __new__ alone; call the class")
        raise AttributeError(f"Strategy: there is no attribute `{attribute}`")

    @property
    def name(self) -> str:
        return self._name

    @property
    def head_ranks(self) -> int | None:
        """Ranks of a team; None where the group decides."""
        return self._head_ranks

    def __reduce__(self) -> tuple[Any, ...]:
        return Strategy, (self._name, self._head_ranks)


def operator_arguments(strategy: str | _C.Strategy) -> tuple[str, int]:
    """What operators take for it: the name, and 0 where the group decides on teams."""
    if isinstance(strategy, str):
        return strategy if strategy.isascii() else as_text(strategy), 0
    if not isinstance(strategy, _C.Strategy):
        raise _no_strategy(strategy)
    return strategy.name, strategy.head_ranks or 0


def _no_strategy(given: Any) -> TypeError:
    return TypeError(
        f"Strategy: expected one of {', '.join(Strategy.names())}, or a Strategy; "
        f"got {type(given).__name__}"
    )
