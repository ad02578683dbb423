"""Memory files that transport values between processes, and the pickling errors of such values.

Layout: length of the pickle (8 bytes; 0 while the file is not complete), the pickle, then each storage at a
multiple of 64. The length is written last.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from multiprocessing import reduction
from typing import Any, final

import torch
from torch.nn.utils import parametrize

from rankwise.errors import NotPicklableError, text_of
from rankwise.processes.parametrized_modules import reduced

_HEADER = struct.Struct("!Q")
_ALIGNMENT = 64
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
    """A value that is packed by itself: a reader that cannot read it gets an `Unreadable` in its place."""

    def __init__(self, value: object) -> None:
        self.value = value


@final
class Unreadable:
    """A value that could not be read; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


def pack(value: object, descriptor: int) -> None:
    """Write a value; tensors that share a storage still do when it is read."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    pickled = stream.getbuffer()
    start = _aligned(_HEADER.size + len(pickled))
    size = start + pickler.size
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, max(size, mmap.PAGESIZE))
    with mmap.mmap(descriptor, 0) as memory:
        memory[_HEADER.size : _HEADER.size + len(pickled)] = bytes(pickled)
        for offset, storage in pickler.storages:
            target = torch.frombuffer(
                memory, dtype=torch.uint8, count=storage.nbytes(), offset=start + offset
            )
            target.copy_(torch.empty(0, dtype=torch.uint8).set_(storage.cpu()))
        memory[: _HEADER.size] = _HEADER.pack(len(pickled))


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
    (length,) = _HEADER.unpack_from(memory)
    if length == 0:
        raise EOFError("the value is not complete")
    pickled = io.BytesIO(memory[_HEADER.size : _HEADER.size + length])
    return _Unpickler(pickled, memory, _aligned(_HEADER.size + length), copy).load()


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """Collect each storage once; pickle its offset in its place."""

    def __init__(self, stream: io.IOBase) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.storages: list[tuple[int, torch.UntypedStorage]] = []
        self.size = 0
        self._places: dict[int, int] = {}
        self._names = {id(named): name for name, named in _sent_by_name.get().items()}

    def _isolated(self, value: object) -> bytes:
        """Return the pickle of a value; its storages are among this one's."""
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.storages, pickler._places, pickler.size = self.storages, self._places, self.size
        pickler.dump(value)
        self.size = pickler.size
        return stream.getvalue()

    def persistent_id(self, obj: object) -> tuple[int, int, torch.dtype | None] | str | bytes | None:
        if type(obj) is Isolated:
            return self._isolated(obj.value)
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
            return Unreadable(f"{type(error).__name__}: {text_of(error)}")

    def persistent_load(self, pid: tuple[int, int, torch.dtype | None] | str | bytes) -> object:
        if isinstance(pid, bytes):
            return self._isolated(pid)
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
    """A stream of which only the digest is kept."""

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
