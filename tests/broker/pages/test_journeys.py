"""What people do here, in a real browser: buy a model, sell privacy, operate the market."""

import csv
import json
import re
import zipfile
from datetime import datetime
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from safetensors.numpy import load

from flmarket.broker.office import listing, market, statements, tasks
from flmarket.ledger import ESCROW

pytest.importorskip("playwright.sync_api")
from playwright.sync_api import expect

expect.set_options(timeout=60_000)


@pytest.mark.slow
def test_a_buyer_explores_posts_watches_and_downloads(window):
    seen = window()
    page = seen.page
    seen.sign_in("buyer")
    expect(page.get_by_role("heading", name="On the market now")).to_be_visible()

    page.get_by_role("navigation").get_by_role("link", name="Post a task").click()
    page.get_by_label("Name").fill("Biopsy triage, winter")
    told = page.locator("#explorer .answer")
    expect(told).to_contain_text("200.00 a round")
    before = told.inner_text()
    page.get_by_label("Budget of a round", exact=True).fill("60")
    expect(told).to_contain_text("60.00 a round")
    assert _bound(told.inner_text()) > _bound(before), "less money should buy a worse bound"
    expect(page.locator("#explorer canvas")).to_be_visible()
    seen.shoot("post")

    page.get_by_label("Rounds", exact=True).fill("2")
    page.get_by_text("Training and timing").click()
    page.get_by_label("A round takes").fill("3")
    page.get_by_role("button", name="Post and deposit").click()
    expect(page).to_have_url(re.compile(r"/tasks/t_\w+/live$"))
    expect(page.locator(".seat.won").first).to_be_visible()
    log = page.get_by_role("log")
    expect(log).to_contain_text("Round 1: 20 sealed bids for 60.00.")
    expect(page.locator(".seat.posted").first).to_be_visible()
    expect(log).to_contain_text("Round 2 settled")
    expect(page.locator("[data-live]")).to_have_text("Ended")
    expect(page.get_by_role("heading", level=1)).to_have_text("Round 2 of 2")

    page.get_by_role("link", name="Model and bill").click()
    with page.expect_download() as started:
        page.get_by_role("link", name="Download the model").click()
    with zipfile.ZipFile(started.value.path()) as model:
        weights = load(model.read("weights.safetensors"))
    assert weights
    assert all(np.isfinite(array).all() for array in weights.values())

    page.get_by_role("link", name="Round 2", exact=True).click()
    with page.expect_download() as started:
        page.get_by_role("link", name=re.compile("JSON receipt of")).first.click()
    receipt = started.value.path().read_text()
    page.get_by_role("navigation").get_by_role("link", name="Ledger").click()
    answer = page.locator("#receipt-answer")
    page.get_by_label("Receipt", exact=True).fill(receipt)
    page.get_by_role("button", name="Check it").click()
    expect(answer).to_contain_text("This receipt is genuine")
    forged = json.loads(receipt)
    forged["price_micros"] += 1
    page.get_by_label("Receipt", exact=True).fill(json.dumps(forged))
    page.get_by_role("button", name="Check it").click()
    expect(answer).to_contain_text("This receipt does not hold")


ASKED = {
    "auction": {"budget", "bidders", "aggregation", "perturbation"},
    "sampling": {"expected", "hard_cap", "scheme"},
    "reward": {"reward"},
    "joint": {"joint_budget", "epsilon", "selection", "rule"},
}


def test_the_form_asks_for_what_the_kind_and_the_model_need(window):
    seen = window(height=1000)
    page = seen.page
    seen.sign_in("buyer")
    seen.open("/tasks/new")
    for kind, asked in ASKED.items():
        page.locator(f"[name=kind][value={kind}]").check()
        for field in set().union(*ASKED.values()):
            expect(page.locator(f"#{field}")).to_be_visible(visible=field in asked)
        told = expect(page.locator("#explorer"))
        if kind == "auction":
            told.to_contain_text("200.00 a round")
        else:
            told.to_contain_text("compares budgets of auctions of single updates only")
            told.to_contain_text("Deposit now, total")
    for model in ("mlp", "softmax", "mnist-cnn"):
        page.get_by_label("Model", exact=True).select_option(model)
        expect(page.get_by_label("Hidden layers")).to_be_visible(visible=model == "mlp")
        expect(page.get_by_label("Settings of the model")).to_be_visible(visible=model == "mnist-cnn")


