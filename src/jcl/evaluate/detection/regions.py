"""torchvision's region proposals and its choice of regions to learn from, for all images of a batch at once.

The same rules, with far fewer and larger pieces of work for a GPU, which waited for the host a third of the time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.rpn import RegionProposalNetwork

from jcl.evaluate.detection.suppression import keep_greedily

_IGNORED, _BACKGROUND = -1, 0  # as torchvision labels regions; above are the classes


def treat_batches_at_once(detector: GeneralizedRCNN) -> None:
    """Give a detector of torchvision's these proposals and choices in place of its own."""
    rpn, heads = detector.rpn, detector.roi_heads
    detector.rpn = BatchedProposals(
        rpn.anchor_generator,
        rpn.head,
        rpn.proposal_matcher.high_threshold,
        rpn.proposal_matcher.low_threshold,
        rpn.fg_bg_sampler.batch_size_per_image,
        rpn.fg_bg_sampler.positive_fraction,
        rpn._pre_nms_top_n,
        rpn._post_nms_top_n,
        rpn.nms_thresh,
        rpn.score_thresh,
    )
    matcher = rpn.proposal_matcher
    detector.rpn.proposal_matcher = WaitlessMatcher(
        matcher.high_threshold, matcher.low_threshold, allow_low_quality_matches=True
    )
    for part in (detector.rpn, heads):
        sampler = part.fg_bg_sampler
        part.fg_bg_sampler = BatchedSampler(sampler.batch_size_per_image, sampler.positive_fraction)


class BatchedProposals(RegionProposalNetwork):  # type: ignore[misc]
    """Proposals of all images of a level are suppressed together on a GPU; on a CPU torchvision's way stays."""

    def filter_proposals(
        self,
        proposals: Tensor,
        objectness: Tensor,
        image_shapes: list[tuple[int, int]],
        num_anchors_per_level: list[int],
    ) -> tuple[list[Tensor], list[Tensor]]:
        if proposals.device.type == "cuda":
            return self.filter_together(proposals, objectness, image_shapes, num_anchors_per_level)
        boxes, scores = super().filter_proposals(proposals, objectness, image_shapes, num_anchors_per_level)
        return boxes, scores

    def filter_together(
        self, proposals: Tensor, objectness: Tensor, image_shapes: list[tuple[int, int]], counts: list[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The best boxes and their scores for each image, best first."""
        images = len(image_shapes)
        objectness = objectness.detach().reshape(images, -1)
        sizes = proposals.new_tensor([(width, height) * 2 for height, width in image_shapes])[:, None]
        all_boxes, all_scores, all_kept = [], [], []
        levels = zip(torch.split(objectness, counts, 1), torch.split(proposals, counts, 1), strict=True)
        for level_objectness, level_proposals in levels:
            best, places = level_objectness.topk(min(self.pre_nms_top_n(), level_objectness.shape[1]), dim=1)
            boxes = level_proposals.gather(1, places[..., None].expand(-1, -1, 4)).clamp(min=0).minimum(sizes)
            scores = best.sigmoid()
            large = ((boxes[..., 2:] - boxes[..., :2]) >= self.min_size).all(dim=-1)
            all_kept.append(keep_greedily(boxes, large & (scores >= self.score_thresh), self.nms_thresh))
            all_boxes.append(boxes)
            all_scores.append(scores)
        return self._best(torch.cat(all_boxes, 1), torch.cat(all_scores, 1), torch.cat(all_kept, 1))

    def _best(self, boxes: Tensor, scores: Tensor, kept: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        most = min(self.post_nms_top_n(), scores.shape[1])
        best, places = scores.masked_fill(~kept, -1.0).topk(most, dim=1)
        boxes = boxes.gather(1, places[..., None].expand(-1, -1, 4))
        numbers = kept.sum(dim=1).clamp(max=most).tolist()
        chosen = [image[:number] for image, number in zip(boxes, numbers, strict=True)]
        return chosen, [image[:number] for image, number in zip(best, numbers, strict=True)]


class WaitlessMatcher(Matcher):  # type: ignore[misc]
    """Gives each object its nearest anchors, however far, without the host's waiting for how many these are."""

    def set_low_quality_matches_(self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor) -> None:
        nearest = match_quality_matrix == match_quality_matrix.amax(dim=1, keepdim=True)
        matches.copy_(torch.where(nearest.any(dim=0), all_matches, matches))


class BatchedSampler:
    """Draws so many regions of each image to learn from, at most a fraction of them objects, the rest background."""

    def __init__(self, batch_size_per_image: int, positive_fraction: float) -> None:
        self.batch_size_per_image = batch_size_per_image
        self.positive_fraction = positive_fraction

    def __call__(self, labels: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The drawn objects and the drawn background of each image, as masks over its regions."""
        lengths = [len(image) for image in labels]
        padded = pad_sequence(labels, batch_first=True, padding_value=_IGNORED)
        objects = padded > _BACKGROUND
        most = int(self.batch_size_per_image * self.positive_fraction)
        chosen = _draw(objects, padded.new_full((len(labels),), most, dtype=torch.int64), most)
        left = self.batch_size_per_image - chosen.sum(dim=1)
        background = _draw(padded == _BACKGROUND, left, self.batch_size_per_image)
        return _split(chosen, lengths), _split(background, lengths)


def _draw(eligible: Tensor, counts: Tensor, most: int) -> Tensor:
    """A mask of up to `counts` (b,) random ones of the eligible (b, n), where no count is above `most`."""
    lots = torch.rand(eligible.shape, device=eligible.device).masked_fill_(~eligible, -1.0)
    best, places = lots.topk(min(most, lots.shape[1]), dim=1)
    drawn = (best >= 0) & (torch.arange(best.shape[1], device=best.device) < counts[:, None])
    return torch.zeros_like(eligible).scatter_(1, places, drawn)


def _split(masks: Tensor, lengths: list[int]) -> list[Tensor]:
    return [mask[:length] for mask, length in zip(masks, lengths, strict=True)]
