"""Builds a command from the pydantic model of its options (`jcl.settings.options`).

    @command("knn", "commands.KnnOptions", group=EVALUATE)
    def knn(options: KnnOptions) -> dict[str, Any]:
        '''Help text of the command.'''

The model is named by its place in `jcl.settings` and imported when the command runs, so that `jcl --help` does not wait
for pydantic. The function gets the validated model. What it returns is written to the file given by `--json`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from jcl.errors import SettingsError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from jcl.settings.options import CliField, Options

Figures = dict[str, Any]
CommandFunction = Callable[[Any], "Figures | None"]

_COMMANDS: dict[str, tuple[str, CommandFunction]] = {}
_STYLE: dict[str, Any] = {"rich_markup_mode": "rich", "context_settings": {"help_option_names": ["-h", "--help"]}}
_METAVARS = {int: "INTEGER", float: "FLOAT", str: "TEXT", Path: "PATH"}


class WrongUsage(SettingsError):
    """The command line cannot be parsed."""

    def __init__(self, problem: str, command: str) -> None:
        end = "" if problem.endswith("?") else "."
        super().__init__(f"{problem[:1].upper()}{problem[1:]}{end} See `{command} --help`.")


class PlainTypes:
    """Leaves Python types, such as `<bool>` of flags, out of the help; other options have a placeholder."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if parameter.param_type_name == "argument" or parameter.is_flag:
                parameter.display_type_rich = lambda ctx: None
        return found


class PlainCommand(PlainTypes, TyperCommand):
    pass


class LazyGroup(PlainTypes, TyperGroup):
    """Builds the options of a command only when it is called, so that listing commands is fast."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, _build(found.name) if found is not None and found.name in _COMMANDS else found, rest


app = typer.Typer(
    name="jcl",
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    **_STYLE,
)


def command(name: str, model: str, *, group: str) -> Callable[[CommandFunction], CommandFunction]:
    """Register a command whose options are the model `model` of `jcl.settings`, in a group of `jcl --help`."""

    def register(function: CommandFunction) -> CommandFunction:
        def placeholder() -> None:
            """For the list of commands; `LazyGroup` builds the command when it is called."""

        app.command(name, help=function.__doc__, rich_help_panel=group)(placeholder)
        _COMMANDS[name] = (model, function)
        return function

    return register


def _build(name: str) -> Any:
    path, function = _COMMANDS[name]
    module, _, class_name = path.rpartition(".")
    model: type[Options] = getattr(importlib.import_module(f"jcl.settings.{module}"), class_name)

    def run(context: typer.Context, **values: Any) -> None:
        sources = {key: context.get_parameter_source(key) for key in values}
        given = {key: values[key] for key, source in sources.items() if source and source.name == "COMMANDLINE"}
        _run(function, _validated(context, model, given))

    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    run.__signature__ = inspect.Signature([context, *_parameters(model)])  # type: ignore[attr-defined]
    single = typer.Typer(add_completion=False, **_STYLE)
    single.command(name, cls=PlainCommand, help=function.__doc__)(run)
    return typer.main.get_command(single)


def _run(function: CommandFunction, options: Options) -> None:
    """Call the command, as several ranks with --devices, and write its results to --json."""
    from jcl.cli.app import check_json_file
    from jcl.cli.printing import refuse_swapped, warn_ambiguous_data, write_json

    json_file: Path | None = getattr(options, "json_file", None)
    check_json_file(json_file)
    if isinstance(data := getattr(options, "data", None), str):
        refuse_swapped(getattr(options, "weights", None), data)
        warn_ambiguous_data(data)
    from jcl.distributed.launch import is_launched, launch

    if (devices := getattr(options, "devices", 1)) > 1 and not is_launched():
        launch(sys.argv[1:], devices)
        return
    figures = function(options)
    if figures is not None:
        write_json(figures, json_file)


def _validated(context: typer.Context, model: type[Options], values: dict[str, Any]) -> Options:
    from pydantic import ValidationError

    from jcl.settings.schema import invalid_value

    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
    field = problems[0]["loc"][0] if problems[0]["loc"] else ""
    if not field:  # about several options
        raise WrongUsage(problems[0]["msg"].removeprefix("Value error, "), context.command_path)
    of_field = [problem for problem in problems if problem["loc"][0] == field]
    raise WrongUsage(invalid_value(model.flag(str(field)), of_field, str(of_field[0]["input"])), context.command_path)


def _parameters(model: type[Options]) -> list[inspect.Parameter]:
    """The parameters of the command for Typer: arguments first, then options by panel, shared ones last."""
    from jcl.settings.options import PANELS, Options, cli_field

    shared = {
        name
        for base in model.__mro__
        if issubclass(base, Options) and base.__module__ == Options.__module__
        for name in base.model_fields
    }
    fields = [(name, field, cli_field(field)) for name, field in model.model_fields.items()]
    fields.sort(key=lambda entry: (not entry[2].positional, PANELS.index(entry[2].panel), entry[0] in shared))
    return [_parameter(name, field, cli) for name, field, cli in fields]


def _parameter(name: str, field: FieldInfo, cli: CliField) -> inspect.Parameter:
    kind, metavar, choices = _typer_type(field.annotation)
    declared: dict[str, Any] = {"help": field.description, "metavar": cli.metavar or metavar}
    declared["rich_help_panel"] = cli.panel or None
    if choices:
        declared["autocompletion"] = lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]
    default = ... if field.is_required() else _default_text(field.default)
    if cli.positional:
        info: Any = typer.Argument(show_default=default is not None, **declared)
    else:
        info = typer.Option(*cli.names(name), **declared)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is ... else default,
        annotation=Annotated[kind if default is not None else kind | None, info],
    )


def _default_text(default: Any) -> Any:
    """A default as Typer shows it; None where there is nothing to show."""
    if default is None or default in ("", ()):
        return None
    if isinstance(default, bool):
        return default
    return [str(value) for value in default] if isinstance(default, tuple) else str(default)


def _typer_type(annotation: Any) -> tuple[Any, str | None, list[str]]:
    """The type that Typer parses (text, which pydantic then checks), the placeholder in the help and the choices."""
    members = [member for member in _members(annotation) if member is not type(None)]
    if bool in members:
        return bool, None, []
    sequence = next((member for member in members if typing.get_origin(member) in (tuple, list)), None)
    if sequence is not None:
        inner = [part for part in typing.get_args(sequence) if part is not Ellipsis]
        kind, metavar, choices = _typer_type(inner[0])
        several: Any = tuple if len(inner) > 1 else list
        return several[(kind,) * len(inner)], metavar, choices
    literals = [member for member in members if typing.get_origin(member) is Literal]
    choices = [str(choice) for literal in literals for choice in typing.get_args(literal)]
    names = [*dict.fromkeys(_METAVARS[member] for member in members if member in _METAVARS), *choices]
    kind = Path if members == [Path] else str
    return kind, "|".join(names), choices


def _members(annotation: Any) -> list[Any]:
    """The types of a union, without what `Annotated` adds."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        return [inner for member in typing.get_args(annotation) for inner in _members(member)]
    return [annotation]
