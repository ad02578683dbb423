"""The code in docs/migrating parses, and its names exist."""

import ast
import builtins
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import rankwise
from rankwise import callbacks, environments, gradient_sync, precision
from rankwise.environments.detect import environment_names
from rankwise.trainer import Trainer, TrainingModule
from rankwise.trainer.module import TrainerOptimizer
from tests.docs.pages import DOCS

PAGES = sorted((DOCS / "migrating").glob("*.md"))
SHELL = ("python ", "torchrun ")

NAMES: dict[str, Any] = {
    "torch": torch,
    "itertools": itertools,
    "timedelta": timedelta,
    "ZeroRedundancyOptimizer": type("ZeroRedundancyOptimizer", (), {}),  # costs a second to import
    "rankwise": rankwise,
    **vars(builtins),
}
PARTS = ("strategies", "gradient_sync", "process_group", "precision", "data", "environments", "checkpoint")
for part in ("rankwise", *(f"rankwise.{name}" for name in (*PARTS, "callbacks", "loggers"))):
    module = importlib.import_module(part)
    NAMES |= {name: getattr(module, name) for name in module.__all__}

OURS = set(NAMES) - {"ZeroRedundancyOptimizer", *vars(builtins)}

OBJECTS: dict[str, tuple[type, ...]] = {
    "strategy": (rankwise.DDPStrategy,),
    "trainer": (Trainer,),
    "fabric": (rankwise.Fabric,),
    "self": (*(TrainingModule, rankwise.DDPStrategy, precision.Precision), callbacks.BasePredictionWriter),
    "strategy.precision": (precision.Precision,),
    "strategy.environment": (environments.ClusterEnvironment,),
    "super()": (rankwise.DDPStrategy,),
    "optimizer": (TrainerOptimizer, torch.optim.Optimizer),
}
"""What an expression is an instance of."""

USERS = {
    *("args", "batch", "batch_idx", "checkpoint", "dataset", "decision", "environment", "function", "group"),
    *("hook", "is_final_microbatch", "items", "loader", "loss", "loss_of", "make_state", "model", "module"),
    *("num_tokens", "obj", "objects", "optimizer", "optimizers", "output", "path", "result", "scores"),
    *("seed", "state", "tensor", "wrapped", "wrapper", "x", "MyDDP", "MyModule", "MyWrapper", "sampler"),
    *("my_group", "worker_init_fn"),
}
"""Names that the reader defines."""

OWN = {"self.my_group", "self.accuracy", "strategy.precision", "self.ddp_kwargs"}


def rows(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each name of another system in the page's tables, and the pieces of code in its right column."""
    is_of_names = False
    for line in page.read_text().splitlines():
        if line in ("| theirs | ours |", "|---|---|"):
            is_of_names = is_of_names or line == "| theirs | ours |"
        elif not line.startswith("| "):
            is_of_names = False
        elif is_of_names:
            left, _, right = line.partition(" | ")
            yield left, re.findall(r"`([^`]+)`", right)


def _is_code(code: str) -> bool:
    """Return whether it is more than a word of a sentence, and no command."""
    return not code.isidentifier() and not code.startswith(SHELL)


ROWS = [row for page in PAGES for row in rows(page)]
CODE = sorted({code for _, codes in ROWS for code in codes if _is_code(code)})
MENTIONED = sorted({code for _, codes in ROWS for code in codes if code.isidentifier()})


def parsed(code: str) -> ast.Module:
    return ast.parse(f"{code}\ndef decorated(): ..." if code.startswith("@") else code)


def problems(code: str) -> Iterator[str]:
    """Yield what is wrong with a piece of code: syntax, names, attributes, arguments."""
    try:
        tree = parsed(code)
    except SyntaxError as error:
        yield f"{code}: {error}"
        return
    if isinstance(tree.body[0], ast.ImportFrom):
        exec(code, {})
    bound = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in {*NAMES, *OBJECTS, *USERS, *bound}:
            yield f"{code}: {node.id} is nowhere"
        if isinstance(node, ast.Attribute):
            yield from _attribute_problems(code, node)
        if isinstance(node, ast.Call):
            yield from _argument_problems(code, node)
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "self":
            known = any(hasattr(kind, node.name) for kind in (*OBJECTS["self"], _Shardable))
            if not known:
                yield f"{code}: there is no {node.name}() to override"


class _Shardable:
    """What iterable data may have."""

    def shard(self, num_shards: int, index: int) -> Any: ...


def _attribute_problems(code: str, node: ast.Attribute) -> Iterator[str]:
    owner, whole = ast.unparse(node.value), ast.unparse(node)
    kinds = OBJECTS.get(owner, ())
    is_there = whole in OWN or isinstance(node.ctx, ast.Store)
    if kinds and not is_there and not any(_has(kind, node.attr) for kind in kinds):
        yield f"{code}: {owner} has no {node.attr}"


def _has(kind: type, name: str) -> bool:
    return hasattr(kind, name) or any(name in getattr(base, "__annotations__", {}) for base in kind.__mro__)


def _argument_problems(code: str, call: ast.Call) -> Iterator[str]:
    candidates = list(_called(call.func))
    if not candidates or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    errors = []
    for function, has_self in candidates:
        try:
            inspect.signature(function).bind(*[None] * (len(call.args) + has_self), **keywords)
        except TypeError as error:
            errors.append(f"{code}: {error}")
        except ValueError:  # a builtin without signature
            return
        else:
            return
    yield from errors


def _called(function: ast.expr) -> Iterator[tuple[Any, bool]]:
    """Yield what may be called, and whether it takes a `self` before what is given."""
    if isinstance(function, ast.Name) and function.id in OURS:
        yield NAMES[function.id], False
    elif isinstance(function, ast.Attribute):
        owner = function.value
        if ast.unparse(owner) == "StrategyRegistry":
            yield getattr(rankwise.StrategyRegistry, function.attr), False
        for kind in OBJECTS.get(ast.unparse(owner), ()) or _constructed(owner):
            if callable(getattr(kind, function.attr, None)):
                yield getattr(kind, function.attr), True


def _constructed(owner: ast.expr | None) -> list[type]:
    if isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name):
        made = NAMES.get(owner.func.id)
        return [made] if isinstance(made, type) else []
    return []


