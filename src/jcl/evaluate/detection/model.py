"""Faster, Mask and Keypoint R-CNN on a pre-trained ResNet or ConvNeXt with a feature pyramid, and their training.

As in Table 2, everything is trained: no stage and no batch norm is frozen, and the pyramid has batch norms.

The region proposals and samplers follow torchvision's rules for all images of a batch at once. Image by image, a GPU
waits for the host a third of the time.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_map
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.convnext import ConvNeXt
from torchvision.models.detection import FasterRCNN, KeypointRCNN, MaskRCNN
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.keypoint_rcnn import KeypointRCNNHeads, KeypointRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops._utils import split_normalization_params
from torchvision.transforms.v2.functional import resize

from jcl.distributed.device import autocast
from jcl.distributed.group import GradientBuffer, average_statistics
from jcl.evaluate.detection.batches import DetectionBatch, Hardware, scaled_size
from jcl.evaluate.features import evaluation_mode
from jcl.random import DETECTION_REGIONS, hash_words
from jcl.runs.checkpoint import Progress
from jcl.settings.detection import DetectionSettings, Heads, learning_rate
from jcl.train.trainer import TrainingTask

_STAGES = ("layer1", "layer2", "layer3", "layer4")
_POOLED_SIDE = 7  # of the box head's input
_IGNORED, _BACKGROUND = -1, 0  # torchvision's region labels; objects have their class
_ROUNDS_PER_CHECK = 4  # suppression rounds between checks for convergence, which wait for the device
_BOX_LOSSES = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")
LOSSES = {"box": _BOX_LOSSES, "mask": (*_BOX_LOSSES, "loss_mask"), "keypoint": (*_BOX_LOSSES, "loss_keypoint")}
# Channels of the feature pyramid and of the box, mask and keypoint heads.
_HEAD_SIZES: Final[Mapping[Heads, tuple[int, int, list[int], list[int]]]] = {
    "standard": (256, 1024, [256] * 4, [512] * 8),
    "small": (64, 256, [64] * 2, [64] * 4),
}


def detector_body(network: nn.Module) -> nn.Module | None:
    """The modules of a ResNet or ConvNeXt of torchvision or timm, with stages `layer1` to `layer4`; None for others."""
    kind = type(network).__name__
    if kind == "ResNet":
        return network
    if kind != "ConvNeXt":
        return None
    if isinstance(network, ConvNeXt):  # torchvision's has a downsampling before each stage but the first
        stem, first, *others = network.features.children()
        modules = [stem, first, *(nn.Sequential(*others[at : at + 2]) for at in (0, 2, 4))]
    else:
        modules = [network.get_submodule("stem"), *network.get_submodule("stages").children()]
    return nn.Sequential(OrderedDict(zip(("stem", *_STAGES), modules, strict=True)))


def build_detector(body: nn.Module, settings: DetectionSettings, *, classes: int, keypoints: int) -> GeneralizedRCNN:
    """The detector of a task on this body; `classes` excludes the background. The seed initializes new layers."""
    pyramid, box, mask, keypoint = _HEAD_SIZES[settings.heads]
    torch.manual_seed(settings.seed)
    names = {name: str(number) for number, name in enumerate(_STAGES)}
    with evaluation_mode(body), torch.no_grad():
        outputs = IntermediateLayerGetter(body, names)(torch.zeros(1, 3, 64, 64))
    widths = [output.shape[1] for output in outputs.values()]
    backbone = BackboneWithFPN(body, names, widths, pyramid, norm_layer=nn.BatchNorm2d)
    values: dict[str, Any] = {
        "box_head": TwoMLPHead(pyramid * _POOLED_SIDE**2, box),
        "box_predictor": FastRCNNPredictor(box, classes + 1),
        "box_batch_size_per_image": settings.rois_per_image,
    }
    if settings.task == "mask":
        values["mask_head"] = MaskRCNNHeads(pyramid, mask, 1)
        values["mask_predictor"] = MaskRCNNPredictor(mask[-1], mask[-1], classes + 1)
    elif settings.task == "keypoint":
        values["keypoint_head"] = KeypointRCNNHeads(pyramid, keypoint)
        values["keypoint_predictor"] = KeypointRCNNPredictor(keypoint[-1], keypoints)
    kinds = {"box": FasterRCNN, "mask": MaskRCNN, "keypoint": KeypointRCNN}
    detector: GeneralizedRCNN = kinds[settings.task](backbone, **values)
    detector.transform = DetectorTransform(
        settings.test_short_side, settings.max_side, list(settings.mean), list(settings.std)
    )
    _use_batched_proposals(detector)
    _return_float32(detector)
    return detector


def prepare_for_training(detector: GeneralizedRCNN, device: torch.device, ranks: int) -> GeneralizedRCNN:
    """Move the detector to its device; on GPUs, batch norms are synchronized across ranks."""
    if device.type == "cuda":
        if ranks > 1:
            detector = nn.SyncBatchNorm.convert_sync_batchnorm(detector)  # type: ignore[no-untyped-call]
        detector.backbone.to(memory_format=torch.channels_last)
    return detector.to(device)


def build_optimizer(detector: nn.Module, settings: DetectionSettings) -> torch.optim.SGD:
    """SGD with momentum, without weight decay on batch norms."""
    norms, others = split_normalization_params(detector)
    groups = [{"params": others, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)


class DetectorTransform(GeneralizedRCNNTransform):  # type: ignore[misc]
    """Normalizes and pads. Training images arrive resized; test images are resized here in the same way."""

    def resize(self, image: Tensor, target: dict[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor] | None]:
        if self.training:
            return image, target
        size = scaled_size(image.shape[-2], image.shape[-1], self.min_size[-1], self.max_size)
        return resize(image, list(size)), target


class DetectionTask(TrainingTask):
    """A detector on COCO; `parts` are the parts of this rank's batches, from the first iteration to train on.

    torchvision samples the regions of a loss from the global generator, which is seeded by (seed, iteration, part,
    rank) before each pass, so there is no generator state to keep.
    """

    epochs = 1  # schedules of detectors count iterations

    def __init__(
        self,
        detector: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Iterator[DetectionBatch],
        settings: DetectionSettings,
        hardware: Hardware,
    ) -> None:
        self.module, self.optimizer, self.settings = detector, optimizer, settings
        self.steps_per_epoch, self.batch_size = settings.iterations, settings.batch_size
        self._parts, self._hardware = parts, hardware
        self._gradients = GradientBuffer(detector.parameters(), hardware.ranks)
        self._synchronized = any(isinstance(part, nn.SyncBatchNorm) for part in detector.modules())
        detector.train()

    def batches(self, epoch: int, start: int) -> Iterator[list[DetectionBatch]]:
        for _ in range(start, self.steps_per_epoch):
            # All parts are read before anything changes: an image may be unreadable.
            yield list(itertools.islice(self._parts, self.settings.accumulate))

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.settings, step)

    def epoch_at(self, step: int) -> float:
        return 0.0

    def step(self, batch: list[DetectionBatch], step: int, lr: float) -> Tensor:
        """Forward and backward for each part of the batch, then the optimizer; return the loss and its terms."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._gradients.clear()
        device, ranks, names = self._hardware.device, self._hardware.ranks, LOSSES[self.settings.task]
        total = torch.zeros(1 + len(names), device=device)
        for part, content in enumerate(batch):
            images, targets = content.unpack(device)
            torch.manual_seed(int(hash_words(self.settings.seed, DETECTION_REGIONS, step, part, ranks.rank)))
            with autocast(device, self._hardware.precision):
                losses = self.module(images, targets)
            terms = torch.stack([losses[name].float() for name in names])
            loss = terms.sum()
            torch.autograd.backward(loss / len(batch))
            total += torch.cat([loss.detach()[None], terms.detach()]) / len(batch)
        self._gradients.average()
        self.optimizer.step()
        if not self._synchronized:
            average_statistics(self.module, ranks)
        return ranks.average(total)  # any rank's window can be resumed from

    def metrics(self, progress: Progress) -> dict[str, float]:
        means = (progress.window / progress.window_steps).tolist()
        return {"loss": means[0], **dict(zip(LOSSES[self.settings.task], means[1:], strict=True))}


