"""Memory files that transport values between processes, and the pickling errors of such values.

Layout: the lengths of the pickle and of a second one, which is read if the first cannot be (8 bytes each; 0
while the file is not complete, or without that pickle), the pickles, then each storage at a multiple of 64.
The lengths are written last.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import io
import mmap
import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from multiprocessing import reduction
from types import BuiltinFunctionType, FunctionType
from typing import Any, final

import torch
from torch.nn.utils import parametrize

from rankwise.errors import NotPicklableError, text_of
from rankwise.processes.parametrized_modules import reduced

_HEADER = struct.Struct("!QQ")
_ALIGNMENT = 64
# Modules that every process of a job can import.
_EVERYWHERE = ("builtins", "collections", "copyreg", "numpy", "pathlib", "rankwise", "torch", "_codecs")
_NOTHING: Mapping[str, object] = {}
_sent_by_name = ContextVar("sent_by_name", default=_NOTHING)
_read_by_name = ContextVar("read_by_name", default=_NOTHING)


def create_memory_file() -> int:
    """Return a descriptor of an anonymous file that no other process can open by name."""
    try:
        return os.memfd_create("rankwise", os.MFD_CLOEXEC)
    except AttributeError:
        pass
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
    with tempfile.TemporaryFile() as file:  # unlinked from the start, where there is no memfd
        return os.dup(file.fileno())


@final
class Descriptor:
    """A file descriptor that a worker receives: inherited by a fork, duplicated where it is pickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[[Any], Descriptor], tuple[Any]]:
        return _receive_descriptor, (reduction.DupFd(self.number),)


def _receive_descriptor(duplicate: Any) -> Descriptor:
    return Descriptor(duplicate.detach())


def owned_descriptor(cleanup: ExitStack) -> Descriptor:
    """Return a memory file that is closed with `cleanup`."""
    descriptor = create_memory_file()
    cleanup.callback(os.close, descriptor)
    return Descriptor(descriptor)


def send_by_name(objects: Mapping[str, object]) -> None:
    """Pack only the names of these objects from now on, as the reader has its own; see `read_by_name`."""
    _sent_by_name.set(objects)


@contextmanager
def sent_by_name(objects: Mapping[str, object]) -> Iterator[None]:
    """Pack only the names of these objects in the block."""
    token = _sent_by_name.set(objects)
    try:
        yield
    finally:
        _sent_by_name.reset(token)


@contextmanager
def read_by_name(objects: Mapping[str, object]) -> Iterator[None]:
    """In the block, put these objects where a value was packed with their names."""
    token = _read_by_name.set(objects)
    try:
        yield
    finally:
        _read_by_name.reset(token)


@final
class Isolated:
    """A value that is packed by itself.

    The reader gets an `Unreadable` in its place if it cannot be packed, or read.
    """

    def __init__(self, value: object) -> None:
        self.value = value


