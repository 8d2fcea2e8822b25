"""ament_python package, also a plain pip package. Dependencies live in extras: a robot computer stays small."""

from glob import glob

from setuptools import find_packages, setup

NAME = "wam_policy_ros"

# The third-party wheels that carry a complete rclpy for machines without ROS 2. Exact pins: their meta packages do not
# constrain each other. Never installed by default, they would shadow a sourced distribution.
ROS_KILTED = [
    "ros-kilted-rclpy==9.1.2",
    "ros-kilted-rmw-fastrtps-cpp",
    "ros-kilted-sensor-msgs",
    "ros-kilted-trajectory-msgs",
    "ros-kilted-std-msgs",
    "ros-kilted-std-srvs",
    "ros-kilted-diagnostic-msgs",
    "ros-kilted-lifecycle-msgs",
    "ros-kilted-action-msgs",
    "ros-kilted-rosgraph-msgs",
    "ros-kilted-ament-index-python",
    "ros-kilted-rmw-test-fixture-implementation",
]

ENGINE = ["torch>=2.5", "safetensors>=0.4.3", "tokenizers>=0.20", "ftfy>=6.1"]
# cuDNN's 8-bit attention; NVIDIA GPUs only.
FP8_ATTENTION = ["nvidia-cudnn-frontend>=1.18"]
# Before 15 the asyncio server cannot do all that is needed: proxies off, pings without a deadline.
SERVE = ["websockets>=15", "msgpack>=1.0.8", "prometheus_client>=0.20", "pillow>=10"]
# Headless: it needs no X libraries. On a machine with ROS 2 the distribution's python3-opencv is used instead.
VISION = ["opencv-python-headless>=4.8"]
REPORT = ["av>=12", "matplotlib>=3.8"]
# Reads rosbag2 folders without ROS.
REPLAY = ["rosbags>=0.10"]
# Records of a policy; 1.2.1 is the oldest that was tested.
RECORD = ["mcap>=1.2.1", "safetensors>=0.4.3"]
# A torch wheel for GPUs brings the version it was built with; without a GPU the kernels are interpreted and compiled by
# the tests. The versions at both ends were tested. Not pinned: a pin would fight the wheel's.
KERNELS = ["triton>=3.6,<3.10; platform_system == 'Linux'"]
# 3.3 has MjSpec as it is used here. Pictures need an OpenGL library of the system, Mesa's EGL for instance.
SIM = ["mujoco>=3.3.7,<5"]
# Records and trains in the simulator; pyarrow writes LeRobot data sets.
TRAIN = [*ENGINE, *SIM, *REPORT, "pyarrow>=14"]
TEST = ["pytest>=8", "pytest-timeout>=2.3", "pytest-rerunfailures>=14", "hypothesis>=6.100"]

setup(
    name=NAME,
    version="0.1.0",
    description="Run the DreamZero world-action model on a robot: a ROS 2 lifecycle node with the model in its process",
    license="Apache-2.0",
    maintainer="wam_policy_ros authors",
    maintainer_email="wam-policy-ros@users.noreply.github.com",
    packages=find_packages(exclude=["test", "test.*"]),
    package_data={NAME: ["weights/*/*", "weights/*/*/*"]},
    exclude_package_data={NAME: ["weights/*/weights.sha256.json"]},  # hashes of this machine's files
    python_requires=">=3.11",
    install_requires=["setuptools", "numpy>=1.26", "pyyaml>=6"],
    extras_require={
        "engine": ENGINE,
        "kernels": KERNELS,
        "fp8-attention": FP8_ATTENTION,
        "serve": SERVE,
        "vision": VISION,
        "demo": ENGINE + REPORT + VISION + SIM,
        "ros-kilted": ROS_KILTED + VISION,
        "replay": REPLAY + VISION,
        "record": RECORD,
        "sim": SIM,
        "train": TRAIN,
        "test": TEST,
        "dev": TEST + KERNELS + SERVE + REPLAY + RECORD + TRAIN + ["ruff>=0.8", "mypy>=1.13", "types-PyYAML"],
    },
    zip_safe=False,
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", sorted(glob("launch/*.launch.py"))),
        (f"share/{NAME}/config", sorted(glob("config/*"))),
        # `ros2 run` and launch look here; pip puts console scripts into bin/, colcon's own entry point wins over this.
        (f"lib/{NAME}", sorted(glob("scripts/*"))),
    ],
    entry_points={
        "console_scripts": [
            "wam = wam_policy_ros.tools.main:main",
            "wam_policy = wam_policy_ros.ros.main:main",
            "wam_sim = wam_policy_ros.sim.main:main",
            "wam_clip_robot = wam_policy_ros.ros.clip_robot:main",
        ],
    },
)
