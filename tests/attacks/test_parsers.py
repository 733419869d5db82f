"""Every parser on files and messages that somebody broke: it reads them, or raises a typed error; nothing else.

Each case starts from something valid and breaks it: bytes flipped, cut, doubled, or a field of its structure replaced
by an odd value. What the parsers accept need not be sensible here; other tests say what is.
"""

import io
import json
from contextlib import suppress
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flmarket import populations
from flmarket.auctions.posted.menu import LINEAR, read_menu
from flmarket.engines.config import MarketConfig
from flmarket.errors import FlmarketError
from flmarket.learning import SoftmaxRegression
from flmarket.learning.data.files import from_files, read_npz
from flmarket.learning.travel import load_parameters, save_parameters
from flmarket.ledger import Award, HoldReceipt, MemoryLedger
from flmarket.ledger.entry import Entry
from flmarket.ledger.merkle import Head
from flmarket.ledger.receipt import Receipt
from flmarket.privacy import PureDp, cap_from_dict, event_from_dict, event_to_dict

EXAMPLES = settings(max_examples=40, suppress_health_check=list(HealthCheck))
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8), st.just([]), st.just({}),
    st.just([[[[[]]]]]), st.just("\x00"), st.just("9" * 400), st.just({"kind": "pure-dp"}), st.just(1e999),
)  # fmt: skip


def read(parser, value):
    """Typed errors are fine, and so is reading it."""
    with suppress(FlmarketError):
        parser(value)


