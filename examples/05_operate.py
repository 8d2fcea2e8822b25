#!/usr/bin/env python3
"""Watch the node and give it orders where there is no ``ros2`` command.

    python examples/05_operate.py status                       # what it does now; --follow: again and again
    python examples/05_operate.py call reset                   # reset, start, stop, home
    python examples/05_operate.py call estop true              # estop, hold: true or false
    python examples/05_operate.py prompt "pick up the mug"

The exit status is 1 when the node is not there or refuses. ROS_DOMAIN_ID must be the node's.
Needs ROS 2, or ``pip install 'wam_policy_ros[ros-kilted]'``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import rclpy
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
SWITCHES = ("estop", "hold")


def until(node: Node, done: Callable[[], bool], timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    while not done() and time.monotonic() < end_s:
        rclpy.spin_once(node, timeout_sec=0.1)
    return done()


def status(node: Node, args: argparse.Namespace) -> bool:
    texts: list[str] = []
    node.create_subscription(String, f"{args.node}/status", lambda msg: texts.append(msg.data), LATCHED)
    while until(node, lambda: bool(texts), args.timeout):
        print(texts.pop(), flush=True)
        texts.clear()
        if not args.follow:
            return True
    return False


def call(node: Node, args: argparse.Namespace) -> bool:
    kind = SetBool if args.service in SWITCHES else Trigger
    client = node.create_client(kind, f"{args.node}/{args.service}")
    if not client.wait_for_service(args.timeout):
        return False
    request = SetBool.Request(data=args.on == "true") if kind is SetBool else Trigger.Request()
    future = client.call_async(request)
    if not until(node, future.done, args.timeout):
        return False
    if (answer := future.result()) is None:
        return False
    print(f"{'done' if answer.success else 'refused'}: {answer.message}")
    return bool(answer.success)


def prompt(node: Node, args: argparse.Namespace) -> bool:
    publisher = node.create_publisher(String, f"{args.node}/prompt", LATCHED)
    active: list[str] = []
    node.create_subscription(String, f"{args.node}/active_prompt", lambda msg: active.append(msg.data), LATCHED)
    publisher.publish(String(data=args.text))
    if not until(node, lambda: active[-1:] == [args.text], args.timeout):
        return False
    print(f"active prompt: {active[-1]!r}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--node", default="/wam_policy", help="its full name")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for the node")
    orders = parser.add_subparsers(required=True, metavar="ORDER")
    order = orders.add_parser("status", help="print ~/status")
    order.add_argument("--follow", action="store_true", help="until Ctrl-C")
    order.set_defaults(run=status)
    order = orders.add_parser("call", help="call a service")
    order.add_argument("service", choices=["reset", "start", "stop", "home", *SWITCHES])
    order.add_argument("on", nargs="?", choices=["true", "false"])
    order.set_defaults(run=call)
    order = orders.add_parser("prompt", help="change the instruction")
    order.add_argument("text")
    order.set_defaults(run=prompt)
    args = parser.parse_args()
    if args.run is call and (args.service in SWITCHES) != (args.on is not None):
        parser.error(f"{' and '.join(SWITCHES)} take true or false, the others nothing")
    rclpy.init()
    node = Node("wam_operator")
    try:
        if args.run(node, args):
            return 0
        print(f"{args.node} did not answer, or refused", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        node.destroy_node()
        rclpy.try_shutdown()


if __name__ == "__main__":
    sys.exit(main())
