"""Find the mutants of a source file, and draw some of all files by a seed."""

import ast
import difflib
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.mutation.changes import Change, changes_of


@dataclass(frozen=True)
class Mutant:
    """One change of a file, from `begin` to `end`; a test has to run one of `lines` to run it."""

    root: Path
    path: str
    line: int
    begin: int
    end: int
    new: str
    lines: frozenset[int] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.change}"

    @cached_property
    def change(self) -> str:
        """What is changed into what, on one line."""
        old = self.original.encode()[self.begin : self.end].decode()
        return f"{' '.join(old.split())}  ->  {' '.join(self.new.split())}"

    @property
    def original(self) -> str:
        """The file's text."""
        return (self.root / self.path).read_text()

    @cached_property
    def text(self) -> str:
        """The file's text with the change."""
        source = self.original.encode()
        return (source[: self.begin] + self.new.encode() + source[self.end :]).decode()

    @property
    def diff(self) -> str:
        """The change as a unified diff."""
        before, after = (text.splitlines(keepends=True) for text in (self.original, self.text))
        return "".join(difflib.unified_diff(before, after, self.path, self.path, n=2))

    def is_valid(self) -> bool:
        """Whether the changed file is Python, and another program than before."""
        try:
            return ast.dump(ast.parse(self.text)) != ast.dump(ast.parse(self.original))
        except SyntaxError:
            return False


def draw(root: Path, places: Iterable[str], seed: int, count: int) -> list[Mutant]:
    """Draw mutants of files and folders under `root`; `src/a.py:12` restricts a file to one line.

    The same files, seed and count give the same mutants, and nearly the same ones after a change of a few
    lines. All are returned if there are no more than `count`.
    """
    drawn: list[Mutant] = []
    for mutant in _in_random_order(seed, (mutant for place in places for mutant in _of_place(root, place))):
        if len(drawn) == count:
            break
        if mutant.is_valid():
            drawn.append(mutant)
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.begin))


def _in_random_order(seed: int, mutants: Iterable[Mutant]) -> list[Mutant]:
    """Sort mutants by the hash of what identifies each wherever its line stands in the file."""
    found: dict[bytes, Mutant] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for mutant in mutants:
        seen[mutant.path, mutant.change] += 1
        identity = repr((seed, mutant.path, mutant.change, seen[mutant.path, mutant.change]))
        found[hashlib.sha256(identity.encode()).digest()] = mutant
    return [mutant for _, mutant in sorted(found.items())]


def _of_place(root: Path, place: str) -> Iterator[Mutant]:
    name, _, line = place.partition(":")
    path = root / name
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}.")
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        mutants = mutants_of(root, str(file.relative_to(root)))
        yield from (mutant for mutant in mutants if not line or mutant.line == int(line))


def mutants_of(root: Path, path: str) -> Iterator[Mutant]:
    """Return all mutants of one file."""
    source = (root / path).read_text()
    starts = [0, *itertools.accumulate(len(line) for line in source.encode().split(b"\n"))]
    starts = [start + number for number, start in enumerate(starts)]  # each line ends with a newline
    for (node, new), lines in _Finder(ast.parse(source)).found:
        if node.end_lineno is not None and node.end_col_offset is not None:
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            yield Mutant(root, path, node.lineno, begin, end, new, lines)


class _Finder(ast.NodeVisitor):
    """Collects the changes of a module, with the lines that run them.

    A default argument, and what a class or module executes when it is imported, takes effect where the
    function, class or module is used: its lines are all of theirs.
    """

    def __init__(self, module: ast.Module) -> None:
        self.found: list[tuple[Change, frozenset[int]]] = []
        self._in_function = False
        self._lines = _all_lines(module)
        self.generic_visit(module)

    def visit(self, node: ast.AST) -> None:
        if _is_skipped(node):
            return
        self.found += [(change, self._lines_of(node)) for change in changes_of(node)]
        super().visit(node)

    def _lines_of(self, node: ast.AST) -> frozenset[int]:
        return _own_lines(node) if self._in_function and isinstance(node, ast.stmt) else self._lines

    def generic_visit(self, node: ast.AST) -> None:
        before = self._lines
        if self._in_function and isinstance(node, ast.stmt):
            self._lines = _own_lines(node)
        super().generic_visit(node)
        self._lines = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all(node.body, _all_lines(node), in_function=False)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        defaults = (*node.args.defaults, *filter(None, node.args.kw_defaults))
        self._visit_all(defaults, _all_lines(node), in_function=False)
        self._visit_all(node.body, _all_lines(node), in_function=True)

    def _visit_all(self, nodes: Iterable[ast.AST], lines: frozenset[int], *, in_function: bool) -> None:
        before = self._in_function, self._lines
        self._in_function, self._lines = in_function, lines
        for node in nodes:
            self.visit(node)
        self._in_function, self._lines = before

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "cast":
            node = ast.Call(node.func, node.args[1:], node.keywords)
        self.generic_visit(node)


def _own_lines(node: ast.AST) -> frozenset[int]:
    """Return the lines of a statement, of a compound one those of its head."""
    if not isinstance(node, ast.stmt):
        return frozenset()
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if body else node.end_lineno
    return frozenset(range(node.lineno, max(node.lineno, end or 0) + 1))


def _all_lines(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[int]:
    """Return the lines of statements inside functions, which run when they are called, not when imported."""
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    functions = (
        [node] if is_function else [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef)]
    )
    return frozenset(line for each in functions for statement in each.body for line in _own_lines(statement))


def _is_skipped(node: ast.AST) -> bool:
    """Whether a node is left as it is: types, texts, checks by zip, what another system or torch runs."""
    match node:
        case ast.JoinedStr() | ast.pattern() | ast.FunctionDef(name="__repr__"):
            return True
        case ast.FunctionDef(decorator_list=decorators):
            return any("overload" in ast.unparse(each) for each in decorators)
        case ast.If(test=test) | ast.IfExp(test=test):
            text = ast.unparse(test)
            return any(word in text for word in ("TYPE_CHECKING", "sys.platform", "torch.__version__"))
        case ast.keyword(arg="strict"):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Assign(value=ast.Subscript(value=ast.Name(id="Literal" | "Callable" | "Union"))):
            return True
    return False
