"""The kernel lab: judges a reader's operator by its SPEC, and guards one that runs inside the engine.

A function is called on every case of the SPEC, in the engine's dtype too, and compared with the reference in float64;
then timed beside the built-in. `LLMEngine.swap_op` puts an accepted one in force at the safe point. Nothing here binds
operators or knows the engine: `build.py` does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strata_lab.capture import wait_for
from strata_lab.kernels import OPERATORS, SPECS
from strata_lab.kernels.cpu.packing import unpack
from strata_lab.kernels.spec import KernelSpec
from strata_lab.quant.base import LinearWeight

SWAPPED_STEP = "a step with swapped"  # how a fallback begins that is true only while operators are swapped
SLOWEST_MS = 100.0  # of one call on a small case: a step makes dozens of them
_REPEATS = 5
_STAYS_WIDE = ("cos", "sin")  # rotations are float32 whatever the activations are


@dataclass(frozen=True, slots=True)
class Difference:
    """The first element that is not within tolerance: of which case and result, where, and what it should be."""

    case: str
    result: str
    index: tuple[int, ...]
    got: float
    expected: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"case {self.case!r}, {self.result}, element {list(self.index)}: got {self.got:.9g}, expected "
            f"{self.expected:.9g}, allowed difference {self.tolerance:.3g}"
        )


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What `LLMEngine.swap_op` answers.

    Attributes:
        op: the operator.
        status: "applied", "refused" with nothing changed, or "unchanged".
        reason: why it was refused, or what it means here; may be empty.
        difference: the first wrong element of a refused function.
        us: microseconds per call of the function, on the SPEC's case that moves most bytes; 0 if it was not timed.
        built_in_us: the same of the function it replaces.
        bytes_moved: bytes that such a call must move.
        calls_per_step: calls in one decode step of one request under the toggles in force.
        swap_ms: time the engine stood still.
    """

    op: str
    status: str
    reason: str = ""
    difference: Difference | None = None
    us: float = 0.0
    built_in_us: float = 0.0
    bytes_moved: int = 0
    calls_per_step: int = 0
    swap_ms: float = 0.0

    @property
    def ok(self) -> bool:
        """It was not refused."""
        return self.status != "refused"

    def __str__(self) -> str:
        text = f"{self.op}: {self.status}" + (f" ({self.reason})" if self.reason else "")
        if self.us:
            text += f"\n{self.us:.1f} us per call, the built-in {self.built_in_us:.1f} us, {self.bytes_moved} bytes"
        return text + (f"\n{self.calls_per_step} calls per step" if self.calls_per_step else "")


