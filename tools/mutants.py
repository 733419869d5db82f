"""Mutation testing: change one thing in a module, and see whether its tests notice.

    python tools/mutants.py ledger --sample 200 --seed 1     # or account, privacy, guard; all of them without --sample

A mutant is one comparison, operator, number, return, raise or call changed in the module's syntax tree. Each is tried
in a process of its own, forked once the slow imports are done; the module under test is imported from the changed tree,
and the named tests run until the first failure. What survives is printed with its line: a test that is missing, or a
change that means nothing. A sample is drawn evenly, so its share is an estimate of the whole.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import os
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGETS = {
    "ledger": ("flmarket.ledger.rules", ["tests/ledger/test_contract.py", "tests/ledger/test_money.py",
                                         "tests/attacks/test_ledger_ids.py", "tests/simulator/test_found.py"]),
    "account": ("flmarket.ledger.owner_account", ["tests/ledger/test_owner_account.py"]),
    "privacy": ("flmarket.privacy.accountant", ["tests/privacy/test_accountant.py"]),
    "guard": ("flmarket.market.owner", ["tests/engines/flower/test_flower_guard.py", "tests/attacks/test_guard.py",
                                        "tests/market/test_market.py"]),
}  # fmt: skip
SLOW = "not kill and not postgres and not writers and not oracle"
_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
}  # fmt: skip


def mutants(tree: ast.Module) -> list[tuple[int, str, ast.Module]]:
    """Line, what was changed, and the changed tree, for every change there is."""
    found = []
    for number, node in enumerate(ast.walk(tree)):
        for what in _changes(node):
            changed = copy.deepcopy(tree)
            target = next(one for k, one in enumerate(ast.walk(changed)) if k == number)
            _apply(target, what)
            found.append(
                (getattr(node, "lineno", 0), f"{type(node).__name__}: {what}", ast.fix_missing_locations(changed))
            )
    return found


def _changes(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        return ["swap"]
    if isinstance(node, ast.BoolOp) or (isinstance(node, ast.BinOp) and type(node.op) in _SWAPS):
        return ["swap"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ["drop not"]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ["plus one"]
    if isinstance(node, ast.Return) and node.value is not None:
        return ["return nothing"]
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return ["drop"] if calls or isinstance(node, ast.Raise) else []


def _apply(node: ast.AST, what: str) -> None:
    if isinstance(node, ast.Compare):
        node.ops[0] = _SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        node.op = _SWAPS[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp):
        node.op = ast.UAdd()
        node.operand = ast.Call(ast.Name("bool", ast.Load()), [node.operand], [])
    elif isinstance(node, ast.Constant):
        node.value = node.value + 1  # type: ignore[operator]
    elif isinstance(node, ast.Return):
        node.value = None
    else:  # a raise or a call: nothing instead
        node.__class__ = ast.Expr  # type: ignore[assignment]
        node.__dict__.update(value=ast.Constant(None))


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self.name, self.path, self.tree = name, path, tree

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """The module, if it is the one."""
        return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def create_module(self, spec: object) -> None:
        """As usual."""

    def exec_module(self, module: object) -> None:
        """From the tree."""
        exec(compile(self.tree, str(self.path), "exec"), vars(module))  # noqa: S102


def survives(name: str, path: Path, tree: ast.Module, tests: list[str], seconds: float, skipped: str = SLOW) -> bool:
    """Whether all tests pass with the module changed; too long is noticed, too."""
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        sys.meta_path.insert(0, _Changed(name, path, tree))
        import pytest

        os._exit(int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", skipped, *tests])))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


def main() -> None:
    """Try them, and say what survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--skip", nargs="*", default=[], help="words in names of tests to leave out")
    parser.add_argument("--minutes", type=float, default=600.0)
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    import numpy  # noqa: F401  # what is slow to import, once
    import pytest  # noqa: F401
    import scipy.optimize
    import scipy.special  # noqa: F401
    import sqlalchemy.orm  # noqa: F401

    name, tests = TARGETS[options.target]
    path = ROOT / "src" / (name.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    began, skipped = time.monotonic(), " and not ".join([SLOW, *options.skip])
    if not survives(name, path, tree, tests, 1800, skipped):
        sys.exit("the tests do not pass as it is")
    patience = 60 + 4 * (time.monotonic() - began)
    every = mutants(tree)
    chosen = (
        every if options.sample is None else random.Random(options.seed).sample(every, min(options.sample, len(every)))
    )
    killed = tried = 0
    for line, what, changed in chosen:
        if time.monotonic() - began > 60 * options.minutes:
            break
        tried += 1
        if survives(name, path, changed, tests, patience, skipped):
            print(f"survives: {path.relative_to(ROOT)}:{line} {what}", flush=True)
        else:
            killed += 1
    print(
        f"{name}: {killed} of {tried} noticed ({killed / max(tried, 1):.0%}), of {len(every)} mutants in all",
        flush=True,
    )


if __name__ == "__main__":
    main()
