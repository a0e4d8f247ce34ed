"""A store: what is written is what is read, and in which bytes."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import zlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torch_sgmcmc as sg
from torch_sgmcmc import _C

# Of a draw's weights: small draws share a file, large ones have their own.
SMALL, LARGE = 3, 1500


def draw(
    seed: int, dtype: torch.dtype = torch.float32, rows: int = SMALL
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "b.weight": torch.randn(rows, 4, generator=generator).to(dtype),
        "a.bias": torch.randn(4, generator=generator).to(dtype),
        "count": torch.tensor(seed),
    }


def same(one: object, other: dict[str, Tensor]) -> bool:
    one = dict(one)  # type: ignore[call-overload]
    return one.keys() == other.keys() and all(
        one[k].dtype == other[k].dtype and torch.equal(one[k], other[k]) for k in other
    )


def write(path: Path, count: int = 5, chain: int = 0, rows: int = SMALL) -> None:
    with sg.SampleWriter(path, draw(0, rows=rows), chain=chain) as writer:
        for i in range(1, count + 1):
            one = draw(10 * chain + i, rows=rows)
            writer.append(
                one,
                step=20 * i,
                lr=0.1 / i,
                loss=i / 3,
                weight=-1.0,
                prior_precision=[1 / i, i],
            )


def files(path: Path, chain: int = 0) -> dict[str, bytes]:
    folder = path / f"chain-{chain}"
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "lock"}


# ---- Reading -------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [SMALL, LARGE])
def test_what_is_read_is_what_was_written(tmp_path: Path, rows: int) -> None:
    write(tmp_path, rows=rows)
    store = sg.SampleStore(tmp_path)
    assert len(store) == 5 and store.chains == [0]
    assert sorted(store.names) == ["a.bias", "b.weight", "count"]
    for i, one in enumerate(store, start=1):
        assert same(one, draw(i, rows=rows))
        assert (one.chain, one.number, one.step) == (0, i, 20 * i)
        # To the last bit, through the index's text.
        assert (one.lr, one.loss, one.weight) == (0.1 / i, i / 3, -1.0)
        assert one.temperature == 1.0
        assert one.prior_precision == (1 / i, i)


def test_slices_by_chain_draw_and_name(tmp_path: Path) -> None:
    write(tmp_path, 3, chain=0)
    write(tmp_path, 4, chain=2)
    store = sg.SampleStore(tmp_path)
    assert store.chains == [0, 2] and len(store) == 7
    last = store.chain(2)[-2:]["a.bias"]
    assert [one.step for one in last] == [60, 80]
    assert [list(one) for one in last] == [["a.bias"]] * 2
    assert same(last[1], {"a.bias": draw(24)["a.bias"]})
    assert same(store[["count"]][3], {"count": torch.tensor(21)})
    assert last[0].chain == 2 and store[7:].names == []
    with pytest.raises(
        ValueError, match=r"Invalid chain: 1 \(there are draws of \[0, "
    ):
        store.chain(1)
    with pytest.raises(KeyError, match=r"no draw has 'c' \(they have"):
        store["c"]
    with pytest.raises(IndexError):
        store[7]


def test_draws_can_be_compared_and_sent(tmp_path: Path) -> None:
    write(tmp_path, 3)
    store, again = sg.SampleStore(tmp_path), sg.SampleStore(tmp_path)
    assert store[1] in again and again.index(store[2]) == 2
    assert len({*store, *again}) == 3 and store[0] != store[1]
    assert store["count"][0] != store[0] and store[0] != dict(store[0])
    _ = store[0]["count"]
    for copied in (
        pickle.loads(pickle.dumps(store)),
        copy.deepcopy(store),
        pickle.loads(pickle.dumps([*store])),
    ):
        assert [*copied] == [*store]
        assert all(same(one, draw(i)) for i, one in enumerate(copied, start=1))
    one = pickle.loads(pickle.dumps(store[-1:]["count"]))[0]
    assert [*one] == ["count"] and (one.lr, one.loss) == (0.1 / 3, 1.0)


def test_no_other_tensor_is_read(tmp_path: Path) -> None:
    """One is there, although all others of the draw are damaged."""
    write(tmp_path, 1)
    (one,) = sg.SampleStore(tmp_path)
    bytes_of = bytearray(one.path.read_bytes())
    bytes_of[-1] ^= 1
    one.path.write_bytes(bytes_of)
    (one,) = sg.SampleStore(tmp_path)
    assert torch.equal(one["a.bias"], draw(1)["a.bias"])
    with pytest.raises(sg.DamagedDraw, match=r"'b\.weight' are altered"):
        one["b.weight"]


def test_writing_into_what_was_read_stays_here(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (one,) = sg.SampleStore(tmp_path)
    before = one.path.read_bytes()
    one["a.bias"].zero_()
    assert one.path.read_bytes() == before


DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
)


def of_all_kinds() -> dict[str, Tensor]:
    tensors = {
        f"{i}.{dtype}": torch.arange(i + 1).to(dtype) for i, dtype in enumerate(DTYPES)
    }
    odd = ("a b", "é\u4e2d\U0001f600", 'q"\\\n\t\x01\x7f/', "", "\\n")
    tensors |= {name: torch.full((2,), float(i)) for i, name in enumerate(odd)}
    return tensors | {"empty": torch.ones(3, 0), "scalar": torch.tensor(2.5)}


def test_all_dtypes_shapes_and_names(tmp_path: Path) -> None:
    tensors = of_all_kinds()
    with sg.SampleWriter(tmp_path, tensors) as writer:
        writer.append(tensors, step=1)
    (one,) = sg.SampleStore(tmp_path)
    assert same(one, tensors)


def test_bytes_are_those_of_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, save

    tensors = of_all_kinds()
    with sg.SampleWriter(tmp_path, tensors) as writer:
        writer.append(tensors, step=1)
    (one,) = sg.SampleStore(tmp_path)
    with safetensors.safe_open(one.path, "pt") as file:
        metadata = file.metadata()
    sums = metadata["crc32"]
    assert len(sums) == 8 * len(tensors)
    assert save(tensors, metadata) == one.path.read_bytes()
    assert same(load_file(one.path), tensors)


def test_draws_of_several_blocks(tmp_path: Path) -> None:
    """Blocks of 1 MiB go by the page cache, and what is left does not."""
    safetensors = pytest.importorskip("safetensors.torch")
    header = 184
    for size in (1 << 20, 3 << 20, (1 << 20) - 8, (2 << 20) + 8, (2 << 20) + 4096):
        data = os.urandom(size - header)
        of_draw = {
            "a": torch.frombuffer(bytearray(data[:-8]), dtype=torch.uint8),
            "b": torch.frombuffer(bytearray(data[-8:]), dtype=torch.uint8),
        }
        with sg.SampleWriter(tmp_path / str(size), of_draw) as writer:
            writer.append(of_draw, step=1)
        (one,) = sg.SampleStore(tmp_path / str(size))
        assert one.path.stat().st_size == size
        sums = "".join(f"{zlib.crc32(part):08x}" for part in (data[:-8], data[-8:]))
        assert safetensors.save(of_draw, {"crc32": sums}) == one.path.read_bytes()


def test_crc32_is_that_of_zlib() -> None:
    for size in (0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 191, 192, 1001):
        data = os.urandom(size)
        memory = torch.frombuffer(bytearray(data + b"-"), dtype=torch.uint8)
        for begin in range(min(size, 9)):
            found = _C.crc32(memory.data_ptr() + begin, size - begin)
            assert found == zlib.crc32(data[begin:])


def test_dtype_on_disk(tmp_path: Path) -> None:
    with sg.SampleWriter(tmp_path, draw(0), dtype=torch.bfloat16) as writer:
        writer.append(draw(1), step=1)
    (one,) = sg.SampleStore(tmp_path)
    expected = draw(1, torch.bfloat16)
    assert same(one, expected) and expected["count"].dtype == torch.int64


def test_a_store_that_is_being_written(tmp_path: Path) -> None:
    store = sg.SampleStore(tmp_path / "later")
    assert len(store) == 0 and store.chains == [] and store.names == []
    with sg.SampleWriter(tmp_path / "later", draw(0)) as writer:
        assert len(store.refresh()) == 0
        for i in range(1, 4):
            writer.append(draw(i), step=i)
            assert len(store) == i - 1
            assert len(store.refresh()) == i and same(store[-1], draw(i))
        with (tmp_path / "later" / "chain-0" / "index").open("ab") as index:
            index.write(b"draw 4 step 4 lr 0.1 tem")  # half of a line
        assert len(store.refresh()) == 3


@pytest.mark.full
def test_ten_thousand_small_draws_are_few_files(tmp_path: Path) -> None:
    one = {"w": torch.zeros(3)}
    with sg.SampleWriter(tmp_path, one) as writer:
        for i in range(1, 2101):
            writer.append({"w": torch.full((3,), float(i))}, step=i)
    names = ["0000000001.draws", "0000001025.draws", "0000002049.draws", "index"]
    assert sorted(files(tmp_path)) == names
    store = sg.SampleStore(tmp_path)
    assert [float(d["w"][1]) for d in store] == [*range(1, 2101)]
    # At most 4 MiB each: the largest draws that share files, and the next size.
    for floats, per_file in ((4096 - 32, 256), (4096 - 16, 1)):
        layout = _C.DrawLayout([("w", "F32", [floats])])
        assert layout.draws_per_file == per_file
    assert 10_000 / 256 < 100


def test_small_draws_are_safetensors_one_behind_the_other(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    write(tmp_path)
    (path,) = (tmp_path / "chain-0").glob("*.draws")
    whole = path.read_bytes()
    size = len(whole) // 5
    for i, one in enumerate(sg.SampleStore(tmp_path)):
        assert one.path == path
        part = whole[i * size : (i + 1) * size]
        assert same(one, safetensors.load(part))


def test_what_is_written_into_a_small_draw_stays_in_it(tmp_path: Path) -> None:
    write(tmp_path)
    store = sg.SampleStore(tmp_path)
    one = store[2]
    one["a.bias"].zero_()
    assert not one["a.bias"].any() and same(store[2], draw(3))
    assert same(pickle.loads(pickle.dumps(one)), draw(3))


def test_a_file_of_many_draws_goes_with_the_last(tmp_path: Path) -> None:
    one = {"w": torch.zeros(4064)}
    with sg.SampleWriter(tmp_path, one) as writer:
        for i in range(1, 262):  # 256 share a file
            writer.append({"w": torch.full((4064,), float(i))}, step=i)
        writer.thin(258)
        assert files(tmp_path).keys() == {"0000000257.draws", "index"}
        for i in range(262, 264):
            writer.append({"w": torch.full((4064,), float(i))}, step=i)
        writer.thin(600)
        # The one that grows stays.
        assert files(tmp_path).keys() == {"0000000257.draws", "index"}
        writer.append({"w": torch.full((4064,), 600.0)}, step=600, number=600)
        (last,) = sg.SampleStore(tmp_path)
        assert float(last["w"][0]) == 600 and last.path.name == "0000000257.draws"


@pytest.mark.parametrize("count", [3, 255, 256, 257])
def test_a_checkpoint_in_a_file_of_many_draws(tmp_path: Path, count: int) -> None:
    """Cut back, it has the bytes of a chain that went on, also if it was full."""
    one = {"w": torch.zeros(4064)}

    def append(writer: sg.SampleWriter, numbers: range, sign: float = 1.0) -> None:
        for i in numbers:
            writer.append({"w": torch.full((4064,), sign * i)}, step=i)

    with sg.SampleWriter(tmp_path / "whole", one) as writer:
        append(writer, range(1, count + 5))
    with sg.SampleWriter(tmp_path / "broken", one) as writer:
        append(writer, range(1, count + 1))
        position = writer.checkpoint()
        kept = files(tmp_path / "broken")
        append(writer, range(count + 1, count + 8), -1.0)
    with sg.SampleWriter(tmp_path / "broken", one) as writer:
        writer.cut_back(position)
        assert files(tmp_path / "broken") == kept
        append(writer, range(count + 1, count + 5))
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


def test_draws_that_a_checkpoint_needs_stay_in_their_file(tmp_path: Path) -> None:
    one = {"w": torch.zeros(4064)}
    with sg.SampleWriter(tmp_path, one) as writer:
        for i in range(1, 260):
            writer.append({"w": torch.full((4064,), float(i))}, step=i)
        position = writer.checkpoint()
        writer.thin(258)
        assert "0000000001.draws" in files(tmp_path)
        writer.cut_back(position)
        assert [float(d["w"][0]) for d in sg.SampleStore(tmp_path)] == [*range(1, 260)]
        writer.thin(258)
        writer.checkpoint()  # of which it is not the last but one
        assert "0000000001.draws" in files(tmp_path)
        writer.checkpoint()
        assert "0000000001.draws" not in files(tmp_path)
        with pytest.warns(UserWarning, match=r"draws \[1, 2, .* were dropped after"):
            writer.cut_back(position)


def test_a_file_stays_for_the_draws_that_the_last_checkpoint_has(
    tmp_path: Path,
) -> None:
    """Where others of it were dropped, and their checkpoints passed, before."""
    one = {"w": torch.zeros(4064)}
    with sg.SampleWriter(tmp_path, one) as writer:
        for i in range(1, 260):
            writer.append({"w": torch.full((4064,), float(i))}, step=i)
        writer.thin(2)
        position = writer.checkpoint()
        writer.thin(258)
        writer.checkpoint()
        assert "0000000001.draws" in files(tmp_path)
        writer.cut_back(position)
        found = [float(d["w"][0]) for d in sg.SampleStore(tmp_path)]
        assert found == [*range(2, 260, 2)]


def test_dropped_draws(tmp_path: Path) -> None:
    with sg.SampleWriter(tmp_path, draw(0, rows=LARGE)) as writer:
        for i in range(1, 6):
            writer.append(draw(i, rows=LARGE), step=i)
        store = sg.SampleStore(tmp_path)
        writer.thin(2)
        assert len(writer) == 2
        with pytest.raises(sg.DamagedDraw, match=r"draw 1 of chain 0.*refresh\(\)"):
            store[0]["count"]
        assert [int(one["count"]) for one in store.refresh()] == [2, 4]
        left = {"0000000002.safetensors", "0000000004.safetensors", "index"}
        assert files(tmp_path).keys() == left


# ---- Damage --------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["cut off", "header", "numbers", "missing"])
def test_a_damaged_draw_is_named_and_the_rest_readable(
    tmp_path: Path, damage: str
) -> None:
    write(tmp_path, rows=LARGE)
    path = tmp_path / "chain-0" / "0000000003.safetensors"
    whole = bytearray(path.read_bytes())
    if damage == "cut off":
        path.write_bytes(whole[:-1])
    elif damage == "missing":
        path.unlink()
    else:
        whole[30 if damage == "header" else -1] ^= 1
        path.write_bytes(whole)
    store = sg.SampleStore(tmp_path)
    with pytest.raises(sg.DamagedDraw, match="draw 3 of chain 0") as error:
        dict(store[2])
    assert str(path) in str(error.value)
    with pytest.warns(UserWarning, match="draw 3 of chain 0"):
        intact = store.intact()
    assert [one.number for one in intact] == [1, 2, 4, 5]
    for one in intact:
        assert same(one, draw(one.number, rows=LARGE))


@pytest.mark.parametrize("damage", ["cut off", "header", "numbers", "missing"])
def test_a_damaged_file_of_many_draws(tmp_path: Path, damage: str) -> None:
    write(tmp_path)
    (path,) = (tmp_path / "chain-0").glob("*.draws")
    whole = bytearray(path.read_bytes())
    size = len(whole) // 5
    intact = [1, 2, 4, 5]
    if damage == "cut off":
        path.write_bytes(whole[: 3 * size - 1])
        intact = [1, 2]
    elif damage == "missing":
        path.unlink()
        intact = []
    else:
        whole[2 * size + 30 if damage == "header" else 3 * size - 1] ^= 1
        path.write_bytes(whole)
    store = sg.SampleStore(tmp_path)
    with pytest.raises(sg.DamagedDraw, match=f"draw 3 of chain 0, {path}: "):
        dict(store[2])
    with pytest.warns(UserWarning, match="draw 3 of chain 0"):
        found = store.intact()
    assert [one.number for one in found] == intact
    assert all(same(one, draw(one.number)) for one in found)


def test_every_flipped_bit_of_a_draw_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (one,) = sg.SampleStore(tmp_path)
    whole = one.path.read_bytes()
    for bit in range(0, 8 * len(whole), 7):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        one.path.write_bytes(damaged)
        with pytest.raises(sg.DamagedDraw):
            dict(sg.SampleStore(tmp_path)[0])


def test_every_flipped_bit_of_an_index_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, 3)
    index = tmp_path / "chain-0" / "index"
    whole = index.read_bytes()
    head = whole.index(b"\ndraw ") + 1
    for bit in range(0, 8 * len(whole), 5):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        index.write_bytes(damaged)
        if bit // 8 < head:
            with pytest.raises(RuntimeError, match=r"Cannot read .*index: its line"):
                sg.SampleStore(tmp_path)
        elif bit // 8 == len(whole) - 1:
            assert len(sg.SampleStore(tmp_path)) == 2  # torn, as far as can be seen
        else:
            with pytest.warns(UserWarning, match=r"lines \[[\d, ]+\] of .*index are"):
                store = sg.SampleStore(tmp_path)
            assert 1 <= len(store) <= 2
            for one in store:
                assert same(one, draw(one.number))


def test_a_truncated_index_has_the_draws_before(tmp_path: Path) -> None:
    write(tmp_path, 3)
    index = tmp_path / "chain-0" / "index"
    whole = index.read_bytes()
    head = whole.index(b"\ndraw ") + 1
    for size in range(head, len(whole) + 1):
        index.write_bytes(whole[:size])
        count = whole[head:size].count(b"\n")
        assert [one.number for one in sg.SampleStore(tmp_path)] == [1, 2, 3][:count]


# ---- Refusals ------------------------------------------------------------------------


def test_a_store_of_another_model(tmp_path: Path) -> None:
    write(tmp_path)
    for other, words in (
        ({"a.bias": torch.ones(4)}, "it has 'b.weight' besides|it has 'count' besides"),
        (draw(0) | {"c": torch.ones(1)}, "it has no 'c'"),
        (
            draw(0) | {"a.bias": torch.ones(5)},
            r"its 'a.bias' is F32 of shape \[4\], not F32 of shape \[5\]",
        ),
        (draw(0, torch.bfloat16), r"its 'a.bias' is F32 of shape \[4\], not BF16 of"),
    ):
        for chain in (0, 1):
            with pytest.raises(ValueError, match=f"is of another model: ({words})"):
                sg.SampleWriter(tmp_path, other, chain=chain)
    assert sg.SampleStore(tmp_path).chains == [0]
    assert not (tmp_path / "chain-1").exists()


def test_draws_of_an_earlier_run_are_not_mixed_with(tmp_path: Path) -> None:
    write(tmp_path, 2)
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        with pytest.raises(
            ValueError, match=r"chain 0 of .* has 2 draws of an earlier"
        ):
            writer.append(draw(3), step=3)
        writer.restart()
        assert len(writer) == 0
        writer.append(draw(3), step=3)
    (one,) = sg.SampleStore(tmp_path)
    assert same(one, draw(3)) and one.number == 1


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    with pytest.raises(ValueError, match=r"^Invalid path: .*one is a file \(must be"):
        sg.SampleStore(tmp_path / "one")


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are none to store"):
        sg.SampleWriter(tmp_path, {})
    with pytest.raises(ValueError, match="float8_e5m2"):
        sg.SampleWriter(tmp_path, {"a": torch.ones(1).to(torch.float8_e5m2)})
    with pytest.raises(ValueError, match=r"Invalid chain: -1 \(must be >= 0\)"):
        sg.SampleWriter(tmp_path, draw(0), chain=-1)
    with pytest.raises(ValueError, match="'__metadata__'"):
        sg.SampleWriter(tmp_path, {"__metadata__": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []
    with sg.SampleWriter(tmp_path, draw(0)) as writer:
        with pytest.raises(ValueError, match=r"nothing for 'count' .*shape \[\]\)"):
            writer.append({k: v for k, v in draw(1).items() if k != "count"}, step=1)
        with pytest.raises(ValueError, match=r"shape \[2\] for 'a.bias'"):
            writer.append(draw(1) | {"a.bias": torch.ones(2)}, step=1)
        writer.append(draw(1), step=1, number=4)
        with pytest.raises(ValueError, match="Invalid number: 4"):
            writer.append(draw(1), step=1, number=4)
        assert len(writer) == 1


# ---- Thinning ------------------------------------------------------------------------


def naive(burn_in: int, every: int, most: int, steps: int) -> tuple[list[int], int]:
    """What is kept of steps 1, 2, ..., by dropping every second whenever it is full."""
    kept: list[int] = []
    interval = 1
    for step in range(1, steps + 1):
        if step <= burn_in or (step - burn_in) % every:
            continue
        number = (step - burn_in) // every
        if number % interval:
            continue
        while len(kept) >= most and number % interval == 0:
            interval *= 2
            kept = [k for k in kept if k % interval == 0]
        if number % interval == 0:
            kept.append(number)
    return kept, interval


@pytest.mark.parametrize("most", [1, 2, 3, 8, 10])
def test_the_thinning_doubles_when_it_is_full(most: int) -> None:
    burn_in, every = 7, 3
    schedule = _C.DrawSchedule(burn_in, every, most)
    kept: list[int] = []
    for step in range(1, 700):
        number = schedule.number(step)
        if schedule.thins(step):
            kept = [k for k in kept if k % schedule.interval(number) == 0]
        if schedule.keeps(step):
            kept.append(number)
        expected, interval = naive(burn_in, every, most, step)
        assert kept == expected and len(kept) <= most, step
        if number:
            assert schedule.interval(number) == interval
    assert len(kept) >= most / 2


def test_a_store_in_memory(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    sampler = sg.SGLD(model.parameters(), 0.1, num_data=1, seed=0)
    store = sg.SampleStore()
    with sg.Collector(sampler, model, store):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            sampler.step()
    assert len(store.refresh()) == 3
    assert torch.equal(store[-1]["weight"], model.weight)
    folder = Path(store.path)
    assert folder.exists()
    del store
    gc.collect()
    assert not folder.exists()
    # One that only its collector knows is there as long.
    collector = sg.Collector(sampler, model, sg.SampleStore())
    gc.collect()
    model(torch.ones(1, 2)).sum().backward()
    sampler.step()
    collector.flush()
    assert collector.num_draws == 1
    collector.close()
