"""Proposals and drawn regions of a whole batch follow torchvision's rules, image by image."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import box_iou, nms

from jcl.evaluate.detection.model import AsyncMatcher, BatchedProposals, BatchedSampler, nms_mask

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def boxes_of(shape: tuple[int, ...], side: float = 100.0) -> Tensor:
    corners = torch.rand(*shape, 2) * side
    return torch.cat([corners, corners + 1 + torch.rand(*shape, 2) * 0.6 * side], dim=-1)


def kept_by_torchvision(boxes: Tensor, candidates: Tensor, threshold: float) -> Tensor:
    """The same mask by torchvision's function, group by group."""
    falling = torch.linspace(1, 0, boxes.shape[1])
    kept = torch.zeros_like(candidates)
    for group, (own, eligible) in enumerate(zip(boxes, candidates, strict=True)):
        places = eligible.nonzero()[:, 0]
        kept[group, places[nms(own[places], falling[places], threshold)]] = True
    return kept


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 300), threshold=st.sampled_from([0.1, 0.5, 0.7]))
def test_suppression_keeps_what_torchvision_keeps(seed, count, threshold):
    torch.manual_seed(seed)
    boxes, candidates = boxes_of((3, count)), torch.rand(3, count) > 0.1
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as in training
        kept = nms_mask(boxes, candidates, threshold)
    torch.testing.assert_close(kept, kept_by_torchvision(boxes, candidates, threshold))


def test_a_chain_of_boxes_is_settled_to_its_end():
    """Each box suppresses the next one unless it is suppressed itself: every second one stays, one a round."""
    start = torch.arange(50.0) * 4
    boxes = torch.stack([start, torch.zeros(50), start + 10, torch.full((50,), 10.0)], dim=-1)[None]
    kept = nms_mask(boxes, torch.ones(1, 50, dtype=torch.bool), threshold=0.4)
    assert kept[0].tolist() == [True, False] * 25


class NoHead(nn.Module):
    pass


def networks(**changes: float) -> tuple[BatchedProposals, RegionProposalNetwork]:
    """Both, with few proposals before and after suppression."""
    values = (AnchorGenerator(), NoHead(), 0.7, 0.3, 16, 0.5, {"training": 60, "testing": 60})
    after = {"training": int(changes.get("after", 40)), "testing": 20}
    threshold = changes.get("score", 0.0)
    return tuple(kind(*values, after, 0.7, threshold) for kind in (BatchedProposals, RegionProposalNetwork))  # type: ignore[return-value]


@pytest.mark.parametrize("changes", [{}, {"score": 0.6}, {"after": 1000}])
def test_proposals_are_torchvisions(changes):
    ours, theirs = networks(**changes)
    torch.manual_seed(3)
    counts = [200, 50, 7]
    proposals = boxes_of((4, sum(counts))) - 10  # beyond the edges
    proposals[1, ::5, 2:] = proposals[1, ::5, :2]  # without an area
    proposals[2] += 500  # all outside of the image
    objectness = torch.randn(4 * sum(counts), 1)
    shapes = [(90, 120), (150, 100), (60, 60), (200, 200)]
    found, scores = ours.filter_together(proposals, objectness, shapes, counts)
    wanted, wanted_scores = theirs.filter_proposals(proposals, objectness, shapes, counts)
    assert [len(boxes) for boxes in found] == [len(boxes) for boxes in wanted] and len(found[0]) > 20
    assert len(found[2]) == 0
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch.testing.assert_close(scores, wanted_scores, rtol=2**-23, atol=0)  # sigmoid's last bit hangs on where it lies


@pytest.mark.parametrize("objects", [1, 2, 9])
def test_anchors_are_matched_as_by_torchvision(objects):
    torch.manual_seed(objects)
    anchors = boxes_of((400,)).round()
    quality = box_iou(torch.cat([boxes_of((objects - 1,)), boxes_of((1,)) + 120]), anchors)  # one touches few
    thresholds = {"high_threshold": 0.7, "low_threshold": 0.3, "allow_low_quality_matches": True}
    found, wanted = AsyncMatcher(**thresholds)(quality), Matcher(**thresholds)(quality)
    assert torch.equal(found, wanted) and (found >= 0).any()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_regions_are_drawn_by_the_rules(device):
    """Images of different lengths: with many objects, with few, without background, with neither."""
    labels = [
        torch.tensor([3] * 50 + [0] * 100 + [-1] * 30, device=device),
        torch.tensor([1] * 2 + [0] * 100, device=device),
        torch.tensor([7] * 20, device=device),
        torch.tensor([-1] * 5, device=device),
    ]
    objects, background = BatchedSampler(16, 0.25)(labels)
    assert [mask.shape for mask in objects] == [mask.shape for mask in background] == [label.shape for label in labels]
    assert [int(mask.sum()) for mask in objects] == [4, 2, 4, 0]
    assert [int(mask.sum()) for mask in background] == [12, 14, 0, 0]
    assert all((label[mask.bool()] > 0).all() for label, mask in zip(labels, objects, strict=True))
    assert all((label[mask.bool()] == 0).all() for label, mask in zip(labels, background, strict=True))


def test_every_region_is_drawn_as_often():
    torch.manual_seed(0)
    labels = [torch.tensor([1] * 8 + [0] * 24)]
    draws = 800
    drawn = torch.zeros(2, 32)
    for _ in range(draws):
        (objects,), (background,) = BatchedSampler(8, 0.25)(labels)
        drawn += torch.stack([objects, background])
    # 2 of 8 objects and 6 of 24 others: a quarter of the time, give or take five standard deviations.
    assert (drawn[0, :8] / draws - 0.25).abs().max() < 5 * (0.1875 / draws) ** 0.5
    assert (drawn[1, 8:] / draws - 0.25).abs().max() < 5 * (0.1875 / draws) ** 0.5
    assert drawn[0, 8:].sum() == drawn[1, :8].sum() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_proposals_are_those_of_the_cpu():
    ours, theirs = networks(after=1000)
    torch.manual_seed(5)
    proposals, objectness = boxes_of((2, 900)), torch.randn(1800, 1)
    found, _ = ours.filter_proposals(proposals.cuda(), objectness.cuda(), [(100, 100)] * 2, [600, 300])
    wanted, _ = theirs.filter_proposals(proposals, objectness, [(100, 100)] * 2, [600, 300])
    torch.testing.assert_close([boxes.cpu() for boxes in found], wanted, rtol=0, atol=0)
