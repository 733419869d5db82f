"""The pages over HTTP: who may see what, forged and hostile requests, headers, secrets, and what forms answer."""

import hashlib
import json
import re
import time

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.office import audits, offers, parties, statements, tasks

HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "x-frame-options": "DENY"}
PAGES = {
    "buyer": ("/tasks", "/tasks/new", "/tasks/new/explore"),
    "owner": ("/owner", "/owner/bid", "/owner/bid/help", "/owner/statement.csv", "/owner/statement.pdf"),
    "operator": ("/operator", "/operator/health", "/operator/log", "/operator/payouts.csv"),
}
WRITES = {
    "/sign-out": ("buyer", "owner", "operator"),
    "/tasks/new": ("buyer",),
    "/owner/bid": ("owner",),
    "/owner/cap": ("owner",),
    "/disputes": ("buyer", "owner", "operator"),
    "/disputes/dp_x": ("operator",),
    "/audit": ("buyer", "owner", "operator"),
    "/ledger/verify": ("operator",),
    "/operator/parties": ("operator",),
    "/operator/deposits": ("operator",),
    "/operator/payouts": ("operator",),
    "/operator/parties/p_x/close": ("operator",),
}


def csrf_of(client):
    return re.search(r'name="csrf_token" value="([^"]+)"', client.get("/").text)[1]


def plain(answer):
    """A page without the session's token, which looks different on each."""
    return re.sub(r'("X-CSRF-Token": |name="csrf_token" value=)"[^"]+"', "", answer.text)


def task_of(demo, role="buyer", name="Biopsy triage, pilot"):
    found = tasks.list_tasks(demo.broker, demo.person(role).party).items
    return next(task.id for task in found if task.name == name)


@pytest.mark.parametrize("path", ["/", "/sign-in", "/ledger", "/theme.css"])
def test_strangers_see_the_market_and_the_way_in(visit, path):
    answer = visit(None).get(path)
    assert answer.status_code == 200
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", [path for paths in PAGES.values() for path in paths])
def test_strangers_are_sent_to_sign_in_and_come_back(visit, path):
    client = visit(None)
    answer = client.get(path)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/sign-in?next={path}")
    htmx = client.get(path, headers={"HX-Request": "true"})
    assert htmx.status_code == 401, "and the page stays, with what was typed on it"


@pytest.mark.parametrize("role", PAGES)
def test_pages_are_for_their_role_only(visit, role):
    client = visit(role)
    for owner, paths in PAGES.items():
        for path in paths:
            allowed = role == owner or (role == "operator" and path == "/tasks")
            assert client.get(path).status_code == (200 if allowed else 403), (role, path)


def test_somebody_elses_task_looks_like_none(visit, demo):
    theirs = task_of(demo)
    other = next(one for one in demo.people if one.party.role == "buyer" and one is not demo.person("buyer"))
    client = visit(None)
    assert client.get(other.link).status_code == 303
    for suffix in ("", "/live", "/stream", "/rounds/1", "/rounds/1/receipts.json", "/model.npz"):
        foreign, missing = client.get(f"/tasks/{theirs}{suffix}"), client.get(f"/tasks/t_nothing{suffix}")
        assert foreign.status_code == missing.status_code == 404, suffix
        assert plain(foreign) == plain(missing)
    post = client.post(f"/tasks/{theirs}/cancel", data={"csrf_token": csrf_of(client)})
    assert post.status_code == 404


def test_an_owner_gets_her_own_receipts_and_nobody_elses(small, joined, order, cheap_bid, play, serve):
    buyer, mine, theirs = joined(small, "buyer"), joined(small, "owner"), joined(small, "owner")
    task = tasks.post_task(small, buyer.party, order(rounds=1, bidders_per_round=12))
    for owner in (mine, theirs):
        offers.place_bid(small, owner.party, task.id, cheap_bid())
    play(small)
    awards = {one.party.id: statements.statement(small, one.party).releases[0].award_id for one in (mine, theirs)}
    path = f"/tasks/{task.id}/rounds/1/receipts.json"
    with serve(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=30) as client:
        assert client.post("/sign-in", data={"key": mine.key}).status_code == 303
        assert [one["award"] for one in client.get(path).json()] == [awards[mine.party.id]]
        assert client.get(path, params={"award": awards[theirs.party.id]}).status_code == 404


