"""Mutation testing: change one thing in a module, and see whether its tests notice.

    python tools/mutants.py ledger guard privacy        # what is not tried yet; results in out/mutants/*.jsonl
    python tools/mutants.py ledger --again              # what survived so far, once more, after new tests
    python tools/mutants.py guard --only record --sample 200 --seed 1
    python tools/mutants.py ledger guard privacy --table

A mutant is a module with one comparison, condition, operator, number, return, raise, call or word of SQL changed. Left
out by rule, because no test should notice: docstrings, annotations and what only types need (`assert`, `overload`,
`cast`, protocols), what is said in an error or a log, `__all__` and `__slots__`, sizes of caches and waiting times.

Tests are collected once. First each runs on the modules as they are, which says how long it takes and which lines it
runs; a mutant is then tried on the tests that run its line, quickest and most telling first, until one fails. Each is
tried in a fork: functions get their changed code there, whoever holds them by then. What is changed outside functions
(constants, defaults, decorators) takes a fork from before the imports, and the changed module is imported. A test that
takes ten times its usual time, or ends the process, has noticed. Before anything counts, it is checked that recompiled
modules pass, and that every module full of `raise` does not, both ways.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import gc
import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "out" / "mutants"
TARGETS = {
    "ledger": (
        [f"flmarket.ledger.{name}" for name in (
            "rules", "journal", "entry", "memory", "sql", "store", "merkle", "receipt", "replay", "owner_account")],
        ["tests/ledger", "tests/attacks/test_ledger_ids.py", "tests/attacks/test_receipts.py",
         "tests/simulator/test_found.py"],
    ),
    "guard": (
        ["flmarket.market.owner", "flmarket.market.record"],
        ["tests/market/test_owner.py", "tests/market/test_record.py", "tests/market/test_masking.py",
         "tests/attacks/test_guard.py", "tests/engines/flower/test_flower_guard.py"],
    ),
    "privacy": (
        [f"flmarket.privacy.{name}" for name in ("accountant", "composition", "caps", "calibration", "additive")],
        ["tests/privacy", "tests/peers"],
    ),
}  # fmt: skip
SLOW = "not postgres and not kill and not power and not deployment and not ray"
SECONDS = 6.0  # a test that takes longer is left out
_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_CALLS |= {"minimum": "maximum", "maximum": "minimum"}
_SQL = re.compile(r"^(select|insert|update|delete|pragma|begin)\b", re.IGNORECASE)
_WORDS = {
    " and ": " or ", " or ignore": "", " is null": " is not null", " is not null": " is null", " < ": " <= ",
    " > ": " >= ", " desc": " asc", " not in ": " in ", " = ?": " <> ?",
}  # fmt: skip
_UNHEARD = {"maxsize", "timeout"}  # arguments that change no answer


class Mutant:
    """One change in a module: where it is, how it is made and taken back."""

    def __init__(
        self, scope: ast.AST | None, name: str, node: ast.AST, what: str, change: Callable[[], object]
    ) -> None:
        self.scope, self.name, self.line, self.what, self.change = scope, name, getattr(node, "lineno", 0), what, change

    def key(self, module: str, text: str) -> str:
        """The same as long as what is around the change is."""
        return hashlib.sha256(f"{module} {self.name} {text}".encode()).hexdigest()[:16]


def mutants(tree: ast.Module) -> list[Mutant]:
    """Every change there is, each to be made on this very tree (and undone by copying fields back)."""
    found: list[Mutant] = []

    def visit(node: ast.AST, scope: ast.AST | None, names: tuple[str, ...], messages: bool = False) -> None:
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if function and any(
            "overload" in ast.unparse(one) or "abstract" in ast.unparse(one) for one in node.decorator_list
        ):
            return
        protocol = isinstance(node, ast.ClassDef) and "Protocol" in [ast.unparse(base) for base in node.bases]
        if isinstance(node, ast.Assert) or protocol or _unheard(node):
            return
        for what, change in _changes(node, messages):
            found.append(Mutant(scope, ".".join(names), node, what, change))
        inner = (*names, node.name) if function or isinstance(node, ast.ClassDef) else names
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_params"):
                continue
            body = function and field == "body" and scope is None
            skipped = _docstring(node) if field == "body" else None
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and child is not skipped:
                    visit(child, node if body else scope, inner, messages or isinstance(node, ast.Raise))

    visit(tree, None, ())
    return found


def _docstring(node: ast.AST) -> ast.AST | None:
    first = node.body[0] if getattr(node, "body", None) and isinstance(node.body, list) else None
    return first if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else None


def _unheard(node: ast.AST) -> bool:
    """What no test should notice."""
    if isinstance(node, ast.keyword):
        return node.arg in _UNHEARD
    if isinstance(node, ast.Assign):
        names = [one.id for one in node.targets if isinstance(one, ast.Name)]
        return any(name in ("__all__", "__slots__") for name in names) or "TypeVar" in ast.unparse(node.value)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        return called.startswith(("_log.", "logging.", "warnings.")) or called in ("cast", "lru_cache")
    if isinstance(node, ast.Expr):  # a dropped call would be one of these
        return isinstance(node.value, ast.Call) and _unheard(node.value)
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _set(node: ast.AST, **fields: Any) -> Callable[[], Callable[[], None]]:
    """A change of fields, which returns the way back."""

    def change() -> Callable[[], None]:
        before = {name: getattr(node, name) for name in fields}
        for name, value in fields.items():
            setattr(node, name, value)
        return lambda: [setattr(node, name, value) for name, value in before.items()] and None

    return change


def _place(items: list[Any], index: int, *new: Any) -> Callable[[], Callable[[], None]]:
    def change() -> Callable[[], None]:
        before = list(items)
        items[index : index + 1] = new
        return lambda: items.__setitem__(slice(None), before)

    return change


def _not(node: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), node)


def _changes(node: ast.AST, messages: bool) -> Iterator[tuple[str, Callable[[], Callable[[], None]]]]:
    if messages:  # the words of an error
        return
    if isinstance(node, ast.Compare):
        for k, op in enumerate(node.ops):
            if type(op) in _SWAPS:
                yield f"swap {type(op).__name__}", _place(node.ops, k, _SWAPS[type(op)]())
    if isinstance(node, ast.BoolOp):
        yield "swap and/or", _set(node, op=_SWAPS[type(node.op)]())
        for k in range(len(node.values)):
            pair = [node.values[1 - k]] if len(node.values) == 2 else []  # syntax trees have two at least
            yield f"drop operand {k}", _place(node.values, k, *pair)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _SWAPS:
        yield f"swap {type(node.op).__name__}", _set(node, op=_SWAPS[type(node.op)]())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "drop not", _set(node, operand=_not(node.operand))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "drop minus", _set(node, op=ast.UAdd())
    if isinstance(node, ast.If | ast.While | ast.IfExp) and isinstance(node.test, ast.Call | ast.Name | ast.Attribute):
        yield "negate", _set(node, test=_not(node.test))
    if isinstance(node, ast.comprehension):
        for k, condition in enumerate(node.ifs):
            yield "drop filter", _place(node.ifs, k)
            if isinstance(condition, ast.Call | ast.Name | ast.Attribute):
                yield "negate", _place(node.ifs, k, _not(condition))
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield "flip", _set(node, value=not node.value)
        elif isinstance(node.value, int | float):
            yield "plus one", _set(node, value=node.value + 1)
        elif isinstance(node.value, str) and _SQL.match(node.value):
            for word, other in _WORDS.items():
                for at in (one.start() for one in re.finditer(re.escape(word), node.value, re.IGNORECASE)):
                    text = node.value[:at] + other + node.value[at + len(word) :]
                    yield f"SQL{word} at {at}", _set(node, value=text)
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return nothing", _set(node, value=ast.Constant(None))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in _CALLS:
            field = "attr" if isinstance(node.func, ast.Attribute) else "id"
            yield f"{name} → {_CALLS[name]}", _set(node.func, **{field: _CALLS[name]})
    for name in ("body", "orelse", "finalbody"):
        for k, part in enumerate(
            getattr(node, name, None) or [] if not isinstance(node, ast.Lambda | ast.IfExp) else []
        ):
            calls = isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and not _unheard(part)
            raises = isinstance(part, ast.Raise) and "NotImplementedError" not in ast.unparse(part)
            jumps = isinstance(part, ast.Break | ast.Continue)
            if calls or raises or jumps:
                yield (
                    f"drop line {part.lineno} {type(part).__name__.lower()}",
                    _place(getattr(node, name), k, ast.Pass()),
                )


class Module:
    """A module under test: its mutants, and its functions once it is imported."""

    def __init__(self, name: str) -> None:
        self.name, self.path = name, ROOT / "src" / (name.replace(".", "/") + ".py")
        self.tree = ast.parse(self.path.read_text(encoding="utf-8"))

    @functools.cached_property
    def mutants(self) -> dict[str, tuple[Mutant, str]]:
        """By key, each with a line of what it looks like; changes that come to the same are one."""
        found: dict[str, tuple[Mutant, str]] = {}
        whole = {}
        for mutant in mutants(self.tree):
            scope = mutant.scope or self.tree
            if id(scope) not in whole:
                whole[id(scope)] = ast.unparse(scope)
            undo = mutant.change()
            text = ast.unparse(ast.fix_missing_locations(scope))
            undo()
            if text != whole[id(scope)]:
                pairs = zip(whole[id(scope)].splitlines(), text.splitlines(), strict=False)
                line = next((after for before, after in pairs if before != after), "(a line less)")
                found.setdefault(mutant.key(self.name, text), (mutant, line.strip()))
        return found

    def compiled(self, mutant: Mutant | None = None) -> CodeType:
        """The module's code, with the change."""
        undo = mutant.change() if mutant else lambda: None
        try:
            return compile(ast.fix_missing_locations(self.tree), str(self.path), "exec", dont_inherit=True)
        finally:
            undo()

    def planted(self) -> CodeType:
        """The module with functions that raise."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not any(isinstance(one, ast.Yield) for one in ast.walk(node)):
                node.body.insert(0, ast.parse("raise RuntimeError('planted')").body[0])
        return compile(ast.fix_missing_locations(tree), str(self.path), "exec", dont_inherit=True)

    @functools.cached_property
    def functions(self) -> dict[tuple[str, int], list[FunctionType]]:
        """All function objects made of this module's code, by name and line."""
        found = defaultdict(list)
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename == str(self.path):
                found[one.__code__.co_qualname, one.__code__.co_firstlineno].append(one)
        return dict(found)

    def install(self, code: CodeType) -> int:
        """Give functions their new code, where they differ; how many got some."""
        changed, left = 0, [code]
        while left:
            part = left.pop()
            for inner in part.co_consts:
                if isinstance(inner, CodeType):
                    left.append(inner)
                    for function in self.functions.get((inner.co_qualname, inner.co_firstlineno), ()):
                        if len(inner.co_freevars) == len(function.__code__.co_freevars):
                            function.__code__ = inner
                            changed += 1
        return changed


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from changed code."""

    def __init__(self, module: Module, code: CodeType) -> None:
        self.module, self.code = module, code

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """The module, if it is the one."""
        mine = name == self.module.name
        return importlib.util.spec_from_file_location(name, self.module.path, loader=self) if mine else None

    def create_module(self, spec: object) -> None:
        """As usual."""

    def exec_module(self, module: object) -> None:
        """From the code."""
        exec(self.code, vars(module))  # noqa: S102


def forked(work: Callable[[Callable[[object], None]], None], seconds: float) -> tuple[str, list[Any]]:
    """Run something in a fork: how it ended, and what it said on the way."""
    folder = Path(tempfile.mkdtemp(prefix="mutant-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))  # noqa: S108
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            os.setsid()
            os.close(read)
            null = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(null, stream)
            os.environ |= {"PYTEST_DEBUG_TEMPROOT": str(folder), "TMPDIR": str(folder)}
            tempfile.tempdir = None
            work(lambda said: os.write(write, json.dumps(said).encode() + b"\n") and None)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            os._exit(code)
    os.close(write)
    until, text, handle = time.monotonic() + seconds, b"", os.pidfd_open(pid)
    late = False
    while not late:
        ready, _, _ = select.select([read, handle], [], [], max(0.0, until - time.monotonic()))
        if read in ready:
            part = os.read(read, 1 << 20)
            text += part
            if part:
                continue
        late = not ready
        if handle in ready:
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # whatever it started, and itself if it is late
    _, status = os.waitpid(pid, 0)
    os.close(handle)
    os.close(read)
    shutil.rmtree(folder, ignore_errors=True)
    said = [json.loads(line) for line in text.splitlines()]
    ended = os.waitstatus_to_exitcode(status)
    alarms = (-signal.SIGALRM, -signal.SIGPROF)
    return ("late" if late or ended in alarms else {0: "passed", 1: "failed"}.get(ended, f"exit {ended}")), said


def arguments(tests: list[str]) -> list[str]:
    """How pytest is called."""
    return ["-q", "-s", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", *tests]


class Runner:
    """A pytest plug-in that collects, and then tries mutants instead of running the tests."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def pytest_collection(self, session: Any) -> None:
        """Before tests are imported: Hypothesis looks for a failure, and makes it no prettier."""
        quick_hypothesis()

    def pytest_runtestloop(self, session: Any) -> bool:
        """Everything."""
        self.items = {item.nodeid: item for item in session.items}
        gc.collect()
        for module in self.bench.modules:
            print(f"{module.name}: {len(module.functions)} functions, {len(module.mutants)} mutants", flush=True)
        gc.freeze()  # forks share what is never looked at again
        self.bench.tests = self.measured()
        self.bench.hot(self)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """What came of a part of a test."""
        self.reports.append(report)

    def run(self, names: list[str], said: Callable[[object], None], traced: Trace | None = None) -> None:
        """Run these tests until one fails."""
        for name, following in zip(names, [*names[1:], None], strict=True):
            usual = self.bench.tests.get(name, {"seconds": 60.0})["seconds"]
            signal.setitimer(signal.ITIMER_PROF, 5 + 10 * usual)
            signal.setitimer(signal.ITIMER_REAL, 30 + 30 * usual)
            began = time.process_time(), time.monotonic()
            if traced:
                traced.begin()
            self.reports: list[Any] = []
            item, nextitem = self.items[name], following and self.items[following]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            spent = max(time.process_time() - began[0], (time.monotonic() - began[1]) / 3)
            bad = [report for report in self.reports if report.failed]
            lines = traced.end() if traced else None
            skipped = any(report.skipped for report in self.reports)
            said({"test": name, "seconds": round(spent, 3), "failed": bool(bad), "skipped": skipped, "lines": lines,
                  "why": str(bad[0].longrepr)[-2000:] if bad and traced else ""})  # fmt: skip
            if bad and not traced:
                sys.exit(1)

    def measured(self) -> dict[str, dict[str, Any]]:
        """Seconds and lines of every test, on modules as they are but recompiled."""
        bench = self.bench
        known = {name: one for name, one in bench.load().items() if name in self.items}
        new = [name for name in self.items if name not in known]

        def all_of_them(said: Callable[[object], None]) -> None:
            for module in bench.modules:
                if (
                    module.install(module.compiled()) != sum(map(len, module.functions.values()))
                    or not module.functions
                ):
                    sys.exit(f"{module.name}: not every function can be given other code")
            self.run(new, said, Trace({str(module.path): module.name for module in bench.modules}))

        print(f"{len(known)} tests measured before, {len(new)} to measure", flush=True)
        if new:
            ended, told = forked(all_of_them, 3600)
            failed = [one["test"] + "\n" + one["why"] for one in told if one["failed"]]
            known |= {one["test"]: one for one in told if not one["failed"]}
            bench.tests = known
            bench.save()
            if failed or ended != "passed":
                sys.exit(f"{ended}: these tests do not pass as it is, after {told[-1:]}:\n" + "\n".join(failed))
        return known


