"""Layers of hosts are packed for the device in whose context they were made."""

import torch

from gristmill.integrations.collect import Collected


def test_the_device_of_a_layer_is_that_of_its_making() -> None:
    with torch.device("meta"):
        collected = Collected(torch.nn.Module())
    assert collected.device.type == "meta" and torch.empty(0).device.type == "cpu"
    assert Collected(torch.nn.Module()).device.type == "cpu"
