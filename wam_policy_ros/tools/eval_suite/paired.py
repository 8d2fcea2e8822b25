"""Two policies on the same seeds: the difference of their success, its interval, and whether it is within a margin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wam_policy_ros.contract.errors import ConfigError
from wam_policy_ros.train.evaluate import wilson


@dataclass(frozen=True)
class Paired:
    """Counts of seeds.

    Attributes:
        both, only_new, only_reference, neither: who succeeded.
    """

    both: int
    only_new: int
    only_reference: int
    neither: int

    @classmethod
    def of(cls, new: Sequence[bool], reference: Sequence[bool]) -> Paired:
        """From the outcomes of the same seeds in the same order."""
        pairs = list(zip(new, reference, strict=True))
        return cls(*(pairs.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))))

    @property
    def count(self) -> int:
        return self.both + self.only_new + self.only_reference + self.neither

    @property
    def difference(self) -> float:
        """Share of successes, new minus reference."""
        return (self.only_new - self.only_reference) / self.count if self.count else 0.0

    def interval(self, z: float = 1.96) -> tuple[float, float]:
        """95 % interval of ``difference``.

        R. G. Newcombe, Improved confidence intervals for the difference between binomial proportions based on paired
        data, Statistics in Medicine 17 (1998) 2635-2650, method 10: Wilson's intervals of both shares, squared and
        added, with the correlation of the pairs (its numerator corrected for continuity when positive).
        """
        a, b, c, d = self.both, self.only_new, self.only_reference, self.neither
        n = self.count
        if not n:
            return -1.0, 1.0
        new, reference = (a + b) / n, (a + c) / n
        low_new, high_new = wilson(a + b, n, z)
        low_ref, high_ref = wilson(a + c, n, z)
        margins = (a + b) * (c + d) * (a + c) * (b + d)
        excess = float(a * d - b * c)
        if excess > 0:
            excess = max(excess - n / 2, 0.0)
        phi = excess / math.sqrt(margins) if margins else 0.0

        def joined(x: float, y: float) -> float:
            return math.sqrt(max(x * x - 2 * phi * x * y + y * y, 0.0))

        below = joined(new - low_new, high_ref - reference)
        above = joined(high_new - new, reference - low_ref)
        return self.difference - below, self.difference + above

    def not_worse(self, margin: float) -> bool:
        """Non-inferiority at the one-sided level of 2.5 %: the whole 95 % interval lies above ``-margin``.

        Raises:
            ConfigError: a margin outside 0 to 1.
        """
        if not 0.0 < margin < 1.0:
            raise ConfigError("a margin is a share of the episodes", got=margin, expected="between 0 and 1, e.g. 0.05")
        return self.interval()[0] > -margin
