import os

import pytest

from jcl.errors import SettingsError
from jcl.settings.recipes import build_settings, parse_assignments, recipe_names, recipe_summary, recipe_values
from jcl.settings.values import settings_text

PAPER_ALIKE = {"method.temperature": 0.2, "method.queue_size": 65536, "method.key_momentum": 0.999}
PAPER_ALIKE |= {"model.embedding_dim": 128, "model.head": "mlp", "model.stem": "imagenet", "views.recipe": "moco-v2"}
PAPER_ALIKE |= {"train.schedule": "cosine", "train.schedule_by": "epoch", "train.warmup_epochs": 0.0}
PAPER_ALIKE |= {"train.momentum": 0.9, "train.weight_decay": 1e-4, "views.min_scale": 0.2, "views.image_size": 224}

PRESETS = {
    "imagenet-paper": {
        "model.backbone": "resnet50",
        "method.num_keys": 5,
        "method.covariance_scale": 4.0,
        "method.covariance_schedule": "constant",
        "train.batch_size": 512,
        "train.lr": 0.06,
        "train.epochs": 200,
    },
    "imagenet-official": {
        "model.backbone": "resnet50",
        "method.num_keys": 4,
        "method.covariance_scale": 2.0,
        "method.covariance_schedule": "linear",
        "train.batch_size": 256,
        "train.lr": 0.03,
        "train.epochs": 200,
    },
    "imagenet100-ablation": {
        "model.backbone": "resnet18",
        "method.num_keys": 5,
        "method.covariance_scale": 4.0,
        "method.covariance_schedule": "constant",
        "train.batch_size": 128,
        "train.lr": 0.1,
        "train.epochs": 100,
        "data.subset": "imagenet100",
    },
}


def value_of(settings, name):
    section, key = name.split(".")
    return getattr(getattr(settings, section), key)


@pytest.mark.parametrize("recipe", PRESETS)
def test_presets_are_what_the_paper_and_its_script_say(recipe):
    settings = build_settings(recipe)
    wanted = PAPER_ALIKE | PRESETS[recipe]
    assert {name: value_of(settings, name) for name in wanted} == wanted
    assert settings.method.name == "jcl" and settings.recipe == recipe


def test_moco_v1_is_the_published_one():
    settings = build_settings("imagenet-moco-v1")
    method, train = settings.method, settings.train
    assert (method.name, method.num_keys, method.temperature, method.queue_size) == ("moco-v1", 1, 0.07, 65536)
    assert (train.schedule, train.milestones, train.decay) == ("step", (120, 160), 0.1)
    assert (train.batch_size, train.lr, train.epochs, train.weight_decay) == (256, 0.03, 200, 1e-4)
    assert (settings.model.head, settings.views.recipe) == ("linear", "moco-v1")


def test_cifar_recipe_has_the_small_stem():
    settings = build_settings("cifar10")
    assert (settings.model.backbone, settings.model.stem, settings.data.location) == ("resnet18", "small", "cifar10")
    assert settings.views.image_size == 32


def test_there_are_the_recipes_that_are_promised_and_all_of_them_work():
    assert {"cifar10", "cifar100", "photos", "demo", "folder", *PRESETS} <= set(recipe_names())
    for name in recipe_names():
        assert build_settings(name).recipe == name
        assert recipe_summary(name)
        assert "summary" not in recipe_values(name)


def test_the_folder_recipe_leaves_to_the_data_what_depends_on_it():
    settings = build_settings("folder")
    chosen = ["method.queue_size", "method.key_momentum", "views.image_size", "model.bn_groups", "train.batch_size"]
    chosen += ["views.recipe", "method.num_queries", "method.num_keys", "method.covariance_scale"]
    chosen += ["train.lr", "train.weight_decay"]
    assert {value_of(settings, name) for name in chosen} == {"auto"}


@pytest.mark.parametrize("recipe", ["folder", "imagenet-paper", "cifar10", "demo"])
@pytest.mark.parametrize("method", ["jcl", "moco-v2", "moco-v1", "multi-key", "multi-key-backprop"])
def test_every_method_goes_with_every_recipe(recipe, method):
    settings = build_settings(recipe, method=method)
    assert settings.method.name == method
    assert (settings.method.num_keys == 1) == method.startswith("moco")
    if method == "moco-v1":
        assert (settings.method.temperature, settings.model.head, settings.views.recipe) == (0.07, "linear", "moco-v1")
    else:
        assert settings.model.head == "mlp"


def test_what_a_person_says_wins_over_method_and_method_over_recipe():
    assert build_settings("folder", method="moco-v1", values={"method.temperature": 0.5}).method.temperature == 0.5
    assert build_settings("folder", method="moco-v1", values={"model.head": "mlp"}).model.head == "mlp"
    assert build_settings("folder", values={"method.name": "moco-v2"}).method.num_keys == 1
    # Two answers to one question: the more detailed one wins, with all that it implies.
    both = build_settings("folder", method="moco-v2", values={"method.name": "jcl"}).method
    assert (both.name, both.num_keys) == ("jcl", "auto")
    with pytest.raises(SettingsError, match="exactly one key"):
        build_settings("folder", method="moco-v2", values={"method.num_keys": 4})


