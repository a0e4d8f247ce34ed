from collections.abc import Sequence
from enum import IntEnum
from typing import Any

VARIANCE_DECAY: float
MIN_GRADIENTS: int
NOISE_BLOCK: int
LOOK: int
PROPOSAL: int
REFRESHMENT: int

class Purpose(IntEnum):
    UPDATE = 0
    MOMENTUM = 1
    PRECISION = 2
    INDEX_CHAIN = 3
    PROBE = 4
    METROPOLIS = 5
    BOUNCE_CLOCK = 6
    REFRESHMENT = 7
    MINIBATCH = 8
    SUBSAMPLE = 10
    SUBSAMPLE_BLOCK = 11
    POISSON = 12
    SEED = 13

def isa() -> str: ...
def settings(
    sampler: str,
) -> list[tuple[str, str, float, float, float, bool, bool, tuple[str, ...]]]: ...
def op_specs() -> list[dict[str, Any]]: ...
def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def fold_in(seed: int, stream: int) -> int: ...
def gamma(shape: float, *, seed: int, step: int, element: int) -> float: ...
def index_chain_accepts(
    log_ratio: float, *, seed: int, step: int, proposal: int
) -> bool: ...
def packed_step(
    *,
    checks: bool,
    seed: int,
    num_chains: int,
    calls: Sequence[
        tuple[int, bool, Sequence[int], Sequence[int], Sequence[int], Sequence[float]]
    ],
) -> bytearray: ...
def samples_by(time: float, interval: float) -> int: ...

class PlanGuard:
    def __init__(
        self,
        groups: list[dict[str, Any]],
        owned: Sequence[dict[str, Any]],
        is_updated: Sequence[bool],
        hyperparameters: Sequence[str],
        state: dict[Any, Any],
    ) -> None: ...
    def note(self) -> None: ...
    def has_same_values(self) -> bool: ...
    def gradients(self, groups: Any, state: Any) -> list[Any] | None: ...

def rate_of(
    losses: int,
    derivatives: int,
    count: int,
    double_precision: bool,
    num_data: float,
    temperature: float,
    replacement: bool,
    prior: float,
) -> tuple[int, float, float]: ...
def minibatches(
    num_data: int,
    batch_size: int,
    *,
    count: int,
    replacement: bool,
    seed: int,
    step: int,
    num_replicas: int,
    rank: int,
) -> bytearray: ...
def check_share(batch_size: int, num_replicas: int, rank: int) -> None: ...
def equal_running(
    before: int | None, equal: bool, zero: bool, *, hint: str, off: str
) -> int | None: ...
def ratio(part: float, whole: float) -> float: ...
def draw_below(
    bound: int, count: int, *, purpose: int, seed: int, step: int, element: int
) -> bytearray: ...

class BounceClock:
    def __init__(self) -> None: ...
    @staticmethod
    def load(saved: Sequence[float]) -> BounceClock: ...
    def save(self) -> list[float]: ...
    def copy(self) -> BounceClock: ...
    def __deepcopy__(self, memo: dict[int, object]) -> BounceClock: ...
    def next(
        self, num_std: float, refresh_rate: float, *, seed: int, step: int
    ) -> tuple[int, float, float]: ...
    @staticmethod
    def accepts(rate: float, value: float, *, seed: int, step: int) -> bool: ...
    def observe(self, wait: float, value: float, variance: float) -> None: ...
    def bounce(
        self, wait: float, value: float, variance: float, reflected: float
    ) -> None: ...
    def take(
        self,
        event: int,
        wait: float,
        value: float,
        variance: float,
        reflected: float | None,
    ) -> None: ...
    @staticmethod
    def warning(proposals: int, violations: int, num_std: float) -> str: ...
    def restart(self) -> None: ...
    def rate(self, num_std: float, times: Sequence[float]) -> list[float]: ...
    @property
    def now(self) -> float: ...
    @property
    def observations(self) -> list[tuple[float, float, float]]: ...
