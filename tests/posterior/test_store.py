"""A store: what is written is what is read, and faults are refused by name."""

import copy
import json
import math
import os
import pickle
import subprocess
import sys
import threading
import time
import zlib

import pytest
import torch
from children import outcome
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

import torch_sgmcmc as sg
from torch_sgmcmc.draws import store as writers
from torch_sgmcmc.draws import store_files
from torch_sgmcmc.draws.store_files import delete_all


def draw(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        "b.weight": torch.randn(3, 4, generator=generator).to(dtype),
        "a.bias": torch.randn(4, generator=generator).to(dtype),
        "count": torch.tensor(seed),
    }


def same(one, other):
    one = dict(one)
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in other
    )


def write(path, count=5, chain=0, per_file=0):
    with sg.SampleWriter(path, draw(0), chain=chain) as writer:
        for i in range(1, count + 1):
            writer.append(
                draw(10 * chain + i),
                step=20 * i,
                lr=0.1 / i,
                loss=i / 3,
                weight=-1.0,
                prior_precision=[1 / i, i],
            )
            if per_file and i % per_file == 0:
                writer.flush()


def files(path, chain=0):
    folder = path / f"chain-{chain}"
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock"}


def name(number):
    return f"draws-{number:06d}.safetensors"


# ---- Reading -------------------------------------------------------------------------


@pytest.mark.parametrize("per_file", [0, 1, 2])
def test_draws_are_read_as_written(tmp_path, per_file):
    write(tmp_path, per_file=per_file)
    store = sg.SampleStore(tmp_path)
    assert len(store) == 5 and store.chains == [0]
    assert sorted(store.names) == ["a.bias", "b.weight", "count"]
    for i, one in enumerate(store, start=1):
        assert same(one, draw(i))
        assert (one.chain, one.step) == (0, 20 * i)
        # To the last bit, through the index's text.
        assert (one.lr, one.loss, one.weight) == (0.1 / i, i / 3, -1.0)
        assert one.temperature == 1.0
        assert one.prior_precision == (1 / i, i)
    assert len(files(tmp_path)) == 1 + (-(-5 // per_file) if per_file else 1)


def test_the_format(tmp_path):
    """Anyone reads a store with safetensors and json."""
    write(tmp_path, 3, per_file=2)
    info = json.loads((tmp_path / "store.json").read_text())
    assert info == {
        "format": 1,
        "likelihood": None,
        "tensors": {
            "b.weight": {"dtype": "F32", "shape": [3, 4]},
            "a.bias": {"dtype": "F32", "shape": [4]},
            "count": {"dtype": "I64", "shape": []},
        },
        "not_sampled": {},
    }
    folder = tmp_path / "chain-0"
    lines = (folder / "index.jsonl").read_bytes().splitlines(keepends=True)
    first, second = map(json.loads, lines)
    assert first["count"] == 2 and first["step"] == [20, 40]
    assert first["lr"] == [0.1, 0.05] and first["prior_precision"] == [[1, 1], [0.5, 2]]
    assert second["file"] == name(1) and second["count"] == 1
    data = (folder / name(0)).read_bytes()
    assert first["bytes"] == len(data) and first["crc32"] == zlib.crc32(data)
    body, _, checksum = lines[0].rpartition(b', "line_crc32": ')
    assert int(checksum[:-2]) == zlib.crc32(body)
    tensors = load_file(folder / name(0))
    assert torch.equal(tensors["a.bias"][1], draw(2)["a.bias"])
    assert tensors["count"].tolist() == [1, 2]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        writer.append(draw(1), step=1, loss=math.inf)
    (one,) = sg.SampleStore(tmp_path)
    assert math.isnan(one.loss) and math.isnan(one.lr)
    content = (tmp_path / "chain-0" / "index.jsonl").read_text()
    json.loads(content, parse_constant=pytest.fail)


def test_slices_by_chain_draw_and_name(tmp_path):
    write(tmp_path, 3, chain=0)
    write(tmp_path, 4, chain=2, per_file=3)
    store = sg.SampleStore(tmp_path)
    assert store.chains == [0, 2] and len(store) == 7
    last = store.chain(2)[-2:]["a.bias"]
    assert [one.step for one in last] == [60, 80]
    assert [list(one) for one in last] == [["a.bias"]] * 2
    assert same(last[1], {"a.bias": draw(24)["a.bias"]})
    assert same(store[["count"]][3], {"count": torch.tensor(21)})
    assert last[0].chain == 2 and store[7:].names == []
    with pytest.raises(ValueError, match=r"Invalid chain: 1 \(must be in \[0"):
        store.chain(1)
    with pytest.raises(KeyError, match=r"no draw has 'c' \(they have"):
        store["c"]
    with pytest.raises(IndexError):
        store[7]


def test_draws_can_be_sent(tmp_path):
    write(tmp_path, 3)
    store = sg.SampleStore(tmp_path)
    assert len({*store[:2], store[2]}) == 3  # hashable, with a Mapping's tensors
    _ = store[0]["count"]
    for copied in (
        pickle.loads(pickle.dumps(store)),
        copy.deepcopy(store),
        pickle.loads(pickle.dumps([*store])),
    ):
        assert all(same(one, draw(i)) for i, one in enumerate(copied, start=1))
    memory = sg.SampleStore()
    write(memory, 3)
    for sent in [*memory.refresh()]:
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(sent))))
        assert same(again, dict(sent))
    one = pickle.loads(pickle.dumps(store[-1:]["count"]))[0]
    assert [*one] == ["count"] and (one.lr, one.loss) == (0.1 / 3, 1.0)


