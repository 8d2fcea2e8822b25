"""Which rank does what: ranks form a grid of guidance branches and of parts of a branch's sequence."""

from __future__ import annotations

from dataclasses import dataclass

from wam_policy_ros.contract.errors import ConfigError


@dataclass(frozen=True)
class Grid:
    """Ranks in rows: one row of ``sequence`` ranks per guidance branch, the conditional one first. Rank 0 leads.

    Attributes:
        guidance: branches that run on ranks of their own, 1 or 2.
        sequence: ranks that share a branch.
    """

    guidance: int
    sequence: int

    @classmethod
    def of(cls, gpus: int, *, guided: bool) -> Grid:
        """Guidance first, as its ranks exchange least; what is left shares the sequence. 2 is 2 x 1, 4 is 2 x 2, 8 is
        2 x 4; without guidance N is 1 x N.

        Raises:
            ConfigError: the ranks do not divide into two equal branches.
        """
        if not guided or gpus == 1:
            return cls(1, gpus)
        if gpus % 2:
            raise ConfigError(
                "two guidance branches need an even number of GPUs",
                got=gpus,
                expected="1, 2, 4 or 8",
                remedy="set gpus to one of them; without guidance any divisor of the attention heads will do",
            )
        return cls(2, gpus // 2)

    @property
    def size(self) -> int:
        return self.guidance * self.sequence

    def branch(self, rank: int) -> int:
        """Guidance branch of a rank: 0 conditional, 1 unguided."""
        return rank // self.sequence

    def row(self, branch: int) -> list[int]:
        """Ranks that share a branch."""
        return list(range(branch * self.sequence, (branch + 1) * self.sequence))

    @property
    def heads(self) -> list[int]:
        """The first rank of each branch."""
        return [self.row(branch)[0] for branch in range(self.guidance)]