class Guarded:
    """A swapped operator; from its first failure on, the built-in answers.

    Args:
        fn: the reader's function.
        built_in: what it stands in for.
        failed: called once with the error, before the error ends the step.
    """

    def __init__(
        self, fn: Callable[..., Any], built_in: Callable[..., Any], failed: Callable[[Exception], None]
    ) -> None:
        self.fn, self._built_in, self._failed = fn, built_in, failed
        self.armed, self.broken, self.calls = False, False, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's answer, or the built-in's once it has failed."""
        if self.broken:
            return self._built_in(*args, **kwargs)
        self.calls += 1
        try:
            return self.fn(*args, **kwargs)
        except Exception as error:
            if self.armed:  # before that it is a trial or a capture, whose failure is answered otherwise
                self.broken = True
                self._failed(error)
            raise


def spec_of(op: str) -> KernelSpec:
    """The contract of an operator; raises `ValueError` for an unknown one."""
    if op not in OPERATORS:
        raise ValueError(f"operator {op!r} is unknown; the operators are {', '.join(OPERATORS)}")
    return next(spec for spec in SPECS() if spec.name == op)


def judge(
    op: str, fn: Callable[..., Any], built_in: Callable[..., Any], device: torch.device, dtype: torch.dtype, rows: bool
) -> SwapReport:
    """Whether `fn` keeps the contract of `op`: status "applied" if it may run, else "refused" with the reason.

    Args:
        op: the operator's name.
        fn: called with the operator's keyword arguments.
        built_in: timed beside it.
        device: where it is tried.
        dtype: of the engine's activations, tried beside the SPEC's own.
        rows: weights in layout "rows", as Triton's operators take them.
    """
    spec, largest = spec_of(op), (-1, {})  # type: tuple[KernelSpec, tuple[int, dict[str, Any]]]
    for name, make in _trials(spec, device, dtype, rows):
        inputs = make()
        try:
            started = time.perf_counter()
            returned = fn(**inputs)
            wait_for(device)
            took_ms = (time.perf_counter() - started) * 1e3
        except Exception as error:
            return SwapReport(op, "refused", f"case {name!r} raised {type(error).__name__}: {error}")
        reason, difference = _fault(spec, name, returned, inputs, make)
        if reason:
            return SwapReport(op, "refused", reason, difference)
        if took_ms > SLOWEST_MS and (took_ms := _microseconds(fn, make(), device) / 1e3) > SLOWEST_MS:
            limit = f"case {name!r} takes {took_ms:.0f} ms per call; at most {SLOWEST_MS:.0f} ms keep the engine alive"
            return SwapReport(op, "refused", limit)
        moved = spec.bytes_moved(**inputs)
        largest = max(largest, (moved, make()), key=lambda pair: pair[0])
    moved, inputs = largest
    times = [_microseconds(f, inputs, device) for f in (fn, built_in)]
    return SwapReport(op, "applied", us=times[0], built_in_us=times[1], bytes_moved=moved)


def _trials(
    spec: KernelSpec, device: torch.device, dtype: torch.dtype, rows: bool
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    for case in spec.cases():

        def make(make: Callable[[torch.device], dict[str, Any]] = case.make) -> dict[str, Any]:
            inputs = make(device)
            return {n: unpack(x) if rows and isinstance(x, LinearWeight) else x for n, x in inputs.items()}

        def narrow(make: Callable[[], dict[str, Any]] = make) -> dict[str, Any]:
            return {n: x.to(dtype) if _activation(n, x) and n not in _STAYS_WIDE else x for n, x in make().items()}

        yield case.name, make
        if dtype != torch.float32 and dtype in spec.tolerance:
            yield f"{case.name}, {str(dtype).removeprefix('torch.')}", narrow


def _activation(name: str, x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and not name.endswith("_cache")


def _fault(
    spec: KernelSpec, case: str, returned: Any, inputs: dict[str, Any], make: Callable[[], dict[str, Any]]
) -> tuple[str, Difference | None]:
    """What is wrong with an answer, and its first wrong element; ("", None) if nothing is."""
    before, plain = make(), make()
    exact = {n: x.double() if _activation(n, x) else x for n, x in make().items()}
    for name, x in before.items():
        if isinstance(x, Tensor) and not name.endswith("_cache") and not _same(x, inputs[name]):
            return f"case {case!r}: it changes its argument {name!r}", None
    model, expected = _results(spec.ref(**plain), plain), _results(spec.ref(**exact), exact)
    got = _results(returned, inputs)
    if got.keys() != model.keys():
        return f"case {case!r}: it returns {list(got)}, the contract says {list(model)}", None
    owned = {x.untyped_storage().data_ptr() for n, x in inputs.items() if isinstance(x, Tensor) and x.numel()}
    for name, x in got.items():
        want = model[name]
        if not isinstance(x, Tensor) or (x.shape, x.dtype, x.device) != (want.shape, want.dtype, want.device):
            shown = f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            must = f"{want.dtype} {list(want.shape)} on {want.device}"
            return f"case {case!r}: {name} is {shown}, the contract says {must}", None
        if name.startswith("result") and x.numel() and x.untyped_storage().data_ptr() in owned:
            return f"case {case!r}: {name} shares memory with an argument; return a fresh tensor", None
        if found := _first_wrong(case, name, x, expected[name], *spec.tolerance.get(x.dtype, (0.0, 0.0))):
            return str(found), found
    return "", None


def _results(returned: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    values = () if returned is None else returned if isinstance(returned, tuple) else (returned,)
    return {f"result {i}": x for i, x in enumerate(values)} | {n: x for n, x in inputs.items() if n.endswith("_cache")}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _first_wrong(case: str, name: str, x: Tensor, want: Tensor, rtol: float, atol: float) -> Difference | None:
    got, right = x.double(), want.double()
    wrong = ~torch.isclose(got, right, rtol=rtol, atol=atol, equal_nan=True)
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    value = right[index].item()
    return Difference(case, name, index, got[index].item(), value, atol + rtol * abs(value))


def _microseconds(fn: Callable[..., Any], inputs: dict[str, Any], device: torch.device) -> float:
    """Median time of one call."""
    fn(**inputs)
    times = []
    for _ in range(_REPEATS):
        wait_for(device)
        started = time.perf_counter()
        fn(**inputs)
        wait_for(device)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)


def changed_ops(before: Mapping[str, Guarded], after: Mapping[str, Guarded]) -> Mapping[str, str]:
    """Operators that another function computes now, as "op NAME" to the function's name or "built-in"."""
    moved = {name for name in {*before, *after} if before.get(name) is not after.get(name)}
    names = {n: getattr(after[n].fn, "__name__", "swapped") if n in after else "built-in" for n in moved}
    return {f"op {name}": names[name] for name in sorted(names)}
