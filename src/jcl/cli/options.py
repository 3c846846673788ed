"""Build a command from the pydantic model of its options (`jcl.settings.options`).

    @command("knn", group=EVALUATE)
    def knn(options: commands.KnnOptions) -> dict[str, Any]:
        '''Help text of the command.'''

The annotation names the model by its place in `jcl.settings`. It is imported when the command runs, so that
`jcl --help` does not wait for pydantic. The function gets the validated model. What it returns is written to the file
given by `--json`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import jcl
from jcl.cli.printing import out, refuse_swapped, write_json
from jcl.cores import start_forkserver
from jcl.distributed.launch import is_launched, launch
from jcl.errors import SettingsError
from jcl.runs.json_object import holds_results

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from jcl.settings.options import CliField, Options

CommandFunction = Callable[[Any], dict[str, Any] | None]
TRAIN, EVALUATE, STUDY, EXCHANGE, DATA = "Train", "Evaluate", "Study", "Exchange", "Data and recipes"  # groups

_COMMANDS: dict[str, CommandFunction] = {}
_STYLE: dict[str, Any] = {"rich_markup_mode": "rich", "context_settings": {"help_option_names": ["-h", "--help"]}}
_METAVARS = {"integer": "INTEGER", "number": "FLOAT", "string": "TEXT", "path": "PATH"}  # by the type in JSON schema


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


app = typer.Typer(name="jcl", cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, **_STYLE)


def _show_version(asked: bool) -> None:
    if asked:
        out.print(f"jcl {jcl.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Joint Contrastive Learning: turn a folder of images without labels into a pre-trained backbone."""


def command(name: str, *, group: str) -> Callable[[CommandFunction], CommandFunction]:
    """Register a command in a group of `jcl --help`."""

    def register(function: CommandFunction) -> CommandFunction:
        def placeholder() -> None:
            """For the list of commands; `LazyGroup` builds the command when it is called."""

        app.command(name, help=function.__doc__, rich_help_panel=group)(placeholder)
        _COMMANDS[name] = function
        return function

    return register


def _build(name: str) -> Any:
    function = _COMMANDS[name]
    module, _, class_name = function.__annotations__["options"].rpartition(".")
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
    from jcl.settings.commands import RunOptions, WorkersOptions

    json_file: Path | None = getattr(options, "json_file", None)
    _check_json_file(json_file)
    _check_outputs(options)
    alone = (devices := getattr(options, "devices", 1)) == 1 or is_launched()
    data = getattr(options, "data", None)
    if alone and data and isinstance(options, RunOptions | WorkersOptions) and Path(data).is_dir():
        start_forkserver()  # now, so that it imports torch while this process does
    if data:
        refuse_swapped(getattr(options, "weights", None) or getattr(options, "run", None), data)
    if not alone:
        launch(sys.argv[1:], devices)
        return
    figures = function(options)
    if figures is not None:
        write_json(figures, json_file)


def _check_outputs(options: Options) -> None:
    """Raise, before any work, if an output is an input, has the wrong extension, or exists without --force."""
    from jcl.runs.atomic import refuse_overwrite
    from jcl.settings.options import cli_field

    out = getattr(options, "out", None)
    for name, field in type(options).model_fields.items():
        path, ending = getattr(options, name), cli_field(field).ending
        if out and path and cli_field(field).positional:
            inputs = [Path(each) for each in (path if isinstance(path, tuple) else (path,))]
            if out.is_file() and any(each.is_file() and out.samefile(each) for each in inputs):
                raise SettingsError(f"{out} is an input of this command; choose another --out.")
        if ending and path is not None:
            if path.suffix.lower() != ending:
                raise SettingsError(f"{path} must end in {ending}.")
            refuse_overwrite(path, force=getattr(options, "force", False))


def _check_json_file(path: Path | None) -> None:
    """Raise, before anything is done, if `--json` would overwrite something that is not results of jcl."""
    if path is None:
        return
    if str(path) == "-":
        raise SettingsError("--json takes the name of a file; standard output has the table.")
    from jcl.runs.folder import RunFolder

    # The run needs these files, and `holds_results` would take them for results.
    own = ("summary.json", "result.json", "cell.json", "probe.json", "detect.json", "data.json")
    if path.name in own and RunFolder(path.parent).holds_run():
        raise SettingsError(f"{path} is the run's own file; choose another name. Its page shows other .json files too.")
    if path.exists() and (path.suffix != ".json" or not holds_results(path)):
        raise SettingsError(f"{path} already exists and does not hold results of jcl; choose another name.")
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise SettingsError(f"{path} cannot be written: {folder} is not a folder that you may write to.")


def _validated(context: typer.Context, model: type[Options], values: dict[str, Any]) -> Options:
    from pydantic import ValidationError

    from jcl.settings.values import invalid_value

    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = error.errors()
    field = problems[0]["loc"][0]
    of_field = [problem for problem in problems if problem["loc"][0] == field]
    raise WrongUsage(invalid_value(model.flag(str(field)), of_field, str(of_field[0]["input"])), context.command_path)


def _parameters(model: type[Options]) -> list[inspect.Parameter]:
    """The parameters of the command for Typer: arguments first, then options by panel, shared ones last."""
    from jcl.settings.options import PANELS, SharedOptions, cli_field

    bases = [base for base in model.__mro__ if issubclass(base, SharedOptions) and SharedOptions in base.__bases__]
    shared = {name for base in bases for name in base.model_fields}
    fields = [(name, field, cli_field(field)) for name, field in model.model_fields.items()]
    fields.sort(key=lambda entry: (not entry[2].positional, PANELS.index(entry[2].panel), entry[0] in shared))
    schemas = model.model_json_schema()["properties"]
    return [_parameter(name, field, cli, schemas[name]) for name, field, cli in fields]


def _parameter(name: str, field: FieldInfo, cli: CliField, schema: dict[str, Any]) -> inspect.Parameter:
    kind, metavar, choices = _typer_type(schema)
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


def _typer_type(schema: dict[str, Any]) -> tuple[Any, str | None, list[str]]:
    """The type that Typer parses (text, which pydantic then checks), the placeholder in the help and the choices."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind["type"] != "null"]
    if any(kind["type"] == "boolean" for kind in kinds):
        return bool, None, []
    for kind in kinds:
        if kind["type"] == "array":
            parts = kind.get("prefixItems") or [kind["items"]]
            inner, metavar, choices = _typer_type(parts[0])
            several: Any = tuple if len(parts) > 1 else list
            return several[(inner,) * len(parts)], metavar, choices
    fixed = [kind.get("enum", [kind["const"]] if "const" in kind else []) for kind in kinds]
    choices = [str(choice) for values in fixed for choice in values]
    free = [kind for kind, values in zip(kinds, fixed, strict=True) if not values]
    names = dict.fromkeys(_METAVARS[kind.get("format", kind["type"])] for kind in free)
    only_path = [kind.get("format") for kind in kinds] == ["path"]
    return Path if only_path else str, "|".join([*names, *choices]), choices
