"""One judge: scores a response, or compares two responses.

Asked --questions.py--> messages, schema --client.py--> answer --> Judgement
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rayapp.config.other_models import JudgeSection
from rayapp.core.errors import ConfigError, RewardFailedError, one_line
from rayapp.core.http import EndpointClient
from rayapp.core.trajectories import storable
from rayapp.extras.judges.questions import MAX_SCORE, Asked, Messages, pairwise_question, read_answer, rubric_question

Winner = Literal["A", "B", "tie"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Cost of a judge's answers."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    dollars: float = 0.0
    failed: int = 0  # Questions without a usable answer.

    def __add__(self, other: Bill) -> Bill:
        return Bill(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    @property
    def terms(self) -> dict[str, float]:
        return {f"judged/{name}": float(value) for name, value in asdict(self).items()}


class JudgeFailedError(RewardFailedError):
    """The answer of a judge is unusable; the error has the answer's cost."""

    def __init__(self, message: str, kind: str, bill: Bill | None = None) -> None:
        super().__init__(message, kind)
        self.bill = bill or Bill()


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A judge's answer."""

    # {"reason": …, "scores": …} of a rubric judge, {"reason": …, "winner": …} of a pairwise judge, {"probs": […]} of a
    # reward model.
    answer: Mapping[str, Any]
    bill: Bill = field(default_factory=Bill)

    @property
    def reason(self) -> str:
        return one_line(self.answer.get("reason", ""), 500)


class Judge:
    """One judge with its client and its cache.

    Args:
        folder: folder for the cache of answers; None, or `cache: false` of the judge: no cache.
        num_sharing: number of processes that use the judge at the same time, by which the rate limits are divided.
    """

    def __init__(self, section: JudgeSection, *, num_sharing: int = 1) -> None:
        self.section = section
        self._client = EndpointClient(section.endpoint, num_sharing=num_sharing)

    async def score(self, asked: Asked) -> tuple[float, dict[str, float], Judgement]:
        """Ask a rubric judge or reward model; return score, criteria's scores and answer. Raises RewardFailedError."""
        if self.section.kind == "reward_model":
            said = await self._classified(asked)
            return self._of_class(said.answer["probs"]), {}, said
        said = await self._answered(*rubric_question(self.section, asked))
        scores = said.answer["scores"]
        parts = {name: scores[name] / MAX_SCORE for name in self.section.rubric}
        return sum(parts.values()) / len(parts), parts, said

    async def compare(self, first: Asked, second: Asked) -> tuple[Winner, Judgement]:
        """Ask a pairwise judge, showing the responses in this order. Raises RewardFailedError."""
        said = await self._answered(*pairwise_question(self.section, first, second))
        return said.answer["winner"], said

    async def check(self) -> None:
        """Ask the judge one question without the cache. Raises ConfigError: it gives no usable answer."""
        sample = Asked(messages=({"role": "user", "content": "What is 6 times 7?"},), response="42", reference="42")
        try:
            if self.section.kind == "reward_model":
                self._of_class((await self._classified(sample)).answer["probs"])
            elif self.section.kind == "pairwise":
                await self._answered(*pairwise_question(self.section, sample, sample))
            else:
                await self._answered(*rubric_question(self.section, sample))
        except RewardFailedError as error:
            raise ConfigError(
                f"{error} ({error.kind}). Check base_url, model and api_key_env of this judge (docs/judges.md)"
            ) from error

    async def close(self) -> None:
        await self._client.close()

    async def _answered(self, messages: Messages, schema: Mapping[str, Any]) -> Judgement:
        """Ask the judge, and again after an unusable answer, except at temperature 0, where it would be the same."""
        section, paid = self.section, Bill()
        body: dict[str, Any] = {"model": section.model, "messages": messages, "max_tokens": section.max_tokens}
        if section.response_format != "none":
            form = {"name": "judgement", "strict": True, "schema": schema}
            with_schema = {"json_schema": form} if section.response_format == "json_schema" else {}
            body["response_format"] = {"type": section.response_format, **with_schema}
        if section.temperature is not None:
            body["temperature"] = section.temperature
        for is_last in (True,) if section.temperature == 0 else (False, True):
            try:
                found = await self._client.post(f"{section.base_url}/chat/completions", body)
                paid += self._bill(found)
                return Judgement(answer=self._read_choice(found, schema), bill=paid)
            except RewardFailedError as error:
                if is_last or error.kind != "judge_answer":
                    raise JudgeFailedError(str(error), error.kind, paid) from None
        raise AssertionError("the last try returns or raises")

    def _read_choice(self, found: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
        try:
            choice = found["choices"][0]
            text = _text(choice["message"]["content"]) or choice["message"].get("refusal") or ""
            if not isinstance(text, str):
                raise TypeError
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._failed(f"the answer is not a chat completion: {_short(found)}") from None
        try:
            return read_answer(text, schema)
        except RewardFailedError as error:
            cut = f" (cut at max_tokens = {self.section.max_tokens})" if choice.get("finish_reason") == "length" else ""
            raise RewardFailedError(f"judge {self.section.name} {error}{cut}", error.kind) from None

    async def _classified(self, asked: Asked) -> Judgement:
        section = self.section
        body = {"model": section.model, "messages": asked.chat, "use_activation": False}
        found = await self._client.post(f"{section.base_url.removesuffix('/v1')}/classify", body)
        try:
            probs = [float(value) for value in found["data"][0]["probs"]]
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._failed(f"the answer is not a classification: {_short(found)}") from None
        return Judgement(answer={"probs": probs}, bill=self._bill(found))

    def _of_class(self, probs: list[float]) -> float:
        if len(probs) != 1:
            raise self._failed(f"the model has {len(probs)} classes: use a reward model with one class")
        try:
            return storable(probs[0])
        except ValueError:
            raise self._failed(f"the score is {probs[0]}, which is not a finite number") from None

    def _bill(self, found: Mapping[str, Any]) -> Bill:
        usage = found.get("usage")
        counts = usage if isinstance(usage, dict) else {}
        known = [counts.get(name) for name in ("prompt_tokens", "completion_tokens")]
        read, written = (number if isinstance(number, int) else 0 for number in known)
        dollars = (read * self.section.input_price + written * self.section.output_price) / 1e6
        return Bill(requests=1, tokens_in=read, tokens_out=written, dollars=dollars)

    def _failed(self, what: str) -> RewardFailedError:
        return RewardFailedError(f"judge {self.section.name}: {what}", "judge_answer")


def _short(found: Mapping[str, Any]) -> str:
    return json.dumps(found)[:300]


def _text(content: Any) -> Any:
    """Return a message's text, which some servers send in parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return content
