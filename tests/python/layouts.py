"""Ways to deal the tokens of a stream out to ranks, for tests over all of them."""

from __future__ import annotations

from longspan import Ownership, Packing


def ownerships(packing: Packing, ranks: int) -> dict[str, Ownership]:
    tokens = packing.tokens
    sizes = [0] * ranks
    sizes[0] = tokens // 5  # then ranks without tokens, and the rest on the last
    sizes[-1] += tokens - tokens // 5
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    for i, begin in enumerate(range(0, tokens, 3)):
        # Dealt out backwards in pieces of 3, with an irregular order.
        pieces[(i * 5 + 2) % ranks].insert(0, (begin, min(begin + 3, tokens)))
    return {
        "contiguous": Ownership.contiguous(tokens, ranks),
        "head-tail": Ownership.head_tail(tokens, ranks),
        "per-document": Ownership.per_document_head_tail(packing, ranks),
        "uneven": Ownership.of_sizes(sizes),
        "scattered": Ownership.of_ranges(pieces),
    }