@final
class Unreadable:
    """A value that could not be packed or read; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @classmethod
    def because_of(cls, error: Exception) -> Unreadable:
        """Return what stands in the place of a value at which an exception was raised."""
        return cls(f"{type(error).__name__}: {text_of(error)}".partition("\n")[0].rstrip("."))


@final
class Parts(dict[Any, Any]):
    """Values by name that are packed together, and so keep their references to each other.

    Where they cannot be packed or read together, each is packed by itself, as an `Isolated`.
    """


def pack(value: object, descriptor: int) -> None:
    """Write a value; tensors that share a storage still do when it is read.

    Raises what pickling raises, unless that is only because of what is in `Parts`.
    """
    forms, pickler = _forms_of(value)
    pickled = b"".join(forms)
    start = _aligned(_HEADER.size + len(pickled))
    size = start + pickler.size
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, max(size, mmap.PAGESIZE))
    with mmap.mmap(descriptor, 0) as memory:
        memory[_HEADER.size : _HEADER.size + len(pickled)] = pickled
        for offset, storage in pickler.storages:
            target = torch.frombuffer(
                memory, dtype=torch.uint8, count=storage.nbytes(), offset=start + offset
            )
            target.copy_(torch.empty(0, dtype=torch.uint8).set_(storage.cpu()))
        memory[: _HEADER.size] = _HEADER.pack(*map(len, forms))


def _forms_of(value: object) -> tuple[tuple[bytes, bytes], _Pickler]:
    """Return the pickle of a value, and one with its parts by themselves if that may be needed.

    The pickler has the storages of both.
    """
    stream, apart = io.BytesIO(), io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except Exception:
        if not pickler.has_parts:
            raise
        pickler = _Pickler(apart, packs_parts_apart=True)
        pickler.dump(value)
        return (apart.getvalue(), b""), pickler
    if pickler.needs_other_modules:  # which the reader may not have
        pickler = _Pickler(apart, packs_parts_apart=True, before=pickler)
        pickler.dump(value)
    return (stream.getvalue(), apart.getvalue()), pickler


def unpack(descriptor: int, *, copy: bool) -> Any:
    """Read the value back.

    Without `copy` its tensors lie in the file's memory, mapped privately: nothing is copied until it is
    written to, and the file must not be packed again.

    Raises:
        EOFError: when no complete value was packed.
    """
    size = os.fstat(descriptor).st_size
    if size < _HEADER.size:
        raise EOFError("nothing was packed")
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    length, length_apart = _HEADER.unpack_from(memory)
    if length == 0:
        raise EOFError("the value is not complete")
    middle, end = _HEADER.size + length, _HEADER.size + length + length_apart
    try:
        return _Unpickler(io.BytesIO(memory[_HEADER.size : middle]), memory, _aligned(end), copy).load()
    except Exception:
        if length_apart == 0:
            raise
        return _Unpickler(io.BytesIO(memory[middle:end]), memory, _aligned(end), copy).load()


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """Collect each storage once; pickle its offset in its place.

    `before` is a pickler whose storages and names are this one's, too.
    """

    def __init__(
        self, stream: io.IOBase, *, packs_parts_apart: bool = False, before: _Pickler | None = None
    ) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.has_parts = False
        self.needs_other_modules = False  # to read what follows the beginning of the first `Parts`
        self.size = 0
        self.storages: list[tuple[int, torch.UntypedStorage]] = []
        self._places: dict[int, int] = {}
        self._packs_parts_apart = packs_parts_apart
        if before is None:
            self._names = {id(named): name for name, named in _sent_by_name.get().items()}
        else:
            self._names = before._names
            self._take_storages(before)

    def _take_storages(self, other: _Pickler) -> None:
        self.storages, self._places, self.size = [*other.storages], {**other._places}, other.size

    def _isolated(self, value: object) -> bytes:
        """Return the pickle of a value, or of an `Unreadable`; its storages are among this one's."""
        stream = io.BytesIO()
        pickler = _Pickler(stream, packs_parts_apart=self._packs_parts_apart, before=self)
        try:
            pickler.dump(value)
        except Exception as error:  # noqa: BLE001  pickling runs anybody's code
            return pickle.dumps(Unreadable.because_of(error))
        self._take_storages(pickler)
        return stream.getvalue()

    def persistent_id(self, obj: object) -> Any:
        if type(obj) is Isolated:
            return self._isolated(obj.value)
        if type(obj) is Parts:
            self.has_parts = True
            if self._packs_parts_apart:
                return {name: self._isolated(value) for name, value in obj.items()}
        if (name := self._names.get(id(obj))) is not None:
            return name
        storage, dtype = obj, None
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
        if not isinstance(storage, torch.UntypedStorage):
            return None
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self._places:
            self._places[key] = self.size
            self.storages.append((self.size, storage))  # kept alive, so that no other storage gets its key
            self.size = _aligned(self.size + size)
        return self._places.get(key, 0), size, dtype

    def reducer_override(self, obj: object) -> Any:
        named: Any = obj if isinstance(obj, (type, FunctionType, BuiltinFunctionType)) else type(obj)
        self.needs_other_modules |= self.has_parts and not are_everywhere([str(named.__module__)])
        if isinstance(obj, torch.nn.Module) and parametrize.is_parametrized(obj):
            return reduced(obj, pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _rebuild_tensor(storage: torch.UntypedStorage, *args: Any) -> Any:
    # Tensors of newer dtypes, such as uint16 and float8, pickle an untyped storage but need a typed one.
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    return torch._utils._rebuild_tensor_v3(typed, *args)


class _Unpickler(pickle.Unpickler):
    """Take the storages from the mapped memory."""

    def __init__(self, stream: io.BytesIO, memory: mmap.mmap, start: int, copy: bool) -> None:
        super().__init__(stream)
        self._memory = memory
        self._start = start
        self._copy = copy
        self._storages: dict[int, torch.UntypedStorage] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _rebuild_tensor if found is torch._utils._rebuild_tensor_v3 else found

    def _isolated(self, pickled: bytes) -> object:
        unpickler = _Unpickler(io.BytesIO(pickled), self._memory, self._start, self._copy)
        unpickler._storages = self._storages
        try:
            return unpickler.load()
        except Exception as error:  # noqa: BLE001  pickling runs anybody's code
            return Unreadable.because_of(error)

    def persistent_load(self, pid: Any) -> object:
        if isinstance(pid, bytes):
            return self._isolated(pid)
        if isinstance(pid, dict):
            return Parts({name: self._isolated(pickled) for name, pickled in pid.items()})
        if isinstance(pid, str):
            return _read_by_name.get()[pid]
        offset, size, dtype = pid
        storage = self._storages.get(offset) if size else torch.UntypedStorage(0)
        if storage is None:
            start = self._start + offset
            view = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=start)
            storage = self._storages[offset] = (view.clone() if self._copy else view).untyped_storage()
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def are_everywhere(modules: Iterable[str]) -> bool:
    """Return whether every process of a job can import these modules."""
    return all(module.partition(".")[0] in _EVERYWHERE for module in modules)