def _return_float32(detector: GeneralizedRCNN) -> None:
    """Cast the outputs of the pyramid and the heads to float32.

    torchvision makes anchors and decodes boxes in the dtype of these outputs, and bfloat16 is too coarse for
    coordinates: around 1,000 its values are 8 pixels apart.
    """
    heads = detector.roi_heads
    predictors = (heads.box_predictor, heads.mask_predictor, heads.keypoint_predictor)
    for module in (detector.backbone, detector.rpn.head, *predictors):
        if module is not None:
            module.register_forward_hook(lambda _module, _inputs, outputs: tree_map(Tensor.float, outputs))


def _use_batched_proposals(detector: GeneralizedRCNN) -> None:
    """Replace torchvision's proposals, matcher and samplers, which keep their parameters, by the batched ones."""
    rpn = detector.rpn
    rpn.__class__ = BatchedProposals
    rpn.proposal_matcher.__class__ = AsyncMatcher
    for part in (rpn, detector.roi_heads):
        sampler = part.fg_bg_sampler
        part.fg_bg_sampler = BatchedSampler(sampler.batch_size_per_image, sampler.positive_fraction)


class BatchedProposals(RegionProposalNetwork):  # type: ignore[misc]
    """On a GPU, suppresses the proposals of all images of a level together; a CPU uses torchvision's method."""

    def filter_proposals(self, proposals: Tensor, *arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
        on_gpu = proposals.device.type == "cuda"
        boxes, scores = (self.filter_together if on_gpu else super().filter_proposals)(proposals, *arguments)
        return boxes, scores

    def filter_together(
        self, proposals: Tensor, objectness: Tensor, image_shapes: list[tuple[int, int]], counts: list[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The best boxes of each image and their scores, best first."""
        objectness = objectness.detach().reshape(len(image_shapes), -1)
        sizes = proposals.new_tensor([(width, height) * 2 for height, width in image_shapes])[:, None]
        all_boxes, all_scores, all_kept = [], [], []
        levels = zip(torch.split(objectness, counts, 1), torch.split(proposals, counts, 1), strict=True)
        for level_objectness, level_proposals in levels:
            best, places = level_objectness.topk(min(self.pre_nms_top_n(), level_objectness.shape[1]), dim=1)
            boxes = level_proposals.gather(1, places[..., None].expand(-1, -1, 4)).clamp(min=0).minimum(sizes)
            scores = best.sigmoid()
            large = ((boxes[..., 2:] - boxes[..., :2]) >= self.min_size).all(dim=-1)
            all_kept.append(nms_mask(boxes, large & (scores >= self.score_thresh), self.nms_thresh))
            all_boxes.append(boxes)
            all_scores.append(scores)
        boxes, scores, kept = torch.cat(all_boxes, 1), torch.cat(all_scores, 1), torch.cat(all_kept, 1)
        count = min(self.post_nms_top_n(), scores.shape[1])
        best, places = scores.masked_fill(~kept, -1.0).topk(count, dim=1)
        boxes = boxes.gather(1, places[..., None].expand(-1, -1, 4))
        numbers = kept.sum(dim=1).clamp(max=count).tolist()
        return _truncate(boxes, numbers), _truncate(best, numbers)


class AsyncMatcher(Matcher):  # type: ignore[misc]
    """Matches each object to its nearest anchors, without waiting for the device to know how many there are."""

    def set_low_quality_matches_(self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor) -> None:
        nearest = match_quality_matrix == match_quality_matrix.amax(dim=1, keepdim=True)
        matches.copy_(torch.where(nearest.any(dim=0), all_matches, matches))


@dataclass(frozen=True)
class BatchedSampler:
    """Samples regions of each image to train on: at most a fraction of objects, the rest background."""

    batch_size_per_image: int
    positive_fraction: float

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Masks of the sampled objects and of the sampled background over the regions of each image."""
        lengths = [len(image) for image in labels]
        padded = pad_sequence(labels, batch_first=True, padding_value=_IGNORED)
        most = int(self.batch_size_per_image * self.positive_fraction)
        counts = padded.new_full((len(labels),), most, dtype=torch.int64)
        objects = _sample(padded > _BACKGROUND, counts, most)
        rest = self.batch_size_per_image - objects.sum(dim=1)
        background = _sample(padded == _BACKGROUND, rest, self.batch_size_per_image)
        return _truncate(objects, lengths), _truncate(background, lengths)


def _sample(eligible: Tensor, counts: Tensor, most: int) -> Tensor:
    """A mask of up to `counts` (b,) <= `most` random entries of the eligible ones (b, n)."""
    draws = torch.rand(eligible.shape, device=eligible.device).masked_fill_(~eligible, -1.0)
    best, places = draws.topk(min(most, draws.shape[1]), dim=1)
    chosen = (best >= 0) & (torch.arange(best.shape[1], device=best.device) < counts[:, None])
    return torch.zeros_like(eligible).scatter_(1, places, chosen)


def _truncate(rows: Tensor, lengths: list[int]) -> list[Tensor]:
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def nms_mask(boxes: Tensor, candidates: Tensor, threshold: float) -> Tensor:
    """Non-maximum suppression in each group of boxes (g, n, 4), sorted by falling score; a mask (g, n) of those kept.

    torchvision's kernel walks through the boxes of one image in a single thread block: 2.8 ms on an H200 for the 9,000
    proposals of a training image, almost a quarter of the time of an iteration. Here all groups are processed at once.
    A box is kept if it is a candidate and overlaps no kept box before it by more than the threshold. Applying this rule
    to all boxes settles at least one more box of each group in every round, and usually all of them in a few rounds.
    """
    suppresses = _overlaps(boxes, threshold).triu_(diagonal=1)
    suppresses &= candidates[:, :, None]
    # A half-precision matrix product is the fastest way to see whether any kept box suppresses a box.
    weights = suppresses.to(torch.float16 if boxes.device.type == "cuda" else torch.float32)
    kept, rounds = candidates, 0
    with torch.autocast(boxes.device.type, enabled=False):  # which would copy the whole matrix in every round
        while rounds < boxes.shape[1]:
            before = kept
            for _ in range(_ROUNDS_PER_CHECK):
                before, kept = kept, candidates & (kept[:, None].to(weights.dtype) @ weights)[:, 0].eq(0)
                rounds += 1
            if bool((before == kept).all()):
                break
    return kept


def _overlaps(boxes: Tensor, threshold: float) -> Tensor:
    """Whether the intersection over union of two boxes of a group exceeds the threshold, (g, n, n)."""
    left, top, right, bottom = boxes.unbind(dim=-1)
    intersection = _common_length(left, right).mul_(_common_length(top, bottom))
    area = (right - left) * (bottom - top)
    return intersection / (area[:, :, None] + area[:, None, :] - intersection) > threshold


def _common_length(start: Tensor, end: Tensor) -> Tensor:
    """The length of the intersection of two intervals of a group, (g, n, n)."""
    first_end = torch.minimum(end[:, :, None], end[:, None, :])
    return first_end.sub_(torch.maximum(start[:, :, None], start[:, None, :])).clamp_(min=0)
