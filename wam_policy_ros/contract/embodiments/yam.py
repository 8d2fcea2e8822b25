"""YAM: two 6-joint arms with grippers, three cameras. All four fields are predicted relative to the state.

The raw camera size is whatever the checkpoint's ``metadata.json`` says; the one below is only used without one.
"""

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.contract.interface import CameraSpec, FieldSpec

_STATE = (
    FieldSpec("left_joint_pos", 6, "rad", "joint_position"),
    FieldSpec("left_gripper_pos", 1, "1", "gripper"),
    FieldSpec("right_joint_pos", 6, "rad", "joint_position"),
    FieldSpec("right_gripper_pos", 1, "1", "gripper"),
)

YAM = Embodiment(
    tag="yam",
    aliases=(),
    embodiment_id=32,
    cameras=(
        CameraSpec("top_camera-images-rgb", "camera_top", 480, 640),
        CameraSpec("left_camera-images-rgb", "camera_left", 480, 640),
        CameraSpec("right_camera-images-rgb", "camera_right", 480, 640),
    ),
    mosaic="quad",
    state=_STATE,
    action=tuple(FieldSpec(f.name, f.dim, f.unit, f.kind, relative=True) for f in _STATE),
    control_rate_hz=30.0,
    horizon=24,
    raw_size_published=False,
    frame_offsets=(0,),
    prompt_template=(
        "A multi-view video shows that a robot {p} The video is split into four views: The top-left view shows the "
        "top camera, the top-right view shows the right camera, the bottom-left view shows the left camera, and the "
        "bottom-right view is a black screen. The robot {p}"
    ),
)
