"""What can go wrong on the way to a trained network."""

from __future__ import annotations

from wam_policy_ros.contract.errors import WamError


class TrainError(WamError):
    """Training cannot go on."""


class DataError(TrainError):
    """Episodes that cannot be used."""
