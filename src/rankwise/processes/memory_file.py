"""Values in memory files, which transport them between processes.

Layout: the length of the pickle (8 bytes; 0 while the file is not complete), the pickle, then each storage at
a multiple of 64. The length is written last.
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
from dataclasses import dataclass
from functools import cache, cached_property
from multiprocessing import reduction
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import nn
from torch.nn.utils import parametrize

from rankwise.errors import text_of

_HEADER = struct.Struct("!Q")
_ALIGNMENT = 64
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
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
    with tempfile.TemporaryFile() as file:  # unlinked from the start, if memfd is not available
        return os.dup(file.fileno())


@final
@dataclass(frozen=True)
class Descriptor:
    """A file descriptor that a worker receives: inherited by a fork, duplicated where it is pickled."""

    number: int

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
class Unreadable(Exception):
    """Stands in the place of a value that could not be packed or read; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    @classmethod
    def because_of(cls, error: Exception) -> Unreadable:
        """Return the object in place of a value whose packing or reading raised an exception."""
        if isinstance(error, Unreadable):
            return error
        return cls(f"{type(error).__name__}: {text_of(error)}".partition("\n")[0].rstrip("."))


@final
class Parts(dict[Any, Any]):
    """Values by name, each packed by itself; one that cannot be packed or read is an `Unreadable`.

    Where later parts refer to values, or modules, parameters and storages in them, they are the same objects.
    """


def pack(value: object, descriptor: int) -> None:
    """Write a value; raise pickling's errors, except for `Parts`.

    Tensors that share a storage still do when they are read.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    pickled = stream.getvalue()
    start = _aligned(_HEADER.size + len(pickled))
    os.ftruncate(descriptor, 0)
    os.ftruncate(descriptor, max(start + pickler.storages.size, mmap.PAGESIZE))
    with mmap.mmap(descriptor, 0) as memory:
        memory[_HEADER.size : _HEADER.size + len(pickled)] = pickled
        for offset, storage in pickler.storages.values():
            source = torch.empty(0, dtype=torch.uint8).set_(storage.cpu())
            target = torch.frombuffer(memory, dtype=torch.uint8, count=len(source), offset=start + offset)
            target.copy_(source)
        memory[: _HEADER.size] = _HEADER.pack(len(pickled))


def unpack(descriptor: int, *, copy: bool) -> Any:
    """Read the value back; raise `EOFError` if no complete one was packed.

    Without `copy` its tensors lie in the file's memory, mapped privately: nothing is copied until it is
    written to, and the file must not be packed again.
    """
    size = os.fstat(descriptor).st_size
    if size < _HEADER.size:
        raise EOFError("nothing was packed")
    memory = mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    (length,) = _HEADER.unpack_from(memory)
    if length == 0:
        raise EOFError("the value is not complete")
    end = _HEADER.size + length
    start = _aligned(end)

    @cache  # tensors that share a storage get the same object
    def storage_at(offset: int, size: int) -> torch.UntypedStorage:
        view = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start + offset)
        return (view.clone() if copy else view).untyped_storage()

    return _Unpickler(memory[_HEADER.size : end], storage_at).load()


@final
class PickledByValue:
    """A function whose pickle has copies of its tensors, whatever the pickler; it returns packed bytes.

    The picklers of multiprocessing share the memory of tensors: all processes would train the same one.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> bytes:
        return pack_bytes(self._function(*args))

    def __reduce__(self) -> tuple[Callable[[bytes], PickledByValue], tuple[bytes]]:
        return _unpacked_function, (self._packed,)

    @cached_property
    def _packed(self) -> bytes:
        return pack_bytes(self._function)


def _unpacked_function(packed: bytes) -> PickledByValue:
    return PickledByValue(unpack_bytes(packed))


def pack_bytes(value: object) -> bytes:
    """Return a value as `pack` writes it."""
    with ExitStack() as cleanup:
        file = owned_descriptor(cleanup)
        pack(value, file.number)
        return os.pread(file.number, os.fstat(file.number).st_size, 0)


def unpack_bytes(packed: bytes) -> Any:
    """Return the value that `pack_bytes` packed."""
    with ExitStack() as cleanup:
        file = owned_descriptor(cleanup)
        with open(file.number, "wb", closefd=False) as writer:
            writer.write(packed)
        return unpack(file.number, copy=False)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


@final
class _Storages(dict[int, tuple[int, torch.UntypedStorage]]):
    """The storages of a value's tensors with their offsets, each once, by the address of torch's object."""

    size = 0

    def offset_of(self, storage: torch.UntypedStorage) -> int:
        """Return the offset of a storage, which gets one if it has none."""
        key, size = storage._cdata, storage.nbytes()
        if size and key not in self:
            self[key] = self.size, storage  # kept alive, so that no other storage gets its key
            self.size = _aligned(self.size + size)
        return self[key][0] if size else 0