def test_a_buyer_reads_the_model_and_the_bill(window):
    seen = window(height=1000)
    page = seen.page
    seen.sign_in("buyer")
    tile = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name="Biopsy triage, autumn"))
    expect(tile).to_contain_text("accuracy")  # once its first round is settled
    seen.shoot("market")
    page.get_by_role("link", name="Biopsy triage, pilot").click()
    expect(page.get_by_role("heading", name="Bill")).to_be_visible()
    expect(page.locator("figure.drawn canvas")).to_have_count(2)
    seen.shoot("model")
    page.get_by_text("Show the numbers of Accuracy").click()
    rows = page.get_by_role("group", name="Accuracy, as a table").locator("tbody tr")
    expect(rows).to_have_count(30)


def test_an_owner_learns_what_an_epsilon_means_bids_and_takes_the_statement(window, demo):
    seen = window(height=1000)
    page = seen.page
    seen.sign_in("owner")
    page.get_by_role("navigation").get_by_role("link", name="Bid helper").click()
    page.get_by_label("Task", exact=True).select_option(label=_option(page, "Biopsy triage, autumn"))
    page.get_by_label("Most privacy you sell in a round", exact=True).fill("0.5")
    helper = page.locator("#help")
    expect(helper).to_contain_text("What you will have given up")
    expect(helper).to_contain_text("ε = 0.50 alone multiplies odds by at most 1.65")  # e^0.5
    page.get_by_label("Most privacy you sell in a round", exact=True).fill("2")
    expect(helper).to_contain_text("alone multiplies odds by at most 7.39")
    expect(helper).to_contain_text("simulated at the broker")
    expect(helper).to_contain_text("your best bid is what it really costs you")
    seen.shoot("bid")
    page.get_by_label("I have read and accept").check()
    page.get_by_role("button", name="Place this bid").click()
    expect(page.get_by_text("Your bid is in.")).to_be_visible()

    page.get_by_role("navigation").get_by_role("link", name="My data").click()
    expect(page.get_by_text("ε ≤ 2 per round, linear")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("spent, total"))).to_be_visible()
    page.get_by_text("Change your cap").click()
    cap = round(statements.privacy(demo.broker, demo.person("owner").party).spent_epsilon_total) + 40
    page.get_by_label("Most privacy you ever sell, ε total").fill(f"{cap}")
    page.get_by_role("button", name="Set the cap").click()
    expect(page.get_by_role("img", name=re.compile(rf"of {cap}\.00 spent, total"))).to_be_visible()
    seen.shoot("owner")
    page.set_viewport_size({"width": 390, "height": 844})
    seen.shoot("phone")
    page.set_viewport_size({"width": 1200, "height": 1000})
    with page.expect_download() as started:
        page.get_by_role("link", name="Statement").click()
    rows = list(csv.DictReader(started.value.path().read_text().splitlines()))
    assert rows
    assert all(float(row["ε total after"]) <= cap + 1e-9 for row in rows)


