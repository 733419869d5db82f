"""Helm's templates as far as our chart uses them, so that tests need no Helm: actions, `if`, `else`, `range`, pipelines
of a few functions. Whatever else is written there is an error here, and so is a value that does not exist."""

import re

import yaml

_TOKEN = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.S)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')


class ChartError(Exception):
    """What Helm would refuse, or what this reader does not know."""


def render(text, values, *, chart, release="market"):
    """A template with these values, as text."""
    context = {"Values": values, "Chart": {"AppVersion": chart["appVersion"]}, "Release": {"Name": release}}
    tokens, rest = [], 0
    for match in _TOKEN.finditer(text):
        before = text[rest : match.start()]
        if tokens and tokens[-1][0] == "trim":
            tokens.pop()
            before = before.lstrip()
        tokens += [("text", before.rstrip() if match[1] else before), ("action", match[2])]
        tokens += [("trim", "")] if match[3] else []
        rest = match.end()
    tokens.append(("text", text[rest:]))
    out, end = _block(tokens, 0, context, {})
    if end != len(tokens):
        raise ChartError(f"an {tokens[end][1]!r} too many")
    return out


def documents(folder, changes=None, release="market"):
    """All objects of a chart, with changed values."""
    chart = yaml.safe_load((folder / "Chart.yaml").read_text())
    values = merged(yaml.safe_load((folder / "values.yaml").read_text()), changes or {})
    texts = [
        render(one.read_text(), values, chart=chart, release=release) for one in sorted(folder.glob("templates/*"))
    ]
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


def merged(values, changes):
    """Values with changes in them, which may name nothing new."""
    for name, change in changes.items():
        if name not in values:
            raise ChartError(f"no value {name}")
        inside = isinstance(change, dict) and name != "settings"
        values = values | {name: merged(values[name], change) if inside else change}
    return values


def _block(tokens, at, context, names):
    """Text up to the `else` or `end` that belongs to somebody above."""
    out = ""
    while at < len(tokens):
        kind, said = tokens[at]
        if kind == "text":
            out += said
        elif said == "end" or said.split(" ")[0] == "else":
            return out, at
        elif said.startswith("if "):
            text, at = _choice(tokens, at, context, names)
            out += text
        elif said.startswith("range "):
            key, value, where = re.fullmatch(r"range (\$\w+), (\$\w+) := (\S+)", said).groups()
            inside = sorted(_value(where, context, names).items())
            for one in inside:
                text, end = _block(tokens, at + 1, context, names | {key: one[0], value: one[1]})
                out += text
            at = end if inside else _block(tokens, at + 1, context, names | {key: "", value: ""})[1]
        else:
            found = _pipeline(said, context, names)
            if found is None:
                raise ChartError(f"{said} is nothing")
            out += str(found).lower() if isinstance(found, bool) else str(found)
        at += 1
    return out, at


def _choice(tokens, at, context, names):
    """The first branch that holds; the others are read only to find where they end."""
    taken, out, said = False, "", tokens[at][1]
    while said != "end":
        holds = not taken and (said == "else" or bool(_value(said.split("if ", 1)[1], context, names)))
        if holds:
            text, end = _block(tokens, at + 1, context, names)
            out, taken = text, True
        else:
            end = _skip(tokens, at + 1)
        at, said = end, tokens[end][1]
    return out, at


def _skip(tokens, at):
    depth = 0
    while depth or tokens[at][0] != "action" or not (tokens[at][1] == "end" or tokens[at][1].split(" ")[0] == "else"):
        if tokens[at][0] == "action":
            depth += tokens[at][1].startswith(("if ", "range ")) - (tokens[at][1] == "end")
        at += 1
    return at


def _pipeline(said, context, names):
    steps, found = [_WORD.findall(one) for one in said.split(" | ")], None
    for number, step in enumerate(steps):
        words = [_value(one, context, names) for one in step[1:]] + ([found] if number else [])
        if step[0] in _FUNCTIONS:
            found = _FUNCTIONS[step[0]](*words)
        elif number or len(step) > 1:
            raise ChartError(f"an unknown function: {step[0]}")
        else:
            found = _value(step[0], context, names)
    return found


def _value(word, context, names):
    if word.startswith('"') or word.isdigit():
        return yaml.safe_load(word)
    if word in names:
        return names[word]
    if not word.startswith("."):
        raise ChartError(f"an unknown word: {word}")
    found = context
    for name in word[1:].split("."):
        if not isinstance(found, dict) or name not in found:
            raise ChartError(f"no value {word}")
        found = found[name]
    return found


def _quote(value):
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _required(message, value):
    return value if value not in (None, "") else _fail(message)


def _fail(message):
    raise ChartError(message)


_FUNCTIONS = {
    "quote": _quote,
    "upper": str.upper,
    "default": lambda other, value: value or other,
    "required": _required,
    "fail": _fail,
    "toYaml": lambda value: yaml.safe_dump(value, sort_keys=True).rstrip("\n"),
    "nindent": lambda count, text: "\n" + "\n".join(" " * count + line for line in text.split("\n")),
}
