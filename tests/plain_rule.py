"""Section 5 of the design once more, as an imperative program on Python numbers, to hold the library against."""

import math
import struct

from hypothesis import strategies as st

from precision import LossScale


def f32(value: float) -> float:
    """Round to float32 with the C library's own conversion."""
    return struct.unpack("f", struct.pack("f", value))[0] if abs(value) < 3.4028235677973366e38 else math.inf


class PlainRule:
    """The loss-scale rule; ``step`` returns (scale, good steps, hysteresis left, skipped, consecutive skips)."""

    def __init__(self, c: LossScale):
        self.c, self.scale, self.good, self.left, self.skipped, self.row = c, f32(c.initial), 0, c.hysteresis, 0, 0

    def step(self, finite: bool) -> tuple:
        c = self.c
        if finite:
            self.row = 0
            self.good += 1
            if c.hysteresis_refill == "on_finite_step":
                self.left = c.hysteresis
            if self.good >= c.growth_interval:
                if c.mode == "dynamic":
                    self.scale = min(f32(self.scale * f32(c.growth_factor)), f32(c.maximum))
                self.good, self.left = 0, c.hysteresis
        else:
            self.good, self.row, self.skipped = 0, self.row + 1, self.skipped + 1
            self.left = max(self.left - 1, 0)
            if self.left <= 0 and c.mode == "dynamic":
                self.scale = max(f32(self.scale * f32(c.backoff_factor)), f32(c.minimum))
        return (self.scale, self.good, self.left, self.skipped, self.row)


@st.composite
def configs(draw):
    """Dynamic loss scales, with factors that float32 represents and factors that it rounds."""
    minimum = 2.0 ** draw(st.integers(-30, 0))
    maximum = 2.0 ** draw(st.integers(1, 126))
    return LossScale(
        mode="dynamic",
        minimum=minimum,
        maximum=maximum,
        initial=draw(st.floats(minimum, maximum, width=32)),
        growth_factor=draw(st.sampled_from([2.0, 1.5, 1.1, 4.0, 1e6])),
        backoff_factor=draw(st.sampled_from([0.5, 0.7, 0.25, 0.9, 1e-6])),
        growth_interval=draw(st.integers(1, 6)),
        hysteresis=draw(st.integers(1, 4)),
        hysteresis_refill=draw(st.sampled_from(["on_growth", "on_finite_step"])),
    )
