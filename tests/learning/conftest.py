from __future__ import annotations

import os
from pathlib import Path

import pytest

_NAMED = os.environ.get("FLMARKET_DATA")
_SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's data directory or cache."""
    monkeypatch.delenv("FLMARKET_DATA", raising=False)
    monkeypatch.setenv("FLMARKET_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def real_data() -> Path:
    directory = Path(_NAMED) if _NAMED else _SHARED
    if not directory.is_dir():
        pytest.skip(f"no real data: set FLMARKET_DATA to a directory with the data sets ({directory} is none)")
    return directory