def test_every_name_has_a_line_of_code() -> None:
    """Each row has, on the right, at least one piece of code that is Python."""
    assert len(ROWS) > 150
    assert [left for left, codes in ROWS if not any(map(_is_code, codes))] == []


def test_code_can_be_written() -> None:
    """All of it parses; the names, methods and arguments in it are ours."""
    assert [problem for code in CODE for problem in problems(code)] == []


def test_names_that_are_mentioned_are_there() -> None:
    """A single word that is set as code is a name of ours, a method or argument, or torch's."""
    arguments = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
    optimizers = ("step", "zero_grad")
    known = {*NAMES, *USERS, *arguments, *vars(torch.utils.data), *vars(torch.nn.parallel), *optimizers}
    kinds = {kind for found in OBJECTS.values() for kind in found}
    unknown = [name for name in MENTIONED if name not in known]
    assert [name for name in unknown if not any(_has(kind, name) for kind in kinds)] == []


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("strategy.setup_modul(module)", "has no setup_modul"),
        ("DDPStrateg()", "is nowhere"),
        ("with strategy.barrier(:", "invalid syntax"),
        ("strategy.broadcast(x, source=0)", "unexpected keyword argument"),
        ("Trainer(sync_batch_norm=True)", "unexpected keyword argument"),
        ("def configure_dpp(self): ...", "no configure_dpp"),
    ],
)
def test_the_check_can_fail(code: str, complaint: str) -> None:
    """Misspelt code is found."""
    assert complaint in "".join(problems(code))


def _constructors() -> list[str]:
    """Return the pieces of code that make a strategy, a precision or a Trainer that needs nothing else."""
    kinds = (rankwise.DDPStrategy, precision.Precision, Trainer)
    others = ("cuda", "gpu", "mine:", "MyDDP", "Environment(", "Logger(")
    found = []
    for code in CODE:
        body = parsed(code).body
        call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
        made = _constructed(call)
        if made and issubclass(made[0], kinds) and not any(other in code for other in others):
            found.append(code)
    return found


def test_environments_that_are_named_are_there() -> None:
    """An environment's name, which is looked up only when a strategy is bound, is one of ours."""
    named = re.findall(r'cluster_environment="(\w+)"', "\n".join(CODE))
    assert named
    assert set(named) <= set(environment_names())


@pytest.mark.filterwarnings("ignore:barebones=True")  # says that nothing is logged
@pytest.mark.parametrize("code", _constructors())
def test_arguments_are_taken(code: str) -> None:
    """Every constructor takes the values that it is given there."""
    own = {"environment": environments.LocalEnvironment(), "state": object()}
    own |= {"hook": lambda state, bucket: None, "wrapper": lambda hook: hook}
    made = eval(code, {**NAMES, **own})
    assert isinstance(made, rankwise.DDPStrategy | precision.Precision | Trainer)


def test_every_hook_is_described() -> None:
    """docs/gradients.md has every named hook, mode and weighting."""
    text = (DOCS / "gradients.md").read_text()
    known = [*gradient_sync.CommHookRegistry, *(mode.value for mode in gradient_sync.GradientSyncMode)]
    assert [name for name in [*known, "samples", "logged"] if f'`"{name}"`' not in text] == []


def test_every_precision_is_described() -> None:
    """docs/precision.md has every class, and every name means what it says there."""
    text = (DOCS / "precision.md").read_text()
    classes = [name for name in precision.__all__ if name.endswith("Precision")]
    assert [name for name in classes if f"`{name}`" not in text] == []
    table = text.partition("## Which precision")[2].partition("Each is a class")[0]
    names = re.findall(r'^\| `"([\w-]+)"', table, re.MULTILINE)
    assert {precision.create_precision(name).name for name in names} == set(names)
