"""What people type, read exactly; and the words and numbers around it, by hand."""

import dataclasses
import math
import re
from importlib import resources

import pytest

from flmarket.broker.web.pages import posting
from flmarket.broker.web.pages.context import Reader, local_path
from flmarket.broker.web.pages.live import _message
from flmarket.broker.web.pages.rendering import clock, environment, list_of, seconds, theme_css, when
from flmarket.client import wire
from flmarket.report.drawing import DARK, LIGHT
from flmarket.trust import certainty


@pytest.mark.parametrize(
    ("typed", "micros"),
    [
        ("1", 1_000_000),
        (" 0.1 ", 100_000),
        ("1e2", 100_000_000),
        ("0.000001", 1),
        ("123456789.654321", 123456789654321),
    ],
)
def test_amounts_are_read_to_the_millionth(typed, micros):
    reader = Reader({"budget": typed})
    assert reader.micros("budget") == micros
    assert not reader.errors


@pytest.mark.parametrize("typed", ["", "1.0000001", "NaN", "inf", "1,5", "one", "1e30", "1e999999", "0x10"])
def test_other_amounts_are_refused_by_name(typed):
    reader = Reader({"budget": typed})
    reader.micros("budget")
    assert list(reader.errors) == ["budget"]


def test_numbers_are_finite_and_counts_are_whole():
    reader = Reader({"a": "nan", "b": "1e999", "c": "2.5", "d": "٣", "e": "0.25"})
    assert [reader.number(name) for name in "abe"] == [0.0, 0.0, 0.25]
    assert [reader.whole(name) for name in "cd"] == [0, 3]
    assert set(reader.errors) == {"a", "b", "c"}


@pytest.mark.parametrize("target", ["/", "/tasks", "/owner/bid?task=t_1"])
def test_local_paths_are_kept(target):
    assert local_path(target) == target


@pytest.mark.parametrize("target", ["", "tasks", "//x", "/\\x", "/a\\b", "/\n", "https://x/", "data:x"])
def test_other_paths_lead_to_the_market(target):
    assert local_path(target) == "/"


def test_certainty_is_the_odds_read_as_a_probability():
    for epsilon in (0.0, 0.1, 1.0, 5.0):
        share = certainty(epsilon)
        assert share / (1 - share) == pytest.approx(math.exp(epsilon))
    assert certainty(1e6) <= 1


def test_times_are_utc():
    assert when("2026-11-15T23:04:09.120Z") == "15 Nov 2026, 23:04 UTC"
    assert when("2026-11-16T00:04:09+01:00") == "15 Nov 2026, 23:04 UTC"
    assert clock("2026-11-15T23:04:09.120Z") == "23:04:09"
    assert when(None) == "–"


def test_words():
    assert [seconds(value) for value in (3, 61, 7200, 86_400 * 2)] == ["3 s", "1 minute", "2 hours", "2 days"]
    assert [list_of(names) for names in (["a"], ["a", "b"], ["a", "b", "c"], [])] == ["a", "a and b", "a, b and c", ""]


def test_a_message_keeps_its_lines_apart():
    """A line break inside the data of an event would end it."""
    assert _message("log", "<li>a</li>\n<li>b</li>\n", 7) == "id: 7\nevent: log\ndata: <li>a</li>\ndata: <li>b</li>\n\n"
    assert _message("finished", "", 7) == "id: 7\nevent: finished\ndata: \n\n"


def test_the_palette_is_the_reports():
    css = theme_css()
    for theme in (LIGHT, DARK):
        for name, colour in theme.items():
            assert f"--{name}: {colour};" in css


def test_templates_escape_and_are_strict():
    made = environment()
    assert made.from_string("{{ x }}").render(x="<b>") == "&lt;b&gt;"
    with pytest.raises(Exception, match="undefined"):
        made.from_string("{{ forgotten }}").render()
    for name in made.list_templates():
        assert "| safe" not in made.loader.get_source(made, name)[0], f"{name} trusts a value"


def test_money_is_rounded_down_and_exact_beside_it():
    ui = environment().get_template("ui.html.j2").make_module({"csrf": ""})
    assert str(ui.amount(1_999_999)).strip() == '<span class="num" title="1.999999">1.99</span>'


