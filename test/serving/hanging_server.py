"""``wam serve`` with a policy whose calls never end, whoever asks: ``python -m test.serving.hanging_server``."""

from __future__ import annotations

import sys
import threading
from typing import Any

from wam_policy_ros.contract.fakes import HoldPolicy
from wam_policy_ros.tools import serve
from wam_policy_ros.tools.main import main


class Hanging(HoldPolicy):
    def infer(self, session: Any, observation: Any, *, cancelled: Any = None) -> Any:
        serve.say("info", "hanging")
        threading.Event().wait()


if __name__ == "__main__":
    serve.policy_factory = lambda *args: lambda progress: Hanging()  # type: ignore[assignment]
    sys.exit(main(["serve", "--fake", "hold", "--port", "0", "--no-warm-up"]))