def test_audits_are_ones_own_except_for_the_operator(visit, demo):
    audit = audits.list_audits(demo.broker, demo.person("buyer").party).items[0]
    assert visit("buyer").get(f"/audit/{audit.id}").status_code == 200
    assert visit("operator").get(f"/audit/{audit.id}").status_code == 200
    assert visit("owner").get(f"/audit/{audit.id}").status_code == 404


@pytest.mark.parametrize("path", WRITES)
def test_writes_need_the_sessions_token(visit, path):
    """A form on another site is sent with the cookie but without the token."""
    for role in WRITES[path]:
        client = visit(role)
        for forged in ({}, {"csrf_token": ""}, {"csrf_token": "x" * 43}, {"csrf_token": csrf_of(visit(role))}):
            answer = client.post(path, data=forged)
            assert answer.status_code == 403, (role, forged)
        assert client.get("/audit").status_code == 200, "still signed in"


def test_signing_in_with_a_key_and_out_again(visit, demo):
    client = visit(None)
    wrong = client.post("/sign-in", data={"key": "flm_no_thing"})
    assert wrong.status_code == 401
    assert "not known here" in wrong.text
    right = client.post("/sign-in", data={"key": demo.person("buyer").key, "next": "/tasks"})
    assert (right.status_code, right.headers["location"]) == (303, "/tasks")
    cookie = right.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie or "samesite=lax" in cookie
    assert client.post("/sign-out", data={"csrf_token": csrf_of(client)}).status_code == 303
    assert client.get("/tasks").status_code == 303


def test_a_sign_in_form_on_another_site_is_refused(visit, demo):
    answer = visit(None).post(
        "/sign-in", data={"key": demo.person("buyer").key}, headers={"Sec-Fetch-Site": "cross-site"}
    )
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:1", ""])
def test_signing_in_never_leads_away(visit, demo, target):
    answer = visit(None).post("/sign-in", data={"key": demo.person("buyer").key, "next": target})
    assert answer.headers["location"] == "/"


def test_pages_hold_no_secrets(visit, demo):
    """Neither keys nor the cookie nor the hashes of either; only the demonstration shows its own links, to sign in."""
    client = visit("operator")
    cookie = client.cookies["flmarket_session"]
    secrets = [cookie, hashlib.sha256(cookie.encode()).hexdigest(), "hmac-sha256", *(one.key for one in demo.people)]
    secrets += [one.link.rpartition("/")[2] for one in demo.people]
    for path in ("/", "/operator", "/ledger", "/audit", "/tasks", f"/tasks/{task_of(demo)}"):
        text = client.get(path).text
        assert not [secret for secret in secrets if secret in text], path


def test_what_does_not_exist_is_a_page_for_people_and_a_problem_for_programs(visit):
    client = visit(None)
    page = client.get("/no/such/page")
    assert page.status_code == 404
    assert "There is no such page" in page.text
    problem = client.get("/api/v1/no-such-thing")
    assert problem.status_code == 404
    assert problem.headers["content-type"] == "application/problem+json"


def test_names_are_shown_as_text(visit, demo):
    """Somebody's name for a task is not markup, wherever it appears."""
    client = visit("operator")
    name = '<b onclick="x">&'
    answer = client.post("/operator/parties", data={"csrf_token": csrf_of(client), "role": "owner", "party_name": name})
    assert answer.status_code == 303
    answer = client.get(answer.headers["location"])
    assert "<b onclick" not in answer.text
    assert "&lt;b onclick=&#34;x&#34;&gt;&amp;" in answer.text


