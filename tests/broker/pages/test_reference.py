"""The page about the HTTP interface says all that its description says, and leads nowhere else."""

import copy
import re
from html.parser import HTMLParser

import httpx
import pytest

from flmarket.broker.app import create_app
from flmarket.broker.web.pages.reference import describe
from flmarket.broker.web.pages.rendering import render

REF = "#/components/schemas/"


class Reader(HTMLParser):
    """The text below each id, every address, and the names of all tags."""

    def __init__(self, html):
        super().__init__()
        self.texts, self.links, self.tags, self._inside = {}, [], set(), []
        self.feed(str(html))  # markup would escape what is added to it

    def handle_starttag(self, tag, attributes):
        said = dict(attributes)
        self.tags.add(tag)
        self.links += [said[name] for name in ("href", "src", "action") if said.get(name)]
        if said.get("id") and tag in ("details", "h3"):
            self._inside = [said["id"]]  # until the next one begins
            self.texts[said["id"]] = ""

    def handle_data(self, data):
        for one in self._inside:
            self.texts[one] += data


def gaps(document, html):
    """What the description has and the page has not."""
    read, missing = Reader(html), []
    for path, methods in document["paths"].items():
        for method, said in methods.items():
            text = next((text for text in read.texts.values() if text.startswith(f"{method.upper()} {path}\n")), None)
            if text is None:
                missing.append(f"{method} {path}")
                continue
            wanted = [said["description"].replace("`", ""), *said["responses"]]
            wanted += [one["name"] for one in said.get("parameters", ())]
            bodies = [said.get("requestBody", {}), *said["responses"].values()]
            named = re.findall(rf"{REF}(\w+)", str([one for one in bodies if "Problem" not in str(one)]))
            wanted += [one.rpartition("__")[2].strip("_").replace("_", " of ") for one in named]  # a Page_Task_
            missing += [f"{method} {path}: {one}" for one in wanted if one not in text]
    waiting, seen = set(re.findall(rf"{REF}(\w+)", str(document["paths"]))), set()
    while waiting:
        seen.add(name := waiting.pop())
        schema, text = document["components"]["schemas"][name], read.texts.get(f"value-{name}", "")
        missing += [f"{name}.{one}" for one in schema.get("properties", ()) if one not in text]
        waiting |= set(re.findall(rf"{REF}(\w+)", str(schema))) - seen
    missing += [link for link in read.links if link.startswith("#value-") and link[1:] not in read.texts]
    return missing


def test_the_page_says_what_the_description_says(small, serve):
    app = create_app(broker=small)
    with serve(app) as address:
        answer = httpx.get(f"{address}/api")
        document = httpx.get(f"{address}/api/v1/openapi.json").json()
        assert httpx.get(f"{address}/api/v2").json()["status"] == 404  # a program's mistake stays a program's
    assert answer.status_code == 200
    assert gaps(document, answer.text) == []
    read = Reader(answer.text)
    assert not [link for link in read.links if not link.startswith(("/", "#"))]
    assert "style" not in read.tags
    assert "TaskSection" in answer.text
    assert "flmarket__broker" not in re.sub(r'(?:id|href|aria-labelledby)="[^"]*"', "", answer.text)


@pytest.mark.parametrize(
    ("what", "found"),
    [("operation", "post /api/v1/tasks"), ("parameter", "Idempotency-Key"), ("field", "BidRequest.privacy_budget")],
)
def test_what_the_page_leaves_out_is_noticed(small, what, found):
    document = create_app(broker=small).openapi()
    less = copy.deepcopy(document)
    if what == "operation":
        del less["paths"]["/api/v1/tasks"]["post"]
    elif what == "parameter":
        less["paths"]["/api/v1/tasks"]["post"]["parameters"] = []
    else:
        del less["components"]["schemas"]["BidRequest"]["properties"]["privacy_budget"]
    around = {"party": None, "csrf": "", "demo": False, "navigation": [], "title": "x", "currency": "units"}
    whole = render("reference.html.j2", api=describe(document), **around)
    assert gaps(document, whole) == []
    (gap,) = gaps(document, render("reference.html.j2", api=describe(less), **around))
    assert found in gap


def test_what_is_described_is_shown_as_text(small):
    """A model or a kind of the operator's own may bring words that look like markup."""
    document = copy.deepcopy(create_app(broker=small).openapi())
    document["components"]["schemas"]["Bid"]["description"] = "<script>alert(1)</script>"
    around = {"party": None, "csrf": "", "demo": False, "navigation": [], "title": "x", "currency": "units"}
    html = render("reference.html.j2", api=describe(document), **around)
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert" in html
