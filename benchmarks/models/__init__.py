"""The paper's benchmark models, each a flat ``nn.Sequential`` of small layers."""

from benchmarks.models.amoebanet import amoebanetd
from benchmarks.models.resnet import resnet, resnet50, resnet101
from benchmarks.models.unet import unet

__all__ = ["amoebanetd", "resnet", "resnet50", "resnet101", "unet"]
