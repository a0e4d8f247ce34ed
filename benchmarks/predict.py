"""Cost and memory of predictions with many draws, relative to bare forward passes.

    python benchmarks/predict.py [--rounds 30] [--only mnist|resnet|vmap]

The MNIST network 784-100-10 with 1,000 draws and 10,000 inputs, and ResNet-18 with 30
draws and 100 inputs of 3×64×64, from a SampleStore. Both are made in turns in one
process: predict(), and a loop that reads a draw's file by safetensors, puts it into the
model and throws the outputs away. The median of the rounds' ratios of processor time is
reported, with its quartiles. Peak memory is that of processes of their own.

--only vmap: 100 draws in memory of three small networks and 10,000 inputs; predict(),
and the same means, variances and entropies by torch.func.vmap by hand. And the seconds
of report() of four chains of 1,000 stored draws of 5-16-2, for 100 inputs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import torch_sgmcmc as sg

FEW = {"mnist": 10, "resnet": 3}
MANY = {"mnist": 1000, "resnet": 30}
BATCH = {"mnist": 1000, "resnet": 50}


def build(task: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if task == "mnist":
        model = nn.Sequential(nn.Linear(784, 100), nn.Sigmoid(), nn.Linear(100, 10))
        return model, torch.rand(10_000, 784)
    from torchvision.models import resnet18

    return resnet18(num_classes=10), torch.rand(100, 3, 64, 64)


def write(model: nn.Module, folder: Path, count: int) -> None:
    with sg.SampleWriter(folder, model.state_dict()) as writer:
        for i in range(count):
            draw = {
                name: tensor + 0.05 * torch.randn_like(tensor)
                if name.endswith(("weight", "bias"))
                else tensor.clone()
                for name, tensor in model.state_dict().items()
            }
            writer.append(draw, step=i)


def stored(folder: Path, count: int) -> sg.Draws:
    return sg.SampleStore(folder)[:count]


def read(folder: Path, count: int) -> Iterator[dict[str, Tensor]]:
    for draw in stored(folder, count):
        yield load_file(draw.path)


@torch.no_grad()
def bare(model: nn.Module, draws: Iterator[dict[str, Tensor]], x: Tensor, n: int):
    model.eval()
    for draw in draws:
        model.load_state_dict(draw)
        for batch in x.split(n):
            model(batch)


@torch.no_grad()
def in_memory(model: nn.Module, folder: Path, count: int, x: Tensor) -> Tensor:
    """The average of what is all kept."""
    model.eval()
    kept = []
    for draw in read(folder, count):
        model.load_state_dict(draw)
        kept.append(model(x).softmax(1).double())
    return torch.stack(kept).mean(0)


def seconds(function: Callable[[], object]) -> float:
    # Of the processor, by one thread: what else the machine does matters less.
    started = time.process_time()
    function()
    return time.process_time() - started


def report(task: str, rounds: int, folder: Path) -> None:
    model, x = build(task)
    many, few, n = MANY[task], FEW[task], BATCH[task]
    write(model, folder, many)
    part = max(1, many // 20)  # of the draws, in each round
    bare(model, read(folder, few), x, n)  # threads, allocator, page cache
    for chunk_size in (1, 10) if task == "mnist" else (1,):
        ratios, times = [], []
        for _ in range(rounds):
            without = seconds(lambda: bare(model, read(folder, part), x, n))
            ours = seconds(
                lambda c=chunk_size: sg.predict(
                    model, stored(folder, part), x, batch_size=n, chunk_size=c
                )
            )
            ratios.append(ours / without)
            times.append(without)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{task}, chunk_size {chunk_size}: {middle:.3f} ({low:.3f} to {high:.3f}) "
            "times the bare forwards; "
            f"these: {1e3 * statistics.median(times) / part:.1f} ms a draw",
            flush=True,
        )
    found = sg.predict(model, stored(folder, many), x, batch_size=n).mean
    error = (found.double() - in_memory(model, folder, many, x)).abs().max()
    print(f"{task}: {float(error):.1e} from the average in memory")
    peaks = {}
    for count in (few, many):
        command = [sys.executable, __file__, "--peak", task, str(folder), str(count)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[count] = float(done.stdout)
    print(
        f"{task}: peak memory {peaks[many]:.0f} MiB with {many} draws, "
        f"{peaks[few]:.0f} with {few}: {peaks[many] / peaks[few]:.3f} times"
    )


SMALL = (5, 16, 16, 2), (20, 50, 10), (784, 100, 10)


def network(*sizes: int) -> nn.Module:
    layers = [(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(sizes)]
    return nn.Sequential(*list(chain(*layers))[:-1])


@torch.no_grad()
def by_hand(
    model: nn.Module, draws: list[dict[str, Tensor]], x: Tensor
) -> tuple[Tensor, ...]:
    """The mean and variance of probabilities, the total and mean entropy."""
    stacked = {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}
    out = torch.vmap(lambda draw: torch.func.functional_call(model, draw, x))(stacked)
    p = out.softmax(-1)
    mean, entropy = p.mean(0), torch.special.entr(p).sum(-1).mean(0)
    return mean, p.var(0, correction=0), torch.special.entr(mean).sum(-1), entropy


def beside_vmap(rounds: int) -> None:
    for sizes in SMALL:
        torch.manual_seed(0)
        model, x = network(*sizes), torch.rand(10_000, sizes[0])
        state = model.state_dict().items()
        draws = [
            {k: t + 0.05 * torch.randn_like(t) for k, t in state} for _ in range(100)
        ]
        found, expected = sg.predict(model, draws, x), by_hand(model, draws, x)
        values = found.mean, found.variance, found.total, found.aleatoric
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
        hand = partial(by_hand, model, draws, x)
        for size in (1, 25):
            ours = partial(sg.predict, model, draws, x, chunk_size=size)
            ratios = [seconds(ours) / seconds(hand) for _ in range(rounds)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            name = "-".join(map(str, sizes))
            print(
                f"{name}, chunk_size {size}: {middle:.2f} ({low:.2f} to {high:.2f}) "
                "times torch.func.vmap by hand",
                flush=True,
            )


def reports(rounds: int) -> None:
    model, x = network(5, 16, 2), torch.rand(100, 5)
    state = model.state_dict().items()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(4):
            with sg.SampleWriter(folder, model.state_dict(), chain=i) as writer:
                for step in range(1000):
                    draw = {k: t + 0.05 * torch.randn_like(t) for k, t in state}
                    writer.append(draw, step=step)
        times = [seconds(lambda: sg.report(model, folder, x)) for _ in range(rounds)]
    low, middle, high = statistics.quantiles(times, n=4)
    print(f"report: {middle:.2f} ({low:.2f} to {high:.2f}) s")


def peak(task: str, folder: Path, count: int) -> None:
    torch.set_num_threads(1)
    model, x = build(task)
    sg.predict(model, stored(folder, count), x, batch_size=BATCH[task])
    # Not getrusage()'s, which has the parent's peak in it.
    status = Path("/proc/self/status").read_text()
    print(int(status.partition("VmHWM:")[2].split()[0]) / 1024)


def main() -> None:
    """Prints three or four lines for each network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only", choices=[*MANY, "vmap"])
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        task, folder, count = arguments.peak
        peak(task, Path(folder), int(count))
        return
    torch.set_num_threads(1)
    if arguments.only in (None, "vmap"):
        beside_vmap(arguments.rounds)
        reports(arguments.rounds)
    for task in [t for t in MANY if arguments.only in (None, t)]:
        with tempfile.TemporaryDirectory() as folder:
            report(task, arguments.rounds, Path(folder))


if __name__ == "__main__":
    main()
