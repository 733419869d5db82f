"""A buyer's own evaluation set: what is taken and what is not, that models are tested on it and nothing else, and that
data which only owners have can be asked for."""

import csv
import hashlib
import io
import json
import re

import httpx
import numpy as np
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.core import Broker
from flmarket.broker.errors import Conflict, NotFound
from flmarket.broker.office import evaluations, explore, listing, tasks
from flmarket.broker.requests import EvaluationRequest, ExploreRequest
from flmarket.broker.settings import Settings
from flmarket.errors import InvalidInput
from flmarket.learning import load

SCHEMA = {
    "columns": [{"name": "radius", "unit": "mm", "offset": 10.0, "scale": 2.0}, {"name": "site", "values": ["b", "a"]}],
    "classes": ["benign", "malignant"],
}
OWN_TABLE = "radius,site,label\n" + "14,a,benign\n8,b,malignant\n" * 10


def raw(data, rows):
    """Test records as they were before scaling, as CSV."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([*data.encoding.numbers, "label"])
    for i in rows:
        writer.writerow([*(data.x_test[i] * data.encoding.scale + data.encoding.offset), data.classes[data.y_test[i]]])
    return out.getvalue()


def asked(table, name="mine", data="breast-cancer", **more):
    return EvaluationRequest.model_validate({"name": name, "table": table, "data": data, **more})


@pytest.fixture(scope="module")
def cancer():
    return load("breast-cancer")


def test_a_model_is_tested_on_the_buyers_records_and_nothing_else(small, joined, order, play, cancer):
    """Two sets of 40 with the same records, one of them with all labels turned: accuracies add up to 1."""
    buyer = joined(small, "buyer").party
    text = raw(cancer, range(40))
    turned = re.sub("(malignant|benign)", lambda found: {"malignant": "benign"}.get(found[1], "malignant"), text)
    sets = [evaluations.add_set(small, buyer, asked(one, name)) for one, name in ((text, "right"), (turned, "turned"))]
    assert {one.examples for one in sets} == {40}
    posted = [tasks.post_task(small, buyer, order(evaluation=one.id, seed=3)) for one in sets]
    plain = tasks.post_task(small, buyer, order(seed=3))
    play(small)
    right, wrong, usual = (tasks.get_task(small, buyer, one.id) for one in (*posted, plain))
    assert (right.test_examples, wrong.test_examples, usual.test_examples) == (40, 40, len(cancer.y_test))
    assert right.accuracy + wrong.accuracy == pytest.approx(1.0)
    assert right.accuracy != usual.accuracy
    model = [np.load(io.BytesIO(tasks.model(small, buyer, one.id, format="npz").content)) for one in (right, usual)]
    for name in set(model[0].files) - {"about"}:
        assert np.array_equal(model[0][name], model[1][name]), "what it is tested on changes no model"


def test_records_are_scaled_as_the_data_set_is(small, joined, cancer):
    buyer = joined(small, "buyer").party
    made = evaluations.add_set(small, buyer, asked(raw(cancer, range(25)).replace(",", ";")))
    data = small.simulations.data_of("breast-cancer", made.id)
    assert np.allclose(data.x_test, cancer.x_test[:25])
    assert np.array_equal(data.y_test, cancer.y_test[:25])
    assert np.array_equal(data.x_train, cancer.x_train)
    assert evaluations.header(small, "breast-cancer") == (*cancer.encoding.numbers, "label")


def test_the_terms_name_the_set_and_its_columns(small, joined, order, cancer):
    buyer = joined(small, "buyer").party
    made = evaluations.add_set(small, buyer, asked(raw(cancer, range(30))))
    task = tasks.post_task(small, buyer, order(evaluation=made.id)).id
    text = listing.terms_text(small, task)
    terms = json.loads(text)
    assert terms["evaluation"]["set"] == f"{made.id}, the buyer’s own, 30 examples, SHA-256 {made.sha256}"
    assert terms["data"]["columns"] == list(cancer.encoding.numbers)
    assert listing.listing(small, None, task).terms_hash == hashlib.sha256(text.encode()).hexdigest()


GOOD = OWN_TABLE
BAD = {
    "no label": (GOOD.replace("label", "class"), "a header with the columns label"),
    "no number": (GOOD.replace("14,a", "tall,a", 1), "a number in column radius, line 2"),
    "infinite": (GOOD.replace("14,a", "1e999,a", 1), "a number in column radius, line 2"),
    "category": (GOOD.replace("8,b", "8,c", 1), "one of a, b in column site, line 3"),
    "class": (GOOD.replace("malignant", "unclear", 1), "one of benign, malignant in column label, line 3"),
    "fields": (GOOD.replace("8,b,", "8,", 1), "3 fields in every line; line 3 has 2"),
    "endless": (GOOD.replace("8,b", "1e308,b", 1), "at most 1e+12 after scaling in column radius, line 3"),
    "few": ("radius,site,label\n14,a,benign\n", "10 to 20,000 examples; these are 1"),
    "twice": (GOOD.replace("radius,site,label", "radius,site,label,label"), "a header of different names"),
    "quote": (GOOD.replace("14,a", '"14,a', 1), "valid CSV"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_by_line_and_column(small, joined, case):
    buyer, (table, told) = joined(small, "buyer").party, BAD[case]
    with pytest.raises(InvalidInput) as refused:
        evaluations.add_set(small, buyer, asked(table, data="", schema=SCHEMA))
    assert refused.value.field == "table"
    assert told in refused.value.accepted
    assert evaluations.list_sets(small, buyer).items == ()


def test_sets_are_their_buyers(small, joined, order, cancer):
    anna, bert = joined(small, "buyer").party, joined(small, "buyer").party
    made = evaluations.add_set(small, anna, asked(raw(cancer, range(20))))
    theirs = order(evaluation=made.id)
    for act in (
        lambda: tasks.post_task(small, bert, theirs),
        lambda: explore.explore(small, bert, ExploreRequest(task=theirs, budgets_micros=[10**8], profiles=1)),
        lambda: tasks.post_task(small, anna, order(evaluation=made.id, data={"name": "digits"})),
    ):
        with pytest.raises(InvalidInput) as refused:
            act()
        assert refused.value.field == "broker.evaluation"
    with pytest.raises(NotFound):
        evaluations.remove_set(small, bert, made.id)
    assert evaluations.list_sets(small, bert).items == ()
    tasks.post_task(small, anna, theirs)
    with pytest.raises(Conflict, match="terms name it"):
        evaluations.remove_set(small, anna, made.id)
    spare = evaluations.add_set(small, anna, asked(raw(cancer, range(20)), "spare"))
    evaluations.remove_set(small, anna, spare.id)
    assert [one.id for one in evaluations.list_sets(small, anna).items] == [made.id]


def test_a_set_removed_while_a_task_is_posted_is_missed(small, joined, order, cancer, monkeypatch):
    """Between the check of the order and its transaction: no terms name a set that is gone."""
    buyer = joined(small, "buyer").party
    made = evaluations.add_set(small, buyer, asked(raw(cancer, range(20))))
    build = small.simulations.build

    def built_slowly(*args):
        built = build(*args)
        evaluations.remove_set(small, buyer, made.id)
        return built

    monkeypatch.setattr(small.simulations, "build", built_slowly)
    with pytest.raises(InvalidInput) as refused:
        tasks.post_task(small, buyer, order(evaluation=made.id))
    assert refused.value.field == "broker.evaluation"
    assert tasks.list_tasks(small, buyer).items == ()


def test_the_same_key_keeps_one(small, joined):
    buyer, table = joined(small, "buyer").party, asked(OWN_TABLE, data="", schema=SCHEMA)
    first, again = (evaluations.add_set(small, buyer, table, key="k") for _ in range(2))
    assert first == again
    changed = asked(OWN_TABLE.replace("14", "15"), data="", schema=SCHEMA)
    with pytest.raises(Conflict, match="another set"):
        evaluations.add_set(small, buyer, changed, key="k")
    for n in range(small.settings.max_evaluations_per_buyer - 1):
        evaluations.add_set(small, buyer, table, key=f"k{n}")
    assert evaluations.add_set(small, buyer, table, key="k") == first, "it is there, so there is room for it"
    with pytest.raises(Conflict, match="at most"):
        evaluations.add_set(small, buyer, table)


def test_data_that_only_owners_have(tmp_path, joined, order):
    broker = Broker.open(Settings(database_url=f"sqlite:///{tmp_path}/b.db", run_worker=False, superlink="far"))
    buyer = joined(broker, "buyer").party
    made = evaluations.add_set(broker, buyer, asked(OWN_TABLE, "Lung nodules", data="", schema=SCHEMA))
    assert made.id.startswith("own-lung-nodules-")
    data = broker.simulations.data_of(made.id, made.id)
    assert data.feature_names == ("radius", "site=a", "site=b")
    assert data.x_test[:2].tolist() == [[2.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]
    own = {"name": made.id, "owners": 1, "partition": "equal"}
    with pytest.raises(InvalidInput, match="flower"):
        tasks.post_task(broker, buyer, order(data=own, evaluation=made.id))
    with pytest.raises(InvalidInput) as refused:
        tasks.post_task(broker, buyer, order(data=own, engine="flower"))
    assert refused.value.field == "broker.evaluation"
    task = tasks.post_task(broker, buyer, order(data=own, evaluation=made.id, engine="flower"))
    assert (task.test_examples, task.baseline_accuracy) == (20, 0.5)
    terms = json.loads(listing.terms_text(broker, task.id))
    assert terms["data"]["columns"] == ["radius (mm)", "site"]
    assert terms["data"]["labels"] == ["benign", "malignant"]
    broker.close()


def test_from_a_table_to_a_task_on_pages(small, joined, serve, cancer, play):
    buyer = joined(small, "buyer")
    with serve(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=30) as client:
        assert client.post("/sign-in", data={"key": buyer.key}).status_code == 303
        text = client.get("/tasks/data").text
        csrf = re.search(r'name="csrf_token" value="([^"]+)"', text)[1]

        def send(path, **fields):
            return client.post(path, data={"csrf_token": csrf} | fields)

        assert client.get("/tasks/data/header.csv?data=breast-cancer").text.endswith(",label\n")
        assert client.get("/tasks/data/header.csv?data=nothing").status_code == 422
        wrong = send("/tasks/data", set_name="Mine", data="breast-cancer", table="a,b\n1,<script>")
        assert wrong.status_code == 422
        assert "a header with the columns mean radius" in wrong.text
        assert "a,b\n1,&lt;script&gt;" in wrong.text
        for schema in ("{", "[]", '{"columns": []}', '{"columns": [{"name": "label"}], "classes": ["a", "b"]}'):
            bad = send("/tasks/data", set_name="Mine", table=OWN_TABLE, schema=schema)
            assert bad.status_code == 422
            assert 'id="schema-error"' in bad.text
            assert "Input should" not in bad.text
        form = {"set_name": "Mine", "data": "breast-cancer", "table": raw(cancer, range(20)), "idempotency_key": "f1"}
        first, again = send("/tasks/data", **form), send("/tasks/data", **form)
        assert first.status_code == 303
        assert first.headers["location"] == again.headers["location"]
        (made,) = evaluations.list_sets(small, buyer.party).items
        assert "Post a task with it" in client.get(first.headers["location"]).text
        text = client.get(f"/tasks/new?data=breast-cancer&evaluation={made.id}").text
        assert f'value="{made.id}" selected' in text
        task = {
            "name": "A", "kind": "auction", "data": "breast-cancer", "owners": "10", "auction": "posted",
            "aggregation": "opt-aggr", "perturbation": "recommended", "clip": "0.5", "learning_rate": "0.2",
            "rounds": "1", "bidders": "5", "budget": "20", "round_seconds": "0", "deadline_days": "1", "seed": "0",
        }  # fmt: skip
        foreign = send("/tasks/new", **task, evaluation="eval-else-1")
        assert foreign.status_code == 422
        assert 'id="evaluation-error"' in foreign.text
        assert send("/tasks/new", **task, evaluation=made.id).status_code == 303
        play(small)
        (posted,) = tasks.list_tasks(small, buyer.party).items
        assert posted.test_examples == 20
        assert made.sha256 in client.get(f"/market/{posted.id}").text
        assert f'value="{made.id}" selected' in client.get(f"/tasks/new?like={posted.id}").text
        asked_first = send(f"/tasks/data/{made.id}/remove")
        assert "for good?" in asked_first.text
        assert send(f"/tasks/data/{made.id}/remove", confirmed="yes").status_code == 409
