"""What lies on disk: an owner's file, keys, the server's state, the app that is shipped."""

import json
import re
import stat
import tomllib
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flwr.app import Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from flmarket.cli.app import app as command
from flmarket.cli.flower import _ACCOUNT, _market_text
from flmarket.engines.config import MarketConfig
from flmarket.engines.flower import FileStore, OwnerFile, client_app
from flmarket.engines.flower.certificates import node_keys, server_files
from flmarket.engines.flower.files import read_records, write_identity, write_peers
from flmarket.engines.flower.messages import Delivery, Refusal, pack, unpack
from flmarket.engines.flower.node import owner_of_node
from flmarket.errors import ConfigError, InvalidInput
from flmarket.ledger import DurableAccount
from flmarket.market import Bid, Checkpoint, Order, RoundPlan, RoundRecord
from flmarket.market.masking.guarding import public_identity
from flmarket.market.owner import COUNTS_UPDATES
from flmarket.privacy import ApproxDp, PureDp, Unprotected, ZCdp

ROOT = Path(__file__).parents[3]
OWNER = """
owner = 3
data = "records.npz"
[bid]
valuation = "quadratic"
rate = 2.0
privacy_budget = 0.5
[cap]
epsilon = 8.0
"""
APP = OWNER.replace('data = "records.npz"', "records = 6")


def test_the_example_is_the_app_that_deploy_uses():
    packed, example = ROOT / "src/flmarket/engines/flower/app", ROOT / "examples/flower"
    names = [path.relative_to(packed) for path in packed.rglob("*") if path.suffix in (".py", ".toml")]
    assert len(names) == 4
    for name in names:
        assert (packed / name).read_text() == (example / name).read_text(), name


def test_the_examples_market_is_accepted():
    from flmarket.engines.config import MarketConfig

    assert MarketConfig.load(ROOT / "examples/flower/flmarket_app/market.toml").simulation().partition.owners == 10


@pytest.fixture
def owner_file(tmp_path):
    np.savez(tmp_path / "records.npz", x=np.random.default_rng(0).normal(size=(6, 3)), y=np.arange(6) % 2)
    (tmp_path / "owner.toml").write_text(OWNER)
    return tmp_path / "owner.toml"


def test_an_owner_from_her_file_has_secure_noise(owner_file):
    owner = OwnerFile.load(owner_file).owner_at(owner_file.parent)
    assert (owner.number, owner.x.shape, owner.cap, owner.privacy_budget) == (3, (6, 3), PureDp(8.0), 0.5)
    assert not owner.simulated
    assert not owner.allow_raw
    context = Context(
        run_id=1, node_id=1, node_config={"owner-file": str(owner_file)}, state=RecordDict(),
        run_config={"noise": "seeded", "market": "elsewhere", "simulation_seed": 1},
    )  # fmt: skip
    assert not owner_of_node(context).simulated, "a run's configuration does not decide"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (OWNER.replace("owner = 3", "owner = -1"), "owner"),
        (OWNER.replace("epsilon = 8.0", ""), "cap"),
        (OWNER.replace("epsilon = 8.0", "epsilon = 8.0\nrho = 1.0"), "cap"),
        (OWNER.replace("epsilon = 8.0", "epsilon = inf"), "cap.epsilon"),
        (OWNER.replace("quadratic", "cubic"), "bid.valuation"),
        (OWNER + "noise = 'none'\n", "cap.noise.*one of the keys epsilon, delta, rho, none, unit"),
        (OWNER.replace("owner = 3", ""), "owner: None .* needed"),
        (OWNER.replace("owner = 3", f"owner = {2**70}"), "owner: .* less than"),
        (OWNER.replace("owner = 3", "owner = 3\nanswer_seconds = 1e12"), "answer_seconds"),
        (OWNER + 'unit = "record"\n', "cap.*epsilon with delta"),
        (APP.replace("budget = 0.5", "budget = 0.5\nleast_epsilon = 0.6"), "bid.least_epsilon.*at most .*0.5"),
        (APP.replace("budget = 0.5", "budget = 0.5\nleast_records = 7"), "bid.least_records.*at most records, 6"),
        (APP.replace("owner = 3", 'owner = 3\ntrust = ["secure-aggregation"]'), 'trust.*"local"'),
        ("owner = ", "owner.toml.*valid TOML"),
    ],
)
def test_a_bad_file_is_named(owner_file, text, key):
    owner_file.write_text(text)
    with pytest.raises(ConfigError, match=key):
        OwnerFile.load(owner_file)


