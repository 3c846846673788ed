"""Pickles of numpy arrays, the form in which detectron2 wants weights: written plainly and read without running them.

A pickle names functions and has the reader call them. This reader knows the few names that arrays are made of and
answers each with a stand-in of its own that only writes down what it is given; any other name is refused. Not even
numpy's own constructors run on what a stranger wrote: arrays are made afterwards, from a checked type, shape and size.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from typing import Any

import numpy as np

_PLAIN_TYPES = re.compile(r"[<>|=]?([fiu][1248]|b1)")


class RefusedPickle(Exception):
    """The pickle asks for something other than arrays and plain containers; the message is what it asks for."""


class DamagedPickle(Exception):
    """The pickle ends early or makes no sense."""


def dump_arrays(content: dict[str, Any]) -> bytes:
    """A pickle of plain containers and numpy arrays that every version of numpy reads.

    numpy's own pickles name private functions that have moved between versions 1 and 2; `numpy.ndarray` has not.
    """
    buffer = io.BytesIO()
    _ArrayPickler(buffer, protocol=4).dump(content)
    return buffer.getvalue()


class _ArrayPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            # A bytearray, not bytes, so that the array can be written to, as torch asks of what it shares.
            return np.ndarray, (value.shape, value.dtype.str, bytearray(value.tobytes()))
        return NotImplemented


def load_arrays(content: bytes) -> Any:
    """What a pickle of plain containers and arrays holds. Nothing that it names is ever looked up or called."""
    try:
        return _made(_ArrayUnpickler(io.BytesIO(content), encoding="latin1").load(), {})
    except RefusedPickle:
        raise
    # A damaged pickle can fail in any way: these are instructions of a small machine, followed by chance.
    except Exception as error:
        raise DamagedPickle(str(error)) from None


class _ArrayUnpickler(pickle._Unpickler):
    """Written in Python: the one in C makes a table as long as the highest number a pickle gives to anything in it, for
    which ten bytes take all memory there is.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise RefusedPickle(f"{module}.{name}") from None


class _Noted:
    """An array or type as a pickle describes it: what was asked for, what it was given, and its state."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _StandIn:
    """Answers to one name. It has no attributes that a pickle could set, so it is the same for the next file."""

    __slots__ = ()
    name = ""

    def __call__(self, *arguments: Any) -> Any:
        return _Noted(self.name, arguments)


class _Array(_StandIn):
    __slots__ = ()
    name = "array"  # numpy.ndarray(shape, type, bytes), as written here


class _Reconstructed(_StandIn):
    __slots__ = ()
    name = "reconstructed"  # an empty array whose state follows, as numpy writes up to protocol 4


class _FromBuffer(_StandIn):
    __slots__ = ()
    name = "from buffer"  # (bytes, type, shape, order), as numpy writes in protocol 5


class _Type(_StandIn):
    __slots__ = ()
    name = "type"


class _Bytes(_StandIn):
    """`bytes()`, `bytearray(bytes)`, and `_codecs.encode(text, "latin1")`, which is how old pickles hold bytes."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return _raw_bytes(arguments[0] if arguments else b"")


class _Dictionary(_StandIn):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return dict(*arguments)


_STAND_INS: dict[tuple[str, str], _StandIn] = {
    ("numpy", "ndarray"): _Array(),
    ("numpy", "dtype"): _Type(),
    ("numpy.core.multiarray", "_reconstruct"): _Reconstructed(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstructed(),
    ("numpy.core.numeric", "_frombuffer"): _FromBuffer(),
    ("numpy._core.numeric", "_frombuffer"): _FromBuffer(),
    ("builtins", "bytes"): _Bytes(),
    ("builtins", "bytearray"): _Bytes(),
    ("__builtin__", "bytes"): _Bytes(),
    ("__builtin__", "bytearray"): _Bytes(),
    ("_codecs", "encode"): _Bytes(),
    ("collections", "OrderedDict"): _Dictionary(),
}


def _made(value: Any, seen: dict[int, Any]) -> Any:
    """The same containers with arrays in the place of their descriptions.

    `seen` keeps what was made of each thing: a pickle may refer to one thing many times, at many depths.
    """
    if isinstance(value, _StandIn):
        raise ValueError("a name that nothing is made of")
    if not isinstance(value, dict | list | tuple | _Noted):
        return value
    if id(value) not in seen:
        if isinstance(value, _Noted):
            made: Any = _array(value)
        elif isinstance(value, dict):
            made = {key: _made(entry, seen) for key, entry in value.items()}
        else:
            made = [_made(entry, seen) for entry in value]
        seen[id(value)] = made
    return seen[id(value)]


def _array(noted: _Noted) -> np.ndarray[Any, Any]:
    order: Any = "C"
    if noted.name == "array":
        shape, kind, raw = noted.arguments
    elif noted.name == "from buffer":
        raw, kind, shape, order = noted.arguments
    elif noted.name == "reconstructed":
        _, shape, kind, fortran, raw = noted.state
        order = "F" if fortran else "C"
    else:
        raise ValueError(f"a {noted.name} where an array should be")
    element, shape, content = _element_type(kind), tuple(int(side) for side in shape), _raw_bytes(raw)
    if min(shape, default=0) < 0 or math.prod(shape) * element.itemsize != len(content):
        raise ValueError("the size of an array does not fit its shape")
    found = np.frombuffer(content, dtype=element).reshape(shape, order="F" if order == "F" else "C")
    return np.array(found, dtype=element.newbyteorder("="), order="C")


def _element_type(kind: Any) -> np.dtype[Any]:
    """A type of plain numbers, from its name or from the description of a `numpy.dtype`."""
    name, byte_order = kind, ""
    if isinstance(kind, _Noted) and kind.name == "type":
        name, byte_order = kind.arguments[0], kind.state[1] if kind.state else ""
    if not isinstance(name, str) or not _PLAIN_TYPES.fullmatch(name) or byte_order not in ("", "<", ">", "|", "="):
        raise ValueError("an array of something other than numbers")
    return np.dtype(byte_order + name)


def _raw_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("latin1")
    if not isinstance(value, bytes | bytearray):
        raise ValueError("the content of an array is no bytes")
    return bytes(value)
