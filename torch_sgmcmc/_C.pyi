from collections.abc import Sequence

NOISE_BLOCK: int
PURPOSE_UPDATE: int
PURPOSE_MOMENTUM: int
PURPOSE_PRECISION: int
PURPOSE_INDEX_CHAIN: int
PURPOSE_PROBE: int
PURPOSE_MINIBATCH: int
PURPOSE_STRATA: int

def isa() -> str: ...
def philox4x32(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def gamma(shape: float, *, seed: int, step: int, element: int) -> float: ...
def index_chain_accepts(
    log_ratio: float, *, seed: int, step: int, proposal: int
) -> bool: ...
def minibatches(
    num_data: int,
    batch_size: int,
    *,
    count: int,
    replacement: bool,
    seed: int,
    step: int,
) -> bytearray: ...
def stratified_minibatches(
    ends: Sequence[int], batch_size: int, *, count: int, seed: int, step: int
) -> bytearray: ...
