"""Format bytes, times, counts and rates for people: three digits and a unit, the same everywhere."""

from __future__ import annotations

from typing import Final

_PREFIXES: Final = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_COUNTS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def three_digits(number: float) -> str:
    """Format a number of at least 1 with three digits, and all digits before the point.

    >>> three_digits(3.14159), three_digits(31.4159), three_digits(3141.59)
    ('3.14', '31.4', '3,142')
    """
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def format_bytes(num_bytes: float) -> str:
    """Format a quantity of memory.

    >>> format_bytes(3 * 2**29), format_bytes(50 * 2**20), format_bytes(100), format_bytes(0)
    ('1.50 GiB', '50.0 MiB', '0.10 KiB', '0 bytes')
    """
    if num_bytes == 0:
        return "0 bytes"
    for unit, unit_bytes in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(num_bytes) >= unit_bytes:
            return f"{three_digits(num_bytes / unit_bytes)} {unit}"
    return f"{three_digits(num_bytes / 2**10)} KiB"


def format_s(seconds: float) -> str:
    """Format a duration in seconds, milliseconds or microseconds.

    >>> format_s(4.3121), format_s(0.01234), format_s(312.4), format_s(3e-6)
    ('4.31 s', '12.3 ms', '312 s', '3.00 µs')
    """
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds * 1e6)} µs"


def format_span_s(low_s: float, high_s: float) -> str:
    """Format a range of durations, with the unit once where both have the same.

    >>> format_span_s(13.5, 17.2), format_span_s(0.95, 1.1)
    ('13.5 to 17.2 s', '950 ms to 1.10 s')
    """
    low, high = format_s(low_s), format_s(high_s)
    return f"{low.partition(' ')[0] if low.split()[1] == high.split()[1] else low} to {high}"


def format_clock(seconds: float) -> str:
    """Format a duration as a clock shows it.

    >>> format_clock(61.2), format_clock(3723)
    ('1:01', '1:02:03')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def format_count(number: float) -> str:
    """Format a count of parameters, tokens or operations.

    >>> format_count(69_000_000_000), format_count(8_388_608), format_count(950)
    ('69.0 B', '8.39 M', '950')
    """
    for size, suffix in _COUNTS:
        if number >= size:
            return f"{three_digits(number / size)} {suffix}"
    return f"{number:.0f}"


def format_rate(value: float, unit: str) -> str:
    """Format a rate per second with a decimal prefix.

    >>> format_rate(989e12, "FLOP/s"), format_rate(1.25e9, "B/s"), format_rate(3.0, "B/s")
    ('989 TFLOP/s', '1.25 GB/s', '3.00 B/s')
    """
    for size, prefix in _PREFIXES:
        if value >= size:
            return f"{three_digits(value / size)} {prefix}{unit}"
    return f"{three_digits(value)} {unit}"
