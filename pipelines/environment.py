"""The environment that stages, sweeps and tests share: the same bytes on every x86-64 machine.

Libraries look at the processor when they start, and take other kernels on another one: sums are
then added up in another order, or products fused with sums. One such last digit sends a Bayesian
search down another path. So the choice is made here, the one that every x86-64 machine has which
NumPy runs on (SSE 4.2), with one thread each:

======================== ============================= ============================================
variable                 whose kernels                 what changes without it
======================== ============================= ============================================
OPENBLAS_CORETYPE        NumPy's and SciPy's BLAS      products of matrices, factorisations, fits
NPY_DISABLE_CPU_FEATURES NumPy's own loops             exp, log, powers; the order of equal values
GLIBC_TUNABLES           exp, log, sin, pow of the     draws of random numbers, compiled kernels,
                         system's library              SciPy's functions
ATEN_CPU_CAPABILITY      torch's own loops             sums, logarithms of the gamma function
MKL_CBWR                 torch's BLAS                  products of matrices, factorisations
XLA_FLAGS                code that jax generates       every fused expression, sums, products
======================== ============================= ============================================

Roots in torch come from MKL, which no setting pins on AMD: the path of Ax may rest on them, so its
stage states a tolerance. What else remains free does not show in results: for which processor numba
compiles (no ``fastmath``, so LLVM neither fuses nor reorders), which instructions copy and compare
strings, and the number of cores. ``HETERO_PROCESSOR=other`` turns the first two the other way, so
that two runs can be compared.

Most are read as a library is imported, GLIBC_TUNABLES as a process starts. ``python -m
pipelines.environment COMMAND ...`` runs any command so, such as ``dask worker ADDRESS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hetero.errors import ParameterError

# Whoever reads a notebook imports jsonschema, which for a second compiles a grammar of addresses if
# it finds this package; notebooks have none to be checked.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

OTHER = "HETERO_PROCESSOR"

THREADS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
}

# Both names of each, before glibc 2.33 and since; it passes over those that it does not know.
_LIBM = "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable,-FMA4_Usable"

PINNED = {
    "OPENBLAS_CORETYPE": "Nehalem",
    # All that the pinned NumPy dispatches, whether this machine has it or not.
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
    "GLIBC_TUNABLES": _LIBM,
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2 --xla_cpu_multi_thread_eigen=false",
}

# The other choice wherever one is left.
_FREE = {
    "NUMBA_CPU_NAME": "generic",
    "ARROW_USER_SIMD_LEVEL": "NONE",
    "GLIBC_TUNABLES": f"{_LIBM},-AVX512VL,-AVX512BW,-ERMS,-AVX_Fast_Unaligned_Load,-SSSE3,-SSE4_1",
}

# Beside the processor: one hash seed, one clock, no bars, the kernel of this environment.
_STAGE = {
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "0",
    "TZ": "UTC",
    "TQDM_DISABLE": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    # The kernel of this environment, not one of the same name in the user's home.
    "JUPYTER_PREFER_ENV_PATH": "1",
    "JUPYTER_PLATFORM_DIRS": "1",
}


def processor() -> dict[str, str]:
    """Variables that take the choice of kernels from the processor.

    Examples
    --------
    >>> processor()["OPENBLAS_CORETYPE"]
    'Nehalem'
    """
    turned = os.environ.get(OTHER, "")
    if turned not in ("", "other"):
        raise ParameterError(
            f"{OTHER} is '{turned}'.", resolve=f"unset it, or set it to 'other' ({__name__})."
        )
    return THREADS | PINNED | (_FREE if turned else {})


def stage() -> dict[str, str]:
    """What a notebook runs in, as a stage or as a point of a sweep.

    Examples
    --------
    >>> stage()["PYTHONHASHSEED"]
    '0'
    """
    return processor() | _STAGE


@contextmanager
def applied(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started meanwhile."""
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def main(command: list[str]) -> None:
    """Become the command, in this environment."""
    try:
        if not command:
            raise ParameterError(
                "No command is given.", resolve="say `python -m pipelines.environment COMMAND ...`."
            )
        os.environ.update(processor())
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"Error: {command[0]} cannot be run: {error.strerror}.")
    except ParameterError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