@pytest.mark.parametrize("per_file", [0, 1])
def test_writing_into_a_draw_changes_no_file(tmp_path, per_file):
    write(tmp_path, per_file=per_file)
    before = files(tmp_path)
    store = sg.SampleStore(tmp_path)
    one = store[2]
    one["a.bias"].zero_()
    assert not one["a.bias"].any() and same(store[2], draw(3))
    assert same(pickle.loads(pickle.dumps(one)), draw(3))
    assert files(tmp_path) == before


def test_numbers_above_the_largest_of_the_dtype(tmp_path):
    large = {"w": torch.tensor([1e5, 1.0, math.inf])}
    writer = sg.SampleWriter(tmp_path, large, dtype=torch.float16)
    with (
        writer,
        pytest.warns(UserWarning, match="'w' has numbers above 65504") as found,
    ):
        writer.append({"w": torch.tensor([1.0, 1.0, math.inf])}, step=1)
        assert not found
        writer.append(large, step=2)
        writer.append(large, step=3)
    assert len(found) == 1


def test_a_program_that_ends_with_an_open_writer(tmp_path):
    """It prints nothing."""
    program = """
import sys, torch, torch_sgmcmc as sg
writer = sg.SampleWriter(sys.argv[1], {"w": torch.zeros(2)})
writer.append({"w": torch.ones(2)}, step=1)
"""
    command = [sys.executable, "-W", "ignore", "-c", program, tmp_path / "draws"]
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run(command, check=True, **options)
    assert "Traceback" not in done.stderr and "flock" not in done.stderr


DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


def of_all_kinds():
    tensors = {
        f"{i}.{dtype}": torch.arange(i + 1).to(dtype) for i, dtype in enumerate(DTYPES)
    }
    odd = ("a b", "é\u4e2d\U0001f600", 'q"\\\n\t\x01\x7f/', "", "\\n")
    tensors |= {name: torch.full((2,), float(i)) for i, name in enumerate(odd)}
    return tensors | {"empty": torch.ones(3, 0), "scalar": torch.tensor(2.5)}


@pytest.mark.parametrize("count", [1, 3])
def test_all_dtypes_shapes_and_names(tmp_path, count):
    tensors = of_all_kinds()
    with sg.SampleWriter(tmp_path, tensors) as writer:
        for i in range(count):
            writer.append(tensors, step=i)
    assert all(same(one, tensors) for one in sg.SampleStore(tmp_path))


def test_dtype_on_disk(tmp_path):
    with sg.SampleWriter(tmp_path, draw(0), dtype=torch.bfloat16) as writer:
        writer.append(draw(1), step=1)
    (one,) = sg.SampleStore(tmp_path)
    expected = draw(1, torch.bfloat16)
    assert same(one, expected) and expected["count"].dtype == torch.int64