ORDER = {
    "name": "An order", "data": "breast-cancer", "owners": "10", "auction": "posted", "aggregation": "opt-aggr",
    "perturbation": "recommended", "clip": "0.5", "learning_rate": "0.2", "rounds": "1", "bidders": "5", "budget": "20",
    "round_seconds": "0", "deadline_days": "1", "seed": "0",
}  # fmt: skip


def test_a_bad_order_is_explained_and_costs_nothing(visit, demo):
    buyer, client = demo.person("buyer").party, visit("buyer")
    token = csrf_of(client)

    def state():
        posted = [task.name for task in tasks.list_tasks(demo.broker, buyer).items]
        return parties.account(demo.broker, buyer).balance_micros >= before, "An order" in posted

    # refunds of other tasks may come in meanwhile, so the balance may only have grown
    before = parties.account(demo.broker, buyer).balance_micros
    for field, value, message in (
        ("rounds", "0", "At least 1."),
        ("rounds", "many", "a whole number"),
        ("budget", "1.0000001", "at most six decimals"),
        ("budget", "1e400", "at most six decimals"),
        ("owners", "5000", "At most 2,000."),
        ("clip", "nan", "a number"),
        ("auction", "first-price", "One of "),
        ("name", "", "Fill this in."),
        ("data", "secrets", "one of breast-cancer"),
        ("budget", "900000000", "your account holds"),
    ):
        answer = client.post("/tasks/new", data=ORDER | {"csrf_token": token, field: value})
        assert answer.status_code == 422, (field, value)
        assert "nothing was charged" in answer.text
        assert message in answer.text, (field, value)
    assert state() == (True, False)


# what each kind's form asks for, and what its pages must say
FORMS = {
    "auction": ({"budget": "100"}, "ε = ", "100.00</b> a round"),  # for 20 `posted` buys nothing of 5 such owners
    "sampling": (
        {"expected": "10", "hard_cap": "20", "first_rate": "0.1", "scheme": "optimal"},
        "no bound",
        "20.00</b> a round",
    ),
    "reward": ({"reward": "20"}, "ρ = ", "20.00</b> in total"),
    "joint": (
        {"joint_budget": "2000", "epsilon": "20", "selection": "m1", "rule": "median"},
        "at δ = 1e-5",
        "2,000.00</b> in total",
    ),
}


def test_auctions_stand_side_by_side_as_each_is_explored_alone(small, joined, serve):
    buyer = joined(small, "buyer")
    with serve(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=60) as client:
        client.post("/sign-in", data={"key": buyer.key})

        def explore(**typed):
            return client.get("/tasks/new/explore", params=ORDER | {"auction": "all-in", "budget": "200"} | typed).text

        rows = re.findall(r'<tr><th scope="row">([\w-]+)(.*?)</tr>', explore(beside="1"), re.DOTALL)
        rows = [(name, row) for name, row in rows if "Error bound" in row]
        bounds = []
        for name, row in rows:
            alone = re.search(
                r"error\s+bound\s+of\s+the\s+aggregated update is <strong>(.*?)</strong>", explore(auction=name)
            )
            assert f'data-label="Error bound">{alone[1]}<' in row
            bounds.append(float(alone[1].replace(",", "")))
    assert bounds == sorted(bounds)
    assert [name for name, row in rows if "chosen" in row] == ["all-in"]
    assert {name for name, _ in rows} == {"all-in", "posted", "posted-private", "all-in-capped", "m2-bf"}


