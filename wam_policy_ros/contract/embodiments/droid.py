"""DROID: one Franka arm with a two-finger gripper, two exterior cameras and a wrist camera."""

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.contract.interface import CameraSpec, FieldSpec

DROID = Embodiment(
    tag="oxe_droid",
    aliases=("droid",),
    embodiment_id=17,
    cameras=(
        CameraSpec("exterior_image_1_left", "camera_exterior_1", 180, 320),
        CameraSpec("exterior_image_2_left", "camera_exterior_2", 180, 320),
        CameraSpec("wrist_image_left", "camera_wrist", 180, 320),
    ),
    mosaic="wrist_on_top",
    state=(
        FieldSpec("joint_position", 7, "rad", "joint_position"),
        FieldSpec("gripper_position", 1, "1", "gripper"),  # 0 open, 1 closed
    ),
    action=(
        FieldSpec("joint_position", 7, "rad", "joint_position", relative=True),
        FieldSpec("gripper_position", 1, "1", "gripper"),
    ),
    control_rate_hz=15.0,
    horizon=24,
    frame_offsets=(-23, -16, -8, 0),
    prompt_template=(
        "A multi-view video shows that a robot {p} The video is split into three views: The top view shows the camera "
        "view from the robot's wrist, the bottom-left view shows the camera view from the left exterior camera, and "
        "the bottom-right view shows the camera view from the right exterior camera. During training, one of the two "
        "bottom exterior views may be a black screen (dropped view). The robot {p}"
    ),
)
