"""What processes that `longspan verify` starts are given in tests: targets without a model."""

from __future__ import annotations

import os
from typing import Any

from longspan._verify_command import _Target


class Unmade(_Target):
    def make(self, longest: int) -> Any:
        raise ValueError(f"nobody makes {self.name}")


class Dying(_Target):
    def make(self, longest: int) -> Any:
        os._exit(7)
