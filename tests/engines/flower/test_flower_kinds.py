"""Every kind of market from a file to owners' folders, and played by the owners whom these folders describe."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from tomli_w import dumps as toml_text

from flmarket.engines.flower import Deployment, FileStore, InProcessGrid, KindStrategy, OwnerFile, client_app
from flmarket.engines.flower.deployment import write_owner
from flmarket.engines.flower.files import ModelSection
from flmarket.engines.flower.node import owner_of_node
from flmarket.errors import ConfigError
from flmarket.learning import LocalTraining, SoftmaxRegression, described
from flmarket.ledger import AwardState, MemoryLedger, SqlLedger
from flmarket.market import owner_account
from flmarket.market.owner import COUNTS_UPDATES
from flmarket.privacy import ApproxDp, PureDp, RecordLevel, Unprotected, ZCdp
from flmarket.sampling import OptimalSampling, Uniform

DATA = {"name": "breast-cancer", "owners": 4, "partition": "equal"}
GAUSSIAN_CAP = {"privacy_cap": 60.0, "privacy_cap_delta": 1e-5}
MARKETS = {
    "auction": {
        "seed": 3,
        "task": {"name": "tumours", "rounds": 2, "bidders_per_round": 4, "budget_factor": 0.8},
        "data": DATA,
        "owners": {"privacy_cap": 3.0},
        "mechanism": {"auction": "all-in", "perturbation": "sphere"},
    },
    "sampling": {
        "seed": 3,
        "task": {"name": "tumours", "rounds": 3, "budget_per_round": 6.0},
        "data": DATA,
        "training": {"local_steps": 2, "batch_size": 16},
        "mechanism": {"auction": "sampling"},
        "sampling": {"costs": [1.0, 4.0]},
    },
    "reward": {
        "seed": 3,
        "task": {"name": "tumours", "rounds": 2, "learning_rate": 0.1},
        "data": DATA,
        "owners": GAUSSIAN_CAP,
        "mechanism": {"auction": "stackelberg"},
    },
    "joint": {
        "seed": 3,
        "task": {"name": "tumours", "rounds": 2},
        "data": DATA,
        "owners": GAUSSIAN_CAP,
        "training": {"local_steps": 3, "batch_size": 16},
        "mechanism": {"auction": "jdp"},
        "jdp": {
            "budget_factor": 1.0, "costs": [1.0, 4.0], "epsilon": 20.0, "validation": 50, "aggregation": "median",
            "adversary": "dirty-label", "adversaries": 1, "adversary_target": 1,
        },
    },
}  # fmt: skip


@pytest.fixture
def prepared(tmp_path):
    """A deployment's folders for one of the markets; no process is started."""

    def make(kind, **changes):
        values = MARKETS[kind] | {key: MARKETS[kind].get(key, {}) | value for key, value in changes.items()}
        deployment = Deployment(tmp_path / kind, toml_text(values))
        deployment.prepare()
        return deployment

    return make


def play(deployment):
    """The market on the owners' files, in this process; the ledger is the deployment's."""
    files = [deployment.owner_folder(i) / "owner.toml" for i in range(deployment.nodes)]
    grid = InProcessGrid(client_app(owner_of_node), deployment.nodes, lambda i: {"owner-file": str(files[i])})
    kind = deployment.spec.kind()
    with SqlLedger(deployment.ledger_url) as ledger:
        strategy = KindStrategy(kind, ledger, FileStore(deployment.state / "server"), bid_seconds=5.0)
        strategy.start(grid)
    return strategy


def paid_by_the_records(records):
    paid = {}
    for record in records:
        for owner, price, state in zip(record.bidders, record.price_micros, record.state, strict=True):
            if state is AwardState.POSTED and price:
                paid[owner_account(int(owner))] = paid.get(owner_account(int(owner)), 0) + int(price)
    return paid


@pytest.mark.parametrize("kind", MARKETS)
def test_owners_from_their_files_play_every_market(kind, prepared):
    deployment = prepared(kind)
    played = play(deployment)
    with SqlLedger(deployment.ledger_url) as ledger:
        ledger.verify()
        balances, awards = dict(ledger.balances()), list(ledger.awards())
        spent = {i: ledger.privacy_spent(owner_account(i)) for i in range(4)}
        sold = {release.award_id for release in ledger.releases()}
    paid = paid_by_the_records(played.records)
    assert paid
    assert {name: micros for name, micros in balances.items() if name.startswith("owner-") and micros} == paid
    assert balances["escrow"] == 0
    assert sum(balances.values()) == 0
    # the awards are the simulation's, though the noise is not
    books = MemoryLedger()
    deployment.spec.run(ledger=books)
    assert [replace(award, id="") for award in awards] == [replace(award, id="") for award in books.awards()]
    # what the ledger says was sold is what the owners' own accounts say
    assert sold == (set() if kind == "sampling" else {award.id for award in awards})
    for number, account in deployment.accounts().items():
        with account:
            sells = any(award.owner == f"owner-{number}" for award in awards)
            if kind == "sampling":  # without noise: unbounded at home, and no release that a ledger could count
                assert account.spent == (float("inf") if sells else 0.0)
                assert all(release.guarantee == Unprotected() for release in account.releases())
                continue
            assert account.spent == pytest.approx(spent[number], rel=1e-9)
            assert (account.spent > 0) == sells


