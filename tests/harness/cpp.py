"""CMake builds of the C++ library and of programs that use the installed package.

Everything is built as a user would: the library configured, built and installed into a
folder of its own, the programs by ``find_package`` and against that folder alone. They
must need neither Python nor a CUDA toolkit, so neither is on the path of their builds.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

CHECKOUT = Path(__file__).resolve().parents[2]
#: What tests/cpp/consumer/programs.cpp is called by.
PROGRAMS_IN_ONE = ("chain", "documents", "line", "resumable", "store")
#: Where pip puts cmake and ninja; then wherever else they are.
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def compiler() -> str | None:
    """The C++ compiler that CMake would choose."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next(filter(None, map(shutil.which, filter(None, names))), None)


def run(*command: str | Path, path: str = PROGRAMS) -> str:
    """Returns a command's output; raises AssertionError with all of it on failure."""
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for hint in ("CUDA_HOME", "CUDA_PATH", "CUDACXX", "CMAKE_PREFIX_PATH"):
        environment.pop(hint, None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env=environment, **pipes, text=True)
    text = " ".join(map(str, command))
    assert done.returncode == 0, f"{text} exited with {done.returncode}\n{done.stdout}"
    return done.stdout


def tool(name: str) -> str:
    found = shutil.which(name, path=PROGRAMS)
    assert found, f"{name} is missing: pip install '.[test]'"
    return found


def jobs() -> str:
    return os.environ.get("MAX_JOBS", str(os.cpu_count()))


def install(work: Path) -> None:
    """Installs the library, built here unless TORCH_SGMCMC_BUILD names a build.

    With -O1, in half the time: bits do not depend on it, and presets have -O3. And
    each library as one file, of which LibTorch's headers take a third.
    """
    work.mkdir(exist_ok=True)
    build = os.environ.get("TORCH_SGMCMC_BUILD")
    if not build:
        build = str(work / "build")
        cuda = "AUTO" if torch.cuda.is_available() else "OFF"
        run(
            tool("cmake"),
            "-S",
            CHECKOUT,
            "-B",
            build,
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}",
            f"-DTORCH_SGMCMC_CUDA={cuda}",
            "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
            "-DTORCH_SGMCMC_TESTS=OFF",
            "-DCMAKE_UNITY_BUILD_BATCH_SIZE=100",
        )
        run(tool("cmake"), "--build", build, "--parallel", jobs())
    run(tool("cmake"), "--install", build, "--prefix", work / "prefix")


# What a reader has before, and what calls the functions of the snippets.
MODEL = """
  torch::nn::Linear net(5, 3);
  torch_sgmcmc::SGHMC sampler(
      net->parameters(), torch_sgmcmc::SGHMCOptions(0.01).num_data(64));
  const auto x = torch::randn({64, 5});
  const auto y = torch::arange(64).remainder(3);
"""
CALLS = {
    "main": "  {}::program();",
    "group": "  {}::group(net, 1.0);",
    "with_priors": "  {}::with_priors(net, torch::nn::Linear(3, 2));",
    "save_chain": "  {}::save_chain(*net, sampler);",
    "load_chain": "  {}::load_chain(*net, sampler);",
    "collect": "  {}::collect(net, sampler, x, y);",
    "predict": "  if (!{}::predict(net, x).mean.defined()) return 1;",
}


def documents() -> str:
    """The snippets of the documents as a program, each as if it were a file.

    It is read where the headers that they include have been.
    """
    texts = [(CHECKOUT / name).read_text() for name in ("README.md", "docs/cpp.md")]
    snippet = re.compile(r"^```cpp\n(.*?)^```", re.DOTALL | re.MULTILINE)
    blocks = snippet.findall("\n".join(texts))
    assert len(blocks) >= 5
    read = (CHECKOUT / "tests/cpp/consumer/programs.cpp").read_text().splitlines()
    body, calls = "", []
    for number, block in enumerate(blocks):
        lines = block.splitlines()
        own = [line for line in lines if line.startswith("#include")]
        assert "#include <torch_sgmcmc/torch_sgmcmc.h>" in own
        assert {*own} <= {*read}
        rest = "\n".join(line for line in lines if line not in own)
        rest = rest.replace("int main()", "void program()")  # without a return
        body += f"namespace block{number} {{\n{rest}\n}}\n"
        names = re.findall(r"^\w\S* (\w+)\(", block, re.MULTILINE)
        assert names
        calls += [CALLS[name].format(f"block{number}") for name in names]
    return "\n".join([body, "int main() {", MODEL, *calls, "  return 0;", "}", ""])


def path_without(folder: Path, *names: str) -> None:
    """Makes a PATH of all programs but those whose names begin with the given ones."""
    folder.mkdir(exist_ok=True)
    for directory in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in directory.glob("*"):
            link = folder / program.name
            if not program.name.startswith(names) and not link.is_symlink():
                link.symlink_to(program)


class Project:
    """A CMake project that finds the package in prefixes, and its programs."""

    def __init__(self, source: Path, build: Path, path: str) -> None:
        self.source = source
        self.build = build
        self.path = path

    def configure(self, *prefixes: str | Path, options: tuple[str, ...] = ()) -> str:
        """Configures with linkers that drop libraries that are not referred to.

        Programs are not optimised, of which nothing is asked and which takes as long
        again: what they do is the library's. Users' defaults are in preset gcc.
        """
        return run(
            tool("cmake"),
            "-S",
            self.source,
            "-B",
            self.build,
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
            f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefixes))}",
            "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed",
            "-DCMAKE_BUILD_TYPE=Debug",
            "-DCMAKE_CXX_FLAGS_DEBUG=-O0",
            *options,
            path=self.path,
        )

    def program(self, name: str) -> Path:
        """Builds a program."""
        run(
            tool("cmake"),
            "--build",
            self.build,
            "--target",
            name,
            "--parallel",
            jobs(),
            path=self.path,
        )
        return self.build / name
