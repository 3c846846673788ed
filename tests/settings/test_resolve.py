import re
from dataclasses import replace
from math import log2

import pytest

from jcl.errors import SettingsError
from jcl.settings.commands import RunOptions
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import default_knn_k, fit_to_ranks, passes_for_constant_memory, resolve
from jcl.settings.resolved import DataFacts, InitialWeights
from jcl.settings.schema import Settings

SIZES = [20, 100, 1_000, 5_000, 50_000, 130_000, 1_281_167, 2_000_000]


def chosen(images: int, short_side: int = 300, decoded: bool = False, **values):
    settings = build_settings("folder", values={name.replace("__", "."): value for name, value in values.items()})
    return resolve(settings, DataFacts(images, short_side, decoded))


@pytest.mark.parametrize("images", SIZES)
def test_choices_hold_together_for_any_size_of_data(images):
    settings, choices = chosen(images)
    assert "auto" not in {
        value
        for section in ("data", "views", "model", "method")
        for value in getattr(settings, section).model_dump().values()
        if isinstance(value, str)
    }
    batch, groups = settings.train.batch_size, settings.model.bn_groups
    assert 8 <= batch <= min(256, max(8, images // 8))
    assert batch % groups == 0 and (groups == 1 or batch // groups >= 32)
    assert 256 <= settings.method.queue_size <= 65536
    assert settings.method.queue_size <= max(256, images * 3 // 4)
    assert settings.method.key_momentum in (0.95, 0.99, 0.999)
    assert groups % settings.train.key_passes == 0
    assert settings.train.lr == pytest.approx((0.24 if images < 100_000 else 0.03) * batch / 256, abs=1e-6)
    assert settings.method.covariance_scale == (1.0 if images < 100_000 else 4.0)
    assert all(choice.reason and re.match(r"\w+\.\w+$", choice.name) for choice in choices)


@pytest.mark.parametrize(
    ("epochs", "warmup", "told"), [(200, 5, False), (50, 5, False), (12, 1.2, True), (1, 0.1, True)]
)
def test_short_runs_warm_up_for_a_tenth_of_their_epochs(epochs, warmup, told):
    settings, choices = chosen(1_000, train__epochs=epochs)
    assert settings.train.warmup_epochs == pytest.approx(warmup)
    assert ("train.warmup_epochs" in {choice.name for choice in choices}) == told


def test_a_single_step_is_not_called_several():
    reasons = {choice.name: choice.reason for choice in chosen(20, train__epochs=1, train__batch_size=16)[1]}
    assert "a short run of 1 step needs" in reasons["method.key_momentum"]


def test_more_data_never_gets_a_smaller_queue_batch_or_momentum():
    settings = [chosen(images)[0] for images in SIZES]
    for values in (
        [each.method.queue_size for each in settings],
        [each.train.batch_size for each in settings],
        [each.method.key_momentum for each in settings],
    ):
        assert values == sorted(values)
    assert settings[-1].method.queue_size == 65536 and settings[-1].method.key_momentum == 0.999


@pytest.mark.parametrize("images", SIZES)
def test_the_reason_for_the_queue_is_true(images):
    settings, choices = chosen(images)
    reason = next(choice.reason for choice in choices if choice.name == "method.queue_size")
    share, least, most = (0.125, 0, 65_536) if "an eighth of the" in reason else (0.75, 256, 4096)
    exact = images * share
    assert settings.method.queue_size == (least if exact < least else most if exact >= most else 2 ** int(log2(exact)))


@pytest.mark.parametrize(("short_side", "size"), [(28, 32), (32, 32), (64, 64), (96, 64), (160, 128), (500, 224)])
def test_views_fit_the_images(short_side, size):
    settings, _ = chosen(5_000, short_side)
    assert settings.views.image_size == size
    assert settings.model.stem == ("small" if size <= 64 else "imagenet")


@pytest.mark.parametrize(
    ("backbone", "stem"),
    [
        ("resnet50", "small"),
        ("timm/resnet18", "small"),
        ("mobilenet_v3_small", "imagenet"),
        ("resnet26d", "imagenet"),
        ("resnetv2_50", "imagenet"),
    ],
)
def test_the_small_stem_is_chosen_only_where_it_can_be_built(backbone, stem):
    assert chosen(5_000, 32, model__backbone=backbone)[0].model.stem == stem


def test_arrays_need_no_workers_and_keep_their_size():
    settings, _ = chosen(5_000, 40, decoded=True)
    assert (settings.data.workers, settings.data.canvas) == (0, 40)
    settings, _ = chosen(5_000, 300)
    assert 1 <= settings.data.workers <= 16 and settings.data.canvas == 500


def test_values_that_were_given_stay_and_are_not_explained():
    given = {"train__batch_size": 24, "method__queue_size": 77, "model__bn_groups": 3, "train__lr": 0.5}
    settings, choices = chosen(5_000, **given)
    assert (settings.train.batch_size, settings.method.queue_size, settings.model.bn_groups) == (24, 77, 3)
    assert settings.train.lr == 0.5
    named = {choice.name for choice in choices}
    assert not named & {name.replace("__", ".") for name in given} and "method.key_momentum" in named


def test_too_few_images_for_a_batch():
    with pytest.raises(SettingsError, match="15 images are too few"):
        chosen(15)
    assert chosen(15, train__batch_size=4)[0].train.batch_size == 4


def test_groups_that_no_chosen_batch_can_have_are_a_sentence():
    with pytest.raises(SettingsError, match=r"cannot be split into model\.bn_groups=7"):
        chosen(5_000, model__bn_groups=7)


@pytest.mark.parametrize(("keys", "passes"), [(1, 1), (4, 1), (5, 2), (9, 4)])
def test_keys_take_about_the_memory_of_the_query(keys, passes):
    assert chosen(50_000, method__num_keys=keys)[0].train.key_passes == passes


@pytest.mark.parametrize(("keys", "groups", "passes"), [(16, 25, 5), (16, 50, 5), (12, 6, 3), (64, 6, 6), (9, 7, 7)])
def test_batches_that_are_no_power_of_two_are_split_too(keys, groups, passes):
    assert passes_for_constant_memory(keys, groups) == passes


def test_small_views_are_encoded_at_once():
    settings, choices = chosen(50_000, 32, decoded=True, method__num_keys=5)
    assert settings.train.key_passes == 1
    assert "little memory" in next(choice.reason for choice in choices if choice.name == "train.key_passes")
    assert chosen(50_000, 32, decoded=True, method__num_keys=64)[0].train.key_passes > 1


@pytest.mark.parametrize(
    ("recipe", "images", "short_side"), [("cifar10", 50_000, 32), ("cifar100", 50_000, 32), ("photos", 10_000, 240)]
)
def test_images_of_ones_own_are_treated_as_the_recipe_for_such_images_says(recipe, images, short_side):
    named = resolve(build_settings(recipe), DataFacts(images, short_side, decoded=False))[0]
    own = chosen(images, short_side)[0]
    same = {"recipe": own.recipe, "data": own.data, "record": own.record}
    same["views"] = named.views.model_copy(update={"mean": own.views.mean, "std": own.views.std})
    assert named.model_copy(update=same) == own


@pytest.mark.parametrize(
    ("values", "views"),
    [
        ({}, (1, 6, 2)),
        ({"method__name": "multi-key"}, (1, 6, 2)),
        ({"method__name": "moco-v2"}, (1, 6, 1)),
        ({"method__num_queries": 2}, (2, 6, 3)),
        ({"method__num_keys": 7}, (1, 6, 7)),
        ({"method__num_local_queries": 0}, (2, 0, 3)),
        ({"method__num_local_queries": 0, "method__num_queries": 1}, (1, 0, 5)),
        ({"model__backbone": "tiny_cnn"}, (2, 0, 3)),
    ],
)
def test_small_images_get_local_queries(values, views):
    settings = chosen(50_000, 32, **values)[0]
    method = settings.method
    assert (method.num_queries, method.num_local_queries, method.num_keys) == views
    assert settings.views.local_scale == (0.08, 0.6)


@pytest.mark.parametrize(
    ("images", "values", "views"),
    [
        (5_000, {}, (2, 4, 3)),
        (5_000, {"method__name": "moco-v2"}, (1, 4, 1)),
        (5_000, {"method__num_keys": 5}, (1, 4, 5)),
        (5_000, {"model__backbone": "mobilenet_v3_small"}, (2, 0, 3)),
        (5_000, {"method__num_local_queries": 0}, (2, 0, 3)),
        (200_000, {}, (1, 0, 5)),
    ],
)
def test_photographs_get_local_queries_unless_there_are_many(images, values, views):
    method = chosen(images, **values)[0].method
    assert (method.num_queries, method.num_local_queries, method.num_keys) == views


def test_a_single_key_need_not_be_said_where_there_can_be_no_other():
    settings = Settings(method={"name": "moco-v2", "num_keys": "auto"})
    assert resolve(settings, DataFacts(5_000, 32, False))[0].method.num_keys == 1


def test_what_a_method_does_not_use_is_not_spoken_of():
    names = [choice.name for choice in chosen(5_000, method__name="moco-v2", method__num_keys=1)[1]]
    assert "method.covariance_scale" not in names and "train.lr" in names
    one_key = {choice.name for choice in chosen(5_000, method__num_keys=1)[1]}
    assert "method.covariance_scale" not in one_key


@pytest.mark.parametrize(("size", "stem", "said"), [(32, "small", False), (64, "small", True), (96, "imagenet", False)])
def test_the_stem_for_small_views_is_said_to_be_slow(size, stem, said):
    (choice,) = (choice for choice in chosen(5_000, views__image_size=size)[1] if choice.name == "model.stem")
    assert choice.value == stem and ("--image-size 96 is faster" in choice.reason) == said


@pytest.mark.parametrize(("batch", "ranks"), [(240, 3), (256, 2), (384, 6), (448, 7)])
def test_any_number_of_ranks_can_carry_out_what_was_chosen(batch, ranks):
    settings, _ = fit_to_ranks(chosen(50_000, train__batch_size=batch)[0], ranks)
    assert settings.model.bn_groups % ranks == 0 and settings.model.bn_groups % settings.train.key_passes == 0


def test_every_change_for_the_ranks_is_reported():
    before = chosen(50_000, train__batch_size=96, train__accumulate=4, model__bn_groups=4)[0]
    after, changes = fit_to_ranks(before, 3)
    assert {change.name: change.value for change in changes} == {
        "model.bn_groups": after.model.bn_groups,
        "train.accumulate": after.train.accumulate,
        "train.key_passes": after.train.key_passes,
    }
    assert after.train.accumulate != 4 and "instead of 4" in changes[0].reason


def test_gradients_through_keys_need_one_pass():
    settings, choices = chosen(50_000, method__name="multi-key-backprop")
    assert settings.train.key_passes == 1
    assert "gradients" in next(choice.reason for choice in choices if choice.name == "train.key_passes")


def test_choosing_twice_changes_nothing():
    settings, _ = chosen(5_000)
    assert resolve(settings, DataFacts(7, 7, True)) == (settings, [])


def test_few_images_have_few_default_knn_k_and_many_the_usual_number():
    assert [default_knn_k(images) for images in (5, 160, 2_000, 1_281_167)] == [1, 16, 200, 200]
    settings, choices = chosen(160)
    assert settings.record.knn_k == 16
    assert "a tenth of the 160 images" in next(choice.reason for choice in choices if choice.name == "record.knn_k")
    assert chosen(160, record__knn_k=7)[0].record.knn_k == 7
    assert chosen(160, record__knn_images=50)[0].record.knn_k == 5


def test_one_is_not_many():
    with pytest.raises(SettingsError, match="1 image is too few"):
        chosen(1)


def test_existing_weights_are_trained_with_more_care():
    asked = build_settings("folder", values={"data.location": "photos/", "train.epochs": 20})
    facts = DataFacts(images=10_000, short_side=300, decoded=False)
    weights = InitialWeights("imagenet", None, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    (scratch, _), (continued, choices) = (resolve(asked, replace(facts, init=init)) for init in (None, weights))
    assert continued.train.lr == pytest.approx(scratch.train.lr / 3)
    assert (scratch.train.warmup_epochs, continued.train.warmup_epochs) == (2.0, 5.0)
    assert continued.views.mean == weights.mean and continued.views.image_size == scratch.views.image_size
    assert {"train.lr", "views.mean"} <= {choice.name for choice in choices}


def test_named_data_sets_with_initial_weights_use_no_recipe_for_training_from_scratch():
    assert RunOptions(data="cifar10").settings().recipe == "cifar10"
    assert RunOptions(data="cifar10", init="imagenet").settings().recipe == "folder"