@pytest.mark.parametrize("kind", MARKETS)
def test_an_owners_folder_says_what_the_market_says_of_her(kind, prepared):
    deployment = prepared(kind)
    spec, values = deployment.spec, []
    for i in range(4):
        own = OwnerFile.load(deployment.owner_folder(i) / "owner.toml")
        owner, rows = own.owner_at(deployment.owner_folder(i)), spec.partition.records(i)
        if kind == "reward":
            rows = rows[: spec.records]
        np.testing.assert_array_equal(owner.x, spec.data.x_train[rows])
        np.testing.assert_array_equal(owner.y, spec.data.y_train[rows], err_msg="also an adversary's are honest")
        assert not owner.simulated
        assert owner.allow_raw == (kind == "sampling")
        assert own.stays_out()[kind] == ""
        values.append(owner.value)
    if kind == "auction":
        assert values == [None] * 4
        assert owner.cap == PureDp(3.0)
    else:
        assert values == list(spec.privacy_values if kind == "reward" else spec.costs)
    if kind in ("reward", "joint"):
        assert owner.cap == (RecordLevel(ApproxDp(60.0, 1e-5)) if kind == "reward" else ApproxDp(60.0, 1e-5))
    if kind == "joint":
        assert owner.privacy_budget == spec.epsilon
        assert described(owner.trains(spec.kind().announcement(0))) == described(spec.model)


def test_without_a_cap_the_files_have_one_that_never_binds(prepared):
    deployment = prepared("reward", owners={"privacy_cap": float("inf")})
    assert OwnerFile.load(deployment.owner_folder(0) / "owner.toml").cap.cap() == RecordLevel(ZCdp(1e9))
    with SqlLedger(deployment.ledger_url) as ledger:
        assert ledger.cap("owner-0") is None


@pytest.mark.parametrize("kind", ["reward", "joint"])
def test_a_cap_that_cannot_hold_the_noise_is_refused_before_anything_is_written(kind, tmp_path):
    values = MARKETS[kind] | {"owners": {"privacy_cap": 3.0}}
    with pytest.raises(ConfigError, match="privacy_cap_delta"):
        Deployment(tmp_path / "d", toml_text(values))
    with pytest.raises(ConfigError, match="TOML"):
        Deployment(tmp_path / "d", "seed = ")
    assert list(tmp_path.iterdir()) == []


def paid_in_simulation(deployment):
    books = MemoryLedger()
    deployment.spec.run(ledger=books)
    return {number for number in range(4) if any(award.owner == owner_account(number) for award in books.awards())}


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("sampling", "allow_raw = true", "allow_raw = false"),
        ("sampling", "value = ", "# value = "),
        ("reward", "value = ", "# value = "),
        ("joint", "value = ", "# value = "),
        ("joint", "classes = 2", "classes = 3"),
        ("joint", "privacy_budget = 20.0", "privacy_budget = 19.0"),
    ],
)
def test_who_does_not_say_what_a_market_needs_is_not_in_it(kind, old, new, prepared):
    deployment = prepared(kind)
    who = min(paid_in_simulation(deployment))
    path = deployment.owner_folder(who) / "owner.toml"
    change(path, old, new)
    if old not in ("privacy_budget = 20.0", "classes = 2"):  # which keep her out of this market only
        assert OwnerFile.load(path).stays_out()[kind]
    play(deployment)
    with SqlLedger(deployment.ledger_url) as ledger:
        ledger.verify()
        owners = {award.owner for award in ledger.awards()}
    assert owners
    assert owner_account(who) not in owners


def test_sampling_terms_are_those_for_the_cost_in_her_file(prepared):
    deployment = prepared("sampling")
    path = deployment.owner_folder(1) / "owner.toml"
    change(path, f"value = {OwnerFile.load(path).bid.value!r}", "value = 3.75")
    played = play(deployment)
    costs = np.array(deployment.spec.costs)
    costs[1] = 3.75
    q, r = OptimalSampling.from_distribution(Uniform(1.0, 4.0), budget_per_client=1.5).offer(costs)
    np.testing.assert_allclose(played.kind.terms["participation"], q)
    np.testing.assert_allclose(played.kind.terms["payment"], r)


@pytest.mark.parametrize("kind", ["sampling", "joint"])
def test_who_holds_fewer_records_than_the_market_counts_on_is_left_out(kind, prepared):
    deployment = prepared(kind)
    who = min(paid_in_simulation(deployment))
    path = deployment.owner_folder(who) / "records.npz"
    with np.load(path) as held:
        x, y = held["x"][:-1], held["y"][:-1]
    np.savez(path, x=x, y=y)
    play(deployment)
    with SqlLedger(deployment.ledger_url) as ledger:
        owners = {award.owner for award in ledger.awards()}
    assert owners
    assert owner_account(who) not in owners