@pytest.mark.slow
def test_the_operator_verifies_audits_and_registers(window, demo, visit):
    seen = window(height=1000)
    page = seen.page
    seen.sign_in("operator")
    page.get_by_role("navigation").get_by_role("link", name="Ledger").click()
    page.get_by_role("button", name="Verify now").click()
    expect(page.get_by_text("The ledger verifies")).to_be_visible()
    page.get_by_role("searchbox", name="Search").fill("deposit")
    cells = page.locator("#rows tbody tr")
    expect(cells).to_have_count(2)
    expect(cells.first).to_contain_text("Harbour Forms Ltd")
    seen.shoot("ledger")

    page.get_by_role("navigation").get_by_role("link", name="Audit").click()
    page.get_by_label("Auction", exact=True).select_option("all-in")
    page.get_by_role("button", name="Run the auditor").click()
    expect(page.locator("#result")).to_contain_text("all-in keeps what it claims, but lies pay", timeout=60_000)
    expect(page.get_by_role("heading", name="The most profitable lie found")).to_be_visible()
    seen.shoot("audit")

    page.get_by_role("navigation").get_by_role("link", name="Operator").click()
    log = page.get_by_role("list", name="Audit log")
    expect(log).to_contain_text("verified the ledger")
    expect(log).to_contain_text("started an audit")
    seen.shoot("operator")
    page.get_by_label("Name").fill("Riverside practice")
    page.get_by_role("button", name="Register").click()
    expect(page.get_by_role("heading", name="Riverside practice")).to_be_visible()
    page.get_by_role("button", name="Give a new key").click()
    page.get_by_role("button", name="Yes, do it").click()
    key = page.locator("#new-key").inner_text()
    answer = visit(None).post("/sign-in", data={"key": key})
    assert answer.status_code == 303
    page.goto(page.url.split("/operator")[0] + "/operator")
    assert key not in page.content(), "a key is shown once"


def test_a_round_is_shown_whole_before_the_stream_begins(window):
    """Some moments of a running task, the stream held back: what was served tells the same story by itself."""
    seen = window(height=1000)
    page = seen.page
    page.route("**/stream?*", lambda route: None)
    seen.sign_in("operator")
    seen.open("/tasks")
    page.get_by_role("link", name="Handwritten forms").click()
    page.get_by_role("link", name="Watch it live").click()
    for _ in range(200):
        expect(page.locator(".stage")).to_have_count(4)
        paid, done = page.locator(".seat.posted").count(), page.locator(".stage.done").count()
        assert paid == 0 or done == 4, "nobody is paid before the round is settled"
        assert done < 2 or page.locator(".seat.won, .seat.posted").count() > 0, "awards are shown once they are made"
        if paid:
            break
        page.wait_for_timeout(300)
        page.reload()
    else:
        pytest.fail("no round was settled")
    seen.shoot("live")


def test_a_tab_that_nobody_sees_follows_nothing(window, demo):
    """Hidden, its stream ends; seen again, it goes on after the last event that it had, and misses none."""
    seen = window()
    page, asked, ended = seen.page, [], []
    page.on("request", lambda request: asked.append(request.url) if "/stream?" in request.url else None)
    task = next(one for one in market.overview(demo.broker, None).tasks if one.state == "running")
    seen.open(f"/market/{task.id}/live")
    expect(page.locator("[data-live]")).to_have_text("Live")
    page.on("requestfailed", lambda request: ended.append(request.url) if "/stream?" in request.url else None)
    while not asked:
        page.wait_for_timeout(50)
    page.evaluate(_SIGHT, True)
    page.wait_for_timeout(500)
    assert ended == asked, "its stream is still open"
    begun = len(listing.public_events(demo.broker, task.id, after=0, limit=10_000))
    while len(listing.public_events(demo.broker, task.id, after=0, limit=10_000)) <= begun:
        page.wait_for_timeout(100)
    missed = listing.public_events(demo.broker, task.id, after=None)[-1]
    page.evaluate(_SIGHT, False)
    expect(page.locator("[data-live]")).to_have_text("Live")
    expect(page.get_by_role("log")).to_contain_text(f"Round {missed.data['round'] + 1}")
    assert len(asked) == 2