def test_a_store_that_is_being_written(tmp_path):
    store = sg.SampleStore(tmp_path / "later")
    assert len(store) == 0 and store.chains == [] and store.names == []
    with sg.SampleWriter(tmp_path / "later", draw(0)) as writer:
        assert len(store.refresh()) == 0
        for i in range(1, 4):
            writer.append(draw(i), step=i)
            assert len(store.refresh()) == i - 1 == len(writer)
            writer.flush()
            assert len(store) == i - 1
            assert len(store.refresh()) == i and same(store[-1], draw(i))
        with (tmp_path / "later" / "chain-0" / "index.jsonl").open("ab") as index:
            index.write(b'{"file": "draws-000003.safetensors", "cou')
        assert len(store.refresh()) == 3


def test_many_small_draws_are_few_files(tmp_path):
    """And a large one is written by itself."""
    with sg.SampleWriter(tmp_path, {"w": torch.zeros(3)}) as writer:
        for i in range(1, 2501):
            writer.append({"w": torch.full((3,), float(i))}, step=i)
    assert sorted(files(tmp_path)) == [*map(name, range(3)), "index.jsonl"]
    store = sg.SampleStore(tmp_path)
    assert [float(d["w"][1]) for d in store] == [*range(1, 2501)]
    large = {"w": torch.zeros(1 << 20)}
    with sg.SampleWriter(tmp_path / "large", large) as writer:
        for i in range(3):
            writer.append(large, step=i)
    assert len(files(tmp_path / "large")) == 1 + 3


