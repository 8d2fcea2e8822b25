"""One page per robot."""

from .agibot import AGIBOT
from .droid import DROID
from .yam import YAM

ALL = (DROID, AGIBOT, YAM)

__all__ = ["AGIBOT", "ALL", "DROID", "YAM"]