class Trace:
    """Which lines of some files are run."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files, self.lines = files, defaultdict(set)

    def begin(self) -> None:
        """From here."""
        self.lines.clear()
        threading.settrace(self.call)
        sys.settrace(self.call)

    def end(self) -> dict[str, list[int]]:
        """To here."""
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        return {name: sorted(lines) for name, lines in self.lines.items()}

    def call(self, frame: Any, event: str, argument: object) -> Any:
        """Python's tracing function."""
        name = self.files.get(frame.f_code.co_filename)
        if name is None:
            return None
        lines = self.lines[name]
        lines.add(frame.f_lineno)

        def line(frame: Any, event: str, argument: object) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line


@functools.lru_cache(None)
def _sources(path: str) -> dict[str, str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return {
        node.name: hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }


def source_of(test: str) -> str:
    """What a test's function says; empty if there is none any more."""
    path, *_, name = test.split("[")[0].split("::")
    return _sources(path).get(name, "") if (ROOT / path).exists() else ""


def quick_hypothesis() -> None:
    """No shrinking, no explaining."""
    from hypothesis import Phase, settings

    settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate), print_blob=False)
    settings.load_profile("mutants")


class Bench:
    """One target's modules, tests, and results."""

    def __init__(self, target: str, options: argparse.Namespace) -> None:
        self.target, self.options = target, options
        names, self.paths = TARGETS[target]
        self.modules = [Module(name) for name in names]
        self.tests: dict[str, dict[str, Any]] = {}
        self.log, self.measurements = RESULTS / f"{target}.jsonl", RESULTS / f"{target}-tests.json"
        self.kills: Counter[str] = Counter()
        self.began, self.run = time.monotonic(), time.strftime("%Y-%m-%d %H:%M")

    def load(self) -> dict[str, dict[str, Any]]:
        """Measurements of before, of tests that did not change; lines of modules are where they are now."""
        if not self.measurements.exists():
            return {}
        kept, moved = json.loads(self.measurements.read_text(encoding="utf-8")), {}
        for module in self.modules:
            name, text = module.name, module.path.read_text(encoding="utf-8")
            before, after = kept["modules"].get(name, "").splitlines(), text.splitlines()
            blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
            moved[name] = {one.a + k + 1: one.b + k + 1 for one in blocks for k in range(one.size)}
        found = {name: one for name, one in kept["measured"].items() if one["source"] == source_of(name)}
        for one in found.values():
            for name, lines in (one["lines"] or {}).items():
                one["lines"][name] = [moved[name][line] for line in lines if line in moved[name]]
        return found

    def save(self) -> None:
        """Keep the measurements."""
        modules = {module.name: module.path.read_text(encoding="utf-8") for module in self.modules}
        for name, one in self.tests.items():
            one["source"] = source_of(name)
        self.measurements.write_text(json.dumps({"modules": modules, "measured": self.tests}), encoding="utf-8")

    def results(self) -> dict[str, dict[str, Any]]:
        """What is known, by key; the latest counts."""
        if not self.log.exists():
            return {}
        found = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]
        return {one["key"]: one for one in found}

    def todo(self) -> list[tuple[Module, str, Mutant, str]]:
        """What is to be tried."""
        known, drawn = self.results(), random.Random(self.options.seed)
        found = []
        for module in self.modules:
            if self.options.only and module.name.split(".")[-1] not in self.options.only:
                continue
            keys = sorted(module.mutants)
            if self.options.sample:
                keys = drawn.sample(keys, min(len(keys), self.options.sample))
            again = self.options.again
            for key in keys:
                if (known[key]["result"] == "survived" and again) if key in known else not again:
                    found.append((module, key, *module.mutants[key]))
        drawn.shuffle(found)  # a run that is stopped has tried an even share
        return found

    def order(self, module: str, line: int | None) -> list[str]:
        """The tests that run a line (or anything of the module), quickest and most telling first, within the time."""
        chosen, spent = [], 0.0

        def rank(name: str) -> float:
            return self.tests[name]["seconds"] / (1 + self.kills[name])

        # what survived once has passed the quickest: then the tests that are new come first
        for name in reversed(self.tests) if self.options.again else sorted(self.tests, key=rank):
            one = self.tests[name]
            lines = (one["lines"] or {}).get(module, ()) if module else one["lines"]
            if one["seconds"] <= SECONDS and not one["skipped"] and (line in lines if line else lines):
                spent += one["seconds"]
                if spent > self.options.enough:
                    break
                chosen.append(name)
        return chosen

    def hot(self, runner: Runner) -> None:
        """All changes within functions, and the checks that make them count."""
        quick = self.order("", None)
        if (
            forked(lambda said: [one.install(one.compiled()) for one in self.modules] and runner.run(quick, said), 900)[
                0
            ]
            != "passed"
        ):
            sys.exit("recompiled modules do not pass")
        for module in self.modules:
            found = self.trial(runner, module, module.planted(), self.order(module.name, None))
            if found["result"] != "killed":
                sys.exit(f"{module.name} is full of errors, and no test notices")
        todo = [one for one in self.todo() if one[2].scope is not None]
        for number, (module, key, mutant, text) in enumerate(todo):
            if time.monotonic() - self.began > 60 * self.options.minutes:
                break
            tests = self.order(module.name, mutant.line)
            tests = tests or self.order(module.name, self.nearest(module.name, mutant))
            self.note(
                number, len(todo), module, key, mutant, text, self.trial(runner, module, module.compiled(mutant), tests)
            )

    def nearest(self, module: str, mutant: Mutant) -> int:
        """The statement that a line belongs to begins on an earlier line."""
        run = {line for one in self.tests.values() for line in (one["lines"] or {}).get(module, ())}
        first = getattr(mutant.scope, "lineno", 0)
        return next((line for line in range(mutant.line, first, -1) if line in run), -1)

    def trial(self, runner: Runner, module: Module, code: CodeType, tests: list[str]) -> dict[str, Any]:
        """One mutant in a fork of the process that has collected."""

        def work(said: Callable[[object], None]) -> None:
            module.install(code)
            runner.run(tests, said)

        return self.judged(tests, *forked(work, 900)) if tests else {"result": "survived", "by": "", "tests": 0}

    def judged(self, tests: list[str], ended: str, told: list[Any]) -> dict[str, Any]:
        """What a fork's end means."""
        if ended == "passed":
            return {"result": "survived", "by": "", "tests": len(tests)}
        culprit = told[-1]["test"] if told and told[-1]["failed"] else tests[min(len(told), len(tests) - 1)]
        self.kills[culprit] += 1
        return {"result": "killed", "by": culprit, "how": ended, "tests": len(told)}

    def cold(self) -> None:
        """All changes outside functions, each with imports of its own."""
        self.tests = self.load()
        todo = [one for one in self.todo() if one[2].scope is None]
        for module in self.modules[: bool(todo)]:
            for code, due in ((module.compiled(), "survived"), (module.planted(), "killed")):
                found = self.imported(module, code)
                if found["result"] != due:
                    sys.exit(f"{module.name}, imported, should have {due}: {found}")
        for number, (module, key, mutant, text) in enumerate(todo):
            if time.monotonic() - self.began > 60 * self.options.minutes:
                break
            self.note(number, len(todo), module, key, mutant, text, self.imported(module, module.compiled(mutant)))

    def imported(self, module: Module, code: CodeType) -> dict[str, Any]:
        """One mutant in a fork of this process, which has imported none of them."""
        tests = self.order(module.name, None)
        order = {name: place for place, name in enumerate(tests)}

        class Chosen:
            def pytest_collection(self, session: Any) -> None:
                quick_hypothesis()

            def pytest_collection_modifyitems(self, items: list[Any]) -> None:
                items[:] = sorted((one for one in items if one.nodeid in order), key=lambda one: order[one.nodeid])

        def work(said: Callable[[object], None]) -> None:
            import pytest

            sys.meta_path.insert(0, Finder(module, code))
            os.chdir(ROOT)
            files = sorted({name.split("::")[0] for name in tests})
            sys.exit(int(pytest.main([*arguments(files), "-x"], plugins=[Chosen()])) and 1)

        return self.judged(tests, *forked(work, 60 + 10 * sum(self.tests[name]["seconds"] for name in tests)))

    def note(
        self, number: int, of: int, module: Module, key: str, mutant: Mutant, text: str, found: dict[str, Any]
    ) -> None:
        """Write a result down."""
        place = f"{module.path.relative_to(ROOT / 'src' / 'flmarket')}:{mutant.line}"
        row = {"run": self.run, "key": key, "place": place, "what": mutant.what, "text": text, **found}
        with self.log.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row, ensure_ascii=False) + "\n")
        if found["result"] == "survived":
            print(
                f"{self.target} {number + 1}/{of} survives: {place} {mutant.what}: {text} [{found['tests']} tests]",
                flush=True,
            )

    def table(self) -> None:
        """By module: mutants, tried, killed, share; and what survives."""
        known = self.results()
        sums: Counter[str] = Counter()
        survivors = []
        for module in self.modules:
            rows = [known[key] | {"line": one.line} for key, (one, _) in module.mutants.items() if key in known]
            killed = sum(row["result"] == "killed" for row in rows)
            late = sum(row.get("how") == "late" for row in rows)
            sums.update(all=len(module.mutants), tried=len(rows), killed=killed, late=late)
            numbers = len(module.mutants), len(rows), killed, f"{killed / max(1, len(rows)):.1%}", late
            print(f"| `{module.name.removeprefix('flmarket.')}` |", " | ".join(map(str, numbers)), "|")
            survivors += sorted((row for row in rows if row["result"] != "killed"), key=lambda row: row["line"])
        share = f"**{sums['killed'] / max(1, sums['tried']):.1%}**"
        numbers = sums["all"], sums["tried"], sums["killed"], share, sums["late"]
        print(f"| **{self.target}** |", " | ".join(map(str, numbers)), "|")
        for row in survivors:
            where = row["place"].split(":")[0]
            print(f"  {where}:{row['line']} {row['what']}: {row['text']} [{row['tests']}]")


