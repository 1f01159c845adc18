"""What an external agent is handed for one trajectory. Its author reads this: docs/agents.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """One task, and the policy behind the APIs that agents speak."""

    task: str
    """Name of the task, or the data row's source."""
    messages: tuple[Mapping[str, str], ...]
    """What is asked: role and content each."""
    files: Mapping[str, str] = field(default_factory=dict)
    """By relative path: what the task brings along. They lie in `folder`."""
    folder: Path
    """The agent's own, empty but for the files. It is gone when the trajectory ends."""
    url: str
    """Of the session."""
    api_key: str
    """Opens this session alone, as long as the trajectory goes on."""
    model: str = "policy"
    """Any other name does as well."""

    @property
    def prompt(self) -> str:
        """All that is asked, as one text."""
        return "\n\n".join(message["content"] for message in self.messages)

    @property
    def openai_base_url(self) -> str:
        """For `openai.AsyncOpenAI(base_url=…)`."""
        return f"{self.url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For `anthropic.AsyncAnthropic(base_url=…)`."""
        return self.url

    @property
    def environment(self) -> dict[str, str]:
        """Where programs look for the policy and for the task."""
        return {
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_BASE": self.openai_base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "RAYAPP_MODEL": self.model,
            "RAYAPP_TASK_FILE": str(self.task_file),
        }

    @property
    def task_file(self) -> Path:
        """JSON: task, messages and prompt."""
        return self.folder / ".rayapp" / "task.json"

    @property
    def content(self) -> dict[str, str]:
        """Of the folder when the agent begins: the files and the task, by relative path."""
        told = {"task": self.task, "prompt": self.prompt, "messages": [dict(message) for message in self.messages]}
        return {**self.files, str(self.task_file.relative_to(self.folder)): json.dumps(told, ensure_ascii=False)}

    def write(self) -> None:
        """Fill the folder.

        Raises:
            ValueError: a file's path leads out of it.
        """
        for name, text in self.content.items():
            path = (self.folder / name).resolve()
            if not path.is_relative_to(self.folder.resolve()):
                raise ValueError(f"task {self.task}: the file {name!r} leads out of the agent's folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def filled_in(self, argument: str) -> str:
        """An argument of a command, with {prompt}, {model}, {url}, {task_file} and {folder}."""
        values = {
            "{prompt}": self.prompt,
            "{model}": self.model,
            "{url}": self.url,
            "{task_file}": str(self.task_file),
            "{folder}": str(self.folder),
        }
        # Each once, so that a prompt that holds `{url}` stays as it is.
        head, name, rest = min((argument.partition(name) for name in values), key=lambda parts: len(parts[0]))
        return f"{head}{values[name]}{self.filled_in(rest)}" if name else argument
