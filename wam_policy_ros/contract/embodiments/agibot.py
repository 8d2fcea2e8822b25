"""AgiBot G1: two 7-joint arms with effectors, head and waist, three cameras.

The released base checkpoint probably uses a horizon of 48 rows at 30 Hz (DreamZero spec 1.6); the checkpoint's
``action_horizon`` is what counts.
"""

from wam_policy_ros.contract.embodiment import Embodiment
from wam_policy_ros.contract.interface import CameraSpec, FieldSpec

_STATE = (
    FieldSpec("left_arm_joint_position", 7, "rad", "joint_position"),
    FieldSpec("right_arm_joint_position", 7, "rad", "joint_position"),
    FieldSpec("left_effector_position", 1, "1", "gripper"),
    FieldSpec("right_effector_position", 1, "1", "gripper"),
    FieldSpec("head_position", 2, "rad", "joint_position"),
    FieldSpec("waist_position", 2, "rad", "joint_position"),
)

AGIBOT = Embodiment(
    tag="agibot",
    aliases=("agibot_g1",),
    embodiment_id=26,
    cameras=(
        CameraSpec("top_head", "camera_head", 480, 640),
        CameraSpec("hand_left", "camera_hand_left", 480, 640),
        CameraSpec("hand_right", "camera_hand_right", 480, 640),
    ),
    mosaic="quad",
    state=_STATE,
    action=(
        *(FieldSpec(f.name, f.dim, f.unit, f.kind, relative=True) for f in _STATE),
        FieldSpec("robot_velocity", 2, "m/s", "velocity"),
    ),
    control_rate_hz=30.0,
    horizon=48,
    frame_offsets=(-3, -2, -1, 0),
    prompt_template=(
        "A multi-view video shows that a robot {p} The video is split into four views: The top-left view shows the "
        "camera view from the robot's head, the top-right view shows the camera view from the right hand, the "
        "bottom-left view shows the camera view from the left hand, and the bottom-right view is a black screen "
        "(inactive view). The robot {p}"
    ),
)
