"""The page of `rayapp view` in a real browser: load, filter, open, live update, hostile text, keyboard, contrast."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rayapp.core.types import Group, Prompt, Reward, RolloutStatus, Trajectory
from rayapp.runs.trajectories import write_trajectories
from support.runs import HOSTILE_TEXTS, hostile_group

WORDS = ("def", " sort", "(xs):", "\n", " return", " sorted", "(xs)", "<tool>")


def trajectory(reward: float, ids: list[int], mask: list[bool], *, status: str = "scored") -> Trajectory:
    sampled = [word for word, is_sampled in zip((WORDS[i] for i in ids), mask, strict=True) if is_sampled]
    return Trajectory(
        token_ids=np.array(ids, np.int32),
        response_mask=np.array(mask),
        rollout_log_probs=np.linspace(0, -4, len(ids), dtype=np.float32),
        completion_text="".join(sampled),
        reward=Reward(value=reward, status=status, terms={"pass_rate": max(0.0, reward), "solved": float(reward == 1)}),
        status=RolloutStatus.COMPLETED,
        min_policy_version=0,
        max_policy_version=0,
        num_turns=2,
    )


def write_step(folder: Path, step: int, reward: float) -> None:
    """Two groups, of task `sort` and of task `sum`; the second one has equal rewards."""
    (folder / "trajectories").mkdir(parents=True, exist_ok=True)
    mask = [False, False, True, True, False, True]
    groups = []
    for number, (task, rewards) in enumerate({"sort": (reward, -1.0), "sum": (0.5, 0.5)}.items()):
        prompt = Prompt(task=task, text=f"<|im_start|>user\nDo {task}", token_ids=np.array([0, 1], np.int32))
        statuses = ("scored", "timeout" if task == "sort" else "scored")
        rows = [
            trajectory(value, [0, 1, 2, 3, 7, 4 + i], mask, status=status)
            for i, (value, status) in enumerate(zip(rewards, statuses, strict=True))
        ]
        groups.append(Group(group_id=2 * (step - 1) + number, prompt=prompt, trajectories=tuple(rows)))
    # The learner gives each sampled token of the first trajectory 0.05 less than the engine.
    first = groups[0].trajectories[0]
    learner = {0: first.rollout_log_probs[first.response_mask] - np.float32(0.05)}
    write_trajectories(folder / "trajectories" / f"step={step:06d}.parquet", step, groups, learner)
    record = {
        "step": step,
        "time": time.time(),
        "reward/mean": reward,
        "learner/entropy": 1.0 / step,
        "timing_s/step": 9,
    }
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps of eight, with a tokenizer of eight words."""
    from tokenizers import Tokenizer, decoders, models

    folder = tmp_path / "my-run"
    for step in (1, 2, 3):
        write_step(folder, step, reward=step / 3)
    (folder / "config.yaml").write_text(yaml.safe_dump({"train": {"num_steps": 8}, "algorithm": {"clip": 0.2}}))
    (folder / "final").mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "final" / "tokenizer.json"))
    return folder


class Opened:
    """A page that must never log an error, and whose content is asked for in words."""

    def __init__(self, page: Any, base: str) -> None:
        self.page, self.base, self.errors = page, base, []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)

    async def go(self, address: str) -> None:
        """Open an address, and wait until the page shows it: until then it shows the one before."""
        await self.page.goto(f"{self.base}/#/{address}")
        shown = json.dumps(await self.page.evaluate("location.hash"))
        await self.page.locator(f"main[data-address={shown}]:not([aria-busy]) h1").first.wait_for()

    async def text(self, selector: str) -> list[str]:
        return [" ".join(text.split()) for text in await self.page.locator(selector).all_inner_texts()]


@pytest.fixture
async def opened(browser: Any, serve: Any, run: Path) -> Opened:
    page = await browser.new_page(viewport={"width": 1280, "height": 800})
    return Opened(page, await serve(run))


async def test_the_curves_are_drawn_and_read_at_any_step_by_keyboard(opened: Opened) -> None:
    await opened.go("curves")
    chart = opened.page.locator("figure[data-key=Reward]")

    assert await opened.text("figure[data-key=Reward] .value") == ["1"]  # the last of 1/3, 2/3, 1
    await chart.focus()
    await opened.page.keyboard.press("Home")
    assert await opened.text("figure[data-key=Reward] .value") == ["0.333"]
    assert await opened.text("figure[data-key=Entropy] .value") == ["1"]  # every chart reads the same step
    await opened.page.keyboard.press("Enter")
    await opened.page.locator("table.groups").wait_for()
    assert "step_min=1&step_max=1" in opened.page.url
    assert opened.errors == []