def modules_needed(value: object) -> set[str] | None:
    """Return the modules that a reader of the value imports; None if it cannot be packed.

    The data of its tensors is not copied.
    """
    stream = io.BytesIO()
    try:
        pickler = _KeepingPickler(stream)
        pickler.dump(value)
        stream.seek(0)
        unpickler = _KeepingUnpickler(stream, pickler.kept)
        unpickler.load()
    except Exception:  # noqa: BLE001  pickling runs anybody's code
        return None
    return unpickler.modules


def fingerprint(value: object) -> bytes | None:
    """Return a digest of a value and the data of its tensors on the CPU; None if it cannot be pickled."""
    digest = _Digest()
    try:
        pickler = _Pickler(digest)
        pickler.dump(value)
        for _, storage in pickler.storages:
            on_cpu = storage.cpu()
            digest.write((ctypes.c_char * on_cpu.nbytes()).from_address(on_cpu.data_ptr()))
    except Exception:  # noqa: BLE001  pickling runs anybody's code
        return None
    return digest.value.digest()


@final
class _Digest(io.RawIOBase):
    """A stream that keeps only the digest of its data."""

    def __init__(self) -> None:
        self.value = hashlib.blake2b(digest_size=16)

    def write(self, data: Any) -> int:
        self.value.update(data)
        return memoryview(data).nbytes


@final
class _KeepingPickler(_Pickler):
    """Keep named objects and storages, and pickle their positions among these."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.kept: list[object] = []

    def persistent_id(self, obj: object) -> Any:
        if super().persistent_id(obj) is None:
            return None
        self.kept.append(obj)
        return len(self.kept) - 1


@final
class _KeepingUnpickler(_Unpickler):
    """Take what was kept."""

    def __init__(self, stream: io.BytesIO, kept: list[object]) -> None:
        super().__init__(stream, mmap.mmap(-1, mmap.PAGESIZE), 0, copy=False)
        self._kept = kept
        self.modules: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.modules.add(module)
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> object:
        return self._kept[pid]


_DEPTH = 20


def pack_or_explain(value: object, descriptor: int, start_method: str, roots: Mapping[str, object]) -> None:
    """Pack a value; `NotPicklableError` names the attribute of one of the `roots` that cannot be pickled."""
    try:
        pack(value, descriptor)
    except Exception as error:  # noqa: BLE001  pickling runs anybody's code
        path, culprit = _find(roots)
        reason = text_of(culprit or error).partition("\n")[0]
        raise NotPicklableError(path=path, reason=reason, start_method=start_method) from None


def _find(roots: Mapping[str, object]) -> tuple[str, Exception | None]:
    path, error = "what is launched", None
    children: Iterator[tuple[str, object]] = iter(roots.items())
    seen: set[int] = set()
    for _ in range(_DEPTH):
        for child_path, child in children:
            failure = _failure(child)
            if failure is not None and id(child) not in seen:
                path, error = child_path, failure
                seen.add(id(child))
                children = _parts(child, child_path)
                break
        else:
            break
    return path, error


def _failure(value: object) -> Exception | None:
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception as error:  # noqa: BLE001  pickling runs anybody's code
        return error
    return None


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the parts of a value with their paths."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield f"{path}[{key!r}]", part
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, part in enumerate(value):
            yield f"{path}[{index}]", part
    else:
        for name, part in _state(value).items():
            if name in ("_modules", "_parameters", "_buffers") and isinstance(part, Mapping):
                yield from ((f"{path}.{key}", submodule) for key, submodule in part.items())
            else:
                yield f"{path}.{name}", part


def _state(value: object) -> Mapping[str, object]:
    try:
        reduced = value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001  pickling runs anybody's code
        return getattr(value, "__dict__", {})
    state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
    return state if isinstance(state, Mapping) else {}
