"""The files of a task's run: the app that Flower gets, and what the run must know and the SuperLink must not.

    <flower folder>/<task>/broker.json  the database's address, which may hold a password; mode 0600
    <flower folder>/<task>/app          the app, copied from the package
    <flower folder>/<task>/server       the strategy's state (`RoundStore`)
    <flower folder>/<task>/*.log        what Flower's commands said

A run's configuration is stored by the SuperLink and sent to owners, so it names the file only.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from sqlalchemy import make_url

from flmarket.broker.settings import Settings
from flmarket.errors import ConfigError
from flmarket.learning.data.files import DATA_VARIABLE

__all__ = ["RunFile", "check_connection", "copy_app", "remove_secrets", "task_folder"]

_NAME = "broker.json"


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """What a run must know of the service that started it; paths are absolute."""

    database_url: str
    folder: str
    data_dir: str | None
    data_sets: tuple[str, ...]
    bid_seconds: float
    train_seconds: float
    lease_seconds: float
    models: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> RunFile:
        """The service's settings, for a process elsewhere on this machine."""
        data_dir = settings.data_dir or os.environ.get(DATA_VARIABLE)
        return cls(
            database_url=_absolute(settings.database_url),
            folder=str(settings.flower_folder.absolute()),
            data_dir=None if data_dir is None else str(Path(data_dir).expanduser().absolute()),
            data_sets=settings.data_sets,
            bid_seconds=settings.flower_bid_seconds,
            train_seconds=settings.flower_train_seconds,
            lease_seconds=settings.flower_lease_seconds,
            models=settings.models,
        )

    @classmethod
    def load(cls, path: Path) -> RunFile:
        """What `save` wrote."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            lists = {name: tuple(values.get(name, ())) for name in ("data_sets", "models")}
            return cls(**{**values, **lists})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError("broker", str(path), f"a run's file ({type(error).__name__})") from None

    def save(self, task_id: str) -> Path:
        """Write it into the task's folder, for this user only."""
        folder = task_folder(Path(self.folder), task_id)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        part, path = folder / f"{_NAME}.part", folder / _NAME
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as handle:
            json.dump(asdict(self), handle)
        part.replace(path)
        return path

    def settings(self) -> Settings:
        """As the run's own broker takes them."""
        return Settings(
            database_url=self.database_url,
            data_dir=None if self.data_dir is None else Path(self.data_dir),
            data_sets=self.data_sets,
            models=self.models,
            flower_folder=Path(self.folder),
            flower_bid_seconds=self.bid_seconds,
            flower_train_seconds=self.train_seconds,
            flower_lease_seconds=self.lease_seconds,
            run_worker=False,
        )


def task_folder(folder: Path, task_id: str) -> Path:
    """Where a task's run keeps its state."""
    return folder / task_id


def remove_secrets(folder: Path, task_id: str) -> None:
    """The task has ended: no run needs the database's address any more."""
    (task_folder(folder, task_id) / _NAME).unlink(missing_ok=True)


def copy_app(folder: Path) -> Path:
    """The app's folder, as `flwr run` takes it; the package's own may be read-only."""
    target = folder / "app"
    with resources.as_file(resources.files("flmarket.broker.work.flower") / "app") as source:
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def check_connection(name: str) -> None:
    """ConfigError unless Flower's configuration has a SuperLink connection of this name."""
    home = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr")
    path = home / "config.toml"
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("superlink", name, f"a connection in {path}, which cannot be read ({error})") from None
    if not isinstance(known.get(name), dict):
        named = ", ".join(key for key, value in known.items() if isinstance(value, dict)) or "none"
        raise ConfigError("superlink", name, f"a connection in {path} (there: {named})")


def _absolute(url: str) -> str:
    address = make_url(url)
    if address.get_backend_name() == "sqlite" and address.database:
        address = address.set(database=str(Path(address.database).absolute()))
    return address.render_as_string(hide_password=False)