async def test_filters_narrow_the_groups_and_their_address_can_be_shared(opened: Opened, browser: Any) -> None:
    await opened.go("groups")
    assert len(await opened.text("table.groups tbody tr")) == 6

    await opened.page.select_option("select[name=reward_status]", "timeout")
    await opened.page.locator("[data-count='3']").wait_for()
    await opened.page.fill("input[name=reward_min]", "-0.2")
    await opened.page.keyboard.press("Tab")
    await opened.page.locator("[data-count='2']").wait_for()  # means 2/3 - 1 over 2 = -0.17 and 0 of -0.33, -0.17, 0

    other = Opened(await browser.new_page(), opened.base)
    await other.page.goto(opened.page.url)
    await other.page.locator("[data-count='2']").wait_for()
    assert await other.page.input_value("input[name=reward_min]") == "-0.2"
    assert opened.errors + other.errors == []


async def test_a_click_on_a_column_sorts_and_the_back_button_takes_it_back(opened: Opened) -> None:
    await opened.go("groups")

    await opened.page.get_by_role("link", name="Reward", exact=True).click()
    await opened.page.locator("th[aria-sort=descending]", has_text="Reward").wait_for()
    assert (await opened.text("table.groups tbody td:nth-child(4)"))[:3] == ["+0.500"] * 3
    await opened.page.go_back()
    await opened.page.locator("th[aria-sort=descending]", has_text="Step").wait_for()


async def test_a_group_a_trajectory_and_back_with_the_keyboard_alone(opened: Opened) -> None:
    await opened.go("groups?task=sort")
    press = opened.page.keyboard.press

    await press("j")
    await press("Enter")
    await opened.page.locator("article.completion").first.wait_for()
    assert len(await opened.text("article.completion")) == 2
    await press("j")
    await press("j")
    await press("Enter")
    await opened.page.locator("li.turn").first.wait_for()
    assert "index=1" in opened.page.url
    await press("[")
    await opened.page.wait_for_url("**index=0*")
    await press("u")
    await opened.page.locator("article.completion").first.wait_for()
    await press("]")
    await opened.page.wait_for_url("**/group?run=0*")
    await press("u")
    await opened.page.locator("[data-count='3']").wait_for()  # the filter that was set before
    assert "task=sort" in opened.page.url
    await press("?")
    assert await opened.page.locator("dialog[open]").is_visible()
    await press("Escape")
    assert opened.errors == []


async def test_a_trajectory_shows_its_turns_and_colours_sampled_tokens(opened: Opened) -> None:
    await opened.go("trajectory?step=3&group=4&index=0")

    kinds = [await turn.get_attribute("data-kind") for turn in await opened.page.locator("li.turn").all()]
    assert kinds == ["prompt", "sampled", "read", "sampled"]
    tokens = opened.page.locator("li.turn.sampled").first.locator("span[data-i]")
    assert await tokens.all_text_contents() == ["(xs):", "\n"]
    await tokens.nth(0).hover()
    # log-probabilities fall from 0 to -4 over six tokens: the third has -1.6, whose probability is 0.202
    assert "id 2" in (readout := (await opened.text("#readout"))[0])
    assert "log-prob -1.600" in readout
    assert "p 0.202" in readout
    by_log_prob = await tokens.nth(1).evaluate("one => getComputedStyle(one).backgroundColor")
    await opened.page.select_option(".colour-bar select", "advantage")
    await opened.page.locator(".scale", has_text="made likelier").wait_for()
    assert "colour=advantage" in opened.page.url
    by_advantage = await tokens.nth(1).evaluate("one => getComputedStyle(one).backgroundColor")
    assert by_log_prob != by_advantage
    await opened.page.select_option(".colour-bar select", "difference")
    await opened.page.locator(".scale", has_text="engine higher").wait_for()
    await tokens.nth(0).hover()
    assert "learner -1.650" in (await opened.text("#readout"))[0]
    by_difference = await tokens.nth(1).evaluate("one => getComputedStyle(one).backgroundColor")
    assert by_difference not in (by_log_prob, by_advantage, "rgba(0, 0, 0, 0)")

    # Of a trajectory that was not trained on nobody knows it: there is no such colour.
    await opened.go("trajectory?step=3&group=4&index=1")
    assert await opened.page.locator(".colour-bar option[value=difference]:enabled").count() == 0
    assert opened.errors == []


