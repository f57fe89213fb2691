"""Functions that format numbers for a page: rounded, with an interval, or in another unit."""

from collections.abc import Callable
from typing import Any

EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
Printed = list[tuple[str, str]]
NARROW = "†"


class Value(float):
    """A number from a JSON file. Each time the number is printed, its text and its key are recorded.

    narrow: Whether the record's intervals are older than their method (docs/method.md), and narrower than they say.
    """

    key: str
    printed: Printed
    narrow: bool = False

    @classmethod
    def of(cls, number: float, key: str, printed: Printed, narrow: bool = False) -> "Value":
        value = cls(number)
        value.key, value.printed, value.narrow = key, printed, narrow
        return value

    def scaled(self, factor: float) -> "Value":
        """Return the number in another unit: multiplied by `factor`, with the same key."""
        return Value.of(float(self) * factor, self.key, self.printed, self.narrow)

    def __truediv__(self, other: float) -> "Value":
        return Value.of(float(self) / float(other), f"{self.key} / {_key(other)}", self.printed)

    def __sub__(self, other: float) -> "Value":
        return Value.of(float(self) - float(other), f"{self.key} - {_key(other)}", self.printed)

    def __format__(self, spec: str) -> str:
        text = super().__format__(spec)
        self.printed.append((text, self.key))
        return text

    def __str__(self) -> str:
        if not self.is_integer():
            raise ValueError(f"{self.key} is {float(self)}; name a format, such as {{{{ {self.key}|fixed }}}}")
        return f"{self:,.0f}"


def _key(number: float) -> str:
    return number.key if isinstance(number, Value) else str(number)


def tagged(value: Any, key: str, printed: Printed, narrow: bool = False) -> Any:
    """Return a JSON value with every number in it replaced by a Value that has the number's key. narrow: See Value."""
    if isinstance(value, dict):
        return {name: tagged(each, _joined(key, name), printed, narrow) for name, each in value.items()}
    if isinstance(value, list):
        return [tagged(each, f"{key}[{place}]", printed, narrow) for place, each in enumerate(value)]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return Value.of(value, key, printed, narrow)


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if name.isidentifier() else f'{key}["{name}"]'


def fixed(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}"


def percent(share: Value, digits: int = 0) -> str:
    return f"{share.scaled(100):.{digits}f} %"


def bounds(estimate: Any) -> tuple[Value, Value, Value]:
    """Return value, low and high of an interval, which results store as a list or as a dict."""
    if isinstance(estimate, dict):
        return estimate["value"], estimate["low"], estimate["high"]
    value, low, high = estimate
    return value, low, high


def interval(estimate: Any, digits: int = 2) -> str:
    """Return text such as "1.68 (1.54 to 1.84)". A dagger marks intervals of an older method."""
    value, low, high = bounds(estimate)
    mark = NARROW if low.narrow else ""
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}){mark}"


def mean(values: dict[str, Value], digits: int = 3) -> str:
    """Return text with a mean over seeds and the standard deviation."""
    deviation = values["sd"] if "sd" in values else values["spread"]
    return f"{values['mean']:.{digits}f} (sd {deviation:.{digits}f})"


def correlation(found: dict[str, Value]) -> str:
    return interval([found["r"], found["low"], found["high"]])


def millions(value: Value, digits: int = 0) -> str:
    return f"{value.scaled(1e-6):,.{digits}f}"


def measured(result: dict[str, Any]) -> str:
    """Return text with the date, the number of threads and the processor of a result."""
    threads = result.get("threads")
    on = processor(result)
    if threads is not None:
        on = f"{threads} {'thread' if threads == 1 else 'threads'} of {on}"
    return f"{result['date']}, {on}"


def processor(result: dict[str, Any]) -> str:
    """Return the name of a result's processor with the fastest of its instruction sets for matrix products."""
    name = result["cpu"].replace("(R)", "").rpartition(" (")[0].removesuffix(" Processor")
    best = extension(result)
    return f"{name} ({best})" if best else name


def extension(result: dict[str, Any]) -> str:
    """Return the fastest instruction set of a result's processor for matrix products, or "" if none is known."""
    known = [flag for flag in EXTENSIONS if flag in result["cpu"].rpartition(" (")[2]]
    return known[-1] if known else ""


FILTERS: dict[str, Callable[..., Any]] = {
    "fixed": fixed,
    "percent": percent,
    "interval": interval,
    "measured": measured,
    "processor": processor,
    "mean": mean,
    "correlation": correlation,
    "count": len,
    "last": lambda values: values[-1],
    "millions": millions,
}