def main() -> None:
    """Try them, and say what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", choices=TARGETS)
    parser.add_argument("--sample", type=int, help="so many of each module, drawn evenly")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="modules, by their last names")
    parser.add_argument("--again", action="store_true", help="what survived before")
    parser.add_argument("--minutes", type=float, default=600.0, help="for each target, and as much for its constants")
    parser.add_argument("--enough", type=float, default=10.0, help="seconds of tests for one mutant, as measured")
    parser.add_argument("--functions", action="store_true", help="only what is changed within functions")
    parser.add_argument("--table", action="store_true", help="try nothing, show what is known")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.nice(10)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    sys.path[:0] = [str(ROOT / "src")]
    RESULTS.mkdir(parents=True, exist_ok=True)
    for target in options.targets:
        if options.table:
            Bench(target, options).table()
            continue
        pid = os.fork()
        if pid == 0:  # what is imported here stays here
            import pytest

            bench = Bench(target, options)
            os._exit(int(pytest.main([*arguments(bench.paths), "-k", SLOW], plugins=[Runner(bench)])))
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"{target}: stopped")
        import numpy  # noqa: F401  # what is slow to import, once
        import pytest
        import scipy.optimize
        import scipy.special  # noqa: F401
        import sqlalchemy.orm  # noqa: F401

        bench = Bench(target, options)
        if not options.functions:
            bench.cold()
        bench.table()


if __name__ == "__main__":
    main()
