"""The files of a task's run: the app that Flower gets, and what the run must know and the SuperLink must not.

    <flower folder>/<task>/broker.json  the database's address, which may hold a password; mode 0600
    <flower folder>/<task>/app          the app, copied from the package
    <flower folder>/<task>/*.log        what Flower's commands said

A run's configuration is stored by the SuperLink and sent to owners, so it names the file only.
"""

import json
import os
import shutil
import tomllib
from importlib import resources
from pathlib import Path

from sqlalchemy import make_url

from flmarket.broker.settings import Settings
from flmarket.engines.config import DataFile
from flmarket.errors import ConfigError
from flmarket.files import write_file
from flmarket.learning.data.files import DATA_VARIABLE

_NAME = "broker.json"
_TOLD = {"data_sets", "models", "flower_bid_seconds", "flower_train_seconds", "flower_lease_seconds"}


def save_for_run(settings: Settings, task_id: str) -> Path:
    """Write down what a run, elsewhere on this machine, must know of the service that starts it: some of its settings,
    with absolute paths; into the task's folder, for this user only."""
    address, data_dir = make_url(settings.database_url), settings.data_dir or os.environ.get(DATA_VARIABLE)
    if address.get_backend_name() == "sqlite" and address.database:
        address = address.set(database=str(Path(address.database).absolute()))
    paths = {
        "database_url": address.render_as_string(hide_password=False),
        "data_dir": None if data_dir is None else str(Path(data_dir).expanduser().absolute()),
        "flower_folder": str(settings.flower_folder.absolute()),
    }
    sets = [str(Path(name).expanduser().absolute()) if DataFile.is_one(name) else name for name in settings.data_sets]
    told = settings.model_dump(mode="json", include=_TOLD) | paths | {"data_sets": sets}
    folder = task_folder(settings.flower_folder.absolute(), task_id)
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    write_file(folder / _NAME, json.dumps(told), private=True)
    return folder / _NAME


def load_in_run(path: Path) -> Settings:
    """What `save_for_run` wrote, as the run's own broker takes it."""
    try:
        return Settings(**json.loads(path.read_text(encoding="utf-8")), run_worker=False)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("broker", str(path), f"a run's file ({type(error).__name__})") from None


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
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        known = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("superlink", name, f"a connection in {path}, which cannot be read ({error})") from None
    if not isinstance(known.get(name), dict):
        named = ", ".join(key for key, value in known.items() if isinstance(value, dict)) or "none"
        raise ConfigError("superlink", name, f"a connection in {path} (there: {named})")