WIDTHS = (375, 768, 1440)
SCHEMES = {"light": None, "dark": ["color-contrast"]}  # and what axe looks for: between them only colours differ
EVERYWHERE = {
    None: [
        "/",
        "/sign-in",
        "/ledger",
        "@market",
        "@market/live",
        "/market/compare?task=@auction&task=@flower",
        "/market/compare",
    ],
    "buyer": [
        "/",
        "/tasks",
        "/tasks/new",
        "/tasks/data",
        "@task",
        "@task/live",
        "@task/rounds/2",
        "/audit",
        "/account",
        "/ledger",
    ],
    "owner": ["/owner", "/owner/bid", "/account"],
    "operator": [
        "/operator",
        "/operator/log",
        "/operator/payouts",
        "/operator/runs/@flower",
        "/operator/parties/@owner",
        "/tasks",
        "@task",
        "/ledger?q=deposit",
    ],
}


@pytest.mark.parametrize("role", EVERYWHERE)
def test_every_page_fits_every_screen_and_is_built_for_everybody(window, gallery, axe, role):
    """Every kind of market, and Flower, at three widths in light and dark, with names as long as they may be: axe finds
    nothing, nothing is wider than the window, nothing lies on the footer."""
    seen = window(market=gallery, height=844, reduced_motion="reduce")
    page = seen.page
    page.add_init_script(axe)
    if role is not None:
        seen.sign_in(role)
    for path in _paths(gallery, EVERYWHERE[role]):
        seen.open(path)
        expect(page.locator(".htmx-request")).to_have_count(0)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 844})
            for scheme, rules in SCHEMES.items():
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate(_INSPECT) == _FINE, (path, width, scheme)
                assert page.evaluate(_AXE, rules) == [], (path, width, scheme)
        assert "alert(1)</script>" not in page.content()


def test_the_inspection_finds_what_is_wrong(window, gallery, axe):
    """Planted: a page too wide, a table on the footer, grey on grey, a button without a name, two headings."""
    page = window(market=gallery, width=375, height=844).page
    page.add_init_script(axe)
    page.goto(f"{gallery.address}/sign-in")
    assert (page.evaluate(_INSPECT), page.evaluate(_AXE)) == (_FINE, [])
    page.evaluate("""() => document.querySelector("main").insertAdjacentHTML("beforeend",
      '<h1 id="main">Again</h1><button></button><p class="planted">Pale</p><table><tr><td>On the footer')""")
    page.evaluate("""() => {
      const sheet = new CSSStyleSheet();
      sheet.replaceSync(".planted { color: #999; background: #888; width: 400px } main { height: 9rem; flex: none }");
      document.adoptedStyleSheets = [sheet];
    }""")
    found = page.evaluate(_INSPECT)
    assert found["wide"] > 0
    assert found["headings"] == 2
    assert found["doubled"] == ["main"]
    assert found["on the footer"]
    assert {"color-contrast", "button-name"} <= {rule for rule, *_ in page.evaluate(_AXE)}
    assert [rule for rule, *_ in page.evaluate(_AXE, SCHEMES["dark"])] == ["color-contrast"]


HOSTILE = {
    "reversed": "abc\u202edef",
    "markup": "<img src=x onerror=alert(1)>" * 3,  # and longer than a name may be
    "huge": "9" * 400,
    "nan": "NaN",
    "negative": "-1",
    "empty": "",
}
FORMS = {
    "buyer": ["/tasks/new", "/tasks/data", "/account"],
    "owner": ["/owner", "/owner/bid", "/account"],
    "operator": ["/operator", "/operator/parties/@buyer", "/operator/payouts", "/operator/log", "/audit", "/ledger"],
    None: ["/sign-in", "/ledger"],
}


