"""Typed, validated settings of a pre-training run.

A recipe is a YAML file with values of these settings; a run folder keeps the complete set in `settings.yaml`. Values
that read "auto" are chosen from the data before training (see `automatic.py`) and replaced by what was chosen.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from jcl.core.registry import METHODS
from jcl.errors import SettingsError

Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
CropShare = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Triple = tuple[float, float, float]

ViewName = Literal["moco-v2", "moco-v1", "small", "none"]


def _known_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"must be {', '.join(map(repr, METHODS))}")
    return name


MethodName = Annotated[str, AfterValidator(_known_method)]
BatchSize = Annotated[int, Field(ge=2)]
NumKeys = Annotated[int, Field(ge=1, le=1024)]
NumQueries = Annotated[int, Field(ge=1, le=64)]
_MOST_YAML_NODES = 10_000  # a hundred times what settings hold
_MOST_PROBLEMS = 3  # that a message lists
_LONGEST_SHOWN = 200  # letters of a value that does not work


class Section(BaseModel):
    """Settings that belong together: an unknown name is an error, and nothing changes once it is validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Kind = TypeVar("Kind", bound=Section)


class DataSettings(Section):
    """Where the images come from and how they reach the device."""

    location: str = Field("", description="folder of images, .npz file, .tar shards, or demo, cifar10, cifar100, stl10")
    root: str = Field("", description="where data sets known by name are kept (empty: $JCL_DATA or ~/.cache/jcl/data)")
    subset: str = Field("", description="imagenet100, or a file with one class folder a line: use only these")
    download: bool = Field(True, description="fetch a data set known by name when it is not under data.root")
    canvas: PositiveInt | Auto = Field("auto", description="longest side in pixels at which images are decoded")
    workers: Annotated[int, Field(ge=0)] | Auto = Field("auto", description="processes that decode images")
    strict: bool = Field(False, description="stop at the first training image, folder or shard that is unreadable")


class ViewSettings(Section):
    """How a view of an image is made."""

    recipe: ViewName | Auto = Field("moco-v2", description="kind of views")
    image_size: PositiveInt | Auto = Field("auto", description="side in pixels of the views")
    min_scale: CropShare = Field(0.2, description="least share of the image in a crop")
    mean: Triple = Field((0.485, 0.456, 0.406), description="subtracted per channel")
    std: tuple[Positive, Positive, Positive] = Field((0.229, 0.224, 0.225), description="divided by per channel")


class ModelSettings(Section):
    """The encoder."""

    backbone: str = Field("resnet50", description="torchvision or timm name, or tiny_cnn")
    stem: Literal["imagenet", "small"] | Auto = Field("auto", description="first layers: for photographs or ~32 px")
    head: Literal["mlp", "linear"] = Field("mlp", description="MoCo v2's or MoCo v1's projection head")
    head_width: PositiveInt | Literal["features"] = Field("features", description="of the head's hidden layer")
    embedding_dim: PositiveInt = Field(128, description="dimension of queries and keys")
    bn_groups: PositiveInt | Auto = Field("auto", description="batch-norm groups of the batch (ShuffleBN)")


class MethodSettings(Section):
    """What is learned from the views."""

    name: MethodName = Field("jcl", description="contrastive method")
    num_keys: NumKeys | Auto = Field(5, description="key views per image, M'")
    num_queries: NumQueries | Auto = Field(1, description="query views per image (paper: 1)")
    covariance_scale: NotNegative | Auto = Field(4.0, description="weight of the keys' covariance, lambda")
    covariance_schedule: Literal["constant", "linear"] = Field("constant", description="linear: lambda (e+1)/E")
    temperature: Positive = Field(0.2, description="softmax temperature, tau")
    queue_size: PositiveInt | Auto = Field("auto", description="past keys kept as negatives, K")
    key_momentum: Share | Auto = Field("auto", description="momentum of the key encoder")


class TrainSettings(Section):
    """How long and how fast."""

    epochs: PositiveInt = Field(200, description="passes over the data")
    batch_size: BatchSize | Auto = Field("auto", description="images per step, over all devices")
    lr: Positive | Auto = Field("auto", description="highest learning rate, after the warm-up")
    weight_decay: NotNegative | Auto = Field(1e-4, description="on all parameters, as MoCo has it")
    momentum: Share = Field(0.9, description="of SGD")
    schedule: Literal["cosine", "step", "constant"] = Field("cosine", description="shape of the learning rate")
    schedule_by: Literal["epoch", "step"] = Field("epoch", description="how often the learning rate changes")
    milestones: tuple[PositiveInt, ...] = Field((120, 160), description="epochs at which a step schedule decays")
    decay: Positive = Field(0.1, description="factor of a step schedule")
    warmup_epochs: NotNegative | Auto = Field(0.0, description="epochs of linear warm-up")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of everything random")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, ...")
    precision: Literal["auto", "float32", "bfloat16"] = Field("auto", description="of the encoders")
    compile: bool | Auto = Field("auto", description="compile views, encoders and loss (auto: on a GPU)")
    cuda_graph: bool | Auto = Field("auto", description="record a step as one CUDA graph (auto: on a GPU)")
    key_passes: PositiveInt | Auto = Field("auto", description="parts in which the keys are encoded")
    rank_timeout: Positive = Field(600.0, description="seconds after which a rank that does not answer is given up")
    on_nan: Literal["stop", "skip"] = Field("stop", description="what a loss that is not finite does: stop, skip")