GOOD = {
    "owner": 1,
    "data": "records.npz",
    "bid": {"value": 1.0},
    "cap": {"rho": 1.0},
    "model": {"kind": "softmax", "steps": 3},
}


@pytest.mark.parametrize(
    ("section", "planted", "key"),
    [
        (None, {"allow_raw": "yes"}, "allow_raw"),
        (None, {"allow_raw": 1}, "allow_raw"),
        ("bid", {"value": 0.0}, "bid.value"),
        ("bid", {"value": float("inf")}, "bid.value"),
        ("cap", {"rho": 0.0}, "cap.rho"),
        ("cap", {"delta": 1e-6}, "cap"),
        ("model", {"kind": "resnet"}, "model.kind"),
        ("model", {"steps": 0}, "model.steps"),
        ("model", {"epochs": 2}, "model"),
        ("model", {"steps": 2.5}, "model.steps"),
        ("model", {"batch_size": 0}, "model.batch_size"),
        ("model", {"learning_rate": 0.0}, "model.learning_rate"),
        ("model", {"momentum": 1.0}, "model.momentum"),
        ("model", {"dropout": 0.1}, "model.dropout"),
    ],
)
def test_every_field_is_checked(section, planted, key, tmp_path):
    path = tmp_path / "owner.toml"
    path.write_text(toml_text(GOOD))
    assert set(OwnerFile.load(path).stays_out().values()) == {
        "",
        "allow_raw is not true, and updates would leave without noise",
        COUNTS_UPDATES,
    }
    path.write_text(toml_text(GOOD | (planted if section is None else {section: GOOD[section] | planted})))
    with pytest.raises(ConfigError, match=rf"owner\.toml: {key}"):
        OwnerFile.load(path)
    bare = {key: value for key, value in GOOD["model"].items() if key != "steps"}
    path.write_text(toml_text(GOOD | {"model": bare}))
    with pytest.raises(ConfigError, match="steps or epochs"):
        OwnerFile.load(path)


def test_without_a_model_of_her_own_she_trains_the_announced_one(prepared):
    """And with one of her own, her own, if it has as many parameters."""
    deployment = prepared("joint")
    folder = deployment.owner_folder(0)
    said, own = deployment.spec.kind().announcement(0), OwnerFile.load(folder / "owner.toml")
    assert own.model is None
    assert own.owner_at(folder).trains(said).local == deployment.spec.model.local
    hers = own.model_copy(update={"model": ModelSection(kind="softmax", steps=7, batch_size=4)})
    assert hers.owner_at(folder).trains(said).local == LocalTraining(steps=7, batch_size=4, momentum=0.9)
    assert hers.owner_at(folder).trains(replace(said, classes=3)) is None, "another number of parameters"


def test_a_model_section_makes_the_model_it_describes():
    local = LocalTraining(learning_rate=0.3, momentum=0.5, batch_size=8, epochs=2)
    section = ModelSection(kind="softmax", epochs=2, batch_size=8, learning_rate=0.3, momentum=0.5)
    assert section.trainer(5, 3) == SoftmaxRegression(5, 3, local=local)


def test_a_network_is_for_its_own_data_only():
    pytest.importorskip("torch")
    section = ModelSection(kind="mnist-cnn", steps=1)
    assert section.trainer(5, 3) is None
    assert section.trainer(784, 10) is not None


def test_a_model_that_only_this_process_knows_is_refused_before_anything_is_written(tmp_path, prepared):
    """Owners' machines build what is announced by its name."""
    spec = prepared("auction").spec
    model = SoftmaxRegression(30, 2)

    class Mine:
        tensors, initial, train, evaluate = model.tensors, model.initial, model.train, model.evaluate

    with pytest.raises(ConfigError, match="registered"):
        write_owner(replace(spec, model=Mine()), 0, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command_changes_a_market_file_only_as_asked(tmp_path):
    from flmarket.cli.flower import _market_text

    path = tmp_path / "market.toml"
    path.write_text(toml_text(MARKETS["auction"] | {"owners": {"bids": "bids.csv"}}))
    changed = tomllib.loads(_market_text(path, 2, 7, 5))
    assert changed == json.loads(json.dumps(MARKETS["auction"])) | {
        "seed": 5,
        "task": MARKETS["auction"]["task"] | {"rounds": 7},
        "data": DATA | {"owners": 2},
        "owners": {"bids": str(tmp_path / "bids.csv")},
    }
    path.write_text("# as it is\n" + toml_text(MARKETS["sampling"]))
    assert _market_text(path, None, None, None) == path.read_text()
    path.write_text(toml_text(MARKETS["sampling"] | {"data": DATA | {"owners": 51}}))
    with pytest.raises(ConfigError, match=r"data\.owners.*--nodes"):
        _market_text(path, None, None, None)
    assert tomllib.loads(_market_text(path, 50, None, None))["data"]["owners"] == 50
    path.write_text("owners = 3")
    with pytest.raises(ConfigError, match=r"market\.toml"):
        _market_text(path, 3, None, None)
