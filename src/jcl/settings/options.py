"""Options of commands as pydantic models: name, type, default, help and panel are written once.

`jcl.cli.options` turns a model into a command, and the application function takes the model. A field is an option
named after it (`batch_size` is `--batch-size`) unless it is declared with `argument`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, create_model, field_validator
from pydantic.fields import FieldInfo

from jcl.errors import SettingsError
from jcl.paths import expand_user
from jcl.settings.schema import Section, setting_fields

# Panels of `--help` below the main one, in this order.
SETTINGS, DATA, HARDWARE, OUTPUT = "Other settings", "Data", "Hardware", "Output"
PANELS = ("", SETTINGS, DATA, HARDWARE, OUTPUT)


@dataclass(frozen=True)
class CliField:
    """How a field of a model appears on the command line."""

    flags: tuple[str, ...] = ()  # empty: the field's name
    panel: str = ""  # empty: the main panel
    metavar: str | None = None
    positional: bool = False
    setting: str = ""  # the dotted name of the run setting that the option sets
    ending: str = ""  # of a file that the command writes

    def names(self, field: str) -> tuple[str, ...]:
        """The flags of a field, last the one that messages use; for an argument, its name in the usage line."""
        if self.positional:
            return (self.metavar or field.upper(),)
        return self.flags or (f"--{field.replace('_', '-')}",)


def option(default: Any, help: str, *flags: str, panel: str = "", metavar: str | None = None, ending: str = "") -> Any:
    """A field that is an option; `...` as the default makes it required."""
    return _field(default, help, CliField(flags, panel, metavar, ending=ending))


def argument(metavar: str, help: str, default: Any = ...) -> Any:
    """A field that is a positional argument."""
    return _field(default, help, CliField(metavar=metavar, positional=True))


def _field(default: Any, help: str, cli: CliField) -> Any:
    return Field(default, description=help, validate_default=True, json_schema_extra={"cli": cli})  # type: ignore[dict-item]


def cli_field(field: FieldInfo) -> CliField:
    extra = field.json_schema_extra
    cli = extra.get("cli") if isinstance(extra, dict) else None
    return cli if isinstance(cli, CliField) else CliField()


class Options(Section):
    """Base of all commands' options."""

    @field_validator("*")
    @classmethod
    def _expand_home(cls, value: Any) -> Any:
        """Expand `~`, which shells do not expand in `--out=~/runs`."""
        if isinstance(value, tuple):
            return tuple(map(cls._expand_home, value))
        return expand_user(value) if isinstance(value, Path) else value

    @classmethod
    def flag(cls, name: str) -> str:
        """What messages call a field."""
        return cli_field(cls.model_fields[name]).names(name)[-1]

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Raise if one of these options was given."""
        for name in names:
            if name in self.model_fields_set:
                raise SettingsError(f"{self.flag(name)} {why}.")

    def refuse_others(self, name: str, *allowed: str) -> None:
        """Raise if an option was given with `name`, which takes the settings from a folder."""
        others = sorted(self.model_fields_set - {name, *allowed})
        self.refuse(others, f"does not go with {self.flag(name)}, which uses the settings of the folder")


class SharedOptions(Options):
    """Base of options that several commands have; `--help` shows them last."""


Model = TypeVar("Model", bound=Options)


def with_fields(fields: Mapping[str, Any]) -> Callable[[type[Model]], type[Model]]:
    """Add fields made by `optional_field` to a model."""

    def add(model: type[Model]) -> type[Model]:
        made: type[Model] = create_model(model.__name__, __base__=model, __module__=model.__module__, **fields)
        return made

    return add


def run_setting_fields(panels: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """An option for each of these run settings, by panel; `data.location` becomes the argument DATA."""
    fields: dict[str, Any] = {}
    for panel, setting in [(panel, setting) for panel, names in panels.items() for setting in names]:
        name = {"data.location": "data", "method.name": "method"}.get(setting, setting.rpartition(".")[2])
        metavar = {"data": "DATA", "track": "NAME"}.get(name)  # the choices of the tracker are in its help
        cli = CliField(panel=panel, positional=name == "data", metavar=metavar, setting=setting)
        fields[name] = optional_field(setting_fields()[setting], cli)
    return fields


def optional_field(field: FieldInfo, cli: CliField, note: str = "") -> tuple[Any, Any]:
    """A field of the same type and help for `create_model`, with None as its default."""
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return kind | None, _field(None, (field.description or "") + note, cli)