class RecordSettings(Section):
    """What is written down while training."""

    log_every: PositiveInt = Field(20, description="steps per line of metrics.jsonl")
    checkpoint_every: PositiveInt = Field(5, description="epochs between checkpoints")
    checkpoint_minutes: NotNegative = Field(15.0, description="minutes between checkpoints within that; 0: none")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    knn_every: Annotated[int, Field(ge=0)] = Field(10, description="epochs between online kNN; 0: only at the end")
    knn_k: PositiveInt | Auto = Field(200, description="neighbours that vote")
    knn_temperature: Positive = Field(0.1, description="of the votes' weights")
    tensorboard: bool = Field(True, description="write TensorBoard events too")
    report: bool = Field(True, description="make a page of the run, report.html, at its end")


class Settings(Section):
    """Everything that defines a run."""

    recipe: str = Field("", description="the recipe these settings started from")
    data: DataSettings = DataSettings()
    views: ViewSettings = ViewSettings()
    model: ModelSettings = ModelSettings()
    method: MethodSettings = MethodSettings()
    train: TrainSettings = TrainSettings()
    record: RecordSettings = RecordSettings()

    @model_validator(mode="after")
    def _values_fit_together(self) -> Self:
        if not METHODS[self.method.name].several_keys and self.method.num_keys not in (1, "auto"):
            raise ValueError(
                f"{self.method.name} uses exactly one key per image, but method.num_keys is {self.method.num_keys}; "
                "choose a method with several keys, such as jcl"
            )
        batch, groups = self.train.batch_size, self.model.bn_groups
        if isinstance(batch, int) and isinstance(groups, int):
            if batch % groups:
                raise ValueError(f"train.batch_size={batch} cannot be split into model.bn_groups={groups} equal groups")
            if batch // groups < 2:
                raise ValueError(
                    f"train.batch_size={batch} in model.bn_groups={groups} groups leaves one image a group, "
                    "too few for batch-norm statistics; lower model.bn_groups"
                )
        passes = self.train.key_passes
        if isinstance(groups, int) and isinstance(passes, int) and groups % passes:
            raise ValueError(f"train.key_passes={passes} does not divide model.bn_groups={groups}")
        return self


AnySettings = TypeVar("AnySettings", bound=Settings)


def settings_from(values: Mapping[str, Any], origin: str) -> Settings:
    """Validate nested values; every problem becomes a sentence that names `origin` and the key."""
    return validated(Settings, values, origin)


def validated(kind: type[Kind], values: Mapping[str, Any], origin: str) -> Kind:
    """Settings of some kind from nested values; every problem becomes a sentence that names `origin` and the key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_sentences(error.errors(), origin)) from None


def read_settings(path: Path, kind: type[AnySettings]) -> AnySettings:
    """The settings in a YAML file; only plain data is ever read from it."""
    return validated(kind, read_yaml(path), str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, which may be a stranger's."""
    if path.exists() and not path.is_file():  # a pipe would keep its reader waiting for ever
        raise SettingsError(f"cannot read the settings in {path}: it is no file.")
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings in {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path} should hold settings as 'section: values', but it holds {type(values).__name__}.")
    return values


def parse_yaml(text: str) -> Any:
    """Plain data from YAML; whatever is wrong with the text raises `yaml.YAMLError`."""
    try:
        return yaml.load(text, _Loader)
    # What reads numbers and dates raises errors of its own, as at the 99th of a month.
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise yaml.YAMLError(f"{error or type(error).__name__}") from None


class _Loader(yaml.SafeLoader):
    """Reads plain data only, and refuses text in which things refer to each other until they fill the memory."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _written_out(node, {}) > _MOST_YAML_NODES:
            raise yaml.YAMLError(f"it has more than {_MOST_YAML_NODES:,} values")
        return node


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values there are in a node when each reference is replaced by what it refers to."""
    if id(node) not in known:
        known[id(node)] = _MOST_YAML_NODES + 1  # until it is known: what it has in itself would have no end
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in pairs for part in pair]
        known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(node)]


