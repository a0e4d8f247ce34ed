from collections.abc import Sequence
from enum import IntEnum
from typing import Any, overload

FORGETTING: float
MIN_GRADIENTS: int
MOST_CHANGES: int
MOST_WARMUP_STEPS: int
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
def operator_rows() -> list[dict[str, Any]]: ...
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

class Moments:
    @staticmethod
    def of(
        losses: int, derivatives: int, count: int, double_precision: bool
    ) -> Moments: ...
    @property
    def bad(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def mean(self) -> float: ...
    @property
    def squares(self) -> float: ...

def rate_of(
    moments: Moments,
    num_data: float,
    temperature: float,
    replacement: bool,
    prior: float,
) -> tuple[float, float, bool]: ...
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
def changes_running(
    before: int,
    known: Sequence[float],
    now: Sequence[float],
    temperature: float,
    num_data: float,
) -> int: ...
def changed_target() -> str: ...
def equal_running(
    before: int | None, equal: bool, zero: bool, *, hint: str, off: str
) -> int | None: ...
def ratio(part: float, whole: float) -> float: ...
def leapfrog_steps(
    num_steps: int | None,
    length: float | None,
    step_size: float,
    most: int | None = None,
) -> int: ...
def mean_acceptance(log_ratios: Sequence[float]) -> float: ...

class ECSEstimator:
    def __init__(
        self,
        num_data: float,
        batch_size: int = 1,
        num_factors: int = 0,
        lower_bound: float = 0.0,
    ) -> None: ...
    @property
    def num_data(self) -> float: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def num_factors(self) -> int: ...
    @property
    def lower_bound(self) -> float: ...
    def estimate(
        self, differences: int, count: int, weights: int
    ) -> tuple[float, float, float, float]: ...
    def is_overturned(self, mean: float) -> bool: ...
    def is_out_of_bounds(
        self,
        variance: float,
        mean: float,
        *,
        present_variance: float,
        max_variance: float,
    ) -> bool: ...

class Subsample:
    def __init__(
        self,
        *,
        num_data: int,
        num_cells: int,
        num_blocks: int,
        batch_size: int,
        poisson: bool,
        seed: int,
    ) -> None: ...
    def begin(self, block: int) -> int: ...
    def draw(self, step: int) -> tuple[list[int], bytearray]: ...
    def propose(self, step: int) -> tuple[int, list[int], bytearray]: ...

class DualAveraging:
    @overload
    def __init__(self, step_size: float, target: float) -> None: ...
    @overload
    def __init__(self, state: Sequence[float]) -> None: ...
    def update(self, acceptance: float) -> float: ...
    @property
    def target(self) -> float: ...
    @property
    def count(self) -> int: ...
    @property
    def step_size(self) -> float: ...
    @property
    def averaged(self) -> float: ...
    @property
    def state(self) -> list[float]: ...

class BounceClock:
    def __init__(self) -> None: ...
    @staticmethod
    def load(saved: Sequence[float]) -> BounceClock: ...
    def save(self) -> list[float]: ...
    def copy(self) -> BounceClock: ...
    def __deepcopy__(self, memo: dict[int, object]) -> BounceClock: ...
    def next(
        self, confidence: float, refresh_rate: float, *, seed: int, step: int
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
    def warning(proposals: int, violations: int, confidence: float) -> str: ...
    def restart(self) -> None: ...
    def rate(self, confidence: float, times: Sequence[float]) -> list[float]: ...
    @property
    def now(self) -> float: ...
    @property
    def observations(self) -> list[tuple[float, float, float]]: ...

def crc32(at: int, size: int) -> int: ...