def test_a_text_of_a_recipe_is_emptied_by_no_value():
    values = parse_assignments(("data.subset=",))
    assert build_settings("imagenet100-ablation", values=values).data.subset == ""


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(SettingsError, match=r"no recipe called 'imagenet-papr'; did you mean imagenet-paper\?"):
        build_settings("imagenet-papr")
    with pytest.raises(SettingsError, match="no recipe called 'zzz'; there are cifar10"):
        build_settings("zzz")
    with pytest.raises(SettingsError, match=r"Unknown setting 'train.learning-rate'"):
        build_settings("folder", values={"train.learning-rate": 1})
    with pytest.raises(SettingsError, match=r"did you mean train.batch_size"):
        build_settings("folder", values={"train.batch": 1})
    for nonsense in ("moco-v3", ["jcl"], {"jcl": 1}, 5, None):
        with pytest.raises(SettingsError, match=r"method\.name"):
            build_settings("folder", values={"method.name": nonsense})


def test_a_recipe_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("summary: mine\ntrain: {epochs: 7, lr: 1e-3}\nmodel: {backbone: resnet34}\n")
    settings = build_settings(file, values={"train.seed": 4})
    assert (settings.train.epochs, settings.train.lr, settings.train.seed) == (7, 1e-3, 4)
    assert settings.model.backbone == "resnet34" and settings.recipe == str(file)


def test_a_recipe_of_ones_own_starts_from_the_one_it_names(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: cifar10\ntrain: {epochs: 7}\n")
    expected = build_settings("cifar10", values={"train.epochs": 7})
    assert build_settings(file).model_copy(update={"recipe": "cifar10"}) == expected
    file.write_text("recipe: cifar10\nmethod: {name: moco-v1}\n")
    same = {"recipe": "cifar10"}
    assert build_settings(file).model_copy(update=same) == build_settings("cifar10", method="moco-v1")
    assert build_settings(file, method="jcl").model_copy(update=same) == build_settings("cifar10", method="jcl")
    file.write_text("recipe: imagenet-moco-v1\nmethod: {name: jcl}\n")
    same = {"recipe": "imagenet-moco-v1"}
    assert build_settings(file).model_copy(update=same) == build_settings("imagenet-moco-v1", method="jcl")
    for recipe in ("cifar10", "mine.yaml"):
        same = {"recipe": recipe}
        file.write_text(settings_text(expected.model_copy(update=same)))  # as a run writes it
        assert build_settings(file).model_copy(update=same) == expected.model_copy(update=same)
    for other in (str(file), "other.yaml", "[cifar10]", "5"):
        file.write_text(f"recipe: {other}\n")
        with pytest.raises(SettingsError, match="`jcl recipes` does not list"):
            build_settings(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("train.lr: 0.1", r"unknown section 'train.lr'; write train: \{lr: ...\}"),
        ("trian: {lr: 0.1}", r"did you mean train\?"),
        ("train: {learning_rate: 0.1}", "unknown setting 'train.learning_rate'"),
        ("train: {lr: 0.1, epochs: 3, lr: 0.2}", "lr is given twice"),
        ("train: {lr: 0.1}\ntrain: {epochs: 3}", "train is given twice"),
    ],
)
def test_mistakes_in_a_recipe_file_are_named(tmp_path, content, words):
    (tmp_path / "mine.yaml").write_text(content)
    with pytest.raises(SettingsError, match=words):
        build_settings(tmp_path / "mine.yaml")


@pytest.mark.parametrize("content", ["train:", "train: 5", "train: [1]", "train: word"])
def test_a_section_that_is_none_is_a_sentence_whatever_else_is_given(tmp_path, content):
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    for values in ({}, {"train.seed": 4}, {"method.num_keys": 2}):
        with pytest.raises(SettingsError, match="train"):
            build_settings(str(file), values=values)


def test_a_pipe_is_no_recipe(tmp_path):
    os.mkfifo(tmp_path / "own.yaml")
    with pytest.raises(SettingsError, match="regular file"):
        recipe_values(str(tmp_path / "own.yaml"))


@pytest.mark.parametrize("method", ["moco-v1", "moco-v2"])
def test_moco_is_moco_whatever_a_recipe_adds_to_jcl(method, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: {num_queries: 2}\nmodel: {head: linear}\n", encoding="utf-8")
    settings = build_settings(str(mine), method=method)
    assert (settings.method.num_keys, settings.method.num_queries) == (1, 1)
    assert settings.model.head == {"moco-v1": "linear", "moco-v2": "mlp"}[method]
    assert build_settings(str(mine), method=method, values={"method.num_queries": 2}).method.num_queries == 2
    assert build_settings(str(mine), method="multi-key").method.num_queries == 2


def test_a_method_of_a_recipe_file_implies_its_settings(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("method: {name: moco-v1, temperature: 0.1}\n", encoding="utf-8")
    settings = build_settings(str(mine))
    assert (settings.method.num_keys, settings.method.temperature, settings.model.head) == (1, 0.1, "linear")
    other = build_settings(str(mine), method="moco-v2")
    assert (other.method.num_keys, other.method.temperature, other.model.head) == (1, 0.1, "mlp")


@pytest.mark.parametrize("setting", ["method.num_keys", "method.num_queries", "method.num_local_queries"])
def test_a_symmetric_method_has_two_views(setting):
    chosen = build_settings("cifar10", method="moco-v2-symmetric").method
    assert (chosen.num_keys, chosen.num_queries) == (2, 2)
    with pytest.raises(SettingsError, match="two views"):
        build_settings("cifar10", method="moco-v2-symmetric", values={setting: 3})


def test_the_name_of_the_recipe_is_not_a_value():
    with pytest.raises(SettingsError, match="recipe"):
        build_settings("folder", values={"recipe": "demo"})
