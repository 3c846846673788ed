import pytest
import yaml

from jcl.errors import SettingsError
from jcl.settings.recipes import build_settings, describe_settings, parse_assignments
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts, ResolvedSettings
from jcl.settings.schema import Settings, setting_names
from jcl.settings.values import parse_yaml, read_settings, settings_text, validated, with_values


def refusal(**sections) -> str:
    with pytest.raises(SettingsError) as caught:
        validated(Settings, sections, "my.yaml")
    return str(caught.value)


def test_settings_survive_a_file(tmp_path):
    settings = with_values(
        Settings(),
        {"train.lr": 0.1 + 0.2, "train.milestones": [3, 5], "views.std": [0.1, 0.2, 0.3], "train.seed": 2**62},
    )
    (tmp_path / "settings.yaml").write_text(settings_text(settings))
    assert read_settings(tmp_path / "settings.yaml", Settings) == settings
    assert read_settings(tmp_path / "settings.yaml", Settings).train.lr == 0.1 + 0.2  # to the last bit


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("train", "epochs", 0),
        ("train", "batch_size", 1),
        ("train", "lr", 0),
        ("train", "lr", -0.1),
        ("train", "lr", float("nan")),
        ("train", "lr", float("inf")),
        ("train", "lr", "fast"),
        ("train", "lr", 1e308),
        ("train", "seed", -1),
        ("train", "seed", 2**63),
        ("train", "momentum", 1.0),
        ("train", "layer_decay", 0.0),
        ("train", "layer_decay", 1.01),
        ("train", "milestones", [0]),
        ("train", "schedule", "cosin"),
        ("method", "temperature", 0.0),
        ("method", "covariance_scale", -1),
        ("method", "num_keys", 0),
        ("method", "num_keys", 2.5),
        ("method", "queue_size", 0),
        ("method", "key_momentum", 1.0),
        ("method", "name", "mocov2"),
        ("views", "min_scale", 0.0),
        ("views", "min_scale", 1.1),
        ("views", "mean", [0.5] * 17),
        ("views", "std", [0.2, 0.0, 0.2]),
        ("views", "image_size", "small"),
        ("model", "bn_groups", 0),
        ("model", "embedding_dim", -3),
        ("data", "workers", -1),
        ("record", "keep", 0),
        ("record", "knn_every", -1),
    ],
)
def test_impossible_values_are_named_in_one_sentence(section, key, value):
    message = refusal(**{section: {key: value}})
    assert message.startswith("In my.yaml: invalid value") and f" for {section}.{key}: " in message
    assert message[-1] in ".?" and "\n" not in message and message.count("invalid value") == 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"method": {"name": "moco-v2", "num_keys": 5}}, "moco-v2 uses exactly one key"),
        ({"train": {"batch_size": 10}, "model": {"bn_groups": 4}}, "train.batch_size=10 cannot be split"),
        ({"train": {"batch_size": 8}, "model": {"bn_groups": 8}}, "one image per group"),
    ],
)
def test_values_that_do_not_go_together(values, named):
    assert named in refusal(**values)


@pytest.mark.parametrize(
    ("section", "typed", "meant"),
    [
        ("train", "learning_rate", "lr"),
        ("train", "batchsize", "train.batch_size"),
        ("method", "numkeys", "method.num_keys"),
        ("model", "backbon", "model.backbone"),
    ],
)
def test_unknown_keys_come_with_the_nearest(section, typed, meant):
    message = refusal(**{section: {typed: 1}})
    assert f"unknown setting '{section}.{typed}'" in message
    assert meant in message or "lists them all" in message


def test_unknown_sections_and_things_that_are_no_sections():
    assert "unknown setting 'trane'" in refusal(trane={"lr": 1})
    assert "train" in refusal(train=5)
    assert "train" in refusal(train=None)
    assert "1" in refusal(**{"1": 2})
    unknown = "unknown setting '{}'; `jcl recipes --settings` lists them all"
    assert refusal(aaaa=1, bbbb=2).endswith(f"{unknown.format('aaaa')}; {unknown.format('bbbb')}.")


@pytest.mark.parametrize("name", ["train", "lr", "train.learningrate", "train.lr.x", ""])
def test_with_values_takes_dotted_names_only(name):
    with pytest.raises(SettingsError, match=f"Unknown setting '{name}'"):
        with_values(Settings(), {name: 1})


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch HACKED']",
        "train: !!python/object/new:os.system [touch HACKED]",
        "train: !!python/name:os.system",
        "train: {lr: [",
        "just text",
        "- a\n- list",
        "",
        "a: b: c",
        "\tx: 1",
        "[" * 400,
        "train: {lr: 2020-13-45}",
        f"train: {{lr: {'1' * 5000}}}",
        "train: {lr: !!int one}",
        "train: {lr: !!timestamp soon}",
        "train: {lr: !!bool perhaps}",
        "train: &own [*own]",
    ],
)
def test_hostile_or_broken_yaml_is_one_sentence_and_runs_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        read_settings(file, Settings)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["settings.yaml"]


def test_a_message_about_a_long_value_is_short(tmp_path):
    (tmp_path / "settings.yaml").write_text("train: {lr: [" + "1, " * 900 + "]}")
    with pytest.raises(SettingsError) as caught:
        read_settings(tmp_path / "settings.yaml", Settings)
    assert len(str(caught.value)) < 1000


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingsError, match=r"missing\.yaml"):
        read_settings(tmp_path / "missing.yaml", Settings)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SettingsError, match="not valid YAML"):
        read_settings(tmp_path / "binary.yaml", Settings)


def test_every_setting_is_described():
    rows = describe_settings()
    assert [row[0] for row in rows] == setting_names()
    assert all(meaning for _, _, meaning in rows)
    assert len(set(setting_names())) == len(setting_names()) > 30


def test_a_dumped_recipe_is_plain_yaml():
    values = yaml.safe_load(yaml.safe_dump(build_settings("cifar10").model_dump(mode="json")))
    assert validated(Settings, values, "there") == build_settings("cifar10")


def test_a_run_from_before_there_were_windows_goes_on_without_them():
    stored = resolve(build_settings("photos"), DataFacts(1000, 300, decoded=False))[0].model_dump()
    assert stored["data"].pop("windows")
    assert not validated(ResolvedSettings, stored, "settings.yaml").data.windows


@pytest.mark.parametrize(("word", "meant"), [("tau", "method.temperature"), ("lambda", "method.covariance_scale")])
def test_the_papers_letters_are_understood(word, meant):
    with pytest.raises(SettingsError, match=f"did you mean {meant}"):
        build_settings("folder", values={word: 1})


def test_octal_and_base_60_numbers_are_text():
    assert parse_yaml("[1, -2, 0, 0.5, 1.0e-3, 1:4, 010, 1:30.5]") == [1, -2, 0, 0.5, 0.001, "1:4", "010", "1:30.5"]
    assert build_settings("folder", values=parse_assignments(("train.epochs=010",))).train.epochs == 10
    with pytest.raises(SettingsError, match="invalid value '1:4'"):
        build_settings("folder", values=parse_assignments(("method.num_keys=1:4",)))


def test_aliases_which_could_fill_the_memory_are_refused(tmp_path):
    """Each line holds the one before ten times: expanded, these would be a billion values."""
    lines = ["l0: &l0 [0]", *(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 10))]
    (tmp_path / "settings.yaml").write_text("\n".join(lines))
    with pytest.raises(SettingsError, match="alias"):
        read_settings(tmp_path / "settings.yaml", Settings)