def test_a_draw_does_not_wait_for_ever(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(writers.time, "monotonic", lambda: clock[0])
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        for i, seconds in enumerate((0, 29, 31, 40)):
            clock[0] = seconds
            writer.append(draw(i), step=i)
    assert [json.loads(line)["count"] for line in
            files(tmp_path)["index.jsonl"].splitlines()] == [2, 2]  # fmt: skip


def test_threads_append_to_one_writer(tmp_path):
    shape = (3000,)

    def append(first):
        for i in range(first, first + 300):
            writer.append({"w": torch.full(shape, float(i))}, step=i)

    with sg.SampleWriter(tmp_path, {"w": torch.zeros(shape)}) as writer:
        threads = [threading.Thread(target=append, args=(300 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    store = sg.SampleStore(tmp_path)
    assert sorted(one.step for one in store) == [*range(1200)]
    assert all(bool((one["w"] == one.step).all()) for one in store)


def test_a_closed_writer_changes_no_file(tmp_path, monkeypatch):
    """Another file may have the number of the closed index."""
    write(tmp_path / "draws", 2)
    writer = sg.SampleWriter(tmp_path / "draws", draw(0))
    position = writer.checkpoint()
    writer.cut_back(position)
    writer.append(draw(3), step=60)
    with monkeypatch.context() as full, pytest.raises(RuntimeError, match="No space"):

        def fail(path, data):
            raise OSError(28, "No space left on device")

        full.setattr(store_files, "replace_file", fail)
        writer.release()
    before = files(tmp_path / "draws")
    others = [(tmp_path / f"{i}").open("w") for i in range(3)]
    for other in others:
        print("other", file=other, flush=True)
    for change in (writer.flush, writer.restart, lambda: writer.cut_back(position)):
        with pytest.raises(RuntimeError, match="the writer is closed"):
            change()
    for other in others:
        other.close()
        assert (tmp_path / other.name).read_text() == "other\n"
    assert files(tmp_path / "draws") == before


def test_a_writer_keeps_no_numbers_of_its_draws(tmp_path):
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        for i in range(5):
            writer.append(draw(i), step=i)
        writer.flush()
        assert len(writer) == 5
        assert [file.columns for file in writer.files.files] == [{}]


def test_any_default_device(tmp_path, set_default_device):
    expected = [draw(i) for i in range(3)]
    set_default_device("meta")
    for folder in (tmp_path / "a", None):
        store = sg.SampleStore(folder)
        with sg.SampleWriter(store, expected[0]) as writer:
            for i, one in enumerate(expected):
                writer.append(one, step=i)
        assert all(map(same, store.refresh(), expected))


# ---- Resuming ------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [False, True])
def test_cut_back(tmp_path, memory):
    store = sg.SampleStore(None if memory else tmp_path)

    def append(writer, numbers, sign=1):
        for i in numbers:
            writer.append(draw(i), step=sign * i)
            if i % 3 == 0:
                writer.flush()

    with sg.SampleWriter(store, draw(0)) as writer:
        append(writer, range(5))
        position = writer.checkpoint()
        append(writer, range(5, 12), -1)
    with sg.SampleWriter(store, draw(0)) as writer:
        writer.cut_back(position)
        assert len(writer) == 5
        append(writer, range(5, 8))
    found = [*store.refresh()]
    assert [one.step for one in found] == [*range(8)]
    assert all(same(one, draw(i)) for i, one in enumerate(found))
    if not memory:
        assert len(files(tmp_path)) == 1 + 5
    with sg.SampleWriter(store, draw(0)) as writer:
        wrong = {"size": position["size"] + 1, "crc32": position["crc32"]}
        with pytest.raises(
            ValueError, match="Invalid checkpoint: it is not of chain 0"
        ):
            writer.cut_back(wrong)
    assert len(store.refresh()) == 8


def test_draws_of_an_earlier_run_are_not_mixed_with(tmp_path):
    write(tmp_path, 2)
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        with pytest.raises(ValueError, match=r"chain 0 of .* has 2 draws of an earl"):
            writer.append(draw(3), step=3)
        writer.restart()
        assert len(writer) == 0
        writer.append(draw(3), step=3)
    (one,) = sg.SampleStore(tmp_path)
    assert same(one, draw(3))


# ---- Damage --------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut off", "emptied", "altered", "missing"])
def test_a_corrupt_file_is_named_and_the_rest_readable(tmp_path, damage):
    write(tmp_path, per_file=2)
    path = tmp_path / "chain-0" / name(1)
    whole = bytearray(path.read_bytes())
    store = sg.SampleStore(tmp_path)
    if damage == "cut off":
        path.write_bytes(whole[:-1])
    elif damage == "emptied":
        dict(store[3])  # access to the mapped file would now be a SIGBUS
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    else:
        whole[-1] ^= 1
        path.write_bytes(whole)
    with pytest.raises(sg.CorruptDrawError, match=f"^Cannot read {path}: "):
        dict(store[2])
    with pytest.warns(UserWarning, match=f"Cannot read {path}"):
        intact = store.intact()
    assert [one.step for one in intact] == [20, 40, 100]
    assert all(same(one, draw(one.step // 20)) for one in intact)


def test_a_file_deleted_between_stat_and_read(tmp_path, monkeypatch):
    write(tmp_path)
    store = sg.SampleStore(tmp_path)
    stat = os.stat

    def stat_and_delete(path, *rest, **named):
        found = stat(path, *rest, **named)
        if str(path).endswith(".safetensors"):
            os.unlink(path)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat_and_delete)
        with pytest.raises(sg.CorruptDrawError, match=r"Cannot read .*refresh\(\)"):
            store[0]["count"]


def test_every_flipped_bit_of_a_file_is_refused(tmp_path):
    write(tmp_path, 1)
    path = tmp_path / "chain-0" / name(0)
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(sg.CorruptDrawError):
            dict(sg.SampleStore(tmp_path)[0])


def test_every_flipped_bit_of_an_index_is_refused(tmp_path):
    write(tmp_path, 3, per_file=1)
    index = tmp_path / "chain-0" / "index.jsonl"
    whole = index.read_bytes()
    for bit in range(0, 8 * len(whole) - 8, 5):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        index.write_bytes(damaged)
        with pytest.raises(
            RuntimeError, match=r"Cannot read .*index.jsonl: line \d is"
        ):
            sg.SampleStore(tmp_path)
    # Without the last line's end the line is one that is being written.
    index.write_bytes(whole[:-1])
    assert len(sg.SampleStore(tmp_path)) == 2


def test_a_truncated_index_has_the_draws_before(tmp_path):
    write(tmp_path, 3, per_file=1)
    index = tmp_path / "chain-0" / "index.jsonl"
    whole = index.read_bytes()
    for size in range(0, len(whole) + 1, 3):
        index.write_bytes(whole[:size])
        count = whole[:size].count(b"\n")
        assert [one.step for one in sg.SampleStore(tmp_path)] == [20, 40, 60][:count]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"count": 10**18}, "count 1000"),
        ({"count": 0}, "count 0"),
        ({"count": 2}, "count 2"),
        ({"count": "1"}, "count '1'"),
        ({"step": [1e300]}, "integer"),
        ({"step": [10**30]}, "large|big"),
        ({"lr": ["x"]}, "number"),
        ({"lr": 3}, "iterable"),
        ({"loss": None}, "iterable"),
        ({"prior_precision": [3]}, "iterable"),
        ({"file": "../../store.json"}, "file '../../store.json'"),
        ({"file": 3}, "file 3"),
    ],
)
def test_absurd_numbers_with_a_right_checksum(tmp_path, change, words):
    write(tmp_path, 1)
    index = tmp_path / "chain-0" / "index.jsonl"
    line = json.loads(index.read_bytes())
    del line["line_crc32"]
    start = json.dumps(line | change).encode()[:-1]
    index.write_bytes(start + b', "line_crc32": %d}\n' % zlib.crc32(start))
    with pytest.raises(RuntimeError, match=f"Cannot read {index}: line 1 .*({words})"):
        sg.SampleStore(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"format": 1}', b"\xff"])
def test_a_damaged_store_json_is_named(tmp_path, content):
    write(tmp_path, 1)
    path = tmp_path / "store.json"
    path.write_bytes(content)
    for attempt in (sg.SampleStore, lambda p: sg.SampleWriter(p, draw(0))):
        with pytest.raises(RuntimeError, match=f"Cannot read {path}: it is"):
            attempt(tmp_path)
    path.write_text('{"format": 2}')
    with pytest.raises(RuntimeError, match=r"format 2 \(must be 1\)"):
        sg.SampleStore(tmp_path)


def test_only_exact_names_are_chains(tmp_path):
    write(tmp_path, 2)
    for other in ("chain-00", "chain-", "chain-0 ", "chain--1", "chain-1x", "Chain-1"):
        (tmp_path / other).mkdir()
        (tmp_path / other / "index.jsonl").touch()
    assert len(sg.SampleStore(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("a.bias", None, r"its 'a.bias' is F32 \[2, 4\], in store.json missing"),
        ("more", {"dtype": "F32", "shape": []}, "its 'more' is missing, in store.json"),
        ("a.bias", {"dtype": "I32", "shape": [4]}, r"is F32 .*, in store.json I32"),
        ("a.bias", {"dtype": "F32", "shape": [2, 2]}, r"in store.json F32 \[2, 2, 2\]"),
    ],
)
def test_headers_are_compared_with_store_json(tmp_path, name, change, words):
    write(tmp_path, 2)
    path = tmp_path / "store.json"
    content = json.loads(path.read_bytes())
    content["tensors"].pop(name, None)
    if change is not None:
        content["tensors"][name] = change
    path.write_text(json.dumps(content))
    store = sg.SampleStore(tmp_path)
    file = tmp_path / "chain-0" / "draws-000000.safetensors"
    with pytest.raises(sg.CorruptDrawError, match=f"Cannot read {file}: .*{words}"):
        store[0]["b.weight"]
    with pytest.warns(UserWarning, match=words):
        assert len(store.intact()) == 0


def test_deep_json_and_fifos_are_named(tmp_path):
    write(tmp_path, 1)
    for name in ("store.json", "chain-0/index.jsonl", "chain-0/run.json"):
        path = tmp_path / name
        whole = path.read_bytes() if path.exists() else b""
        deep = b'{"format": ' + b"[" * 200_000
        if path.suffix == ".jsonl":
            deep += b', "line_crc32": %d}\n' % zlib.crc32(deep)
        path.write_bytes(deep)
        words = f"^Cannot read {path}: "
        with pytest.raises(RuntimeError, match=f"{words}.* damaged .*recursion"):
            sg.SampleStore(tmp_path)[0].read_run()
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(RuntimeError, match=f"{words}it is not a regular file"):
            sg.SampleStore(tmp_path)[0].read_run()
        path.unlink()
        path.write_bytes(whole)


# ---- Writers -------------------------------------------------------------------------


def test_a_folder_deleted_while_it_is_written(tmp_path):
    folder = tmp_path / "store"
    with pytest.raises(RuntimeError, match=r"^Cannot write .*draws-000001"):
        with sg.SampleWriter(folder, draw(0)) as writer:
            writer.append(draw(1), step=1)
            writer.flush()
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()
            (folder / "chain-0").mkdir(parents=True)  # another program's
            writer.append(draw(2), step=2)
            writer.flush()
    assert [p.name for p in folder.rglob("*")] == ["chain-0"]


def test_a_copy_of_the_folder_keeps_the_lock(tmp_path):
    """POSIX locks are dropped when any file of the same name is closed."""
    with sg.SampleWriter(tmp_path, draw(0)):
        (tmp_path / "chain-0" / "lock").read_bytes()
        held = outcome(lambda: sg.SampleWriter(tmp_path, draw(0)) and None)
        assert held == (
            f"RuntimeError: Cannot write to chain 0 of {tmp_path}: process "
            f"{os.getpid()} writes to it"
        )
    assert outcome(lambda: sg.SampleWriter(tmp_path, draw(0)).close()) == ""


def test_a_fork_does_not_write(tmp_path):
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        writer.append(draw(1), step=1)
        words = f"RuntimeError: Cannot write to chain 0 of {tmp_path}: process "
        found = outcome(lambda: writer.append(draw(2), step=2))
        assert (found or "").startswith(f"{words}{os.getpid()} has opened")
    assert len(sg.SampleStore(tmp_path)) == 1
    # Nor does a fork that lives on keep the lock.
    writer = sg.SampleWriter(tmp_path, draw(0), chain=1)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        writer.close()
        sg.SampleWriter(tmp_path, draw(0), chain=1).close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_store_of_another_model(tmp_path):
    write(tmp_path)
    for other, words in (
        ({"a.bias": torch.ones(4)}, r"its '(b.weight|count)' is .*, here missing"),
        (draw(0) | {"c": torch.ones(1)}, r"its 'c' is missing, here .*F32.*\[1\]"),
        (
            draw(0) | {"a.bias": torch.ones(5)},
            r"its 'a.bias' is .*F32.*\[4\].*, here .*F32.*\[5\]",
        ),
        (draw(0, torch.bfloat16), r"its 'b.weight' is .*'F32'.*, here .*'BF16'"),
    ):
        for chain in (0, 1):
            with pytest.raises(ValueError, match=f"are of another model: {words}"):
                sg.SampleWriter(tmp_path, other, chain=chain)
    assert sg.SampleStore(tmp_path).chains == [0]
    assert not (tmp_path / "chain-1").exists()
    # A store without draws takes what comes.
    sg.SampleWriter(tmp_path / "new", draw(0)).close()
    sg.SampleWriter(tmp_path / "new", {"c": torch.ones(1)}).close()


@pytest.mark.parametrize("first", [None, 0, 1])
def test_a_writer_of_another_model_that_has_not_flushed(tmp_path, first):
    """Writers opened before any draw agree on the model; a restart keeps to it."""
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        if first is not None:
            writer.append(draw(1), step=1)
            if first == 1:
                writer.restart()
        for chain in (0, 1):
            with pytest.raises(ValueError, match=r"its '.*' is .*, here missing"):
                sg.SampleWriter(tmp_path, {"c": torch.ones(1)}, chain=chain)
        with sg.SampleWriter(tmp_path, draw(0), chain=1) as other:
            writer.restart()
            other.append(draw(2), step=1)
        writer.append(draw(1), step=1)
    assert len(sg.SampleStore(tmp_path).intact()) == 2


def test_a_restart_of_the_only_writer_forgets_the_model(tmp_path):
    write(tmp_path)
    sg.SampleWriter(tmp_path, draw(0)).restart()
    sg.SampleWriter(tmp_path, {"c": torch.ones(1)}).close()


def test_a_file_is_no_store(tmp_path):
    (tmp_path / "one").touch()
    with pytest.raises(ValueError, match=r"^Invalid path: .*one is a file \(must be"):
        sg.SampleStore(tmp_path / "one")


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    write(tmp_path, 1)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full, pytest.raises(RuntimeError, match="No space"):
        full.setattr(os, "write", fail)
        sg.SampleWriter(tmp_path, draw(0))
    sg.SampleWriter(tmp_path, draw(0)).close()


def test_other_refusals(tmp_path):
    for tensors, words in (
        ({}, "there are none to store"),
        ({"a": torch.ones(1).to(torch.float8_e5m2)}, "'a' is torch.float8_e5m2"),
        ({"__metadata__": torch.ones(1)}, "'__metadata__'"),
        ({"a": torch.ones(2).to_sparse()}, "'a' is a torch.sparse_coo Tensor"),
        ({"a": torch.ones(2, device="meta")}, "'a' is a .* on meta"),
        ({"a": TwoTensor(torch.ones(2), torch.ones(2))}, "'a' is a .* TwoTensor of"),
    ):
        with pytest.raises(ValueError, match=words):
            sg.SampleWriter(tmp_path, tensors)
    sparse = {"base": torch.ones(2).to_sparse()}
    with pytest.raises(ValueError, match=r"'base' is a torch\.sparse_coo Tensor"):
        sg.SampleWriter(tmp_path, draw(0), not_sampled=sparse)
    for chain in (-1, True, 1.0):
        with pytest.raises((TypeError, ValueError), match=r"^Invalid chain: .* \(must"):
            sg.SampleWriter(tmp_path, draw(0), chain=chain)
    assert list(tmp_path.iterdir()) == []
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        with pytest.raises(ValueError, match=r"nothing for 'count' .*shape \[\]\)"):
            writer.append({k: v for k, v in draw(1).items() if k != "count"}, step=1)
        with pytest.raises(ValueError, match=r"shape \[2\] for 'a.bias'"):
            writer.append(draw(1) | {"a.bias": torch.ones(2)}, step=1)
        writer.append(draw(1), step=1)
        writer.flush()
        assert len(writer) == 1
        with pytest.raises(ValueError, match=r"Invalid step: 1180591620717411303424 "):
            writer.append(draw(1), step=2**70)
    with pytest.raises(RuntimeError, match=r"chain 0 of .*: the writer is closed"):
        writer.append(draw(1), step=1)


def test_only_the_stores_own_files_are_deleted(tmp_path):
    write(tmp_path, 2)
    write(tmp_path, 2, chain=1)
    ours = ["checkpoint-0.pt", "report.md", "report.json", "store.json.1-2.partial"]
    foreign = [
        "report.tex",
        "checkpoint-best-model.pt",
        "notes.json",
        "checkpoint-01.pt",
        "chain-0/mine.txt",
        "chain-0/draws-1.safetensors",
        "chain-01/index.jsonl",
    ]
    (tmp_path / "chain-01").mkdir()
    for path in (*ours, *foreign):
        (tmp_path / path).write_text("x")
    delete_all(tmp_path)
    left = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {*foreign}
    # A folder without our store.json is left alone.
    (tmp_path / "chain-5").mkdir()
    (tmp_path / "chain-5" / "lock").touch()
    delete_all(tmp_path)
    assert (tmp_path / "chain-5" / "lock").exists()


def test_a_store_in_memory():
    model = torch.nn.Linear(2, 1)
    sampler = sg.SGLD(model.parameters(), 0.1, num_data=1, seed=0)
    store = sg.SampleStore()
    with sg.Collector(sampler, model, store):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            sampler.step()
        with pytest.raises(
            RuntimeError, match="chain 0 in memory: this process writes"
        ):
            sg.Collector(sampler, model, store)
    assert len(store) == 3 and store.path is None
    one = store[-1]
    assert torch.equal(one["weight"], model.weight) and one.path is None
    one["weight"].zero_()
    assert torch.equal(store[-1]["weight"], model.weight)
    assert pickle.loads(pickle.dumps([*store]))[0]["weight"].equal(store[0]["weight"])
    with pytest.raises(ValueError, match=r"another model: its 'weight' is .*F32"):
        sg.SampleWriter(store, {"weight": torch.ones(3)})
    with sg.SampleWriter(store, dict(one)) as writer:
        writer.restart()
    sg.SampleWriter(store, {"weight": torch.ones(3)}).close()
