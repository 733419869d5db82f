"""A market app on this machine as it would run on many: SuperLink and SuperNodes as processes, a folder for each.

Like `flmarket.engines.flower.deployment`, but the app is the user's own. Every owner gets a copy of the app's
`owner.toml` with a number of her own, and as `partition-id` that number, by which apps for try-outs find their records.
Paths that the app leaves relative (its ledger, the model that it saves) are in the deployment's folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flmarket.engines.flower.deployment import Deployment, DeploymentFailed
from flmarket.engines.flower.files import OwnerFile
from flmarket.errors import ConfigError


@dataclass
class AppDeployment(Deployment):
    """Use as a context manager. `app` is a Flower app's folder, `overrides` what `flwr run --run-config` takes."""

    toml: str = ""
    app: Path = Path()
    count: int = 3
    overrides: str = ""

    def __post_init__(self) -> None:
        self.folder, self.app = self.folder.resolve(), self.app.resolve()
        if not (self.app / "pyproject.toml").exists():
            raise ConfigError("app", str(self.app), "the folder of a Flower app, with a pyproject.toml")
        files = sorted(path for path in self.app.rglob("owner.toml") if "record" not in path.parts)
        if not files:
            raise ConfigError("app", str(self.app), "one with an owner.toml in it, for its try-out owners")
        self.owner = OwnerFile.load(files[0])
        if self.owner.records is None:
            raise ConfigError(f"{files[0]}: records", None, "how many records the app trains on")
        self.folder.mkdir(parents=True, exist_ok=True)  # only now that everything is in order
        self.begin()

    @property
    def nodes(self) -> int:
        """How many owners there are."""
        return self.count

    def prepare(self) -> None:
        """Write keys, owners' folders and the app."""
        self.prepare_link(self.app)
        for i in range(self.nodes):
            mine = self.owner.model_copy(update={"owner": i, "account": ""})
            (self.owner_folder(i) / "owner.toml").write_text(mine.to_toml(), encoding="utf-8")

    def node_config(self, folder: Path) -> str:
        """Her file, and which part of the try-out's records is hers."""
        number = folder.name.rsplit("-", 1)[1]
        return f"{super().node_config(folder)} partition-id={number} num-partitions={self.nodes}"

    def run(self) -> None:
        """Submit the app."""
        self.submit(self.overrides)

    def wait(self, seconds: float, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
        """Wait for the end of the run; every line of its stream is told as it comes."""
        deadline, log, heard = time.monotonic() + seconds, self.log("run"), 0
        while time.monotonic() < deadline:
            over = self.processes["run"].poll() is not None
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
            whole = [line for line in lines if over or line.endswith("\n")]
            for line in whole[heard:]:
                tell(line.rstrip())
            heard = len(whole)
            if over:
                if not any("Market" in line and "ended" in line for line in whole):
                    raise DeploymentFailed(f"the run ended without the end of a market, see {log}")
                return {"lines": len(whole)}
            self.check_alive()
            time.sleep(0.5)
        raise DeploymentFailed(f"no end after {seconds:g} s, see {log}")
