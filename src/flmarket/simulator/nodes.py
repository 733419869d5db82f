"""The market on nodes: several tasks' servers on one ledger, owners behind a network, and everything that can fail.

The driver, the kinds, the grid's owners, the guard, the accounts and the ledger are the shipped ones. A server is a
generator of the driver's steps; a crash ends all of them, and the next look at a task starts a new one on what its
folder and the ledger say. At the end nothing breaks any more, and every task must end.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Generator
from pathlib import Path

import numpy as np

from flmarket.bids import Kind, Valuations
from flmarket.engines import Spec
from flmarket.engines.flower.strategy import GridOwners
from flmarket.errors import FlmarketError, PrivacyBudgetExhausted
from flmarket.ledger import IdReused, Ledger, LedgerUnavailable, MemoryLedger, SqlLedger
from flmarket.market import Checkpoint, MarketKind, RoundRecord, Rounds, new_task, owner_account
from flmarket.market.kind import release_id
from flmarket.privacy import Cap, PureDp, RecordLevel, Uncapped, ZCdp
from flmarket.simulator import world
from flmarket.simulator.network import Intruder, Network, Node, WatchedOwner
from flmarket.simulator.watch import Books, Home
from flmarket.simulator.world import Chance, Crash, Disk, FailingStore, Swarm, World, failing

BID_SECONDS, TRAIN_SECONDS = 5.0, 20.0
_TRIES = 40  # to end a task once nothing breaks any more


class _WatchedStore(FailingStore):
    """The folder of a task; records are looked at before they are written."""

    def __init__(self, folder: Path, disk: Disk, server: Server) -> None:
        super().__init__(folder, disk)
        self.server = server

    def save_round(self, record: RoundRecord, checkpoint: Checkpoint) -> None:
        """See `FileStore`."""
        self.server.recorded(record)
        super().save_round(record, checkpoint)


class Server:
    """One task's server: what is left of it after a crash is its folder."""

    def __init__(self, world: NodeWorld, spec: Spec, folder: Path) -> None:
        self.world, self.spec, self.folder = world, spec, folder
        self.rounds: Rounds | None = None
        self.over = False
        self._steps: Generator[str, None, None] | None = None
        self._quiet_round = -1  # nothing broke while this round was collected
        self._gone: frozenset[str] = frozenset()  # awards that had ended before it was

    @property
    def name(self) -> str:
        """The task's."""
        return self.spec.name

    def step(self) -> str:
        """The driver's next step, by a new process if there is none."""
        if self._steps is None:
            self._steps = self._played()
        step = next(self._steps, "over")
        if step == "awards" and self.world.chance.quiet and self.rounds is not None and self.rounds.plan is not None:
            self._quiet_round = self.rounds.plan.index
            self.world.watch.look(self.world.ledger)
            self._gone = frozenset(self.world.watch.books.ends)
        if step == "over":
            self.end()
            self.over = True
        return step

    def end(self) -> None:
        """The process ends."""
        steps, self._steps, self.rounds = self._steps, None, None
        if steps is not None:
            steps.close()

    def recorded(self, record: RoundRecord) -> None:
        """A record is about to be written."""
        watch, rounds = self.world.watch, self.rounds
        assert rounds is not None
        watch.look(self.world.ledger)
        lasting, kind = rounds.kind.side.lasting, rounds.kind
        watch.record(self.name, record, lasting=lasting, last=record.index == kind.rounds - 1 or kind.done)
        if record.index == self._quiet_round and rounds.plan is not None:
            for order in rounds.plan.orders:
                node = self.world.nodes[1 + order.owner]
                expired = watch.books.ends.get(order.award) == "expired" and order.award not in self._gone
                if expired and not node.restored:
                    watch.unpaid(release_id(order), order.owner)

    def told(self) -> tuple[int, int, int]:
        """What the records say: rounds, and what they cost; and rounds of the checkpoint."""
        spent = played = 0
        for path in self.folder.glob("record-*.json"):
            record = json.loads(path.read_bytes())
            prices = zip(record["state"], record["price_micros"], strict=True)
            spent, played = spent + sum(price for state, price in prices if state == "posted"), played + 1
        checkpoint = self.folder / "checkpoint.npz"
        following = int(np.load(checkpoint, allow_pickle=False)["next_round"]) if checkpoint.exists() else 0
        return played, spent, following

    def _played(self) -> Generator[str, None, None]:
        world = self.world
        kind: MarketKind = self.spec.kind(buyer=f"buyer-{self.name[1:2]}")
        ledger = failing(world.ledger, world.disk)
        store = _WatchedStore(self.folder, world.disk, self)
        owners = GridOwners(
            world.network, kind.model, ledger.head, bid_seconds=BID_SECONDS, train_seconds=TRAIN_SECONDS
        )
        self.rounds = rounds = Rounds(kind, owners, ledger, store)
        store.lock()
        try:
            for index in rounds.left():
                yield from rounds.steps(index)
        finally:
            store.unlock()


