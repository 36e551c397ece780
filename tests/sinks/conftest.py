"""Trackers stay on this machine: no server, no questions, no reports of use."""

import pytest


@pytest.fixture(autouse=True)
def offline_trackers(monkeypatch, tmp_path):
    for variable, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_DIR": str(tmp_path),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_OFFLINE_DIRECTORY": str(tmp_path),
    }.items():
        monkeypatch.setenv(variable, value)
