"""The compiled kernel, absent where no C compiler was there at install; see telemetry/summary/kernel/module.c."""

from typing import Final

BUILDS: Final[tuple[str, ...]]

def reduce(
    build: int,
    dtype: int,
    data: int,
    numel: int,
    mask: int,
    row: int,
    accumulate: int,
    counts: int,
    bins_per_octave: int,
    lo_exp: int,
    hi_exp: int,
    quantization: int,
    mantissa_bits: int,
    min_exponent: int,
    max_finite: float,
    /,
) -> None: ...
def reduce_many(
    build: int,
    rows: int,
    accumulate: int,
    counts: int,
    bins_per_octave: int,
    lo_exp: int,
    hi_exp: int,
    dtypes: list[int],
    data: list[int],
    numels: list[int],
    counts_index: list[int],
    /,
) -> None: ...
def fingerprint(item_size: int, data: int, numel: int, /) -> int: ...