class _Pickler(pickle.Pickler):
    """Collect each storage once; pickle its offset in its place. With `outer`, pickle a part of its value."""

    def __init__(self, stream: Any, outer: _Pickler | None = None) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        if outer is None:
            named = _sent_by_name.get()
            self.storages = _Storages()
            self._names: dict[int, Any] = {id(each): name for name, each in named.items()}
            self._modules = {each for each in named.values() if isinstance(each, nn.Module)}
            self._parts: list[object] = []  # kept alive, as `_names` has ids
        else:
            self.storages, self._names = outer.storages, outer._names
            self._modules, self._parts = outer._modules, outer._parts

    def _packed_part(self, value: object) -> tuple[int, bytes]:
        """Return the number of a part, and its pickle or an `Unreadable`'s."""
        number, count, stream = len(self._parts), len(self.storages), io.BytesIO()
        self._parts.append(value)
        try:
            _Pickler(stream, self).dump(value)
            for name, each in _shared_parts(value, self._modules):
                self._names.setdefault(id(each), (number, name))
        except Exception as error:  # noqa: BLE001  pickling runs the user's code
            for key in list(self.storages)[count:]:
                del self.storages[key]
            return number, pickle.dumps(Unreadable.because_of(error))
        return number, stream.getvalue()

    def persistent_id(self, obj: object) -> Any:
        if type(obj) is Parts:
            return {name: self._packed_part(value) for name, value in obj.items()}
        if (name := self._names.get(id(obj))) is not None:
            return name
        storage, dtype = obj, None
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
        if not isinstance(storage, torch.UntypedStorage):
            return None
        return self.storages.offset_of(storage), storage.nbytes(), dtype

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            return _reduced(obj)
        return NotImplemented


def _shared_parts(value: object, known: set[nn.Module] | None = None) -> Iterator[tuple[str, object]]:
    """Yield the objects that later parts refer to, by names that the reader also uses.

    Modules that are `known` already are left out, with all that is in them; the others are known then.
    """
    if isinstance(value, nn.Module):
        for path, module in value.named_modules(known, remove_duplicate=known is not None):
            yield path, module
            for name, parameter in module.named_parameters(recurse=False):
                yield f"{path} {name}", parameter
    elif not isinstance(value, _ATOMS):
        yield "", value


def _rebuild_tensor(storage: torch.UntypedStorage, *args: Any) -> Any:
    # Tensors of newer dtypes, such as uint16 and float8, pickle an untyped storage but need a typed one.
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
    return torch._utils._rebuild_tensor_v3(typed, *args)


@final
class _Unpickler(pickle.Unpickler):
    """Take the storages from `storage_at`. With `outer` it reads a part of that one's value."""

    def __init__(
        self, pickled: bytes, storage_at: Callable[..., torch.UntypedStorage], outer: _Unpickler | None = None
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self._storage_at = storage_at
        self._parts: dict[int, Any] = {} if outer is None else outer._parts  # by number and name

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _rebuild_tensor if found is torch._utils._rebuild_tensor_v3 else found

    def _part(self, number: int, pickled: bytes) -> object:
        try:
            value = _Unpickler(pickled, self._storage_at, self).load()
            self._parts[number] = dict(_shared_parts(value))
        except Exception as error:  # noqa: BLE001  pickling runs the user's code
            value = self._parts[number] = Unreadable.because_of(error)
        return value

    def persistent_load(self, pid: Any) -> object:
        if isinstance(pid, dict):
            return Parts({name: self._part(*packed) for name, packed in pid.items()})
        if isinstance(pid, str):
            return _read_by_name.get()[pid]
        if len(pid) == 2:
            part = self._parts[pid[0]]
            if isinstance(part, Unreadable):
                raise part
            return part[pid[1]]
        offset, size, dtype = pid
        storage = self._storage_at(offset, size) if size else torch.UntypedStorage(0)
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


ParametrizedClass = tuple[type[nn.Module], tuple[str, ...]]
"""The class of a module before any parametrization, and the names of its parametrized tensors."""


def kind_of(module: nn.Module) -> ParametrizedClass:
    """Return a module's class, and its parametrized tensors."""
    if not parametrize.is_parametrized(module):
        return type(module), ()
    parametrizations: Any = module.parametrizations
    return parametrize.type_before_parametrizations(module), tuple(parametrizations)


def set_kind(module: nn.Module, kind: ParametrizedClass) -> None:
    """Give a module a class, in which some tensors are parametrized; its parts still have to be set."""
    if kind_of(module) == kind:
        return
    module.__class__, names = kind
    module._modules.pop("parametrizations", None)
    for name in names:
        for parts in (module._parameters, module._buffers, vars(module)):
            parts.pop(name, None)
        module.register_buffer(name, torch.empty(0))
        parametrize.register_parametrization(module, name, nn.Identity(), unsafe=True)


def _reduced(module: nn.Module) -> tuple[Any, ...]:
    """Return the data with which pickle creates a parametrized module again."""
    own, (base, names) = type(module), kind_of(module)
    try:
        module.__class__ = base
        parts: Any = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    finally:
        module.__class__ = own
    make, arguments, *state = parts
    return _rebuilt, (make, arguments, names), *state


def _rebuilt(make: Callable[..., nn.Module], arguments: Iterable[Any], names: tuple[str, ...]) -> nn.Module:
    module = make(*arguments)
    if "_modules" not in vars(module):
        nn.Module.__init__(module)
    set_kind(module, (type(module), names))
    return module


def pickling_error(value: object) -> Exception | None:
    """Return the exception that pickling a value raises, if it does; the data of tensors is not copied."""
    try:
        _Pickler(io.BytesIO()).dump(value)
    except Exception as error:  # noqa: BLE001  pickling runs the user's code
        return error
    return None


def fingerprint(value: object) -> bytes | None:
    """Return a digest of a value and the data of its tensors on the CPU; None if it cannot be pickled."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        pickler = _Pickler(SimpleNamespace(write=digest.update))
        pickler.dump(value)
        for _, storage in pickler.storages.values():
            on_cpu = storage.cpu()
            digest.update((ctypes.c_char * on_cpu.nbytes()).from_address(on_cpu.data_ptr()))
    except Exception:  # noqa: BLE001  pickling runs the user's code
        return None
    return digest.digest()
