"""Which frames a call sees: the recorded server's by arrival, by time otherwise."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test.golden_files import GOLDEN_DIR
from wam_policy_ros.contract.errors import InvalidImage, MissingInput, ObservationError, StaleInput
from wam_policy_ros.contract.fakes import spec_of
from wam_policy_ros.contract.history import FrameHistory, select_frames, step_ns
from wam_policy_ros.contract.interface import CameraSpec, Observation

CAMERAS = ("exterior_image_1_left", "exterior_image_2_left", "wrist_image_left")
BASE = {"exterior_image_1_left": 0, "exterior_image_2_left": 100, "wrist_image_left": 50}
SPEC = replace(spec_of("oxe_droid", weights="test"), cameras=tuple(CameraSpec(c, c, 2, 3) for c in CAMERAS))
MS = 1_000_000


def _images(ids) -> np.ndarray:
    return np.stack([np.full((2, 3, 3), i % 256, dtype=np.uint8) for i in ids])


def _unstamped(first: int, count: int) -> Observation:
    return Observation({c: _images(BASE[c] + first + i for i in range(count)) for c in CAMERAS}, {}, "p")


def _stamped(stamps, **kwargs) -> Observation:
    """``stamps``: one list for all cameras, or camera -> list, in ms. The image shows the stamp modulo 256."""
    per = stamps if isinstance(stamps, dict) else dict.fromkeys(CAMERAS, stamps)
    return Observation(
        {c: _images(per[c]) for c in CAMERAS},
        {},
        "p",
        stamp_ns=max(per[c][-1] for c in CAMERAS) * MS,
        frame_stamps_ns={c: np.array(per[c], dtype=np.int64) * MS for c in CAMERAS},
        **kwargs,
    )


def _ids(drawn, camera) -> list[int]:
    return [int(f[0, 0, 0]) for f in drawn.frames[camera]]


def _ms(drawn, camera) -> list[int]:
    return [s // MS for s in drawn.stamps_ns[camera]]


# --- by order of arrival ---------------------------------------------------------------------------------------------


def test_reproduces_the_recorded_server():
    path = GOLDEN_DIR / "data.json"
    if not path.is_file():
        pytest.skip("fixture data.json is not in this checkout")
    history, sent, first, calls = FrameHistory(SPEC), 0, True, 0
    for step in json.loads(path.read_text())["frame_buffer_sequence"]:
        if step == "reset":
            history, first = FrameHistory(SPEC), True
            continue
        history.add(_unstamped(sent, step["sent_frames"]))
        drawn = history.draw(first)
        for camera, key in zip(CAMERAS, ("ids_ext1", "ids_ext2", "ids_wrist"), strict=True):
            assert _ids(drawn, camera) == step[key]
        sent, first, calls = sent + step["sent_frames"], False, calls + 1
    assert calls == 8


def test_first_call_uses_the_newest_of_four_and_the_others_are_kept():
    history = FrameHistory(SPEC)
    history.add(_unstamped(0, 4))
    first = history.draw(True)
    assert _ids(first, "wrist_image_left") == [53] and first.padded == 0
    history.add(_unstamped(4, 1))
    assert _ids(history.draw(False), "wrist_image_left") == [51, 52, 53, 54]


def test_without_stamps_each_camera_appends_what_it_brings():
    """Four frames of one camera and one of the others, as in the recorded request."""
    history = FrameHistory(SPEC)
    many, few = _unstamped(0, 4), _unstamped(3, 1)
    history.add(replace(many, frames={**few.frames, CAMERAS[0]: many.frames[CAMERAS[0]]}))
    drawn = history.draw(False)
    assert _ids(drawn, CAMERAS[0]) == [0, 1, 2, 3] and _ids(drawn, CAMERAS[2]) == [53] * 4
    assert drawn.padded == 2 * 3


def test_padding_is_reported():
    history = FrameHistory(SPEC)
    history.add(_unstamped(0, 1))
    history.add(_unstamped(1, 1))
    drawn = history.draw(False)
    assert drawn.padded == 2 * 3 and drawn.reference_ns is None
    assert drawn.info == {"frames": 4, "off_schedule": 0, "padded": 6}


def test_identical_observations_count_twice_without_a_clock():
    history = FrameHistory(SPEC)
    for _ in range(5):
        history.add(_unstamped(7, 1))
    assert len(history) == 4 and history.draw(False).padded == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_bounded_buffer_draws_what_an_endless_one_would(counts):
    history, sent = FrameHistory(SPEC), []
    for n in counts:
        history.add(_unstamped(len(sent), n))
        sent += range(len(sent), len(sent) + n)
        expected = [sent[0]] * max(0, 4 - len(sent)) + sent[-4:]
        assert _ids(history.draw(False), "exterior_image_1_left") == [i % 256 for i in expected]
        assert len(history) <= 4


# --- by time ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    stamps=st.lists(st.integers(0, 3_000), min_size=1, max_size=40, unique=True).map(sorted),
    reference=st.integers(0, 3_500),
    offsets=st.lists(st.integers(-30, 0), min_size=1, max_size=6),
    rate=st.sampled_from([5.0, 15.0, 30.0]),
)
def test_select_frames_is_the_nearest(stamps, reference, offsets, rate):
    stamps_ns = [s * MS for s in stamps]
    chosen = select_frames(stamps_ns, reference * MS, offsets, rate)
    padded = off = 0
    for offset, index in zip(offsets, chosen.indices, strict=True):
        target = reference * MS + step_ns(offset, rate)
        distances = [abs(s - target) for s in stamps_ns]
        assert distances[index] == min(distances)
        assert index == max(i for i, d in enumerate(distances) if d == min(distances))
        if target < stamps_ns[0]:
            padded += 1
            assert index == 0
        elif min(distances) > 0.5e9 / rate:
            off += 1
    assert (chosen.padded, chosen.off_schedule) == (padded, off)


def test_of_two_equally_near_the_newer():
    assert select_frames([0, 100 * MS], 50 * MS, (0,), 15.0).indices == (1,)
    assert select_frames([0, 100 * MS], 50 * MS - 1, (0,), 15.0).indices == (0,)


def test_select_frames_accepts_arrays_and_refuses_disorder():
    assert select_frames(np.array([0, 10, 20]), 20, (0,), 15.0).indices == (2,)
    for bad in ([], [2, 1]):
        with pytest.raises(ValueError, match="ascending"):
            select_frames(bad, 0, (0,), 15.0)


def test_frames_on_schedule():
    """15 frames a second: offsets -23, -16, -8, 0 are whole frames."""
    stamps = [round(i * 1000 / 15) for i in range(40)]
    history = FrameHistory(SPEC)
    history.add(_stamped(stamps[:1]))
    assert _ms(history.draw(True), CAMERAS[0]) == [0]
    for s in stamps[1:]:
        history.add(_stamped([s]))
    drawn = history.draw(False)
    assert all(_ms(drawn, c) == [stamps[i] for i in (16, 23, 31, 39)] for c in CAMERAS)
    assert _ids(drawn, CAMERAS[0]) == [stamps[i] % 256 for i in (16, 23, 31, 39)]
    assert (drawn.padded, drawn.off_schedule) == (0, 0)


def test_start_of_a_session_repeats_the_oldest():
    history = FrameHistory(SPEC)
    history.add(_stamped([0, 500, 1000]))
    drawn = history.draw(False)
    assert _ms(drawn, CAMERAS[0]) == [0, 0, 500, 1000]  # targets -533, -67, 467, 1000
    assert drawn.padded == 2 * 3 and drawn.off_schedule == 0


def test_a_gap_is_reported():
    history = FrameHistory(SPEC)
    history.add(_stamped([0, 2000]))
    drawn = history.draw(False)  # targets 467, 933, 1467, 2000
    assert _ms(drawn, CAMERAS[0]) == [0, 0, 2000, 2000] and drawn.off_schedule == 3 * 3 and drawn.padded == 0


def test_reference_is_the_moment_every_camera_has_reached():
    stamps = [i * 100 for i in range(21)]
    history = FrameHistory(SPEC)
    history.add(_stamped({CAMERAS[0]: stamps, CAMERAS[1]: stamps, CAMERAS[2]: [s - 200 for s in stamps]}))
    drawn = history.draw(False)
    assert drawn.reference_ns == 1800 * MS
    assert {_ms(drawn, c)[-1] for c in CAMERAS} == {1800}
    assert json.dumps(drawn.info)


def test_merge_ignores_duplicates_and_sorts_late_frames():
    history = FrameHistory(SPEC)
    history.add(_stamped([100, 300]))
    history.add(_stamped([100, 200, 300, 400]))
    assert len(history) == 4
    changed = _stamped([400])
    changed.frames[CAMERAS[0]][:] = 9
    history.add(changed)
    assert len(history) == 4 and _ids(history.draw(True), CAMERAS[0]) == [400 % 256]


def test_frames_before_the_session_are_never_used():
    history = FrameHistory(SPEC)
    history.add(_stamped([100, 200, 300], session_start_ns=200 * MS))
    assert _ms(history.draw(False), CAMERAS[0]) == [200, 200, 200, 300]
    with pytest.raises(MissingInput, match="since the session started"):
        FrameHistory(SPEC).add(_stamped([100], session_start_ns=101 * MS))


def test_a_clock_set_back_is_refused_and_not_frozen():
    history = FrameHistory(SPEC)
    history.add(_stamped([10_000]))
    with pytest.raises(StaleInput, match="set back") as e:
        history.add(_stamped([500]))
    assert e.value.field == CAMERAS[0]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(1, 400), min_size=3, max_size=3), min_size=1, max_size=30))
def test_pruned_history_draws_what_an_endless_one_would(gaps):
    """Each camera at its own irregular rate; as long as they stay within the margin of each other."""
    history = FrameHistory(SPEC, margin_s=20.0)
    all_stamps: dict[str, list[int]] = {c: [] for c in CAMERAS}
    now = dict.fromkeys(CAMERAS, 0)
    for step in gaps:
        for camera, gap in zip(CAMERAS, step, strict=True):
            now[camera] += gap
            all_stamps[camera].append(now[camera])
        history.add(_stamped({c: [now[c]] for c in CAMERAS}))
        drawn = history.draw(False)
        reference = min(now.values()) * MS
        for camera in CAMERAS:
            stamps = [s * MS for s in all_stamps[camera]]
            chosen = select_frames(stamps, reference, SPEC.frame_offsets, SPEC.control_rate_hz)
            assert list(drawn.stamps_ns[camera]) == [stamps[i] for i in chosen.indices]


def test_memory_is_bounded_by_time_by_count_and_by_skew():
    history = FrameHistory(SPEC)
    for i in range(400):
        history.add(_stamped([i * 20]))  # 50 frames a second
    assert len(history) <= 1.54 * 50 + 3
    behind = FrameHistory(SPEC)
    for i in range(400):
        behind.add(_stamped({CAMERAS[0]: [i * 20], CAMERAS[1]: [i * 20], CAMERAS[2]: [i * 20 - 10**7]}))
    assert len(behind) <= (1.54 + 1.0) * 50 + 3
    crowded = FrameHistory(SPEC, max_frames=10)
    crowded.add(_stamped(list(range(100))))
    assert len(crowded) == 10 and _ms(crowded.draw(True), CAMERAS[0]) == [99]


# --- transactions and refusals ----------------------------------------------------------------------------------------


def test_a_copy_is_independent():
    history = FrameHistory(SPEC)
    history.add(_stamped([0]))
    trial = history.copy()
    trial.add(_stamped([100]))
    assert len(history) == 1 and _ms(history.draw(True), CAMERAS[0]) == [0]
    assert len(trial) == 2 and _ms(trial.draw(True), CAMERAS[0]) == [100]


@pytest.mark.parametrize("observation", [_unstamped(3, 1), _stamped({c: [BASE[c] + 3] for c in CAMERAS})])
def test_the_caller_may_write_into_its_images_afterwards(observation):
    history = FrameHistory(SPEC)
    history.add(observation)
    for image in observation.frames.values():
        image[:] = 255
    assert _ids(history.draw(True), CAMERAS[0]) == [3]


def test_nothing_to_draw():
    with pytest.raises(MissingInput, match="no frames"):
        FrameHistory(SPEC).draw(True)


def _with(camera, image) -> Observation:
    observation = _unstamped(0, 1)
    return replace(observation, frames={**observation.frames, camera: image})


def _with_counts() -> Observation:
    observation = _stamped([0, 10])
    one = {CAMERAS[0]: observation.frames[CAMERAS[0]][-1:]}
    stamps = {CAMERAS[0]: observation.frame_stamps_ns[CAMERAS[0]][-1:]}
    return replace(
        observation,
        frames={**observation.frames, **one},
        frame_stamps_ns={**observation.frame_stamps_ns, **stamps},
    )


def _with_stamps(stamps) -> Observation:
    observation = _stamped([0, 10])
    return replace(observation, frame_stamps_ns={**observation.frame_stamps_ns, CAMERAS[1]: np.asarray(stamps)})


@pytest.mark.parametrize(
    ("observation", "error", "message"),
    [
        (replace(_unstamped(0, 1), frames={c: _images([0]) for c in CAMERAS[:2]}), MissingInput, "wrist_image_left"),
        (_with(CAMERAS[0], np.zeros((1, 2, 3, 3), np.float32)), InvalidImage, "uint8"),
        (_with(CAMERAS[0], [[0]]), InvalidImage, "uint8"),
        (_with(CAMERAS[0], np.zeros((2, 3, 3), np.uint8)), InvalidImage, "shape"),
        (_with(CAMERAS[0], np.zeros((1, 3, 2, 3), np.uint8)), InvalidImage, "shape"),
        (_with(CAMERAS[0], np.zeros((1, 3, 2, 3), np.uint8).transpose(0, 3, 1, 2)), InvalidImage, "channels last"),
        (_with(CAMERAS[0], np.zeros((1, 2, 3, 4), np.uint8)), InvalidImage, "three channels"),
        (_with(CAMERAS[0], np.zeros((0, 2, 3, 3), np.uint8)), InvalidImage, "T >= 1"),
        (_with_counts(), InvalidImage, "different numbers"),
        (_with_stamps([0]), ObservationError, "one integer stamp per frame"),
        (_with_stamps([0.0, 1.0]), ObservationError, "one integer stamp per frame"),
        (_with_stamps([10, 10]), ObservationError, "strictly increase"),
        (_with_stamps([10, 0]), ObservationError, "strictly increase"),
        (replace(_stamped([0]), frame_stamps_ns={CAMERAS[0]: np.array([0])}), ObservationError, "no stamps"),
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_refused_observations_change_nothing(observation, error, message, started):
    history = FrameHistory(SPEC)
    if started:
        history.add(_stamped([0]) if observation.frame_stamps_ns is not None else _unstamped(0, 1))
    before = len(history)
    with pytest.raises(error, match=message):
        history.add(observation)
    assert len(history) == before
    history.add(_unstamped(0, 1) if observation.frame_stamps_ns is None else _stamped([5]))


@pytest.mark.parametrize(("first", "second"), [(_stamped([0]), _unstamped(0, 1)), (_unstamped(0, 1), _stamped([0]))])
def test_a_session_does_not_mix_clocks(first, second):
    history = FrameHistory(SPEC)
    history.add(first)
    with pytest.raises(ObservationError, match="mix"):
        history.add(second)
    assert len(history) == 1


def test_frames_that_are_no_mapping() -> None:
    history = FrameHistory(spec_of("droid", weights=""))
    with pytest.raises(ObservationError, match="not a mapping"):
        history.add(Observation(frames=None, state={}, prompt=""))  # type: ignore[arg-type]
    assert len(history) == 0
