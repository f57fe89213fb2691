"""Functions that format numbers for a page, rounded, with an interval or in another unit, and compare intervals."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from draftlab.intervals import ENOUGH

EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
Printed = list[tuple[str, str]]
NARROW = "†"
SECTIONS = {"greedy": "request"}  # how the keys of a result begin that are of one of its settings


class Value(float):
    """A number from a JSON file. Each time the number is printed, its text and its key are recorded.

    narrow: Whether the interval that it belongs to is too narrow, see narrow_intervals.
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

    def __add__(self, other: float) -> "Value":
        return Value.of(float(self) + float(other), f"{self.key} + {_key(other)}", self.printed)

    def __sub__(self, other: float) -> "Value":
        return Value.of(float(self) - float(other), f"{self.key} - {_key(other)}", self.printed)

    def __format__(self, spec: str) -> str:
        text = super().__format__(spec)
        self.printed.append((text, self.key))
        return text

    def __str__(self) -> str:
        if not self.is_integer():
            raise ValueError(
                f"{self.key} is {float(self)}; name a format, such as {{{{ {self.key}|fixed }}}}"
            )
        return f"{self:,.0f}"


def _key(number: float) -> str:
    return number.key if isinstance(number, Value) else str(number)


def tagged(value: Any, key: str, printed: Printed, narrow: bool = False) -> Any:
    """Return a JSON value with every number in it replaced by a Value that has the number's key. narrow: See Value."""
    if isinstance(value, dict):
        return {
            name: tagged(each, _joined(key, name), printed, narrow) for name, each in value.items()
        }
    if isinstance(value, list):
        return [
            tagged(each, f"{key}[{place}]", printed, narrow) for place, each in enumerate(value)
        ]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return Value.of(value, key, printed, narrow)


def _joined(key: str, name: str) -> str:
    return f"{key}.{name}" if name.isidentifier() else f'{key}["{name}"]'


def fixed(value: float, digits: int = 2) -> str:
    return f"{value:,.{digits}f}"


def percent(share: Value, digits: int = 0) -> str:
    return f"{share.scaled(100):.{digits}f} %"


def narrow_intervals(content: dict[str, Any], section: str) -> bool:
    """Return whether the intervals in a section of a result are narrower than 95 % intervals.

    Results of before 2026-11-28 have intervals of a bootstrap over requests. Over fewer than 24 requests, these contain
    the truth in clearly less than 95 % of cases (docs/method.md). The number of requests is that of the section's
    settings, or the smallest in the file. If there is none, the intervals count as narrow.
    """
    settings: dict[str, Any] = content.get("settings", {})
    about = [
        name
        for name in settings
        if section.startswith(name) or section.startswith(SECTIONS.get(name, name))
    ]
    counts = list(_counts(settings[max(about, key=len)] if about else content))
    return "intervals" not in content and min(counts, default=0) < ENOUGH


def _counts(value: Any) -> Iterator[int]:
    """Yield the numbers of requests or texts in a result."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name in ("prompts", "requests", "texts") and isinstance(each, int):
                yield each
            yield from _counts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _counts(each)


def bounds(estimate: Any) -> tuple[Value, Value, Value]:
    """Return value, low and high of an interval, which results store as a list or as a dict."""
    if isinstance(estimate, dict):
        return estimate["value"], estimate["low"], estimate["high"]
    value, low, high = estimate
    return value, low, high


def interval(estimate: Any, digits: int = 2) -> str:
    """Return text such as "1.68 (1.54 to 1.84)". A dagger marks intervals that are too narrow."""
    value, low, high = bounds(estimate)
    mark = NARROW if low.narrow else ""
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f}){mark}"


def total(values: Iterable[Value]) -> Value:
    first, *more = values
    for value in more:
        first = first + value
    return first


def mean(values: dict[str, Value], digits: int = 3) -> str:
    """Return text with a mean over seeds and the standard deviation."""
    deviation = values["sd"] if "sd" in values else values["spread"]
    return f"{values['mean']:.{digits}f} (sd {deviation:.{digits}f})"


def correlation(found: dict[str, Value]) -> str:
    return interval([found["r"], found["low"], found["high"]])


def separates(first: Any, second: Any) -> bool:
    """Return whether two intervals do not overlap, and are wide enough to say so."""
    _, low, high = bounds(first)
    _, other_low, other_high = bounds(second)
    if low.narrow or other_low.narrow:
        return False
    return low > other_high or other_low > high


def against_plain(speedup: Any) -> str:
    """Return text that says, by its interval, whether a speed-up is above or below 1, unless it is too narrow."""
    _, low, high = bounds(speedup)
    if low.narrow:
        return f"not judged ({NARROW})"
    if low > 1:
        return "faster than plain decoding"
    return "slower than plain decoding" if high < 1 else "not clearly faster or slower"


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
    name, _, flags = result["cpu"].replace("(R)", "").rpartition(" (")
    best = [flag for flag in EXTENSIONS if flag in flags]
    return name.removesuffix(" Processor") + (f" ({best[-1]})" if best else "")


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