def settings_text(settings: Settings) -> str:
    """The settings as YAML, exact to the last bit."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def with_values(settings: AnySettings, values: Mapping[str, Any]) -> AnySettings:
    """The same settings with some changed, given by dotted names such as `train.lr`."""
    nested = settings.model_dump()
    for name, value in values.items():
        put(nested, name, value)
    return validated(type(settings), nested, "the chosen values")


def values_of(settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    """The values of these dotted names, as in JSON."""
    dumped = settings.model_dump(mode="json")
    return {name: value_of(dumped, name) for name in names}


def value_of(dumped: Mapping[str, Any], name: str) -> Any:
    """The value of a dotted name in settings as a nested mapping."""
    section, _, key = name.partition(".")
    return dumped[section][key] if key else dumped[section]


_NO_EFFECT = {
    *("data.root", "data.download", "data.workers"),
    *("train.device", "train.compile", "train.cuda_graph", "train.key_passes", "train.rank_timeout", "train.on_nan"),
}


def affects_results(name: str) -> bool:
    """Whether a setting changes what a run learns or measures, and not only where and how it is carried out."""
    if name.startswith("record."):
        return name in ("record.knn_k", "record.knn_temperature")
    return name not in _NO_EFFECT


def put(nested: dict[str, Any], name: str, value: Any) -> None:
    """Set one value by its dotted name, after making sure that there is such a setting."""
    section, _, key = name.partition(".")
    known = setting_names()
    if name not in known:
        hint = _nearest(name, known)
        raise SettingsError(f"unknown setting {name!r}; {hint}{'' if hint.endswith('?') else '.'}")
    if not key:
        nested[section] = value
        return
    values = nested.setdefault(section, {})
    if not isinstance(values, dict):
        raise SettingsError(f"the section {section!r} should hold settings as 'name: value', but it holds {values!r}.")
    values[key] = str(value) if isinstance(value, Path) else value  # as Python users name the images


def setting_names() -> list[str]:
    """All settings by their dotted names."""
    names = []
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            names += [f"{section}.{key}" for key in kind.model_fields]
        else:
            names.append(section)
    return names


def setting_field(name: str) -> FieldInfo:
    """The field of a setting given by its dotted name."""
    section, _, key = name.partition(".")
    field = Settings.model_fields[section]
    if not key:
        return field
    assert isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    return field.annotation.model_fields[key]


def _nearest(name: str, known: list[str]) -> str:
    by_key = {entry.rpartition(".")[2]: entry for entry in known}
    key = name.rpartition(".")[2]
    found = difflib.get_close_matches(name, known, n=1) or [
        by_key[match] for match in difflib.get_close_matches(key, list(by_key), n=1)
    ]
    return f"did you mean {found[0]}?" if found else "`jcl recipes --settings` lists them all"


def _sentences(problems: list[Any], origin: str) -> str:
    """What is wrong with the first few settings; a value that may be of several types fails once for each of them."""
    by_name: dict[str, list[Any]] = {}
    for problem in problems:
        by_name.setdefault(".".join(str(part) for part in problem["loc"][:2]), []).append(problem)
    found = [_problem(name, of_name) for name, of_name in by_name.items()]
    more = f" and {len(found) - _MOST_PROBLEMS} more" if len(found) > _MOST_PROBLEMS else ""
    text = f"In {origin}: {'; '.join(found[:_MOST_PROBLEMS])}{more}"
    return text if text.endswith("?") else f"{text}."


def _problem(name: str, problems: list[Any]) -> str:
    if problems[0]["type"] == "extra_forbidden":
        return f"unknown setting {name!r}; {_nearest(name, setting_names())}"
    if problems[0]["type"] == "missing" and len(problems[0]["loc"]) < 3:  # and not part of a list
        return f"{name} is missing"
    return invalid_value(name, problems) if name else "; ".join(map(_expected, problems))


def invalid_value(name: str, problems: Sequence[Any], value: str | None = None) -> str:
    """`invalid value 0 for train.epochs: must be at least 1`, from the errors of pydantic for one field."""
    shown = repr(problems[0]["input"]) if value is None else value
    shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."
    wanted = dict.fromkeys(_expected(problem) for problem in problems)
    return f"invalid value {shown} for {name}: {' or '.join(wanted)}"


_EXPECTED = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
    "finite_number": "must be finite",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "missing": "has too few values",
}


def _expected(problem: Any) -> str:
    """What a value should have been."""
    if problem["type"] in _EXPECTED:
        return _EXPECTED[problem["type"]].format(**problem.get("ctx", {}))
    message: str = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return message[0].lower() + message[1:]


def describe_settings(settings: Settings | None = None) -> list[tuple[str, str, str]]:
    """Every setting with its value (its default without `settings`) and its meaning."""
    rows = []
    for name in setting_names():
        field = setting_field(name)
        value = field.default if settings is None else attrgetter(name)(settings)
        rows.append((name, str(value), field.description or ""))
    return rows
