"""Marks that hold for all Python tests."""

import os

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda: needs a CUDA device")
    config.addinivalue_line("markers", "slow: left out by make test-fast")
    config.addinivalue_line("markers", "deep: takes long and is run by make deep alone")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without a device the tests marked `cuda` skip and are counted; with
    LONGSPAN_REQUIRE_CUDA=1 they run, and fail."""
    if torch.cuda.is_available() or os.environ.get("LONGSPAN_REQUIRE_CUDA"):
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
