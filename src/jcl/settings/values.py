"""Read, check and change the values of settings; every error is a sentence that names the setting."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from jcl.console import list_some
from jcl.errors import SettingsError
from jcl.paths import read_file
from jcl.settings.schema import Section, Settings, setting_fields, setting_names

_MAX_PROBLEMS = 3  # in a message
_MAX_VALUE_LENGTH = 200  # characters of an invalid value

Kind = TypeVar("Kind", bound=Section)
AnySettings = TypeVar("AnySettings", bound=Settings)


def validated(kind: type[Kind], values: Mapping[str, Any], origin: str) -> Kind:
    """A model from nested values; errors name `origin` and the setting."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_error_message(error.errors(), origin)) from None


def read_settings(path: Path, kind: type[AnySettings]) -> AnySettings:
    """The settings in a YAML file; only plain data is ever read from it."""
    return validated(kind, read_yaml(path), str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file, which may be untrusted."""
    try:
        values = parse_yaml(read_file(path, SettingsError).decode())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(values, dict):
        raise SettingsError(f"{path} must contain settings as 'section: values', not {type(values).__name__}.")
    return values


def parse_yaml(text: str) -> Any:
    """Plain data from YAML; all errors are `yaml.YAMLError`."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # numbers and dates raise their own errors, for example for the 99th of a month
        raise yaml.YAMLError(str(error) or type(error).__name__) from None


class _Loader(yaml.SafeLoader):
    """Reads plain data only. Aliases are refused, because a few of them can expand to fill the memory."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.YAMLError(f"{twice} is given twice")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> Any:
        """A number; octal and base-60 ones of YAML 1.1, such as 010 and 1:30, stay text."""
        if re.fullmatch(r"[-+]?0[0-9_]+|.*:.*", node.value):
            return node.value
        return self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)


for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def settings_text(settings: Settings) -> str:
    """The settings as YAML, exact to the last bit."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)


def with_values(settings: AnySettings, values: Mapping[str, Any]) -> AnySettings:
    """The same settings with some changed, given by dotted names such as `train.lr`."""
    nested = settings.model_dump()
    for name, value in values.items():
        set_value(nested, name, value)
    return validated(type(settings), nested, "the chosen values")


def values_of(settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """The values of these dotted names, as in JSON."""
    dumped = settings.model_dump(mode="json")
    parts = {name: name.partition(".") for name in names}
    return {name: dumped[section][key] if key else dumped[section] for name, (section, _, key) in parts.items()}


def set_value(nested: dict[str, Any], name: str, value: Any) -> None:
    """Set a value by its dotted name, which must exist."""
    section, _, key = name.partition(".")
    if name not in setting_fields():
        raise SettingsError(f"Unknown setting {name!r}; {_nearest(name)}")
    if not key:
        raise SettingsError(f"{name} is not a setting of a run; choose a recipe with --recipe {value}.")
    values = nested.setdefault(section, {})
    if not isinstance(values, dict):
        raise SettingsError(f"The section {section!r} must contain settings as 'name: value', not {values!r}.")
    values[key] = str(value) if isinstance(value, Path) else value  # Python users may give a path


def _nearest(name: str) -> str:
    by_key = {entry.rpartition(".")[2]: entry for entry in setting_names()}
    found = difflib.get_close_matches(name, by_key.values(), n=1, cutoff=0.8)
    key = name.rpartition(".")[2]
    found += [by_key[close] for close in difflib.get_close_matches(key, by_key, n=1)]
    word = re.compile(rf"\b{re.escape(key)}\b")  # such as "tau", which is in a description
    found += [entry for entry, field in setting_fields().items() if key and word.search(field.description or "")]
    return f"did you mean {found[0]}?" if found else "`jcl recipes --settings` lists them all."


def _error_message(problems: list[Any], origin: str) -> str:
    """What is wrong with the first few settings; pydantic reports a value once for each type that it could have."""
    by_name: dict[str, list[Any]] = {}
    for problem in problems:
        by_name.setdefault(".".join(str(part) for part in problem["loc"][:2]), []).append(problem)
    found = [_problem(*each).rstrip(".") for each in by_name.items()]
    text = f"In {origin}: {list_some(found, _MAX_PROBLEMS, '; ')}"
    return text if text.endswith("?") else f"{text}."


def _problem(name: str, problems: list[Any]) -> str:
    if problems[0]["type"] == "extra_forbidden":
        section, _, key = name.partition(".")
        if name in setting_names():  # written with a dot
            return f"unknown section {name!r}; write {section}: {{{key}: ...}}"
        sections = [] if key else difflib.get_close_matches(name, list(Settings.model_fields), n=1)
        return f"unknown setting {name!r}; {f'did you mean {sections[0]}?' if sections else _nearest(name)}"
    if problems[0]["type"] == "missing" and len(problems[0]["loc"]) < 3:  # and not part of a list
        return f"{name} is missing"
    return invalid_value(name, problems) if name else "; ".join(map(_expected, problems))


def invalid_value(name: str, problems: Sequence[Any], value: str | None = None) -> str:
    """`invalid value 0 for train.epochs: must be at least 1`, from the errors of pydantic for one field."""
    shown = (repr(problems[0]["input"]) if value is None else value)[:_MAX_VALUE_LENGTH]
    first, *others = dict.fromkeys(_expected(problem) for problem in problems)
    wanted = " or ".join([first, *(other.removeprefix("must be ") for other in others)])
    close = difflib.get_close_matches(str(problems[0]["input"]), re.findall(r"'([^' ]+)'", wanted), n=1)
    return f"invalid value {shown} for {name}: {wanted}{f'; did you mean {close[0]}?' if close else ''}"


_WORDS = {
    "Input should be": "must be",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid tuple": "a list such as [1, 2, 3]",
}


def _expected(problem: Any) -> str:
    """What a value should have been."""
    if problem["type"] == "model_type":
        return "must contain settings as 'name: value'"
    message: str = problem["msg"].removeprefix("Value error, ").partition(", unable to")[0]
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return message[0].lower() + message[1:]
