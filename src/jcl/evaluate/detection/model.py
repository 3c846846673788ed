"""Faster, Mask and Keypoint R-CNN on a pre-trained ResNet with a feature pyramid, as the paper's transfer has them.

Everything is trained: no stage and no batch norm is frozen, and the pyramid has batch norms of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN, KeypointRCNN, MaskRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.models.resnet import ResNet

from jcl.evaluate.detection.regions import treat_batches_at_once
from jcl.evaluate.detection.settings import DetectionSettings, Heads
from jcl.evaluate.detection.transforms import scale, scaled_size

_POOLED = 7  # side of the grid on which the box head sees a region


@dataclass(frozen=True)
class HeadSizes:
    """Channels of the pyramid and of the heads."""

    pyramid: int
    box: int
    mask: tuple[int, ...]
    keypoint: tuple[int, ...]


HEAD_SIZES: Final[Mapping[Heads, HeadSizes]] = {
    "standard": HeadSizes(pyramid=256, box=1024, mask=(256,) * 4, keypoint=(512,) * 8),
    "small": HeadSizes(pyramid=64, box=256, mask=(64,) * 2, keypoint=(64,) * 4),
}


class ShortSide(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Normalises and pads; images come scaled in training and are scaled here, the same way, when testing."""

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self.training:
            return image, target
        height, width = image.shape[-2:]
        return scale(image, *scaled_size(height, width, self.min_size[-1], self.max_size)), target


def build_detector(resnet: ResNet, settings: DetectionSettings, *, classes: int, keypoints: int) -> GeneralizedRCNN:
    """The detector of a task on this backbone; `classes` counts no background. New layers start by the seed."""
    sizes = HEAD_SIZES[settings.heads]
    torch.manual_seed(settings.seed)
    width = resnet.layer4[-1].conv1.in_channels  # what the last stage gives, which its later blocks take
    pyramid = BackboneWithFPN(
        resnet,
        {f"layer{stage}": str(stage - 1) for stage in range(1, 5)},
        [width // 8, width // 4, width // 2, width],
        sizes.pyramid,
        norm_layer=nn.BatchNorm2d,
    )
    values: dict[str, Any] = {
        "box_head": TwoMLPHead(sizes.pyramid * _POOLED**2, sizes.box),
        "box_predictor": FastRCNNPredictor(sizes.box, classes + 1),
        "box_batch_size_per_image": settings.rois_per_image,
    }
    if settings.task == "mask":
        values["mask_head"] = MaskRCNNHeads(sizes.pyramid, sizes.mask, 1)
        values["mask_predictor"] = MaskRCNNPredictor(sizes.mask[-1], sizes.mask[-1], classes + 1)
    elif settings.task == "keypoint":
        values["keypoint_head"] = KeypointRCNNHeads(sizes.pyramid, sizes.keypoint)
        values["keypoint_predictor"] = KeypointRCNNPredictor(sizes.keypoint[-1], keypoints)
    kinds = {"box": FasterRCNN, "mask": MaskRCNN, "keypoint": KeypointRCNN}
    detector: GeneralizedRCNN = kinds[settings.task](pyramid, **values)
    detector.transform = ShortSide(settings.test_short_side, settings.max_side, list(settings.mean), list(settings.std))
    treat_batches_at_once(detector)
    _give_float32(detector)
    return detector


def prepared(detector: GeneralizedRCNN, device: torch.device, ranks: int) -> GeneralizedRCNN:
    """The detector on its device, with batch norms over the batches of all ranks where the device knows how to."""
    if device.type == "cuda":
        if ranks > 1:
            detector = nn.SyncBatchNorm.convert_sync_batchnorm(detector)  # type: ignore[no-untyped-call]
        detector.backbone.to(memory_format=torch.channels_last)
    return detector.to(device)


def build_optimiser(detector: nn.Module, settings: DetectionSettings) -> torch.optim.SGD:
    """SGD with momentum; norms have no weight decay."""
    norms = {
        id(parameter)
        for part in detector.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm)
        for parameter in part.parameters()
    }
    groups = [
        {
            "params": [one for one in detector.parameters() if id(one) not in norms],
            "weight_decay": settings.weight_decay,
        },
        {"params": [one for one in detector.parameters() if id(one) in norms], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)


def _give_float32(detector: GeneralizedRCNN) -> None:
    """Have the pyramid and the heads give float32 whatever they compute in.

    torchvision makes anchors and decodes boxes in the type of these outputs, and bfloat16 has too few digits for
    coordinates: next to 1,000 it knows every eighth pixel.
    """
    heads = detector.roi_heads
    parts = [detector.backbone, detector.rpn.head, heads.box_predictor, heads.mask_predictor, heads.keypoint_predictor]
    for part in parts:
        if part is not None:
            part.register_forward_hook(_in_float32)


def _in_float32(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.float()
    if isinstance(outputs, Mapping):
        return type(outputs)((name, value.float()) for name, value in outputs.items())  # type: ignore[call-arg]
    return type(outputs)(_in_float32(_module, None, value) for value in outputs)
