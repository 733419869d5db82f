from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's data directory or cache."""
    monkeypatch.delenv("FLMARKET_DATA", raising=False)
    monkeypatch.setenv("FLMARKET_CACHE", str(tmp_path_factory.mktemp("cache")))