@pytest.mark.parametrize("role", FORMS)
def test_hostile_input_is_answered_in_words_on_a_page_that_holds(window, gallery, role):
    """Every form of a role on a phone, all its fields filled with the same nonsense, whatever the browser would say."""
    seen = window(market=gallery, width=375, height=844, reduced_motion="reduce")
    page, statuses = seen.page, []
    page.on("dialog", lambda dialog: (seen.complaints.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    page.on("response", lambda answer: statuses.append((answer.status, answer.url)))
    if role is not None:
        seen.sign_in(role)
    before = _books(gallery)
    for path in _paths(gallery, FORMS[role]):
        seen.open(path)
        for number in range(page.locator(_FORM).count()):
            for what, text in HOSTILE.items():
                seen.open(path)
                with page.expect_navigation():
                    page.locator(_FORM).nth(number).evaluate(_FILL_AND_SEND, text)
                assert page.evaluate(_INSPECT) == _FINE, (path, number, what)
                said = page.inner_text("body")
                assert not re.search(r"\u202e|\^\[|PureDp\(|Traceback|type=|Input should", said), (path, number, what)
    assert [one for one in statuses if one[0] >= 500] == []
    assert _books(gallery) == before
    # refusals are what is asked for; and a browser says so if it is served what nobody could type there
    seen.complaints[:] = [one for one in seen.complaints if not re.search("status of 4|cannot be parsed", one)]


def test_the_keyboard_reaches_the_content_and_the_colours_stay_chosen(window):
    seen = window(color_scheme="light")
    page = seen.page
    seen.open("/")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    light = _background(page)
    page.get_by_role("button", name="Switch to dark colours").click()
    dark = _background(page)
    assert light != dark
    page.reload()
    assert _background(page) == dark
    seen.shoot("dark")


def test_times_are_the_readers_own(window, gallery):
    """Served in UTC, shown as the browser's clock has them, on pages and in logs."""
    utc, tokyo = (window(market=gallery, timezone_id=zone) for zone in ("UTC", "Asia/Tokyo"))
    for path, kind in ((f"/market/{gallery.tasks['auction']}", "when"), ("/operator/log", "dated")):
        said = []
        for seen in (utc, tokyo):
            if path.startswith("/operator"):
                seen.sign_in("operator")
            seen.open(path)
            expect(seen.page.locator("time[data-time]")).to_have_count(0)
            first = seen.page.locator("main time").last
            said.append((datetime.fromisoformat(first.get_attribute("datetime")), first.inner_text()))
        (at, here), (_, there) = said
        own = at.astimezone(ZoneInfo("Asia/Tokyo"))
        if kind == "when":
            assert here == f"{at.day} {at:%b %Y, %H:%M} UTC"
            assert there == f"{own.day} {own:%b %Y, %H:%M} GMT+9"
        else:
            assert here == f"{at.day} {at:%b, %H:%M:%S}"
            assert there == f"{own.day} {own:%b, %H:%M:%S}"


def test_without_scripts_forms_still_work(browser, demo):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(demo.address + demo.person("operator").link)
    page.goto(demo.address + "/ledger")
    page.get_by_role("button", name="Verify now").click()
    expect(page.get_by_text("The ledger verifies")).to_be_visible()
    page.goto(demo.address + "/sign-in")
    page.get_by_label("API key").fill(demo.person("buyer").key)
    page.get_by_role("button", name="Sign in").click()
    page.goto(demo.address + "/tasks")
    expect(page.get_by_role("heading", name="My tasks")).to_be_visible()
    page.get_by_role("link", name="Biopsy triage, pilot").click()
    expect(page.locator("figure .still svg")).to_have_count(2)
    expect(page.locator("figure .still polyline").first).to_be_visible()
    context.close()


def test_a_market_that_does_not_answer_says_so(window, demo):
    """Requests of a page fail, and a stream: neither is passed over in silence, and what is typed stays."""
    seen = window()
    page = seen.page
    seen.sign_in("buyer")
    page.route("**/tasks/new/explore*", lambda route: route.abort())
    seen.open("/tasks/new")
    page.get_by_label("Name").fill("Still here")
    expect(page.get_by_text("The market did not answer.").first).to_be_visible()
    expect(page.get_by_label("Name")).to_have_value("Still here")
    expect(page.locator("figure .still")).to_have_count(0)
    task = next(one for one in market.overview(demo.broker, None).tasks if one.state == "running")
    page.route("**/stream?*", lambda route: route.abort())
    seen.open(f"/market/{task.id}/live")
    expect(page.locator("[data-live]")).to_have_text("Reconnecting")
    seen.complaints[:] = [one for one in seen.complaints if "ERR_FAILED" not in one]


def _bound(text):
    return float(re.search(r"aggregated update is ([\d.,]+)\.", text)[1].replace(",", ""))


def _option(page, start):
    return next(
        text
        for text in page.get_by_label("Task", exact=True).locator("option").all_inner_texts()
        if text.startswith(start)
    )


def _background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def _paths(gallery, patterns):
    """Addresses, one for each task where the pattern is a task's."""
    for pattern in patterns:
        for one in ("auction", "flower"):
            pattern = re.sub(f"([=/])@{one}", rf"\g<1>{gallery.tasks[one]}", pattern)
        for role in ("buyer", "owner"):
            pattern = pattern.replace(f"@{role}", gallery.person(role).party.id)
        for task in gallery.tasks.values() if "@" in pattern else [""]:
            yield pattern.replace("@task", f"/tasks/{task}").replace("@market", f"/market/{task}")


def _books(gallery):
    """What nonsense must not change: everybody's money, and what is posted."""
    ledger, desk = gallery.broker.books.ledger, gallery.person("operator").party
    posted = len(tasks.list_tasks(gallery.broker, desk).items)
    return [ledger.balance(one.party.id) for one in gallery.people], ledger.balance(ESCROW), posted


_SIGHT = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
_FORM = "main form:not([action*='/end']):not([action$='/close']):not([action$='/reissue']):not([action$='/invite'])"
_FILL_AND_SEND = """(form, text) => {
  form.noValidate = true;
  for (const field of form.querySelectorAll("input:not([type=hidden], [type=radio], [type=checkbox]), textarea")) {
    if (field.type !== "search") field.type = "text";
    field.removeAttribute("maxlength");
    field.value = text;
  }
  for (const box of form.querySelectorAll("[type=checkbox]")) box.checked = true;
  form.submit();
}"""
_AXE = """async (rules) => (await axe.run({resultTypes: ["violations"], ...(rules && {runOnly: rules})})).violations
  .map((one) => [one.id, ...one.nodes.map((node) => node.html.slice(0, 160))])"""
_FINE = {"wide": 0, "headings": 1, "mains": 1, "nameless": [], "doubled": [], "on the footer": []}
_INSPECT = """async () => {
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));  // charts follow the window
  const name = (node) => node.getAttribute("aria-label") || node.getAttribute("aria-labelledby") || node.title
    || [...(node.labels || [])].map((label) => label.textContent.trim()).join("") || node.textContent.trim();
  const kinds = "a, button, input:not([type=hidden]), select, textarea, summary, [role=img]";
  const controls = [...document.querySelectorAll(kinds)];
  const foot = document.querySelector("footer").getBoundingClientRect().top + 1;
  const held = (node) => {  // within something that scrolls, or is clipped, above the footer
    for (let one = node; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      if (style.clipPath !== "none") return true;
      if (one !== node && style.overflowY !== "visible" && one.getBoundingClientRect().bottom <= foot) return true;
    }
    return false;
  };
  const over = [...document.querySelectorAll("main *")]
    .filter((node) => node.checkVisibility() && node.getBoundingClientRect().bottom > foot && !held(node));
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  return {
    wide: Math.max(0, document.documentElement.scrollWidth - window.innerWidth),
    headings: document.querySelectorAll("h1").length,
    mains: document.querySelectorAll("main").length,
    nameless: controls.filter((node) => !name(node)).map((node) => node.outerHTML.slice(0, 120)),
    doubled: ids.filter((id, i) => ids.indexOf(id) !== i),
    "on the footer": over.slice(0, 3).map((node) => node.outerHTML.slice(0, 120)),
  };
}"""
