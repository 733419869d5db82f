"""A whole deployment on this machine: one SuperLink and several SuperNodes as processes, with TLS and registered keys.

Any market file will do: auctions, client sampling, the reward game, robust joint-DP training. The folder gets
everything: certificates and keys, one folder per owner with her records and her `owner.toml`, the app, the
ledger, the server's state and all logs. Each owner's process reads her folder only. Nothing listens beyond loopback,
ports are free ones, and Flower is told to send nothing home.

`stop` ends every process that this deployment started, also those that Flower started and detached: they carry a mark
in their environment. What would break it: SIGKILL on this process, which leaves them; `flmarket deploy` says which.

Owners' files say what each would write about herself, beside the records that she holds. For try-outs, where one
machine plays everybody: owners with files are honest and well; adversaries, drop-outs and faults that a market file
asks for exist in simulations only and are left out here.

`AppDeployment` does the same for an app of the user's own. Every owner gets a copy of the app's `owner.toml` with a
number of her own, and as `partition-id` that number, by which apps for try-outs find their records. Paths that the app
leaves relative (its ledger, the model that it saves) are in the deployment's folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import psutil
from filelock import FileLock, Timeout

from flmarket.bids import Kind
from flmarket.engines.config import MarketConfig
from flmarket.engines.flower import QUIET
from flmarket.engines.flower.certificates import NodeKeys, ServerFiles, node_keys, server_files
from flmarket.engines.flower.files import (
    IDENTITY,
    PEERS,
    BidSection,
    CapSection,
    OwnerFile,
    write_identity,
    write_peers,
)
from flmarket.engines.memory import Spec
from flmarket.errors import ConfigError, FlmarketError
from flmarket.ledger import DurableAccount, SqlLedger, format_micros
from flmarket.market import AuctionSpec, FileStore, JointSpec, Owner, RoundRecord, owner_account
from flmarket.privacy import Cap, Uncapped

RECORDS = "records.npz"
_CONNECTION = "local"
HOST = "127.0.0.1"
MARK = "FLMARKET_DEPLOYMENT"


def registered_cap(market: Spec) -> Cap | None:
    """What the ledger is told; None without a cap, and where nothing is private and all is paid for."""
    cap, owner = getattr(market, "cap", None), market.owner(0)
    return None if cap is None or math.isinf(cap.epsilon) or isinstance(owner.cap, Uncapped) else owner.cap


def write_owner(market: Spec, number: int, folder: Path, kind: str = "") -> Path:
    """Write owner `number`'s records and her `owner.toml`; returns the latter's path. `kind` as the file names it."""
    honest = replace(market, adversary=None, adversaries=0) if isinstance(market, JointSpec) else market
    owner = honest.owner(number)
    described = _described(honest, owner, kind)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / RECORDS, x=owner.x, y=owner.y)
    path = folder / "owner.toml"
    path.write_text(described.to_toml(), encoding="utf-8")
    return path


def _described(market: Spec, owner: Owner, kind_of_market: str) -> OwnerFile:
    """What she would write about herself."""
    given: dict[str, Any] = {"owner": owner.number, "data": RECORDS, "record": "record"}
    given |= {"classes": market.data.n_classes, "cap": CapSection.of(owner.cap)}
    if market.kind().announcement(0).trust != "local":
        given |= {"trust": owner.trust, "identity": IDENTITY, "peers": PEERS}
    if owner.allow_raw:
        given["allow_raw"] = True
    said = market.kind().announcement(0).model
    model = json.loads(said)["name"] if said else ""
    if not model:
        raise ConfigError("model", owner.model, "one that is registered, so that owners' machines can build it")
    if ":" in model:
        given["models"] = (model,)
    if ":" in kind_of_market:
        given["kinds"] = (kind_of_market,)
    bid: dict[str, Any] = {"value": owner.value, "privacy_budget": owner.privacy_budget, "cost": owner.cost}
    if isinstance(market, AuctionSpec):
        kind = Kind(int(owner.valuation.kind[0])).name.lower()
        if kind == "tabulated":
            raise ConfigError("owners.bids", kind, "a valuation family; an owner file has no tables")
        rate = float(owner.valuation.rate[0])
        bid = {"valuation": kind, "rate": rate, "privacy_budget": owner.privacy_budget}
    elif isinstance(owner.cap, Uncapped):
        bid = {"value": owner.value}
    elif isinstance(market, JointSpec):
        bid["privacy_budget"] = market.epsilon
    return OwnerFile(**given, bid=BidSection(**bid))


def _story(record: RoundRecord, baseline: float) -> str:
    """A finished round in one line."""
    ends = [state.value for state in record.state if state is not None]
    awards = ", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends)) or "no awards"
    accuracy = record.metrics.get("accuracy")
    score = "" if accuracy is None else f"; accuracy {accuracy:.3f} (always the largest class: {baseline:.3f})"
    return f"{awards}, {format_micros(record.spent_micros)} paid{score}"


class DeploymentFailed(FlmarketError):
    """A process of the deployment did not do its part; the message names its log."""


@dataclass
class Deployment:
    """Use as a context manager: leaving it stops everything. `toml` is the market file's text."""

    folder: Path
    toml: str
    bid_seconds: float = 300.0  # Flower starts a process for every message: on a busy machine that takes a while
    train_seconds: float = 300.0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.market_file = self.folder / "market.toml"
        try:
            config = MarketConfig.parse(tomllib.loads(self.toml), source=self.market_file.name)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError("market file", str(error), "valid TOML") from None
        self.spec: Spec = config.spec(base=self.folder)
        self.kind = config.kind
        self.spec.owner(0)  # refused if no account could hold what she sells
        self.folder.mkdir(parents=True, exist_ok=True)  # only now that everything is in order
        self.market_file.write_text(self.toml, encoding="utf-8")
        self.begin()

    def begin(self) -> None:
        """Nothing runs yet."""
        self.mark = uuid.uuid4().hex
        self.ports: list[int] = []
        self.tls: ServerFiles | None = None
        self.keys: list[NodeKeys] = []
        self._replaced: list[subprocess.Popen[bytes]] = []
        self._lock = FileLock(self.folder / "lock", timeout=0, thread_local=False)

    def take_over(self) -> None:
        """Have the folder alone: what a killed command left running there is ended; a living one is left in peace."""
        try:
            self._lock.acquire()
        except Timeout:
            raise ConfigError("--out", str(self.folder), "a folder where no other deployment is at work") from None
        note = self.folder / "mark"
        if note.exists():
            self._end(note.read_text(encoding="ascii"))
        note.write_text(self.mark, encoding="ascii")

    @property
    def ledger_url(self) -> str:
        """The ledger's database."""
        return f"sqlite:///{self.folder / 'ledger.db'}"

    @property
    def state(self) -> Path:
        """The server's folder."""
        return self.folder / "state"

    @property
    def nodes(self) -> int:
        """How many owners there are."""
        return self.spec.partition.owners

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def prepare(self) -> None:
        """Write keys, owners' folders and the app, and register every owner's cap with the ledger.

        Owners that are there already stay as they are: their accounts remember what they sold.
        """
        packed = resources.files("flmarket.engines.flower") / "app"
        with resources.as_file(packed) as source:
            self.prepare_link(source)
        if self.spec.kind().announcement(0).trust != "local" and not (self.owner_folder(0) / PEERS).exists():
            identities = {i: write_identity(self.owner_folder(i)) for i in range(self.nodes)}
            for i in range(self.nodes):  # handed round by the owners themselves, anywhere but here
                write_peers(self.owner_folder(i) / PEERS, identities)
        registered = registered_cap(self.spec)
        with SqlLedger(self.ledger_url) as ledger:
            for i in range(self.nodes):
                if not (self.owner_folder(i) / "owner.toml").exists():
                    write_owner(self.spec, i, self.owner_folder(i), self.kind)
                if registered is not None and ledger.cap(owner_account(i)) is None:
                    ledger.register_cap(owner_account(i), registered)

    def prepare_link(self, app: Path) -> None:
        """Certificates, ports, keys, and a copy of the app that is submitted."""
        self.tls = server_files(self.folder / "tls", HOST)
        self.ports = free_ports(1 + self.nodes)
        (self.folder / "logs").mkdir(exist_ok=True)
        self.state.mkdir(exist_ok=True)
        ignore = shutil.ignore_patterns("__pycache__", "record")
        shutil.copytree(app, self.folder / "app", dirs_exist_ok=True, ignore=ignore)
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        connection = f'address = "{HOST}:{self.ports[0]}"\nroot-certificates = "{self.tls.authority}"\n'
        config = f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n{connection}'
        (home / "config.toml").write_text(config, encoding="utf-8")
        self.keys = [node_keys(self.owner_folder(i), "key") for i in range(self.nodes)]

    def owner_folder(self, owner: int) -> Path:
        """Where one owner's data, configuration and record are."""
        return self.folder / f"owner-{owner}"

    def start(self) -> None:
        """SuperLink, keys registered, then SuperNodes."""
        assert self.tls is not None
        self.take_over()
        self._launch(
            "superlink", "flower-superlink", "--host", HOST, "--port", str(self.ports[0]), "--enable-supernode-auth",
            "--ssl-certfile", str(self.tls.certificate), "--ssl-keyfile", str(self.tls.key), "--ssl-ca-certfile",
            str(self.tls.authority), "--disable-runtime-dependency-installation",
        )  # fmt: skip
        self._await_port("superlink", self.ports[0])
        registrations = {
            f"register-{i}": self._launch(
                f"register-{i}", "flwr", "supernode", "register", str(keys.public), _CONNECTION
            )
            for i, keys in enumerate(self.keys)
        }
        for name, process in registrations.items():
            if process.wait(timeout=60) != 0:
                raise DeploymentFailed(f"{name} failed, see {self.log(name)}")
            del self.processes[name]
        for i in range(self.nodes):
            self.start_node(i)

    def start_node(self, owner: int) -> None:
        """One owner's SuperNode."""
        self.launch_node(
            f"supernode-{owner}", self.owner_folder(owner), self.keys[owner].private, self.ports[1 + owner]
        )

    def launch_node(self, name: str, folder: Path, key: Path, port: int) -> subprocess.Popen[bytes]:
        """A SuperNode for the `owner.toml` of a folder, with a private key, registered or not; its log has its name."""
        assert self.tls is not None
        return self._launch(
            name, "flower-supernode", "--superlink", f"{HOST}:{self.ports[0]}", "--root-certificates",
            str(self.tls.authority), "--auth-supernode-private-key", str(key), "--host", HOST, "--port", str(port),
            "--node-config", self.node_config(folder), FLWR_HOME=str(folder / "flwr"),
        )  # fmt: skip

    def node_config(self, folder: Path) -> str:
        """What the SuperNode of an owner's folder is told."""
        return f'owner-file="{folder / "owner.toml"}"'

    def run(self) -> None:
        """Submit the app; it goes on from where an earlier run stopped."""
        (self.state / "result.json").unlink(missing_ok=True)
        settings = {
            "market": str(self.market_file), "ledger": self.ledger_url, "state": str(self.state), "nodes": self.nodes,
            "bid-seconds": self.bid_seconds, "train-seconds": self.train_seconds,
        }  # fmt: skip
        self.submit(" ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()))

    def submit(self, overrides: str) -> None:
        """`flwr run`, with what is overridden in the app's configuration."""
        given = ("--run-config", overrides) if overrides else ()
        self._launch("run", "flwr", "run", str(self.folder / "app"), _CONNECTION, "--stream", *given)

    def wait(self, seconds: float, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
        """Wait for the end of the run and return what the server wrote; every finished round is told as it comes."""
        deadline, store, told = time.monotonic() + seconds, FileStore(self.state / "server"), 0
        while time.monotonic() < deadline:
            while (record := store.record(told)) is not None:
                told += 1
                tell(f"round {told}: {_story(record, self.spec.data.baseline_accuracy)}")
            if (self.state / "result.json").exists():
                return dict(json.loads((self.state / "result.json").read_text()))
            if self.processes["run"].poll() is not None:
                time.sleep(1.0)  # the result may be written as the stream ends
                if not (self.state / "result.json").exists():
                    raise DeploymentFailed(f"the run ended without a result, see {self.log('run')}")
            self.check_alive()
            time.sleep(0.2)
        raise DeploymentFailed(f"no result after {seconds:g} s, see {self.log('run')}")

    def check_alive(self) -> None:
        """Whether SuperLink and SuperNodes are still there; an error that names the log if not."""
        for name in ("superlink", *(f"supernode-{i}" for i in range(self.nodes))):
            process = self.processes.get(name)
            if process is not None and process.poll() is not None:
                raise DeploymentFailed(f"{name} ended with code {process.returncode}, see {self.log(name)}")

    def accounts(self) -> dict[int, DurableAccount]:
        """The owners' privacy accounts, as their own machines have them; close them."""
        found = {}
        for i in range(self.nodes):
            path = self.owner_folder(i) / "record" / f"owner-{i}.account.sqlite"
            if path.exists():
                found[i] = DurableAccount.open(path)
        return found

    def stop(self) -> None:
        """End all processes, gently first; returns when none is left."""
        for process in self.processes.values():
            if process.poll() is None:
                signal_group(process.pid, signal.SIGTERM)
        self._end(self.mark, gently=5.0)
        for process in (*self.processes.values(), *self._replaced):
            process.wait(timeout=10)
        self.processes.clear()
        self._replaced.clear()
        self._lock.release()

    @staticmethod
    def _end(mark: str, gently: float = 0.0) -> None:
        """End all processes that carry a mark; those that are ending already have some time for it."""
        deadline = time.monotonic() + gently
        while processes_marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in processes_marked(mark):
            send_signal(pid, signal.SIGKILL)

    def _launch(self, name: str, command: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        scripts = Path(sys.executable).parent
        path = scripts / command
        if not path.exists():
            raise DeploymentFailed(f"{path} is not there; it comes with: pip install 'flmarket[flower]'")
        search = f"{scripts}{os.pathsep}{os.environ['PATH']}"
        modules = os.pathsep.join(part for part in (os.getcwd(), os.environ.get("PYTHONPATH")) if part)
        variables = os.environ | QUIET | {
            MARK: self.mark, "FLWR_HOME": str(self.folder / "flwr"), "PATH": search,
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": modules,
            **environment,
        }  # fmt: skip
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter's scripts, arguments from this module
                [str(path), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=self.folder,
                start_new_session=True,
            )
        if name in self.processes:
            self._replaced.append(self.processes[name])
        self.processes[name] = process
        return process

    def log(self, name: str) -> Path:
        """What a process said."""
        return self.folder / "logs" / f"{name}.log"

    def _await_port(self, name: str, port: int, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.processes[name].poll() is not None:
                break
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((HOST, port)) == 0:
                    return
            time.sleep(0.1)
        raise DeploymentFailed(f"{name} does not answer on port {port}, see {self.log(name)}")


def processes_marked(mark: str, command: str = "") -> list[int]:
    """Ids of living processes that carry a deployment's mark, those whose command line matches a pattern."""
    return [
        process.pid
        for process in psutil.process_iter(["status", "environ", "cmdline"])  # None where it is somebody else's
        if process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        and (process.info["environ"] or {}).get(MARK) == mark
        and re.search(command, " ".join(process.info["cmdline"] or ()))
    ]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def send_signal(pid: int, number: int) -> None:
    """To one process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def signal_group(pid: int, number: int) -> None:
    """To a process and those of its group, if there are any."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


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
