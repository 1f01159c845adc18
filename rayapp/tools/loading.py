"""Makes a `ToolSet` from a tool file. Each rollout worker opens a set of its own.

Class names of verl stand for classes of this package. Any other class is named by its import path, or by its file:
`dice.py:Dice`, the user's own code: it is trusted and runs in this process.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from rayapp.core.errors import ConfigError, UserError
from rayapp.core.http import TokenBucket
from rayapp.core.names import did_you_mean
from rayapp.tools.base import Tool, ToolContext, ToolSchema
from rayapp.tools.config import McpServer, McpToolConfig, ToolEntry, parse, read_mcp_servers, read_tool_file
from rayapp.tools.mcp_tool import McpLink, McpTool
from rayapp.tools.toolset import ToolSet

_MCP = "rayapp.tools.mcp_tool.McpTool"
# Short names, for tool files and for the tools of tasks.
SHIPPED = {
    "bash": "rayapp.tools.coding.BashTool",
    "edit": "rayapp.tools.coding.EditTool",
    "python": "rayapp.tools.coding.PythonTool",
    "run_tests": "rayapp.tools.coding.RunTestsTool",
    "submit": "rayapp.tools.coding.SubmitTool",
    "submit_work": "rayapp.tools.coding.SubmitWorkTool",
}
# Short name, or verl's class name -> class.
KNOWN = SHIPPED | {
    "verl.tools.mcp_search_tool.MCPSearchTool": _MCP,
    "verl.tools.mcp_base_tool.MCPBaseTool": _MCP,
    "verl.tools.gsm8k_tool.Gsm8kTool": "rayapp.tools.gsm8k.Gsm8kTool",
}


async def open_tools(
    path: str | Path = "",
    context: ToolContext | None = None,
    *,
    brought: Sequence[str] = (),
    made: Sequence[Tool] = (),
) -> ToolSet:
    """Return the tools of a tool file and the tools that a task brings, with their servers connected.

    `brought` are names of a task's tools, without config; a tool of the file replaces one of the same name. `made`
    exist.
    """
    context = context or ToolContext()
    tools = list(made)
    links: list[McpLink] = []
    try:
        for entry in read_tool_file(path) if path else ():
            tools.extend(await _tools_of(entry, Path(path), context, links))
        configured = {tool.schema.name for tool in tools}
        for name in brought:
            tool = _native_tool(ToolEntry(class_name=name), Path(), context, f"tools: {name}")
            if tool.schema.name not in configured:
                tools.append(tool)
        return ToolSet(tools, on_close=[link.close for link in links])
    except BaseException:
        await _close_all([link.close for link in links])
        raise


async def _close_all(closing: Sequence[Callable[[], Awaitable[None]]]) -> None:
    await asyncio.gather(*(close() for close in closing))


async def _tools_of(entry: ToolEntry, path: Path, context: ToolContext, links: list[McpLink]) -> list[Tool]:
    name = KNOWN.get(entry.class_name, entry.class_name)
    where = f"tool file {path}: {entry.class_name}"
    if name == _MCP:
        return await _mcp_tools(entry, path, context, links, where)
    return [_native_tool(entry, path.parent, context, where)]


def _native_tool(entry: ToolEntry, folder: Path, context: ToolContext, where: str) -> Tool:
    schema = ToolSchema.from_openai(entry.tool_schema, where=where) if entry.tool_schema is not None else None
    kind = load_class(entry.class_name, folder, where)
    try:
        tool: Tool = kind(entry.config, schema, context)
        _ = tool.schema.name, tool.timeout_s
    except UserError:
        raise
    except Exception as error:  # boundary: the constructor of the user's class may raise anything
        raise ConfigError(f"{where} can't be made: {type(error).__name__}: {error}") from error
    return tool


async def _mcp_tools(
    entry: ToolEntry, path: Path, context: ToolContext, links: list[McpLink], where: str
) -> list[Tool]:
    if entry.mcp is None:
        raise ConfigError(f"{where} has no section `mcp`: add mcp: {{mcp_servers_config_path: …}}")
    config = parse(entry.config, McpToolConfig, where=f"{where}: config")
    selected = set(entry.mcp.tool_selected_list)
    found: list[Tool] = []
    offered: list[str] = []
    for name, server in read_mcp_servers(entry.mcp, path.parent).items():
        connect = _connector(name, server, config, context)
        shared = connect()
        links.append(shared)
        infos = await shared.list_tools()
        offered += [info.name for info in infos]
        bucket = TokenBucket(rate_per_s=config.rate_limit, burst=max(1, int(config.rate_limit)), clock=time.monotonic)
        found += [
            McpTool(info, config, connect=connect, shared=shared, bucket=bucket)
            for info in infos
            if not selected or info.name in selected
        ]
    if missing := selected - {tool.schema.name for tool in found}:
        raise ConfigError(
            f"{where}: tool_selected_list names {', '.join(sorted(missing))}, which no server offers. Choose from: "
            f"{', '.join(offered) or 'nothing'}"
        )
    return found


def _connector(name: str, server: McpServer, config: McpToolConfig, context: ToolContext) -> Callable[[], McpLink]:
    headers = server.all_headers(context.environ, where=f"MCP server {name!r}")
    return partial(
        McpLink,
        name,
        server.url,
        headers,
        reconnect_timeout_s=config.reconnect_timeout,
        keeps_state=config.session == "trajectory",
    )


def load_class(name: str, folder: Path, where: str) -> Callable[..., Any]:
    """Return the class of a tool: a short name, an import path, or `file.py:Class`, searched first in `folder`."""
    name = KNOWN.get(name, name)
    file, colon, attribute = name.rpartition(":")
    if colon:
        own = Path(file)
        module = _run_file(folder / own if (folder / own).exists() else own, where)
    else:
        module_name, _, attribute = name.rpartition(".")
        try:
            module = importlib.import_module(module_name)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{where} can't be imported ({error}){_hint(name)}") from error
    kind: Callable[..., Any] | None = getattr(module, attribute, None)
    if kind is None:
        raise ConfigError(f"{where}: there is no class {attribute} in {file or module.__name__}")
    return kind


def _hint(name: str) -> str:
    meant = did_you_mean(name, SHIPPED)
    verls = [known for known in KNOWN if known not in SHIPPED]
    return f"{meant} Tools that ship: {', '.join(SHIPPED)}; known class names of verl: {', '.join(verls)}"


def _run_file(path: Path, where: str) -> ModuleType:
    module = ModuleType(f"rayapp_tool_{path.stem}")
    module.__file__ = str(path)
    # The module is registered before it runs, because dataclasses look up their module in sys.modules.
    sys.modules[module.__name__] = module
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    except FileNotFoundError:
        raise ConfigError(f"{where}: there is no file {path}") from None
    except UserError:
        raise
    except Exception as error:  # boundary: the user's file may raise anything
        raise ConfigError(f"{where}: {path} can't be imported: {type(error).__name__}: {error}") from error
    return module