@st.composite
def broken_bytes(draw, whole):
    """`whole` with a few edits."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        edit = draw(st.sampled_from(["flip", "cut", "insert", "double", "end"]))
        if edit == "flip" and content:
            content[at] ^= draw(st.integers(1, 255))
        elif edit == "cut":
            del content[at : at + draw(st.integers(1, 20))]
        elif edit == "insert":
            content[at:at] = draw(
                st.one_of(st.binary(max_size=8), st.sampled_from([b"\n", b",", b"nan", b'"', b"1e999"]))
            )
        elif edit == "double":
            content[at:at] = content[at : at + 30]
        else:
            del content[at:]
    return bytes(content)


@st.composite
def broken_tree(draw, whole):
    """A structure of dictionaries and lists with one or two nodes replaced, added or gone."""
    tree = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 2))):
        node = tree
        while True:
            if isinstance(node, dict) and node:
                key = draw(st.sampled_from(sorted(node)))
            elif isinstance(node, list) and node:
                key = draw(st.integers(0, len(node) - 1))
            else:
                break
            if isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
                node = node[key]
                continue
            edit = draw(st.sampled_from(["replace", "replace", "delete", "add"]))
            if edit == "delete":
                del node[key]
            elif edit == "add" and isinstance(node, dict):
                node[draw(st.text(max_size=5))] = deepcopy(draw(ODD))
            else:
                node[key] = deepcopy(draw(ODD))
            break
    return tree


def proofs():
    ledger = MemoryLedger(clock=lambda: 0)
    ledger.deposit("d", "buyer", 100)
    for number in range(5):
        ledger.hold(Award(f"t/0/{number}", 0, "buyer", f"o{number}", PureDp(0.5), 7))
    ledger.void("t/0/1", "late")
    return {
        Receipt: ledger.receipt("t/0/1").to_dict(),
        HoldReceipt: ledger.hold_receipts(["t/0/2"])["t/0/2"].to_dict(),
        Head: ledger.head().to_dict(),
        Entry: next(ledger.entries()).to_dict(),
    }


@pytest.mark.parametrize("cls", [Receipt, HoldReceipt, Head, Entry])
def test_receipts(cls):
    whole = proofs()[cls]

    @EXAMPLES
    @given(broken_tree(whole))
    def check(tree):
        def use(value):
            found = cls.from_dict(value)
            if cls is Receipt:
                found.check()
            elif cls is HoldReceipt:
                found.verify(award_id="t/0/2", owner="o2", price_micros=7)

        read(use, tree)

    check()
    with pytest.raises(FlmarketError):
        cls.from_dict([])


@EXAMPLES
@given(broken_tree({"event": event_to_dict(PureDp(1.0)), "cap": {"kind": "approx-dp", "epsilon": 1.0, "delta": 1e-6}}))
def test_events_and_caps(tree):
    if isinstance(tree, dict):
        read(event_from_dict, tree.get("event"))
        read(cap_from_dict, tree.get("cap"))


MARKET = """
seed = 3
kind = "auction"
[task]
name = "t"
rounds = 3
budget_per_round = 20.0
[data]
name = "breast-cancer"
owners = 6
[owners]
dropout = 0.1
[mechanism]
auction = "m1"
perturbation = "sphere"
[training]
local_steps = 2
"""


@EXAMPLES
@given(broken_bytes(MARKET.encode()))
def test_market_files(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "market.toml"
    path.write_bytes(content)
    read(MarketConfig.load, path)


OWNER = """
owner = 3
data = "mine.csv"
[bid]
rate = 0.5
privacy_budget = 1.0
[cap]
epsilon = 4.0
"""


@EXAMPLES
@given(broken_bytes(OWNER.encode()))
def test_owner_files(tmp_path_factory, content):
    pytest.importorskip("flwr")
    from flmarket.engines.flower import OwnerFile

    path = tmp_path_factory.getbasetemp() / "owner.toml"
    path.write_bytes(content)
    read(OwnerFile.load, path)


BIDS = "kind,rate,privacy_budget,data_size\nlinear,0.5,1.0,10\nsqrt,2,0.5,3\nstep,1,1,1\n"
BIDS_JSON = json.dumps([{"kind": "tabulated", "grid": [0.5, 1], "values": [1, 2], "privacy_budget": 1, "data_size": 3}])


@EXAMPLES
@given(broken_bytes(BIDS.encode()), broken_bytes(BIDS_JSON.encode()), broken_tree(json.loads(BIDS_JSON)))
def test_files_of_bids(tmp_path_factory, table, text, tree):
    folder = tmp_path_factory.getbasetemp()
    for name, content in (("b.csv", table), ("b.json", text), ("t.json", json.dumps(tree).encode())):
        (folder / name).write_bytes(content)
        read(populations.read_bids, folder / name)


TABLE = "age,income,ok\n" + "".join(f"{n},{n * 7 % 5}.5,{'yes' if n % 2 else 'no'}\n" for n in range(12))


def npz(**arrays):
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


@EXAMPLES
@given(
    broken_bytes(TABLE.encode()),
    broken_bytes(npz(x=np.arange(12.0).reshape(6, 2), y=np.arange(6) % 2)),
    broken_bytes(b"".join(b"%d,%d,%d\n" % (n, n * n, n % 2) for n in range(8))),
)
@pytest.mark.filterwarnings("ignore")
def test_files_of_records(tmp_path_factory, table, arrays, numbers):
    folder = tmp_path_factory.getbasetemp()
    for name, content in (("d.csv", table), ("d.npz", arrays), ("n.csv", numbers), ("n.npz", arrays)):
        (folder / name).write_bytes(content)
    read(lambda path: from_files(path, None, label="ok"), folder / "d.csv")
    read(lambda path: from_files(path, None, label=None), folder / "d.npz")
    read(read_npz, folder / "d.npz")
    pytest.importorskip("flwr")
    from flmarket.engines.flower.files import read_records

    read(read_records, folder / "n.csv")
    read(read_records, folder / "n.npz")


def test_safetensors(tmp_path):
    pytest.importorskip("safetensors")
    model, path = SoftmaxRegression(3, 2), tmp_path / "model.safetensors"
    save_parameters(model, np.arange(4.0), path)
    whole = path.read_bytes()

    @EXAMPLES
    @given(broken_bytes(whole))
    def check(content):
        path.write_bytes(content)
        read(lambda at: load_parameters(model, at), path)

    check()
    path.write_bytes(whole)
    np.testing.assert_array_equal(load_parameters(model, path), np.arange(4.0))


def test_weights_of_learned_auctions(tmp_path):
    pytest.importorskip("safetensors")
    from flmarket.auctions import learned

    shipped = sorted(Path(learned.__file__).parent.glob("weights/**/*.safetensors"), key=lambda p: p.stat().st_size)[0]
    whole, path = shipped.read_bytes(), tmp_path / "mine.safetensors"

    @settings(EXAMPLES, max_examples=40)
    @given(broken_bytes(whole[:2000]))
    def check(content):
        path.write_bytes(content + whole[2000:])
        read(lambda at: learned.load(shipped.parent.name, str(at)), path)

    check()


@EXAMPLES
@given(st.data())
def test_menus(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "menu.json"
    LINEAR.save(path)
    whole = path.read_bytes()
    path.write_bytes(data.draw(broken_bytes(whole)))
    read(read_menu, path)


def test_messages():
    """Every field of every message that travels, replaced by anything that a record can hold."""
    pytest.importorskip("flwr")
    from flwr.app import ConfigRecord, Message, RecordDict
    from hostile import call, order

    from flmarket.engines.flower import InProcessGrid
    from flmarket.engines.flower.messages import Delivery, Refusal, pack, unpack, unpack_escrow, unpack_head
    from flmarket.market import Announcement, Bid, Order

    InProcessGrid(lambda message, context: message, 0)  # Flower's messages ask the process who it is
    bid = Bid(owner=1, data_size=4, privacy_budget=1.0, kind=0, rate=0.5)
    whole = {
        Announcement: call(), Order: order(), Bid: bid, Delivery: Delivery(release="t/0/1", owner=1),
        Refusal: Refusal(owner=1, code="cap", reason="no"),
    }  # fmt: skip
    values = st.one_of(
        st.text(max_size=30), st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.binary(max_size=8),
        st.lists(st.floats(), max_size=3), st.just('{"kind": "pure-dp", "epsilon": "x"}'), st.just("[" * 3000),
    )  # fmt: skip

    @settings(EXAMPLES, max_examples=80)
    @given(st.sampled_from(list(whole)), st.data())
    def check(cls, data):
        content = pack(whole[cls])
        (name,) = content.config_records
        fields = dict(content.config_records[name])
        for key in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
            fields[key] = data.draw(values)
        if data.draw(st.booleans()):
            fields[data.draw(st.sampled_from(["more", "owner"]))] = 1
        records = {name: ConfigRecord(fields)}
        for beside in ("head", "escrow"):
            records[beside] = ConfigRecord(
                {"json": data.draw(st.one_of(st.just("{}"), st.just("[" * 9000), st.text()))}
            )
        message = Message(RecordDict(records), 1, "train")
        read(lambda one: unpack(cls, one), message)
        read(unpack_head, message)
        read(unpack_escrow, message)

    check()