def test_a_mark_that_some_editors_write_is_no_mistake(owner_file):
    owner_file.write_text(OWNER, encoding="utf-8-sig")
    assert OwnerFile.load(owner_file).owner == 3


def test_caps_in_three_currencies(owner_file):
    for line, cap in (("epsilon = 2.0\ndelta = 1e-6", ApproxDp(2.0, 1e-6)), ("rho = 0.5", ZCdp(0.5))):
        owner_file.write_text(OWNER.replace("epsilon = 8.0", line))
        assert OwnerFile.load(owner_file).cap.cap() == cap


def test_records_as_csv(tmp_path):
    (tmp_path / "r.csv").write_text("1.5,2,0\n3,4.25,1\n")
    x, y = read_records(tmp_path / "r.csv")
    np.testing.assert_array_equal(x, [[1.5, 2], [3, 4.25]])
    np.testing.assert_array_equal(y, [0, 1])
    (tmp_path / "bad.csv").write_text("1.5,2,0.5\n")
    for name in ("bad.csv", "missing.npz"):
        with pytest.raises(ConfigError, match="data"):
            read_records(tmp_path / name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # typer asks click for names that click will rename
def test_owner_commands(tmp_path):
    runner, folder = CliRunner(), tmp_path / "me"
    assert runner.invoke(command, ["owner", "init", str(folder), "--number", "4"]).exit_code == 0
    assert OwnerFile.load(folder / "owner.toml").owner == 4
    assert isinstance(runner.invoke(command, ["owner", "init", str(folder)]).exception, ConfigError)
    (folder / "record").mkdir()
    with DurableAccount.open(folder / "record" / "owner-4.account.sqlite", PureDp(10.0)) as account:
        account.charge("t/0/4", "buyer", PureDp(0.5))
    told = json.loads(runner.invoke(command, ["owner", "status", str(folder / "owner.toml"), "--json"]).output)
    assert told["spent"] == 0.5
    assert [release["award"] for release in told["releases"]] == ["t/0/4"]
    said = runner.invoke(command, ["owner", "status", str(folder / "owner.toml")]).output
    assert "t/0/4" in said
    assert "takes part in: auctions\n" in said
    assert "not in client sampling: no value is given" in said
    assert {market for market, why in told["stays_out"].items() if why} == {"sampling", "reward", "joint"}
    text = (folder / "owner.toml").read_text()
    text = re.sub(r"(?m)^(# delta|# unit|epsilon) = .*\n", "", text)  # updates without noise fit under no cap
    (folder / "owner.toml").write_text(re.sub(r"^# (?=\[?\w+( =|\]))", "", text, flags=re.MULTILINE))
    out = OwnerFile.load(folder / "owner.toml").stays_out()
    assert set(out.values()) == {"", COUNTS_UPDATES}, "with all that the template names"
    assert out["reward"] == COUNTS_UPDATES


def test_the_owner_file_in_the_docs_is_accepted_and_takes_part_in_all_that_sells_updates(tmp_path):
    page = (ROOT / "docs/flower.md").read_text()
    (tmp_path / "owner.toml").write_text(page.partition("`owner.toml`:\n\n```\n")[2].partition("```")[0])
    out = OwnerFile.load(tmp_path / "owner.toml").stays_out()
    assert {kind for kind, why in out.items() if why} == {"reward"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_deploy_refuses_what_it_cannot_do(tmp_path):
    runner = CliRunner()
    assert isinstance(runner.invoke(command, ["deploy", "cloud"]).exception, ConfigError)
    (tmp_path / "ledger.db").touch()
    again = runner.invoke(command, ["deploy", "local", "--out", str(tmp_path)])
    assert isinstance(again.exception, ConfigError)
    assert list(tmp_path.iterdir()) == [tmp_path / "ledger.db"], "nothing was written"


def test_the_servers_certificate_is_signed_by_the_authority(tmp_path):
    files = server_files(tmp_path, "127.0.0.1", "superlink")
    authority = x509.load_pem_x509_certificate(files.authority.read_bytes())
    server = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "superlink"]
    other = x509.load_pem_x509_certificate(server_files(tmp_path / "other").authority.read_bytes())
    with pytest.raises(Exception, match=r"issuer|signature|^$"):
        server.verify_directly_issued_by(other)
    keys = node_keys(tmp_path, "key")
    private = load_ssh_private_key(keys.private.read_bytes(), None)
    assert private.public_key() == load_ssh_public_key(keys.public.read_bytes())
    for secret in (files.key, keys.private):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600


def test_a_deployment_in_sums_needs_one_word_more(tmp_path):
    alone = MarketConfig.parse(tomllib.loads(_market_text(None, None, None, None, "secure-aggregation")))
    assert (alone.trust, alone.data.owners) == ("secure-aggregation", 5)
    assert alone.spec().owner(0).cap == ApproxDp(10.0, 1e-5)
    file = tmp_path / "market.toml"
    file.write_text(_market_text(None, None, None, None, None).replace(*_ACCOUNT))
    assert MarketConfig.load(file).trust == "local"
    changed = MarketConfig.parse(tomllib.loads(_market_text(file, None, None, None, "secure-aggregation")))
    assert changed.trust == "secure-aggregation"
    with pytest.raises(ConfigError, match="--trust"):
        command(["deploy", "local", "--trust", "nobody", "--out", str(tmp_path / "d")], standalone_mode=False)


def test_keys_for_masked_sums_are_kept_and_read_back(owner_file):
    folder = owner_file.parent
    public = write_identity(folder)
    assert write_identity(folder) == public, "made once"
    assert stat.S_IMODE((folder / "identity.key").stat().st_mode) == 0o600
    write_peers(folder / "peers.toml", {0: public, 12: b"p" * 32})
    said = ['trust = ["secure-aggregation"]', 'identity = "identity.key"', 'peers = "peers.toml"', "least_honest = 3"]
    owner_file.write_text("\n".join(said) + owner_file.read_text())
    owner = OwnerFile.load(owner_file).owner_at(folder)
    assert public_identity(owner) == public
    assert (dict(owner.peers), owner.least_honest) == ({0: public, 12: b"p" * 32}, 3)
    odd = [("identity.key", "none"), ("identity.key", "00"), ("peers.toml", "1 = 5"), ("peers.toml", "1 = ''")]
    for name, text in odd:
        before = (folder / name).read_text()
        (folder / name).write_text(text)
        with pytest.raises(ConfigError, match=name.partition(".")[0]):
            OwnerFile.load(owner_file).owner_at(folder)
        (folder / name).write_text(before)


class TestStore:
    def test_a_delivery_that_was_cut_off_does_not_count(self, tmp_path):
        store = FileStore(tmp_path)
        store.save_deliveries(0, {7: np.arange(3.0)})
        store.save_deliveries(0, {8: np.arange(4.0)})
        path = tmp_path / "updates-000000.log"
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert set(store.deliveries(0)) <= {7}
            store.save_deliveries(0, {9: np.ones(2)})
            assert 9 in store.deliveries(0), "what comes after a cut-off record can be read"
        path.write_bytes(whole)
        found = store.deliveries(0)
        np.testing.assert_array_equal(found[7], np.arange(3.0))
        np.testing.assert_array_equal(found[8], np.arange(4.0))

    def test_a_flipped_bit_in_a_delivery_is_seen(self, tmp_path):
        store = FileStore(tmp_path)
        store.save_deliveries(0, {7: np.arange(3.0)})
        path = tmp_path / "updates-000000.log"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(bytes(content))
        assert store.deliveries(0) == {}

    def test_a_finished_round_clears_what_led_to_it(self, tmp_path, market):
        record = market(task={"rounds": 1}).simulation().run().rounds[0]
        store = FileStore(tmp_path)
        for index in (0, 1):
            store.save_plan(RoundPlan(index), {"costs": [1.0]})
            store.save_deliveries(index, {1: np.zeros(2)})
            store.save_exchange(index, b"before")
            store.save_exchange(index, b"after")
        (tmp_path / "plan-000001.json.part").write_text("half")
        store.save_round(record, Checkpoint(1, np.arange(2.0), [np.ones(2)], {"done": False}, b"theirs"))
        assert store.plan(0) is None
        assert store.deliveries(0) == {}
        assert (store.exchange(0), store.exchange(1)) == (b"", b"after")
        assert store.plan(1) == RoundPlan(1)
        assert set(store.deliveries(1)) == {1}
        assert store.terms() == {"costs": [1.0]}
        assert store.record(0).to_dict() == record.to_dict()
        assert store.record(1) is None
        assert not list(tmp_path.glob("*.part"))
        saved = store.checkpoint()
        assert (saved.next_round, saved.notes, saved.owners) == (1, {"done": False}, b"theirs")
        np.testing.assert_array_equal(saved.parameters, np.arange(2.0))
        np.testing.assert_array_equal(saved.history, [np.ones(2)])

    def test_records_and_plans_survive_the_way_to_disk(self, tmp_path, market):
        spec = market(owners={"dropout": 0.3, "faulty": 0.2}).simulation()
        record = spec.run().rounds[0]
        again = RoundRecord.from_dict(json.loads(json.dumps(record.to_dict())))
        assert again.to_dict() == record.to_dict()
        assert again.delivered.tolist() == record.delivered.tolist()
        kind, store = spec.kind(), FileStore(tmp_path)
        bid = Bid(owner=2, data_size=9, privacy_budget=0.5, kind=5, rate=0.0, grid=(0.5, 1.0), values=(1.0, 2.0))
        losses = PureDp(0.5), ZCdp(0.1), ApproxDp(1.0, 1e-5), Unprotected()
        orders = tuple(
            kind.order(3, i, loss=loss, price_micros=i, records=1, learning_rate=0.1) for i, loss in enumerate(losses)
        )
        for plan in (RoundPlan(3), RoundPlan(4, "t/4/budget", 7, orders, {"kept": [1]}, (bid,))):
            store.save_plan(plan, {})
            assert store.plan(plan.index) == plan

    @pytest.mark.parametrize(
        ("market", "perturbation", "loss"),
        [
            ("auction", "sphere", PureDp(0.5)),
            ("reward", "gaussian-zcdp", ZCdp(0.5)),
            ("joint", "m3-update-analytic-client", ApproxDp(0.5, 1e-5)),
            ("joint", "", Unprotected()),
            ("sampling", "", Unprotected()),
        ],
    )
    def test_a_plan_of_the_version_before_is_taken_up(self, tmp_path, market, perturbation, loss):
        """Its orders had a bare number for their loss, and said again what the announcement says."""
        lasting = market in ("reward", "joint")
        order = {
            "award": "t/0/7" if lasting else "t/2/7", "task": "t", "buyer": "buyer", "market": market, "round_index": 2,
            "rounds": 5, "owner": 7, "epsilon": 0.5, "price_micros": 3, "records": 20, "features": 3, "classes": 2,
            "perturbation": perturbation, "clip": 1.0, "steps": 1, "batch_size": 0, "learning_rate": 0.1, "l2": 0.0,
            "delta": 1e-5, "total_size": 4.0,
        }  # fmt: skip
        saved = {"index": 2, "deposit_id": "t/2/budget", "deposit_micros": 9, "orders": [order], "memory": {}}
        (tmp_path / "plan-000002.json").write_text(json.dumps(saved))
        (found,) = FileStore(tmp_path).plan(2).orders
        assert (found.loss, found.lasting, found.award, found.total_size) == (loss, lasting, order["award"], 4.0)


finite = st.floats(0, 1e9)


@given(
    bid=st.builds(
        Bid, owner=st.integers(0, 2**32), data_size=st.integers(0, 2**40), privacy_budget=finite,
        kind=st.integers(0, 5), rate=finite, grid=st.just(()) | st.tuples(finite), values=st.tuples(finite),
    )
)  # fmt: skip
def test_values_survive_the_way_through_a_message(bid):
    message = Message(pack(bid), 1, "query.bid")
    assert unpack(Bid, message) == bid
    assert unpack(Delivery, message) is None
    assert unpack(Order, message) is None


@given(key=st.sampled_from(["owner", "code", "reason"]), value=st.integers(-9, -1) | st.binary(max_size=3))
def test_a_value_of_the_wrong_kind_is_an_error(key, value):
    content = pack(Refusal(owner=1, code="c", reason="r"))
    content["refusal"][key] = value
    with pytest.raises(InvalidInput):
        unpack(Refusal, Message(content, 1, "train"))


@pytest.fixture(autouse=True)
def _identity():
    """Flower's `Message` wants to know which process this is."""
    from flmarket.engines.flower import InProcessGrid

    InProcessGrid(client_app(owner_of_node), 1)
