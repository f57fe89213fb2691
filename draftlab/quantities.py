"""Numbers in words: significant digits without an exponent, sizes in memory, and durations."""

import math

SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def format_number(value: float, digits: int = 3) -> str:
    """Return a number as text with a number of significant digits and without an exponent, such as 12,060 or 0.0123.

    A number keeps all digits before its decimal point. inf and nan are themselves.
    """
    if not math.isfinite(value):
        return f"{value:g}"
    if value == 0:
        return f"{value:.{digits - 1}f}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    # rounding may add a digit, as 9.999 becomes 10.0
    decimals = digits - 1 - math.floor(math.log10(abs(round(value, decimals))))
    return f"{value:,.{max(decimals, 0)}f}"


def format_bytes(count: float, digits: int = 3) -> str:
    """Return a number of bytes in GB, MB or kB (powers of 1000)."""
    for unit, scale in SIZES:
        # 999.6 MB would print as 1,000 MB
        if abs(count) >= 0.9995 * scale:
            return f"{format_number(count / scale, digits)} {unit}"
    return f"{count:,.0f} bytes"


def format_duration(seconds: float) -> str:
    """Return a duration in the units in which people give it: 0.82 s, 45 s, 12 min, 3 h 40 min, 2 d 4 h."""
    if seconds < 9.95:
        return f"{format_number(seconds, 2)} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days:,} d {hours} h" if hours else f"{days:,} d"
