"""Rates of matrix products: measured on a CPU, from the data sheet on a GPU, none for a device that is not listed."""

from __future__ import annotations

import pytest
import torch

from loopscale.environment.compute import matmul_rate


def test_a_cpu_is_measured():
    rate = matmul_rate([(64, 64)], 128, torch.device("cpu"), seconds=0.05)
    assert rate is not None
    assert 1e6 < rate < 1e14


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 2080", None),
        ("NVIDIA A1000", None),
    ],
)
def test_a_gpu_has_its_dense_peak_or_none(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)  # no machine of the tests has one
    assert matmul_rate([(64, 64)], 128, torch.device("cuda", 0)) == peak