@pytest.mark.parametrize("parts", [[(0.25, "teal"), (0.5, "blue")], [(1.0, "rust")], []])
def test_bars_stand_side_by_side(parts):
    ui = environment().get_template("ui.html.j2").make_module({"csrf": ""})
    found = [tuple(map(float, pair)) for pair in re.findall(r'x="([\d.]+)%" width="([\d.]+)%"', str(ui.bar(parts)))]
    starts = [100 * sum(share for share, _ in parts[:i]) for i in range(len(parts))]
    assert found == [(start, 100 * share) for start, (share, _) in zip(starts, parts, strict=True)]


def test_text_and_controls_stand_out_on_every_tint():
    """WCAG AA: 4.5 : 1 for text, 3 : 1 for the borders of controls, on paper and on each tinted background."""
    css = resources.files("flmarket.broker.web").joinpath("static", "app.css").read_text()
    mixes = re.findall(r"--([\w-]+): color-mix\(in srgb, var\(--(\w+)\) (\d+)%, var\(--paper\)\)", css)
    assert {name for name, _, _ in mixes} == {"tint-blue", "tint-good", "tint-bad", "tint-rust", "field"}
    for theme in (LIGHT, DARK):
        paper = _rgb(theme["paper"])
        mixed = {name: _mixed(_rgb(theme[colour]), paper, int(share) / 100) for name, colour, share in mixes}
        assert _contrast(mixed.pop("field"), paper) >= 3
        for background in (paper, _rgb(theme["wash"]), *mixed.values()):
            for text in ("ink", "muted", "blue", "bad"):
                assert _contrast(_rgb(theme[text]), background) >= 4.5, text
        for fill in ("blue", "teal", "plum", "good"):  # buttons, avatars and stages carry paper-coloured text
            assert _contrast(paper, _rgb(theme[fill])) >= 4.5, fill


def _rgb(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _mixed(colour, paper, share):
    return [share * a + (1 - share) * b for a, b in zip(colour, paper, strict=True)]


def _contrast(first, second):
    darker, lighter = sorted(_luminance(one) for one in (first, second))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour):
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("kind", "field"), [("auction", "budget"), ("sampling", "hard_cap"), ("reward", "reward")])
def test_amounts_are_refused_in_the_markets_own_currency(kind, field):
    typed = Reader(posting._DEFAULTS | {"name": "triage", "kind": kind, field: "-1"})
    assert posting._order(typed, currency="EUR") is None
    assert typed.errors[field].endswith(" EUR.")


def test_the_suggested_budget_is_the_least_that_buys_nearly_the_best():
    """By hand: the best bound is 4, a quarter more is 5, and 30 is the least budget of those tried that reaches it."""
    tried = ((10.0, None), (20.0, 8.0), (30.4, 5.0), (60.0, 4.0), (90.0, 4.2))
    points = tuple(wire.BudgetPoint(round(budget * 1e6), bound, 0, 1.0, 0.5, "", None) for budget, bound in tried)
    view = wire.Exploration("posted", "opt-aggr", "privunit", 31, 5, 30, 90_000_000, 0.6, points)
    assert posting._suggested(view) == ("31", "31.00")
    nobody = dataclasses.replace(view, points=points[:1])
    assert posting._suggested(nobody) is None


def test_a_models_settings_are_read_as_they_are_typed():
    typed = posting._DEFAULTS | {"name": "t", "model": "mnist-cnn", "model_settings": "width = 32, rate=0.5 , act=relu"}
    reader = Reader(typed)
    assert posting._settings(reader, "model_settings") == {"width": 32, "rate": 0.5, "act": "relu"}
    for bad in ("width", "= 3", "a b = 3", "name = softmax", "width ="):
        reader = Reader(typed | {"model_settings": bad})
        assert posting._order(reader) is None
        assert reader.errors["model_settings"].startswith("This should be like")


def test_days_without_number_are_refused():
    reader = Reader(posting._DEFAULTS | {"name": "t", "deadline_days": "1e308"})
    assert posting._order(reader) is None
    assert reader.errors["deadline_days"].startswith("At most")


def test_a_cap_below_what_is_expected_is_refused():
    typed = posting._DEFAULTS | {"name": "t", "kind": "sampling", "expected": "50"}
    reader = Reader(typed | {"hard_cap": "10"})
    assert posting._order(reader) is None
    assert reader.errors == {"hard_cap": "At least what a round is expected to cost."}
    assert posting._order(Reader(typed | {"hard_cap": "50"})) is not None