async def test_a_run_that_goes_on_updates_the_page_by_itself(opened: Opened, run: Path) -> None:
    await opened.go("groups")
    await opened.page.locator("[data-state=running]", has_text="step 3 of 8").wait_for()

    write_step(run, 4, reward=1.0)

    await opened.page.locator("[data-count='8']").wait_for()
    await opened.page.locator("[data-state=running]", has_text="step 4 of 8").wait_for()
    await opened.go("curves")
    write_step(run, 5, reward=0.125)
    await opened.page.locator("figure[data-key=Reward] .value", has_text="0.125").wait_for()
    assert opened.errors == []


async def test_runs_are_compared_with_their_curves_and_what_differs(browser: Any, serve: Any, run: Path) -> None:
    other = run.with_name("other-run")
    write_step(other, 1, reward=0.25)
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 0.25, "reward/solved/mean": 0.5}\n')
    (other / "config.yaml").write_text(yaml.safe_dump({"train": {"num_steps": 8}, "algorithm": {"clip": 0.3}}))
    opened = Opened(await browser.new_page(), await serve(run, other))

    await opened.go("compare")

    assert await opened.text("figure[data-key=Reward] .series .name") == ["my-run", "other-run"]
    assert await opened.text("table.settings tbody tr") == ["algorithm.clip 0.2 0.3"]
    # only the second run has this metric: it keeps the second colour
    only_other = opened.page.locator("figure[data-key='Tests passed'] .swatch")
    assert await only_other.evaluate("one => one.style.getPropertyValue('--colour')") == "var(--c1)"
    await opened.page.get_by_role("checkbox", name="other-run").uncheck()
    await opened.page.wait_for_url("**runs=0*")
    assert opened.errors == []


async def test_hostile_texts_are_shown_and_never_run(browser: Any, serve: Any, tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    write_trajectories(tmp_path / "trajectories" / "step=000001.parquet", 1, [hostile_group(0), hostile_group(1)])
    opened = Opened(await browser.new_page(), await serve(tmp_path))

    for address in (
        "groups",
        "group?step=1&group=0",
        "trajectory?step=1&group=0&index=0",
        "groups?task=<img src=x onerror=document.title='owned'>",
    ):
        await opened.go(address)
        assert "owned" not in await opened.page.title()
        assert await opened.page.locator("main :is(script, img, iframe, object, svg[onload])").count() == 0
        assert await opened.page.locator("main a[href^=javascript]").count() == 0
    await opened.go("group?step=1&group=0")
    shown = await opened.page.locator("article.completion pre").all_text_contents()
    assert HOSTILE_TEXTS[0] in shown[0]
    assert "\u241b[31mred" in shown[2]  # the escape character as a picture, so that nothing is hidden
    assert "⟨U+202E⟩" in shown[2]
    assert "more characters" in shown[3]
    width = await opened.page.evaluate("() => document.documentElement.scrollWidth - innerWidth")
    assert width <= 0  # a line of 400,000 characters doesn't push the page apart
    assert opened.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "address",
    ["curves", "groups", "group?step=3&group=4", "trajectory?step=3&group=4&index=0"],
)
async def test_text_stands_out_from_its_ground_and_all_that_can_be_used_has_a_name(
    browser: Any, serve: Any, run: Path, scheme: str, address: str
) -> None:
    page = await browser.new_page(color_scheme=scheme)
    opened = Opened(page, await serve(run))
    await opened.go(address)

    low = await page.evaluate((Path(__file__).parent / "contrast.js").read_text())
    nameless = await page.evaluate(
        "() => [...document.querySelectorAll('a, button, select, input')].filter(one => !(one.textContent?.trim() "
        "|| one.getAttribute('aria-label') || one.labels?.length)).map(one => one.outerHTML)"
    )

    assert low == []  # each text has at least 4.5 : 1 (WCAG AA), 3 : 1 when large
    assert nameless == []


async def test_a_server_that_is_gone_is_told_and_the_page_stays(browser: Any, run: Path, serve: Any) -> None:
    page = await browser.new_page()
    opened = Opened(page, await serve(run))
    await opened.go("groups")
    await page.locator("table.groups tbody tr").nth(5).wait_for()

    await page.context.set_offline(True)

    await page.locator(".state", has_text="the server does not answer").wait_for()
    assert len(await opened.text("table.groups tbody tr")) == 6
