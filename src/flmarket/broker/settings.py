"""What an operator can set, in one frozen value; every limit of the service is here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`database_url`: SQLite by default, `postgresql+psycopg://…` for many users. Sizes in bytes, times in seconds."""

    database_url: str = "sqlite:///flmarket-broker.db"
    data_dir: Path | None = None
    # Only these may be asked for, so that a request can never start a download.
    data_sets: tuple[str, ...] = ("breast-cancer", "digits")

    # A connection in $FLWR_HOME/config.toml; without one, Flower tasks are refused. The folder has the runs' state; the
    # SuperLink's ServerApps must see it, and the database, as this process does.
    superlink: str = ""
    flower_folder: Path = Path("flmarket-flower")
    flower_bid_seconds: float = 60.0
    flower_train_seconds: float = 600.0
    flower_start_seconds: float = 180.0
    flower_lease_seconds: float = 30.0
    flower_tries: int = 5

    run_worker: bool = True
    worker_pause: float = 0.2
    lease_seconds: float = 15.0

    max_body_bytes: int = 256 * 1024
    requests_per_second: float = 100.0
    request_burst: int = 300
    anonymous_requests_per_second: float = 50.0
    anonymous_burst: int = 200
    sign_ins_per_minute: float = 30.0
    # Whose word on a client's address (X-Forwarded-For) is taken: addresses or networks. Nobody's by default.
    trusted_proxies: tuple[str, ...] = ()
    # Work that takes seconds has threads of its own: so many at once, one for each party, and so many that wait.
    heavy_workers: int = 2
    max_heavy_waiting: int = 16
    max_streams: int = 200
    max_streams_per_party: int = 8
    stream_seconds: float = 3600.0
    stream_poll_seconds: float = 0.3

    session_seconds: float = 12 * 3600.0
    secure_cookies: bool = False
    idempotency_seconds: float = 24 * 3600.0

    max_tasks_per_buyer: int = 100
    max_active_audits: int = 4
    max_keys_per_party: int = 20
