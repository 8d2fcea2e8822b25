# Two commands do everything: `make demo` and `make test`. Both set up .venv first.
#
#   make demo [CHECKPOINT=folder TOKENIZER=folder] [CLIPS=folder] [DURATION=seconds]
#   make demo-sim [CHECKPOINT=folder] [DURATION=seconds]    in the simulator, without ROS
#   make test        lint, types and all tests
#   make venv        only the virtual environment (idempotent)
#
# Machines with a sourced ROS 2: `make demo ROS=` uses its rclpy, NumPy and OpenCV instead of the PyPI wheels.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ROS ?= ros-kilted
DURATION ?=
CHECKPOINT ?=
# With weights of its own or others' the simulator is the robot; clips only when they are asked for.
CLIPS ?= $(if $(CHECKPOINT)$(wildcard wam_policy_ros/weights/*/config.json),,$(wildcard ../shared/video))
TOKENIZER ?=
REPORT ?= demo_report

comma := ,
EXTRAS := dev$(if $(ROS),$(comma)demo$(comma)$(ROS))
ifeq ($(ROS),)
  # The distribution's NumPy and OpenCV are what its message packages were compiled against: they stay as they are.
  VENV_FLAGS := --system-site-packages
  PINS := $(VENV)/ros-constraints.txt
  RUN :=
else
  # The wheels bring their own libraries; a half-sourced ROS environment would mix two installations.
  PINS := constraints.txt
  RUN := env -u LD_LIBRARY_PATH -u PYTHONPATH -u AMENT_PREFIX_PATH -u CMAKE_PREFIX_PATH -u RMW_IMPLEMENTATION \
	-u ROS_DOMAIN_ID -u _ROS_WHEELS_BOOTSTRAP_COMPLETE
endif

PIP := $(RUN) $(BIN)/python -m pip install -qq --disable-pip-version-check -c $(PINS)

.PHONY: help venv demo demo-sim test lint bench clean

help:
	@sed -n '1,9s/^# \{0,1\}//p' Makefile

venv: $(VENV)/.ready

$(VENV)/.ready: setup.py constraints.txt
	@echo "[1/4] virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v and (v <= (3, 13) or not "$(ROS)") else \
	  f"Python 3.11, 3.12 or 3.13 is needed, this is {v[0]}.{v[1]}; try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || { rm -rf $(VENV); \
	  echo "python3 -m venv failed; on Debian or Ubuntu: apt install python3-venv"; exit 1; }
	@test -n "$(ROS)" || $(PYTHON) -c 'import numpy; print("numpy==" + numpy.__version__)' > $(PINS)
	@$(PIP) pip setuptools wheel
	@echo "[2/4] torch (large: a few minutes on a slow line)"
	@$(PIP) torch
	@echo "[3/4] the package, its tools$(if $(ROS), and ROS 2 from wheels ($(ROS)))"
	@$(PIP) --no-build-isolation -e '.[$(EXTRAS)]'
	@echo "[4/4] ready"
	@touch $@

demo: venv
	@$(RUN) $(BIN)/wam demo $(if $(DURATION),--seconds $(DURATION)) --report '$(REPORT)' $(if $(CLIPS),--clips '$(CLIPS)') \
	  $(if $(CHECKPOINT),--checkpoint '$(CHECKPOINT)') $(if $(TOKENIZER),--tokenizer '$(TOKENIZER)')

demo-sim: venv
	@$(PIP) --no-build-isolation -e '.[train]'
	@$(RUN) $(BIN)/wam demo --sim $(if $(DURATION),--seconds $(DURATION)) --report '$(REPORT)' \
	  $(if $(CHECKPOINT),--checkpoint '$(CHECKPOINT)',$(if $(wildcard wam_policy_ros/weights/*/config.json),,--expert)) $(if $(TOKENIZER),--tokenizer '$(TOKENIZER)')

lint: venv
	@$(RUN) $(BIN)/ruff check .
	@$(RUN) $(BIN)/ruff format --check .
	@$(RUN) $(BIN)/mypy

test: lint
	@$(RUN) WAM_TEST_COMPLETE=1 ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST $(BIN)/python -m pytest test

bench: venv
	@$(RUN) $(BIN)/wam bench step

clean:
	rm -rf $(VENV) build install log dist *.egg-info demo_report bench_out .mypy_cache .ruff_cache .pytest_cache
