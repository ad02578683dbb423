"""Read a package's source and say which rules of the house it breaks. Imports nothing of what it reads."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ORDER = (
    *("start", "time_limit", "errors", "checks", "ranks", "seed", "named_options", "nested"),
    *("hyperparameters", "paths", "torch_internals", "environments", "processes", "stores", "monitoring"),
    *("failures", "process_group", "launchers", "checkpoint", "compatibility", "gradient_sync", "precision"),
    *("data", "strategies", "registry", "callbacks", "loggers", "profilers", "fabric", "trainer"),
    "",  # rankwise/__init__.py
    *("doctor", "testing", "integrations", "lightning", "__main__"),
)
INDEPENDENT = (
    {"gradient_sync", "precision", "checkpoint", "data"},
    {"callbacks", "loggers", "profilers"},
    {"fabric", "trainer"},
)

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    part: frozenset(ORDER[:position]).difference(
        {""} if part in ORDER[: ORDER.index("")] else set(),
        *(group for group in INDEPENDENT if part in group),
    )
    for position, part in enumerate(ORDER)
}
"""What each part of the package (a folder or file right under it) may import, beside itself."""

HAVE_HOOKS = (*("callbacks", "loggers", "trainer.data.data_module"), *("trainer.hooks", "trainer.module"))
"""Parts and modules with hooks that are called with the Trainer and its module: decision 16."""

FOR_TYPES = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
HOOK_TYPES = ("trainer.Trainer", "trainer.trainer.Trainer", "trainer.TrainingModule")


@dataclass(frozen=True)
class Module:
    """A source file: its dotted name in the package's parent, its path and its text."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed source."""
        return ast.parse(self.text, str(self.path))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All that the parsed source consists of."""
        return list(ast.walk(self.tree))

    @property
    def is_package(self) -> bool:
        """Whether this is a folder's `__init__.py`."""
        return self.path.name == "__init__.py"

    @property
    def part(self) -> str:
        """The part of the package that it belongs to; an empty string for the package's own `__init__`."""
        return _part(self.name)

    @property
    def public_names(self) -> list[str]:
        """What its `__all__` holds."""
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                    return list(ast.literal_eval(value))
        return []

    def where(self, node: ast.stmt | ast.expr) -> str:
        """Return a place in the file, as editors know it."""
        return f"{self.path}:{node.lineno}"


def read_package(folder: Path) -> dict[str, Module]:
    """Return the modules of the package in `folder`, by dotted name."""
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path)
    return modules


# ------------------------------------------------------------------------------------------- imports


def imports_of(module: Module, modules: Mapping[str, Module]) -> set[str]:
    """Return the package's modules that `module` imports, anywhere in it, for types too.

    `HOOK_TYPES` do not count where `HAVE_HOOKS` import them for types.
    """
    exempt = _hook_types(module)
    runs = set(_nodes(module.tree, for_types=False)) if exempt else set()
    found = {
        _existing(name, modules)
        for node in module.nodes
        for name in _imported_names(node, module)
        if name not in exempt or node in runs
    }
    return found - {"", module.name}


def _hook_types(module: Module) -> set[str]:
    package, _, inside = module.name.partition(".")
    if module.part not in HAVE_HOOKS and inside not in HAVE_HOOKS:
        return set()
    return {f"{package}.{name}" for name in HOOK_TYPES}


def wrong_directions(modules: Mapping[str, Module]) -> list[str]:
    """Return the imports that go another way than `MAY_IMPORT` says."""
    problems = []
    for module in modules.values():
        if module.part not in MAY_IMPORT:
            problems.append(f"{module.name} has no place in MAY_IMPORT: give {module.part!r} one")
            continue
        allowed = MAY_IMPORT[module.part] | {module.part}
        wrong = sorted(name for name in imports_of(module, modules) if _part(name) not in allowed)
        problems.extend(f"{module.name} imports {name}" for name in wrong)
    return problems


