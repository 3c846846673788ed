"""Pickles of numpy arrays, as detectron2 keeps weights, written and read without executing anything in them.

A pickle names functions for its reader to call. This reader maps the few names that arrays are made of to stand-ins
that only record their arguments, and refuses every other name. `PickledArray.to_numpy` builds the array afterwards,
from a checked dtype, shape and size; not even numpy's own constructors see unchecked values.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

_NUMERIC_DTYPE = re.compile(r"[<>|=]?([fiu][1248]|b1)")


class RefusedPickle(Exception):
    """The pickle names something other than arrays and plain containers; the message is that name."""


class DamagedPickle(Exception):
    """The pickle is truncated, inconsistent or not a pickle."""


def dump_arrays(content: dict[str, Any]) -> bytes:
    """A pickle of plain containers and numpy arrays that every version of numpy reads.

    numpy's own pickles name private functions that moved between versions 1 and 2; `numpy.ndarray` did not.
    """
    buffer = io.BytesIO()
    _ArrayPickler(buffer, protocol=4).dump(content)
    return buffer.getvalue()


class _ArrayPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            # A bytearray rather than bytes keeps the array writable, which torch.from_numpy wants.
            return np.ndarray, (value.shape, value.dtype.str, bytearray(value.tobytes()))
        return NotImplemented


def load_arrays(content: bytes) -> Any:
    """The plain containers in a pickle, with a `PickledArray` for each array."""
    try:
        return _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except RefusedPickle:
        raise
    except Exception as error:  # damaged opcodes can fail in any way
        raise DamagedPickle(str(error)) from None


class PickledArray:
    """An array or dtype as a pickle describes it."""

    def __init__(self, kind: str, *arguments: Any) -> None:
        self.kind, self.arguments = kind, arguments
        self.state: Any = None

    def to_numpy(self) -> NDArray[Any]:
        """The array, in C order and native byte order."""
        order: Any = "C"
        try:
            if self.kind == "reconstruct":  # numpy up to protocol 4
                _, shape, dtype, fortran, raw = self.state
                order = "F" if fortran else "C"
            elif self.kind == "frombuffer":  # numpy with protocol 5
                raw, dtype, shape, order = self.arguments
            else:  # as written by `dump_arrays`
                shape, dtype, raw = self.arguments
            element, shape, content = _checked_dtype(dtype), tuple(int(side) for side in shape), _to_bytes(raw)
            if min(shape, default=0) < 0 or math.prod(shape) * element.itemsize != len(content):
                raise ValueError("the size of an array does not match its shape")
            values = np.frombuffer(content, dtype=element).reshape(shape, order="F" if order == "F" else "C")
            return np.array(values, dtype=element.newbyteorder("="), order="C")
        except Exception as error:  # the description may be of anything
            raise DamagedPickle(str(error)) from None


def _checked_dtype(dtype: Any) -> np.dtype[Any]:
    """A numeric dtype, from its name or from a described `numpy.dtype`."""
    name, byte_order = dtype, ""
    if isinstance(dtype, PickledArray) and dtype.kind == "dtype":
        name, byte_order = dtype.arguments[0], dtype.state[1] if dtype.state else ""
    if not isinstance(name, str) or not _NUMERIC_DTYPE.fullmatch(name) or byte_order not in ("", "<", ">", "|", "="):
        raise ValueError("not an array of numbers")
    return np.dtype(byte_order + name)


def _to_bytes(value: Any = b"", *_: Any) -> bytes:
    """Stands in for `bytes`, `bytearray` and `_codecs.encode(text, "latin1")`; never for `bytes(length)`."""
    if isinstance(value, str):
        return value.encode("latin1")
    if not isinstance(value, bytes | bytearray):
        raise ValueError("the content of an array is not bytes")
    return bytes(value)


_STAND_INS = {
    "numpy.ndarray": partial(PickledArray, "ndarray"),
    "numpy.dtype": partial(PickledArray, "dtype"),
    "numpy.core.multiarray._reconstruct": partial(PickledArray, "reconstruct"),
    "numpy.core.numeric._frombuffer": partial(PickledArray, "frombuffer"),
    "builtins.bytes": _to_bytes,
    "builtins.bytearray": _to_bytes,
    "_codecs.encode": _to_bytes,
    "collections.OrderedDict": dict,
}


class _ArrayUnpickler(pickle._Unpickler):
    """The unpickler written in Python: the one in C allocates as much memory as a few bytes of a pickle ask for."""

    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        usual_name = full_name.replace("numpy._core.", "numpy.core.").replace("__builtin__.", "builtins.")
        if usual_name not in _STAND_INS:
            raise RefusedPickle(full_name)
        return _STAND_INS[usual_name]

    def load_build(self) -> None:
        """Set the state of an array or dtype, and of nothing else: stand-ins must stay as they are."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], PickledArray):
            raise pickle.UnpicklingError("state for something other than an array")
        self.stack[-1].state = state

    def load_bytearray8(self) -> None:
        """As in the base class, but without allocating the stated length first."""
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BYTEARRAY8[0]] = load_bytearray8
