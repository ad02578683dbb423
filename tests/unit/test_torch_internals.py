"""What rankwise uses of torch's private members, and what happens where a version of torch lacks one."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import rankwise
from rankwise import torch_internals
from rankwise.errors import ConfigurationError
from rankwise.processes.fork_safety import import_functional
from rankwise.strategies import DDPElasticStrategy, DDPForkStrategy
from rankwise.torch_internals import INTERNALS, JOB, check_torch, missing

SOURCES = sorted(Path(rankwise.__file__).parent.rglob("*.py"))
LISTED = {name for internal in INTERNALS for name in internal.names.split()}
OF_OTHERS = {
    "os, sys and typing": "_exit _getframe _current_frames _fields _asdict _replace",
    "threading": "_DummyThread",
    "multiprocessing": "_inheriting _exit_function _forkserver _forkserver_pid",
    "concurrent.futures": "_python_exit _threads_queues _threads_wakeups",
    "torchmetrics": "_defaults _computed _forward_cache _reductions _update_count _num_vals_seen",
    "Lightning": "_accelerator_connector _signal_connector _trainer _log_hyperparams _hparams_name",
    "rankwise, set by name": "_class_in_lightning _norm_total",
}
"""Private members of others than torch."""


@pytest.fixture(autouse=True)
def not_checked_yet() -> Iterator[None]:
    """Check anew in each test, and after it."""
    check_torch.cache_clear()
    yield
    check_torch.cache_clear()


def private_names() -> dict[str, str]:
    """Return the private attributes that the sources use, which no class or module of theirs defines."""
    own, used = set[str](), dict[str, str]()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            own |= names_defined(node)
            for name in names_used(node):
                used.setdefault(name, f"{path.name}:{getattr(node, 'lineno', 0)}")
    is_private = (name for name in used if name.startswith("_") and not name.endswith("__") and name != "_")
    return {name: used[name] for name in is_private if name not in own}


def names_defined(node: ast.AST) -> set[str]:
    """Return what a node defines: functions, classes, variables, fields, and attributes of `self`."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return {node.attr} if getattr(node.value, "id", None) in ("self", "cls") else set()
    return set()


def names_used(node: ast.AST) -> list[str]:
    """Return the attributes that a node reads, and the names that it imports from torch."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
        return [alias.name for alias in node.names]
    return []


def test_every_use_is_listed() -> None:
    """A private member of torch is in the table, or another library's; each entry of the table is used."""
    others = {name for names in OF_OTHERS.values() for name in names.split()}
    unknown = {name: place for name, place in private_names().items() if name not in LISTED | others}
    modules = {"_C", "_dynamo", "_utils", "_distributed_c10d"}
    assert {name: place for name, place in unknown.items() if name not in modules} == {}
    text = "".join(path.read_text() for path in SOURCES if path.name != "torch_internals.py")
    assert [name for name in LISTED if name not in text] == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.distributed.optim uses torch.jit
def test_this_torch_has_them() -> None:
    """But for what newer versions have added, for which the table names the way out."""
    import_functional()  # without the temporary folder of older versions
    added = {"_dump_fr_trace"} if torch.__version__ < "2.8" else set()
    names = [name for internal in INTERNALS for name in missing(internal)]
    assert {name.rpartition(".")[2] for name in names} <= added, names


def test_a_missing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named before anything starts, with its versions; what one feature needs, others do without."""
    monkeypatch.delattr(DistributedDataParallel, "_check_reducer_finalized")
    for name in [name for name in vars(DistributedDataParallel) if name != "__init__"]:
        method = inspect.getattr_static(DistributedDataParallel, name)
        if "_check_reducer_finalized" in getattr(getattr(method, "__code__", None), "co_names", ()):
            monkeypatch.delattr(DistributedDataParallel, name)
    text = r"lacks .*DistributedDataParallel\._check_reducer_finalized"
    with pytest.raises(ConfigurationError, match=text):
        DDPForkStrategy(accelerator="cpu", devices=2).bind()
    monkeypatch.undo()
    check_torch.cache_clear()
    lost = INTERNALS[-1]._replace(names="_no_such_name")
    monkeypatch.setattr(torch_internals, "INTERNALS", (*INTERNALS, lost))
    assert DDPForkStrategy(accelerator="cpu", devices=2).launch(rank_of) == 0
    with pytest.raises(ConfigurationError, match=r"for ddp_elastic: .*dynamic_rendezvous\._no_such_name"):
        DDPElasticStrategy(accelerator="cpu", devices=2).launch(rank_of)


def rank_of(strategy: Any) -> int:
    rank: int = strategy.global_rank
    return rank


def test_a_newer_torch_works_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and it names the versions."""
    monkeypatch.setattr(torch_internals, "NEWEST", "2.5")
    with pytest.warns(UserWarning, match=r"is newer than the versions .*2\.6 to 2\.5"):
        check_torch(JOB)
    check_torch(JOB)
