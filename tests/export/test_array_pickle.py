"""Pickles of arrays: every way in which numpy writes them is read, and nothing else is."""

import contextlib
import pickle
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest

from jcl.export.array_pickle import DamagedPickle, PickledArray, RefusedPickle, dump_arrays, load_arrays

ARRAYS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "number": np.array(7, dtype=np.int64),
    "none": np.zeros((0, 3), dtype=np.float64),
    "columns": np.asfortranarray(np.arange(6, dtype=np.float16).reshape(2, 3)),
    "other end": np.arange(5, dtype=">i4"),
    "truth": np.array([True, False]),
    "view": np.arange(20, dtype=np.uint8).reshape(4, 5)[:, ::2],
}


def assert_equal(content: dict[str, PickledArray]) -> None:
    found = {name: value.to_numpy() for name, value in content.items()}
    assert found.keys() == ARRAYS.keys()
    for name, wanted in ARRAYS.items():
        assert found[name].dtype == wanted.dtype.newbyteorder("=") and found[name].shape == wanted.shape, name
        assert np.array_equal(found[name], wanted) and found[name].flags.writeable, name


@pytest.mark.parametrize("protocol", range(6))
def test_numpys_own_pickles(protocol):
    assert_equal(load_arrays(pickle.dumps(ARRAYS, protocol=protocol)))
    assert_equal(load_arrays(pickle.dumps(OrderedDict(ARRAYS), protocol=protocol)))


def test_pickles_of_older_numpy_name_other_modules():
    content = pickle.dumps(ARRAYS, protocol=2)
    assert b"numpy._core" in content
    assert_equal(load_arrays(content.replace(b"numpy._core.", b"numpy.core.")))


def test_ours_are_read_by_us_and_by_anyone_and_name_nothing_that_has_moved():
    content = dump_arrays({"model": ARRAYS, "text": "a", "truth": True})
    found = load_arrays(content)
    assert_equal(found["model"])
    assert found["text"] == "a" and found["truth"] is True
    assert b"_core" not in content and b"multiarray" not in content
    program = "import pickle, sys; print(float(pickle.loads(sys.stdin.buffer.read())['model']['matrix'].sum()))"
    ended = subprocess.run([sys.executable, "-c", program], input=content, capture_output=True, check=True)
    assert float(ended.stdout) == 66.0
    for name, value in pickle.loads(content)["model"].items():
        assert value.flags.writeable and np.array_equal(value, ARRAYS[name])


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("numpy", "load"),
        ("numpy", "memmap"),
        ("pathlib", "Path"),
        ("numpy", "a.b"),
    ],
)
def test_other_names_are_refused_before_anything_is_made(module, name):
    content = f"c{module}\n{name}\n(S'touch x'\ntR.".encode()
    with pytest.raises(RefusedPickle, match=f"{module}.{name}"):
        load_arrays(content)


def test_arrays_of_objects_and_wrong_sizes_are_damage():
    for content in (
        pickle.dumps(np.array([1, "x"], dtype=object)),
        pickle.dumps(np.array(["x"])),
        pickle.dumps(np.zeros(2, dtype=[("x", "f4")])),
        b"cnumpy\nndarray\n((I1000000000000\ntS'f4'\nS'abcd'\ntR.",
        b"cnumpy\nndarray\n((I-1\ntS'f4'\nS''\ntR.",
        b"cnumpy\nndarray\n((I1\ntS'O'\nS'abcdefgh'\ntR.",
        b"cbuiltins\nbytearray\n(I1000000000000\ntR.",
        b"cnumpy\ndtype\n(S'f4'\ntR.",
    ):
        with pytest.raises(DamagedPickle):
            load_arrays(content).to_numpy()


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04Nr\xff\xff\xff\x07.",
        b"\x80\x04Np134217727\n.",
        b"\x80\x05\x96" + (1 << 32).to_bytes(8, "little") + b".",
    ],
    ids=["binary memo", "text memo", "bytearray"],
)
def test_large_numbers_allocate_no_memory(content):
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(DamagedPickle):
        load_arrays(content)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize("name", ["numpy\nndarray", "numpy\ndtype", "builtins\nbytes", "collections\nOrderedDict"])
def test_a_pickle_cannot_change_the_reader_for_the_next_file(name):
    for state in ("(dS'name'\nS'other'\nsb.", "(N(dS'__defaults__'\n(S'x'\ntstb."):
        with pytest.raises(DamagedPickle):
            load_arrays(f"c{name}\n{state}".encode())
    test_numpys_own_pickles(4)


def test_nested_and_recursive_containers_take_no_time():
    nested: list[object] = []
    for _ in range(30):
        nested = [nested] * 10
    assert len(load_arrays(pickle.dumps(nested))) == 10
    loop: list[object] = []
    loop.append(loop)
    assert len(load_arrays(pickle.dumps(loop))) == 1