class NodeWorld(World):
    """A swarm of faults, some owners, some tasks."""

    def __init__(self, swarm: Swarm, folder: Path, chance: Chance) -> None:
        super().__init__(swarm, folder, chance)
        self.turns = swarm.turns
        self.disk = Disk(chance, "server crash", "ledger error")
        self.ledger: Ledger = self._ledger()
        self.nodes = {1 + number: self._node(number) for number in range(swarm.owners)}
        self.network = Network(self.nodes, self.clock, chance, self.watch)
        self.intruder = Intruder(self.network, chance)
        self.servers: dict[str, Server] = {}
        self._kept: tuple[dict[str, object], Books, dict[str, Server]] | None = None

    # the cast

    def _ledger(self) -> Ledger:
        if self.chance.stream("ledger").random() < 0.8:
            return MemoryLedger()
        return SqlLedger(f"sqlite:///{self.folder}/ledger.db")

    def _node(self, number: int) -> Node:
        draw, path = self.chance.stream("owners"), self.folder / f"owner-{number}"
        cap, noise = world.drawn_cap(draw), self.chance.stream(f"noise of {number}")
        rows = world.dealt(self.swarm.owners).records(number)
        data = world.data_of(self.swarm.owners)

        def owner(node: Node) -> WatchedOwner:
            return WatchedOwner(
                number=number, x=data.x_train[rows], y=data.y_train[rows], cap=cap, record=path, value=1.0, classes=2,
                valuation=Valuations([int(Kind.LINEAR)], [draw.choice((0.05, 0.3, 1.0))]), simulation_seed=0,
                privacy_budget=draw.choice((0.3, 1.0, 1.0, 5.0)), allow_raw=isinstance(cap, Uncapped),
                touched=lambda: node.touched(self.watch), draws=lambda: noise.getrandbits(64), most_seconds=30.0,
            )  # fmt: skip

        lies = draw.random() < 0.4
        if lies:
            self.watch.liars.add(number)
        self.watch.homes[number] = Home(number, path.with_suffix(".account.sqlite"), self.watch.broke)
        return Node(owner, path, lies, self.chance)

    # the play

    def _begin(self) -> None:
        """Nothing more to do."""

    def _turn(self) -> None:
        chance = self.chance
        live = [server for server in self.servers.values() if not server.over]
        if self.begun < self.swarm.tasks and (not live or (len(live) < 4 and chance.stream("act").random() < 0.2)):
            self._post()
        elif live:
            self._step(chance.choice("act", live))
        self._accidents()
        self.clock.sleep(chance.uniform("pause", 0.0, 0.5))
        self.watch.look(self.ledger)

    def _post(self) -> None:
        draw, self.begun = self.chance.stream("tasks"), self.begun + 1
        kind, name = draw.choice(world.KINDS), f"t{self.begun}"
        spec = world.market(draw, kind, name, self.swarm.owners)
        new_task(self.ledger, name)
        self.servers[name] = Server(self, spec, self.folder / name)
        self.tell("buyer", f"posts {name}, {kind}, {spec.kind().rounds} rounds")

    def _step(self, server: Server) -> None:
        before = len(self.chance.fired)
        try:
            step = server.step()
            self.tell(server.name, step if step != "over" else "is over")
            if step == "over":
                self._ended(server)
        except Crash:
            self.tell("server", f"the power fails ({self.why(before)}) while {server.name} is played")
            for one in self.servers.values():
                one.end()
            self.disk.dead = False
        except (LedgerUnavailable, OSError) as error:
            self.tell(server.name, f"stops: {error} ({self.why(before)})")
            server.end()
        except FlmarketError as error:
            self.tell(server.name, f"stops: {type(error).__name__}: {error}")
            server.end()
            if self.chance.quiet:
                self.watch.broke("ends", f"{server.name} cannot go on: {type(error).__name__}: {error}")
        except Exception as error:
            self.watch.broke("ends", f"{server.name} ends by {type(error).__name__}: {error}")

    def _ended(self, server: Server) -> None:
        self.watch.look(self.ledger)
        self.watch.books.compare(self.ledger.balances())
        played, spent, following = server.told()
        if played != following:
            self.watch.broke("bill", f"{server.name} has {played} records of {following} rounds")
        lasting = server.spec.kind().side.lasting
        self.watch.ended(server.name, spent, played, lasting=lasting)

    def _accidents(self) -> None:
        chance, nodes = self.chance, list(self.nodes.values())
        node = chance.choice("whom", nodes)
        if chance.happens("node away"):
            node.away_until = self.clock.now + chance.uniform("away", 1.0, 120.0)
            self.tell(f"owner {node.number}", f"is away until {node.away_until:.0f} s")
        if chance.happens("clock jump"):
            node.skew = chance.choice("skew", [-3600.0, -40.0, 0.0, 40.0, 3600.0])
            self.tell(f"owner {node.number}", f"her clock is {node.skew:+.0f} s off")
        if chance.happens("cap changed"):
            cap = world.drawn_cap(chance.stream("caps"), node.owner.cap)
            done = "sets" if node.change_cap(cap) else "cannot set"
            self.tell(f"owner {node.number}", f"{done} her cap to {cap}")
        if chance.happens("cap registered"):
            self._register(node)
        if chance.happens("journal restored"):
            if node.restore_journal():
                self.tell(f"owner {node.number}", "her journal is put back from a backup")
            else:
                node.keep_journal()
        if chance.happens("hostile server"):
            self.tell("intruder", self.intruder.act())
        if chance.happens("server restored"):
            self._backup()
        if chance.happens("posted twice"):
            self._twice()

    def _register(self, node: Node) -> None:
        caps: list[Cap] = [PureDp(0.5), PureDp(5.0), RecordLevel(ZCdp(0.5)), ZCdp(20.0)]
        cap = self.chance.choice("registered", caps)
        try:
            self.ledger.register_cap(owner_account(node.number), cap)
            self.tell(f"owner {node.number}", f"registers {cap} at the ledger")
        except (PrivacyBudgetExhausted, FlmarketError) as error:
            self.tell(f"owner {node.number}", f"cannot register {cap}: {error}")

    def _twice(self) -> None:
        """A second run of a task that the ledger knows is refused."""
        known = [name for name in self.servers if self.ledger.has_task(name)]
        if not known:
            return
        name = self.chance.choice("again", known)
        try:
            new_task(self.ledger, name)
            self.watch.broke("once", f"a second task {name} is taken on")
        except IdReused:
            self.tell("buyer", f"posts {name} again and is refused")

    def _backup(self) -> None:
        """Keep what servers and ledger have, or put it back: both together, as the store asks for."""
        if not isinstance(self.ledger, MemoryLedger):
            return
        copied = self.folder / "backup"
        for one in self.servers.values():
            one.end()
        if self._kept is None:
            self.tell("server", "is backed up")
            books = copy.deepcopy(self.watch.books, {id(self.watch): self.watch})
            self._kept = copy.deepcopy(vars(self.ledger)), books, dict(self.servers)
            for name, server in self.servers.items():
                if server.folder.exists():
                    shutil.copytree(server.folder, copied / name)
            return
        self.tell("server", "is put back from the backup, with its ledger")
        state, books, servers = self._kept
        self._kept = None
        vars(self.ledger).update(state)
        self.watch.books = books
        for name, server in self.servers.items():
            shutil.rmtree(server.folder, ignore_errors=True)
            if (copied / name).exists():
                shutil.copytree(copied / name, server.folder)
            server.over = False
        self.servers = servers
        shutil.rmtree(copied, ignore_errors=True)

    # the end

    def _settle(self) -> None:
        for server in self.servers.values():
            server.end()
        for node in self.nodes.values():
            node.away_until, node.skew = 0.0, 0.0
        self.clock.sleep(10 * TRAIN_SECONDS)
        for server in list(self.servers.values()):
            for _ in range(_TRIES):
                if server.over or self.watch.broken:
                    break
                self._step(server)
                self.watch.look(self.ledger)
            if not server.over and not self.watch.broken:
                self.watch.broke("ends", f"{server.name} does not end")
        if not self.watch.broken:
            try:
                self.ledger.verify()
            except FlmarketError as error:
                self.watch.broke("money", f"the log is not sound: {error}")

    def _leave(self) -> None:
        self.rounds = sum(server.told()[0] for server in self.servers.values())
        for server in self.servers.values():
            server.end()
        for node in self.nodes.values():
            node.restart()
        for home in self.watch.homes.values():
            home.close()
        if isinstance(self.ledger, SqlLedger):
            self.ledger.close()
