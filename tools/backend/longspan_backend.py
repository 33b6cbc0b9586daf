"""The build backend: scikit-build-core's, once what it needs is there.

With --no-build-isolation pip installs nothing and looks for nothing; the first import that
fails is then all it says. This says everything that is missing, and the line that helps.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

# Modules, and the requirements of pyproject.toml that bring them.
NEEDED = {"scikit_build_core": "scikit-build-core>=0.10", "torch": "torch>=2.11"}


def _refuse(*_: Any, **__: Any) -> None:
    missing = [NEEDED[name] for name in NEEDED if importlib.util.find_spec(name) is None]
    wanted = " ".join(f'"{requirement}"' for requirement in missing)
    sys.exit(
        f"longspan: {sys.executable} has no {' and no '.join(missing)}, which a build without "
        f"isolation takes from there; run: pip install {wanted} cmake ninja"
    )


def __getattr__(hook: str) -> Any:
    if hook.startswith("__"):
        raise AttributeError(hook)
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        return _refuse
    return getattr(importlib.import_module("scikit_build_core.build"), hook)