@pytest.mark.parametrize("kind", FORMS)
def test_the_form_posts_every_kind_and_pages_tell_of_it(kind, small, joined, play, serve):
    fields, loss, budget = FORMS[kind]
    buyer, operator = joined(small, "buyer"), joined(small, "operator")
    with serve(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=60) as client:

        def get(path):
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.status_code)
            return answer.text

        assert client.post("/sign-in", data={"key": buyer.key}).status_code == 303
        token = csrf_of(client)
        typed = ORDER | {"kind": kind, "rounds": "2", "name": f"A {kind}"} | fields
        told = client.get("/tasks/new/explore", params=typed).text
        assert ("compares budgets of auctions of single updates only" in told) == (kind != "auction")
        assert "Deposit now, total" in told
        for name in fields:
            wrong = client.post("/tasks/new", data=typed | {"csrf_token": token, name: "-1"})
            assert wrong.status_code == 422, name
            assert f'id="{name}-error"' in wrong.text, name
            assert f'value="{kind}" checked' in wrong.text
        wrong = client.post("/tasks/new", data=typed | {"csrf_token": token, "model": "mlp", "hidden": "many"})
        assert 'id="hidden-error"' in wrong.text
        task = client.post("/tasks/new", data=typed | {"csrf_token": token}).headers["location"].removesuffix("/live")
        get(f"{task}/live")
        play(small)

        assert f"A {kind}" in get("/tasks")
        assert kind in get("/")
        live, page, last = get(f"{task}/live"), get(task), get(f"{task}/rounds/2")
        assert budget in live
        assert loss in live.replace("\xa0", " ")
        assert loss in last
        assert ("total, all rounds" if kind in ("reward", "joint") else "this round") in last
        get(f"{task}/rounds/1")
        assert "Download the model" in page
        assert client.get(f"{task}/model.npz").status_code == 200
        assert "event: finished" in client.get(f"{task}/stream").text
        receipt = client.get(f"{task}/rounds/2/receipts.json").json()[0]
        answer = client.post("/ledger/receipt", data={"receipt": json.dumps(receipt)}).text
        assert "This receipt is genuine" in answer
        assert loss in answer
        get("/ledger")

        client.cookies.clear()
        assert client.post("/sign-in", data={"key": operator.key}).status_code == 303
        for path in ("/operator", "/tasks", task, f"{task}/live", f"{task}/rounds/2", "/ledger"):
            get(path)
        whole = client.get(f"{task}/rounds/2/receipts.json").json()[0]
        answer = client.post("/ledger/receipt", data={"receipt": json.dumps(whole)}).text
        assert "This receipt is genuine" in answer


def test_a_form_sent_twice_posts_one_task(visit, demo):
    client = visit("buyer")
    form = ORDER | {"csrf_token": csrf_of(client), "idempotency_key": "form-1", "name": "Sent twice"}
    first, second = client.post("/tasks/new", data=form), client.post("/tasks/new", data=form)
    assert first.status_code == second.status_code == 303
    assert first.headers["location"] == second.headers["location"]
    names = [task.name for task in tasks.list_tasks(demo.broker, demo.person("buyer").party).items]
    assert names.count("Sent twice") == 1


def test_a_bid_past_what_is_allowed_is_explained(visit, demo):
    client, owner = visit("owner"), demo.person("owner").party
    found = offers.list_offers(demo.broker, owner).items  # among them what other tests post, which may just end
    task = next(one.task_id for one in found if one.name == "Biopsy triage, autumn")
    form = {"csrf_token": csrf_of(client), "task": task, "epsilon": "1", "kind": "linear", "rate": "1", "records": ""}
    form["accept"] = "on"
    for change, message in (
        ({"epsilon": "-1"}, "At least 0.001 ε per round."),
        ({"rate": "inf"}, "a number"),
        ({"accept": ""}, "Read the terms"),
        ({"records": "10000000"}, "records of your place"),
        ({"task": "t_none"}, "There is no offer"),
    ):
        answer = client.post("/owner/bid", data=form | change)
        assert answer.status_code == 422, change
        assert message in answer.text, (change, re.findall(r"(?s)<main.*", answer.text))


