"""A request goes out with the frame that completes a set, when it arrives."""

from __future__ import annotations

import numpy as np

from wam_policy_ros.ros.control import FRESH_S
from wam_policy_ros.ros.messages import rgb_to_image

from .test_control import DT_NS, Desk

MS = 1_000_000


class FrameDesk(Desk):
    """Images are told to the loop, as the node does, one camera after the other."""

    def images(self, count: int = 3) -> None:
        image = rgb_to_image(np.zeros((18, 32, 3), np.uint8), stamp_ns=self.ros_ns)
        for camera in list(self.inputs.cameras.values())[:count]:
            camera.on_message(image, self.now())
            self.loop.on_image()

    def wait(self, ns: int) -> None:
        self.ros_ns += ns
        self.steady_ns += ns

    def running(self) -> None:
        self.deliver()
        self.images()
        self.run()
        self.images()
        while self.ros_ns < self.loop._due_ns:
            self.wait(MS)
        self.deliver_joints()

    def deliver_joints(self) -> None:
        frames = {name: camera.frames.copy() for name, camera in self.inputs.cameras.items()}
        arrived = {name: camera.arrived_ns for name, camera in self.inputs.cameras.items()}
        self.deliver()
        for name, camera in self.inputs.cameras.items():
            camera.frames, camera._arrived_ns = frames[name], arrived[name]


PATIENT = {"sync.max_age_s": 1.0, "sync.joint_max_age_s": 1.0}


def test_a_request_that_is_due_waits_for_the_next_frame_and_leaves_with_it() -> None:
    desk = FrameDesk(**PATIENT)
    desk.running()
    count = len(desk.worker.requests)
    desk.loop.on_tick()
    assert len(desk.worker.requests) == count, "the newest frame is old, the next one is on its way"
    desk.wait(20 * MS)
    desk.images(2)
    assert len(desk.worker.requests) == count, "the third camera is still missing"
    desk.wait(2 * MS)
    desk.images()
    assert len(desk.worker.requests) == count + 1
    request = desk.worker.requests[-1]
    assert request.observation.arrived_ns == desk.steady_ns and request.submitted_s == desk.steady_ns * 1e-9


def test_while_the_last_camera_is_missing_the_others_are_decoded_ahead() -> None:
    desk = FrameDesk(**PATIENT)
    ahead: list[int] = []
    desk.inputs._decode_ahead = lambda frame, make, urgent: ahead.append(frame.stamp_ns) if urgent else None
    desk.running()
    ahead.clear()
    desk.wait(20 * MS)
    desk.images(2)
    assert set(ahead) == {desk.ros_ns}, "not the frames of the set before"
    count = len(desk.worker.requests)
    desk.images()
    assert len(desk.worker.requests) == count + 1
    ahead.clear()
    desk.wait(33 * MS)
    desk.images(2)
    assert not ahead, "no request is due, nothing is decoded for it"


def test_the_tick_asks_when_frames_are_slow_or_fresh() -> None:
    desk = FrameDesk(**PATIENT)
    desk.running()
    count = len(desk.worker.requests)
    desk.wait(DT_NS + 10 * MS)
    desk.deliver_joints()
    desk.loop.on_tick()
    assert len(desk.worker.requests) == count, "a camera at the control rate may be a little late"
    desk.wait(DT_NS // 2)
    desk.deliver_joints()
    desk.loop.on_tick()
    assert len(desk.worker.requests) == count + 1, "more than a control step has passed without a frame"
    fresh = FrameDesk(**PATIENT)
    fresh.running()
    fresh.deliver()  # not told
    fresh.wait(round(FRESH_S * 1e9))
    count = len(fresh.worker.requests)
    fresh.loop.on_tick()
    assert len(fresh.worker.requests) == count + 1


def test_images_of_an_unsound_or_faulted_robot_ask_nothing() -> None:
    desk = FrameDesk(**PATIENT)
    desk.running()
    desk.loop.latch("test")
    count = len(desk.worker.requests)
    desk.wait(DT_NS)
    desk.images()
    assert len(desk.worker.requests) == count


def test_a_simulator_that_holds_the_clock_is_not_waited_for() -> None:
    desk = FrameDesk(simulated=True, warm_up_s=(0.5,), **PATIENT)
    desk.running()
    origin_ns = desk.worker.requests[0].observation.stamp_ns
    assert desk.loop._due_ns - origin_ns >= 8 * DT_NS - 10, "what was measured in real seconds does not count"
    desk.deliver()  # the last frames before the clock stands, and nobody looked at them
    count = len(desk.worker.requests)
    for waited_ms, asked in ((20, 0), (50, 0), (60, 1)):
        desk.steady_ns += waited_ms * MS
        desk.loop.on_tick()
        assert len(desk.worker.requests) == count + asked, waited_ms
    desk.steady_ns += 700 * MS
    desk.answer()
    assert desk.loop.pace.mean_s == 0.0, "no time on the clock, whatever it took"


def test_a_simulator_s_clock_may_be_heard_before_its_picture() -> None:
    desk = FrameDesk(simulated=True, **PATIENT)
    desk.running()
    count = len(desk.worker.requests)
    desk.loop.on_tick()
    assert len(desk.worker.requests) == count, "no picture for long, but the clock has just moved: it is coming"
    late = rgb_to_image(np.zeros((18, 32, 3), np.uint8), stamp_ns=desk.ros_ns - DT_NS)
    for camera in desk.inputs.cameras.values():
        camera.on_message(late, desk.now())
        desk.loop.on_image()
    desk.loop.on_tick()
    assert len(desk.worker.requests) == count, "that one is of the moment before"
    desk.images()
    assert [r.observation.stamp_ns for r in desk.worker.requests[count:]] == [desk.ros_ns]


def test_a_picture_that_never_comes_is_not_waited_for_either() -> None:
    desk = FrameDesk(simulated=True, **PATIENT)
    desk.running()
    count = len(desk.worker.requests)
    for waited_ms, asked in ((0, 0), (60, 0), (60, 1)):
        desk.steady_ns += waited_ms * MS
        desk.loop.on_tick()
        assert len(desk.worker.requests) == count + asked, waited_ms
