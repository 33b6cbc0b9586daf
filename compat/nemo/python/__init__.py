"""NeMo AutoModel's context-parallel modules, name for name.

Results follow the reference, except where it is wrong; ``with strict():`` brings
back its rules there too. Bad arguments are refused either way.
docs/reference-map.md lists every difference.
"""

from longspan.compat.nemo._strict import is_strict, strict

__all__ = ["is_strict", "strict"]