def test_a_live_stream_resumes_where_it_was(visit, demo):
    """A finished task's stream tells what is missing since the last event and then ends."""
    client, task = visit("buyer"), task_of(demo)
    known = tasks.events(demo.broker, demo.person("buyer").party, task, limit=1000)
    middle = known[len(known) // 2].id
    text = client.get(f"/tasks/{task}/stream", headers={"Last-Event-ID": str(middle)}).text
    assert text.startswith("retry: ")
    assert f"id: {known[-1].id}\nevent: log\n" in text
    assert text.rstrip().endswith("event: finished\ndata:")
    told = re.findall(r"Round (\d+) settled", text)
    assert told[0] == "30"
    assert min(map(int, told)) > 10, "what the browser knew already is not told again"


def test_every_picture_script_and_style_comes_from_here(visit, demo):
    """The files that pages name exist, and neither they nor the pages name a file elsewhere."""
    client = visit("buyer")
    named = set()
    for path in ("/", "/sign-in", "/tasks/new", f"/tasks/{task_of(demo)}", "/ledger", "/audit"):
        text = client.get(path).text
        assert not re.findall(r'(?:src|href|action)="(?:https?:)?//', text), path
        assert not re.findall(r"<(?:script(?! src)|style)|\sstyle=|\son\w+=", text), path
        named |= set(re.findall(r'(?:src|href)="(/(?:static|theme)[^"#]*)', text))
    assert len(named) >= 8
    for address in named:
        answer = client.get(address)
        assert answer.status_code == 200, address
    sizes = {address: len(client.get(address).content) for address in named if ".js" in address}
    assert sum(sizes.values()) < 125_000, sizes


def test_strangers_share_one_front_page_and_members_do_not(small, joined, order, serve):
    """What a stranger is shown may be a second old; somebody signed in sees the market as it is, and her own name."""
    buyer = joined(small, "buyer", "Orchard Labs")
    with serve(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=30) as client:
        small.recent.seconds = 3600.0  # instead of one, so that the test may be slow
        before = client.get("/").text
        tasks.post_task(small, buyer.party, order(name="Just posted"))
        assert client.get("/").text == before
        assert client.post("/sign-in", data={"key": buyer.key}).status_code == 303
        assert "Just posted" in client.get("/").text
        client.cookies.clear()
        small.recent._values.clear()
        after = client.get("/").text
        assert "Just posted" in after
        assert "Orchard Labs" not in after


def test_an_award_is_disputed_and_decided_on_pages(visit, demo):
    """Found on her page, told to the operator alone, decided once, and both sides read the note."""
    client, desk = visit("owner"), visit("operator")
    until = time.monotonic() + 30  # the demo is under way: she sells soon
    while "/disputes/new" not in (page := client.get("/owner").text) and time.monotonic() < until:
        time.sleep(0.2)
    assert re.search(r"Of your last 20 awards</dt><dd>\d+ of \d+ delivered", page)
    path = re.search(r'href="(/disputes/new\?award=[^"]+)"', page)[1]
    award = re.search(r'name="award" value="([^"]+)"', client.get(path).text)[1]
    form = {"csrf_token": csrf_of(client), "award": award}
    empty = client.post("/disputes", data=form | {"reason": ""})
    assert (empty.status_code, "Fill this in." in empty.text) == (422, True)
    assert client.post("/disputes", data=form | {"reason": "<b>no pay</b>"}).status_code == 303
    assert "About your awards" in client.get("/disputes").text
    (made,) = re.findall(r'href="(/disputes/dp_\w+)"', desk.get("/operator").text)
    asked = desk.get(made)
    assert "&lt;b&gt;no pay&lt;/b&gt;" in asked.text
    answer = {"csrf_token": csrf_of(desk), "note": "It was paid.", "decision": "pay"}
    assert "It is final." in desk.post(made, data=answer).text
    answer["confirmed"] = "yes"
    while (done := desk.post(made, data=answer)).status_code == 422 and time.monotonic() < until:
        assert "still being played" in done.text  # it was in escrow, and is frozen: the round ends first
        time.sleep(0.2)
    assert done.status_code == 303
    other = desk.post(made, data=answer | {"decision": "refund"})
    assert (other.status_code, "is decided" in other.text) == (422, True)
    assert "It was paid." in client.get("/disputes").text
    buyers = [visit(None) for one in demo.people if one.party.role == "buyer"]
    for buyer, one in zip(buyers, (one for one in demo.people if one.party.role == "buyer"), strict=True):
        buyer.get(one.link)
        seen = buyer.get("/disputes").text
        assert "no pay" not in seen
        assert award not in seen