def cycles(modules: Mapping[str, Module]) -> list[str]:
    """Return the cycles of imports, each once, as `a -> b -> a`."""
    graph = {name: sorted(imports_of(module, modules)) for name, module in modules.items()}
    found: dict[frozenset[str], str] = {}
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            loop = trail[trail.index(name) :]
            found.setdefault(frozenset(loop), " -> ".join([*loop, name]))
        elif name not in done:
            for target in graph[name]:
                visit(target, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return sorted(found.values())


def private_imports(modules: Mapping[str, Module]) -> list[str]:
    """Return the imports of a private module by a module of another folder."""
    return [
        f"{module.name} imports {name}"
        for module in modules.values()
        for name in sorted(imports_of(module, modules))
        if name.rpartition(".")[2].startswith("_") and not name.endswith("__")
        if name.rpartition(".")[0] != (module.name if module.is_package else module.name.rpartition(".")[0])
    ]


def modules_in_strings(modules: Mapping[str, Module], tables: Mapping[str, str]) -> list[str]:
    """Return the strings that name a module of the package outside the tables of such names.

    Args:
        modules: the package.
        tables: by module, the top-level name of its table; all that stands in a table must name a module.
    """
    problems = []
    for module in modules.values():
        table = [node for node in module.tree.body if _assigns(node, tables.get(module.name, ""))]
        in_table = {node for statement in table for node in ast.walk(statement)}
        for node in module.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
                is_module = node.value in modules
                if is_module != (node in in_table):
                    found = "" if is_module else "there is no "
                    problems.append(f"{module.where(node)}: {found}{node.value!r}")
    return sorted(problems)


def _assigns(node: ast.stmt, name: str) -> bool:
    match node:
        case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
            return target == name
    return False


def _existing(name: str, modules: Mapping[str, Module]) -> str:
    while name and name not in modules:  # `from package.module import a_class`
        name = name.rpartition(".")[0]
    return name


def _imported_names(node: ast.AST, module: Module) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom():
            source = _absolute(node, module)
            return [f"{source}.{alias.name}" for alias in node.names]
        case ast.Call(
            func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"), args=[first, *_]
        ):
            return [first.value] if isinstance(first, ast.Constant) and isinstance(first.value, str) else []
    return []


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    if not node.level:
        return node.module or ""
    parents = module.name.split(".")
    parents = parents[: len(parents) - node.level + module.is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _nodes(node: ast.AST, for_types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        found: list[ast.AST] = [child]
        if not for_types and isinstance(child, ast.If) and ast.unparse(child.test) in FOR_TYPES:
            found = [*child.orelse]
        for each in found:
            yield each
            yield from _nodes(each, for_types)


def _part(name: str) -> str:
    return (*name.split("."), "")[1]


# ------------------------------------------------------------------------------------------- statements


def bare_asserts(modules: Mapping[str, Module]) -> list[str]:
    """Return the assert statements: `python -O` drops them."""
    return [module.where(node) for module, node in _walk(modules) if isinstance(node, ast.Assert)]


def _walk(modules: Mapping[str, Module]) -> Iterator[tuple[Module, ast.AST]]:
    return ((module, node) for module in modules.values() for node in module.nodes)


def unexplained_hasattr(modules: Mapping[str, Module]) -> list[str]:
    """Return the calls of `hasattr` without `# why:` on their line or the one before."""
    problems = []
    for module, node in _walk(modules):
        match node:
            case ast.Call(func=ast.Name(id="hasattr"), lineno=line):
                lines = ["", *module.text.splitlines()][line - 1 : line + 1]
                if not any("# why:" in text for text in lines):
                    problems.append(module.where(node))
    return problems


def long_files(modules: Mapping[str, Module], limit: int, but: Mapping[str, int]) -> list[str]:
    """Return the files of more than `limit` lines; `but` holds other limits, by the module's name."""
    counts = {module.name: len(module.text.splitlines()) for module in modules.values()}
    return [f"{name}: {count} lines" for name, count in counts.items() if count > but.get(name, limit)]


def crowded_folders(modules: Mapping[str, Module], limit: int) -> list[str]:
    """Return the folders of more than `limit` files, their `__init__` aside."""
    counts = Counter(module.path.parent for module in modules.values() if not module.is_package)
    return [f"{folder}: {count} files" for folder, count in sorted(counts.items()) if count > limit]


def function_lengths(modules: Mapping[str, Module]) -> list[int]:
    """Return the number of lines of each function, its decorators and docstring aside, in ascending order."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return sorted(_length(node) for _, node in _walk(modules) if isinstance(node, functions))


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    parts: list[ast.stmt] = [function, *(function.body[:1] if ast.get_docstring(function) else ())]
    whole, *docstring = ((part.end_lineno or part.lineno) - part.lineno + 1 for part in parts)
    return whole - sum(docstring)


def names_with_several_meanings(modules: Mapping[str, Module]) -> list[str]:
    """Return the public names that several modules define at the top level, and where; no type variables."""
    homes: dict[str, list[str]] = {}
    for module in modules.values():
        for name in dict.fromkeys(name for node in module.tree.body for name in _names_defined(node)):
            if not name.startswith("_"):
                homes.setdefault(name, []).append(module.name)
    return [f"{name}: {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1]


def _names_defined(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar" | "ParamSpec"))):
            return []
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def without_all(modules: Mapping[str, Module]) -> list[str]:
    """Return the packages whose `__init__` does not say what is public."""
    packages = [module for module in modules.values() if module.is_package]
    return [module.name for module in packages if not re.search(r"^__all__\b", module.text, re.MULTILINE)]


def unroled_files(modules: Mapping[str, Module]) -> list[str]:
    """Return the files whose first line is no sentence that says their role."""
    role = re.compile(r'r?"""\S.*[.:;,]')
    return [module.name for module in modules.values() if not role.match(module.text.partition("\n")[0])]


# ------------------------------------------------------------------------------------------- errors


def public_errors(errors: Module) -> list[str]:
    """Return the exception classes in the module's `__all__`."""
    bases = _bases(errors)

    def is_exception(name: str) -> bool:
        builtin = getattr(builtins, name, None)
        if isinstance(builtin, type) and issubclass(builtin, BaseException):
            return True
        return any(is_exception(base) for base in bases.get(name, []))

    return [name for name in errors.public_names if is_exception(name)]


def tree_of_errors(errors: Module) -> dict[str, tuple[str, ...]]:
    """Return the tree in the module's docstring: for each class its parent in it, and the builtins beside it.

    A line is `|   |-- Name (Builtin)   what it is for`; the first name is the root.
    """
    tree: dict[str, tuple[str, ...]] = {}
    above: list[tuple[int, str]] = []
    for line in (ast.get_docstring(errors.tree) or "").splitlines()[1:]:
        if found := re.match(r"([|` -]*)(\w+)(?: \(([\w, ]+)\))?", line):
            depth, name, builtin = len(found[1]), found[2], found[3]
            above = [(column, other) for column, other in above if column < depth]
            parents = [other for _, other in above[-1:]]
            tree[name] = (*parents, *(builtin.split(", ") if builtin else []))
            above.append((depth, name))
    return tree


def bases_of_errors(errors: Module) -> dict[str, tuple[str, ...]]:
    """Return the exception classes of the module with their bases, but those whose name says private."""
    public = {name: bases for name, bases in _bases(errors).items() if not name.startswith("_")}
    return {name: () if bases == ("Exception",) else bases for name, bases in public.items()}


def _bases(errors: Module) -> dict[str, tuple[str, ...]]:
    classes = [node for node in errors.tree.body if isinstance(node, ast.ClassDef)]
    return {
        node.name: tuple(base.id for base in node.bases if isinstance(base, ast.Name)) for node in classes
    }


def raised_errors(modules: Iterable[Module], names: Iterable[str]) -> set[str]:
    """Return those of `names` that the modules make an instance of, or hand on as a class."""
    used = {
        node.id
        for module in modules
        for node in _nodes(module.tree, for_types=False)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return used & set(names)


def errors_expected(paths: Iterable[Path]) -> set[str]:
    """Return the names, in code and in texts, that a test fails without: those that it compares with.

    These are what `pytest.raises` and `raises` are given, and what an assert demands: by `isinstance`, by a
    comparison with the class, its `__name__` or text that holds it. Nothing else fails by itself if an error
    is not raised any more: no table, `except` or docstring, and no program's source with its imports.
    """
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            match node:
                case ast.Call(func=ast.Name(id="raises") | ast.Attribute(attr="raises")):
                    texts = (keyword.value for keyword in node.keywords if keyword.arg == "match")
                    for given in (*node.args[:2], *texts):
                        found.update(_words(given))
                case ast.Assert(test=test):
                    found.update(_words(test))
    return found


def _words(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.UnaryOp(op=ast.Not()) | ast.Compare(ops=[ast.NotIn() | ast.NotEq() | ast.IsNot()]):
            return
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name[:1].isupper():
            return  # an error that the test builds itself
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Constant(value=str(text)):
            yield from re.findall(r"\w+", text)
    for child in ast.iter_child_nodes(node):
        yield from _words(child)
