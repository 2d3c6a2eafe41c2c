"""The explorer's page in a browser: a tree and passes worked out by hand, keys, widths, hostile tokens.

Needs playwright and a Chromium (on Debian: `apt-get install chromium`); CHROMIUM may name its binary.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import struct
from itertools import pairwise

import numpy as np
import pytest
from explorer_runs import HOSTILE, NOTHING, Run, Texts, random_answer, record

from eagle_tree.explore import collect, render, select

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="playwright is not installed"),
    pytest.mark.skipif(CHROMIUM is None, reason=f"no Chromium: none of {', '.join(NAMES)} is on the PATH"),
]

TEXTS = Texts(["The", " cat", " dog", " sat", " ran", " on", " off", " it", " mat", "."])
THE, CAT, DOG, SAT, RAN, ON, OFF, IT, MAT, STOP = range(10)
ANSWER = [THE, CAT, RAN, OFF, IT, MAT, STOP]
# The ─┬─ 1 cat (.64) ─┬─ 3 sat (.5) ── 5 on (.25)      walk: cat, ran; bonus: off
#      └─ 2 dog (.25)  └─ 4 ran (.25)
FIRST = record(
    [0, 0, 1, 1, 3], [CAT, DOG, SAT, RAN, ON], [0.64, 0.25, 0.5, 0.25, 0.25], [0.8, 0.1, 0.2, 0.6, 0.5], [1, 4]
)
SECOND = record([0, 1, 1], [IT, MAT, STOP], [0.5, 0.5, 0.25], [0.5, 0.5, 0.25], [1, 2])  # off: it, mat; bonus: .
ONE = record([0], [CAT], [0.64], [0.8], [1])
TWO = record([0], [DOG], [0.25], [0.1], [])


def two_policies() -> dict:
    """`tree` starts passes at tokens 0 and 3 of the answer, `chain` at 0, 2, 3, 4 and 5."""
    run = Run().answer("tree", "q1", ANSWER, [FIRST, SECOND])
    run.answer("chain", "q1", ANSWER, [ONE, NOTHING, TWO, TWO, TWO])
    return data_of(run)


def data_of(run: Run, tokenizer=TEXTS) -> dict:
    tables = run.tables()
    return collect(tables, select(tables), tokenizer) | {"run": {"name": "a run", "whole": True}}


@pytest.fixture(scope="module")
def tab():
    """A browser's tab, and what pages in it complained of or asked for."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu"])
        page, faults = browser.new_page(reduced_motion="reduce"), []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text))
        page.on("dialog", lambda dialog: faults.append(f"dialog {dialog.message}"))
        page.on("request", lambda request: faults.append(request.url))
        yield page, faults
        browser.close()


@pytest.fixture()
def show(tab, tmp_path):
    """Opens the page of some data; the test fails if the page complains, or asks for anything but itself."""
    page, faults = tab
    address = (tmp_path / "page.html").as_uri()
    faults.clear()

    def show(data: dict, width: int = 1600, fragment: str = "", scheme: str = "light"):
        (tmp_path / "page.html").write_text(render(data), encoding="utf-8")
        page.set_viewport_size({"width": width, "height": 1000})
        page.emulate_media(color_scheme=scheme)
        page.goto("about:blank")  # the same page with another fragment would not be loaded again
        page.goto(f"{address}{fragment}")
        return page

    yield show
    assert set(faults) <= {address, "about:blank"}


class Panel:
    """One of the two panels, by what a person sees of it."""

    def __init__(self, page, index: int = 0):
        self.root = page.locator(".panel").nth(index)

    def node(self, v: int):
        return self.root.locator(f'.node[data-node="{v}"]')

    def with_class(self, name: str) -> list[int]:
        nodes = self.root.locator(f".node.{name}:not(.hidden)")
        return [int(v) for v in nodes.evaluate_all("nodes => nodes.map(node => node.dataset.node)")]

    def mask_row(self) -> tuple[int, list[int]] | None:
        """The row of the mask that is lit, and the columns that are lit in it."""
        if not self.root.locator(".mask .row").count():
            return None
        columns = self.root.locator(".mask path.seen").get_attribute("data-columns")
        return int(self.root.locator(".mask .row").get_attribute("data-row")), [int(u) for u in columns.split()]

    def text(self, name: str) -> str:
        return self.root.locator(f".{name}").first.inner_text()

    def sums(self) -> list[str]:
        """Drafter's, target's and realised tokens."""
        return self.root.locator(".bars .sum").all_inner_texts()

    def emphasised(self, name: str) -> list[str]:
        return self.root.locator(f".answer .{name}").all_inner_texts()


# --- the tree, its mask, its numbers ---


def test_a_tree_shows_tokens_confidences_and_scores(show):
    panel = Panel(show(two_policies()))
    assert panel.node(0).inner_text() == "The"
    assert panel.node(4).inner_text().split() == ["·ran", ".25"]
    assert panel.with_class("bonus") == [6] and panel.node(6).inner_text() == "·off"
    dots = [panel.node(v).locator(".dot").evaluate("dot => getComputedStyle(dot, '::before').width") for v in (1, 4)]
    wide, narrow = (float(width.removesuffix("px")) for width in dots)
    assert wide == pytest.approx(20 * 0.8)  # the area is the score: .64 has the root .8
    assert narrow == pytest.approx(20 * 0.4)  # .64 · .25 = .16


@pytest.mark.parametrize("how", ["hover", "focus"])
def test_a_node_lights_its_ancestors_and_its_row_of_the_mask(show, how):
    panel = Panel(show(two_policies()))
    assert panel.mask_row() is None
    getattr(panel.node(5), how)()
    assert panel.with_class("lit") == [0, 1, 3, 5]
    assert panel.mask_row() == (5, [0, 1, 3, 5])
    detail = panel.text("detail").split()
    assert {"0.250", "0.080", "0.500", "rejected"} <= set(detail)  # confidence, .64 · .5 · .25, the target's p


def test_a_row_of_the_mask_lights_its_node(show):
    page = show(two_policies())
    panel = Panel(page)
    box = panel.root.locator(".mask .frame").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + box["height"] * 4.5 / 6)
    assert panel.with_class("chosen") == [4]
    assert panel.mask_row() == (4, [0, 1, 4])


def test_the_mask_is_beside_the_tree_where_there_is_room_and_below_it_elsewhere(show):
    for width, beside in ((1600, True), (390, False)):
        root = Panel(show(two_policies(), width=width)).root
        tree, mask = (root.locator(name).bounding_box() for name in (".tree", ".mask"))
        assert (mask["x"] >= tree["x"] + tree["width"]) is beside
        assert (mask["y"] >= tree["y"] + tree["height"]) is not beside


def test_a_node_that_both_trees_have_is_marked_in_the_other(show):
    page = show(two_policies())
    Panel(page).node(1).hover()
    assert Panel(page, 1).with_class("twin") == [1]
    Panel(page).node(2).hover()
    assert Panel(page, 1).with_class("twin") == []


# --- the walk ---


def test_verifying_goes_level_by_level(show):
    page = show(two_policies(), fragment="#b=")
    panel = Panel(page)
    assert panel.with_class("accepted") == [1, 4]  # a page opens with the pass verified
    page.locator("#level").fill("0")
    assert panel.with_class("drafted") == [1, 2, 3, 4, 5] and panel.with_class("bonus") == []
    assert panel.sums() == ["0.00 of 2.45", "0.00 of 2.62", "0 so far"]
    page.locator("#forth").click()
    assert panel.with_class("accepted") == [1] and panel.with_class("rejected") == [2]
    assert panel.with_class("drafted") == [3, 4, 5]
    assert panel.sums() == ["0.89 of 2.45", "0.90 of 2.62", "1 so far"]  # .64 + .25; .8 + .1
    page.locator("#forth").click()
    assert panel.with_class("accepted") == [1, 4] and panel.with_class("rejected") == [2, 3, 5]
    assert panel.with_class("bonus") == []
    assert "candidate 2 of 2. Accepted." in panel.text("story")
    page.locator("#forth").click()
    assert panel.with_class("bonus") == [6]
    assert panel.sums() == ["2.45 tokens", "2.62 tokens", "3 tokens"]  # with level 3: + .08; + .8 · .2 · .5
    assert "3 tokens from one forward (2 accepted, 1 bonus)" in panel.text("story")
    assert page.locator("#forth").is_disabled()


def test_verify_plays_to_the_end_and_pauses(show):
    page = show(two_policies(), fragment="#b=")
    page.clock.install(time=0)
    page.reload()
    page.clock.pause_at(60_000)
    panel = Panel(page)
    page.keyboard.press("v")
    assert page.locator("#level-name").inner_text() == "drafted"
    page.clock.run_for(1000)
    assert panel.with_class("accepted") == [1]
    page.keyboard.press("v")
    page.clock.run_for(5000)
    assert page.locator("#level-name").inner_text() == "level 1"
    page.keyboard.press("v")
    page.clock.run_for(5000)
    assert page.locator("#level-name").inner_text() == "verified"
    assert page.locator("#play").inner_text() == "▶ Verify"
    page.clock.resume()


def test_a_walk_that_the_end_cuts_off_has_no_bonus(show):
    """Two tokens of the walk's three were emitted."""
    panel = Panel(show(data_of(Run().answer("tree", "q1", [THE, CAT, RAN], [FIRST]))))
    assert panel.with_class("accepted") == [1, 4]
    assert panel.with_class("bonus") == []
    assert "only 2 tokens of this walk were emitted" in panel.text("story")
    assert panel.emphasised("run") == [" cat ran"]


def test_an_expectation_that_is_no_product_along_the_path_has_no_levels(show):
    data = two_policies()
    data["prompts"][0]["answers"][0]["passes"][0]["expected"][1] = 2.0
    panel = Panel(show(data, fragment="#b="))
    assert panel.root.locator(".track.drafter i").count() == 4  # three levels and the bonus token
    assert panel.root.locator(".track.target i").count() == 2
    assert panel.sums()[1] == "2.00 tokens"


# --- passes, policies, text ---


def test_arrows_step_through_the_passes_of_a_and_with_shift_of_b(show):
    page = show(two_policies())
    a, b = Panel(page), Panel(page, 1)
    assert (a.text("where"), b.text("where")) == ("pass 1 of 2", "pass 1 of 5")
    page.keyboard.press("ArrowRight")
    assert (a.text("where"), b.text("where")) == ("pass 2 of 2", "pass 3 of 5")
    page.keyboard.press("ArrowRight")  # there is no further one
    assert a.text("where") == "pass 2 of 2"
    page.keyboard.press("Shift+ArrowRight")
    assert (a.text("where"), b.text("where")) == ("pass 2 of 2", "pass 4 of 5")
    page.keyboard.press("ArrowLeft")
    assert (a.text("where"), b.text("where")) == ("pass 1 of 2", "pass 1 of 5")


def test_policies_are_aligned_by_position(show):
    """Both panels show the pass that emits the same token; the page says where the passes do not coincide."""
    page = show(two_policies())
    notice = page.locator("#notice")
    assert "Both passes start at token 0 of the answer, The" in notice.inner_text()
    page.keyboard.press("Shift+ArrowRight")
    assert Panel(page).text("where") == "pass 1 of 2"
    assert (
        "A's starts at token 0 of the answer, B's at 2. Both emit token 3; B's knows 2 tokens more"
        in notice.inner_text()
    )
    page.keyboard.press("c")
    assert "Both passes start at token 3 of the answer, ·off" in notice.inner_text()


def test_answers_that_differ_are_said_to_differ(show):
    run = Run().answer("tree", "q1", ANSWER, [FIRST, SECOND])
    data = data_of(run.answer("chain", "q1", [THE, CAT, SAT, ON], [ONE, TWO]))
    page = show(data)
    assert "differ" not in page.locator("#notice").inner_text()  # the first pass starts before that
    page.keyboard.press("ArrowRight")
    assert "The two answers differ from token 2 on" in page.locator("#notice").inner_text()
    assert Panel(page, 1).text("blank") == "This answer ended at token 3: there is no pass at this place."


def test_accepted_runs_of_the_text_are_marked_and_lead_to_their_pass(show):
    page = show(two_policies())
    panel = Panel(page)
    assert panel.text("answer") == "The cat ran off it mat."
    assert panel.emphasised("run") == [" cat ran", " it mat"]
    assert panel.emphasised("bonus") == [" off", "."]
    panel.root.locator(".answer .pass").nth(1).click()
    assert panel.text("where") == "pass 2 of 2"
    assert panel.emphasised("now") == [" it mat."]


def test_a_policy_may_be_changed_or_stand_alone(show):
    page = show(two_policies())
    Panel(page).root.locator("select").select_option(label="chain")
    assert Panel(page).text("where") == "pass 1 of 5"
    Panel(page, 1).root.locator("select").select_option(label="– nothing beside A –")
    assert not Panel(page, 1).root.locator(".tree").is_visible()
    assert page.locator("#notice").inner_text() == ""


def test_the_address_leads_back_to_the_same_place(show):
    page = show(two_policies())
    page.keyboard.press("ArrowRight")
    assert page.evaluate("location.hash") == "#prompt=q1&a=tree&b=chain&token=4"
    page.reload()
    assert Panel(page).text("where") == "pass 2 of 2"


def test_tokens_without_a_tokenizer_are_numbers(show):
    run = Run().answer("tree", "q1", ANSWER, [FIRST, SECOND])
    panel = Panel(show(data_of(run, tokenizer=None)))
    assert panel.node(4).inner_text().split() == ["#4", ".25"]
    assert panel.text("answer").split() == [str(token) for token in ANSWER]


# --- the keyboard alone ---


def test_the_keyboard_reaches_a_tree_and_walks_in_it(show):
    page = show(two_policies(), fragment="#b=")
    panel = Panel(page)
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('node')"):
            break
    places = []
    for key in ("ArrowRight", "ArrowDown", "ArrowUp", "ArrowRight", "ArrowDown", "ArrowRight", "ArrowLeft", "Home"):
        page.keyboard.press(key)
        (chosen,) = panel.with_class("chosen")
        places.append(chosen)
        assert panel.mask_row() is None if chosen == 6 else panel.mask_row()[0] == chosen
    assert places == [1, 2, 1, 3, 4, 6, 4, 0]
    assert panel.text("where") == "pass 1 of 2"  # within a tree the arrows do not step
    page.keyboard.press("Escape")
    assert panel.with_class("lit") == []
    assert page.locator(".node[tabindex='0']").count() == 1  # one stop of the tab key


def test_a_node_says_what_it_is(show):
    panel = Panel(show(two_policies()))
    assert panel.node(4).get_attribute("aria-label") == "·ran, confidence 0.25, score 0.16, accepted"
    assert panel.node(4).get_attribute("aria-level") == "3"


# --- what a model may emit ---


VISIT_EVERY_NODE = """() => {
    const panel = document.querySelector(".panel"), next = panel.querySelector(".next");
    for (let fits = true; ; next.click()) {
        for (const node of panel.querySelectorAll(".node")) {
            node.focus();
            fits &&= document.documentElement.scrollWidth <= innerWidth;
        }
        if (next.disabled) return fits;
    }
}"""
"""Focus all nodes of all passes; whether the page kept within the window's width."""


@pytest.mark.parametrize("width", [390, 1600])
def test_hostile_tokens_are_shown_and_do_nothing(show, width):
    output, trees = random_answer(np.random.default_rng(0), passes=12, nodes=30, tokens=len(HOSTILE))
    output[1], output[2] = 8, 9
    run = Run().answer("<b>policy</b>", "</script>\u202e", output, trees)
    data = data_of(run, Texts(HOSTILE)) | {"run": {"name": "</title><script>window.broken = 1</script>"}}
    page = show(data, width=width, fragment="#token=<script>&prompt=%00")
    assert page.evaluate(VISIT_EVERY_NODE)
    assert page.evaluate("window.broken") is None
    assert page.locator("script").count() == 2
    assert page.locator("main img, main b.x, main a").count() == 0
    shown = page.locator("main").inner_text()
    assert "</script><scri" in page.locator(".panel").first.inner_html().replace("&lt;", "<").replace("&gt;", ">")
    assert not any(mark in shown for mark in "\u202e\u200f\u2067\u2069\u202c\u2028\0\x1b")  # marks are named instead
    assert "⟨U+202E⟩" in page.locator("#prompt").inner_text()


def test_a_node_stays_on_its_line_whatever_its_token(show):
    """10,000 characters, as many accents on one letter, line breaks: no label is higher than its row or wider than its
    column."""
    hostile = range(len(HOSTILE))
    tree = record([0] * len(HOSTILE), list(hostile), [0.5] * len(HOSTILE), [0.5] * len(HOSTILE), [1])
    page = show(data_of(Run().answer("tree", "q1", [9, 0, 1], [tree]), Texts(HOSTILE)), width=390)
    boxes = [Panel(page).node(v).bounding_box() for v in range(1, len(HOSTILE) + 1)]
    assert {box["height"] for box in boxes} == {22}
    assert max(box["width"] for box in boxes) <= 210
    assert all(one["y"] + one["height"] <= other["y"] for one, other in pairwise(boxes))


# --- sizes ---


@pytest.fixture(scope="module")
def large_run() -> dict:
    """200 passes of each of two policies, 59 nodes each."""
    rng, run = np.random.default_rng(0), Run()
    for policy in ("a", "b"):
        run.answer(policy, "q1", *random_answer(rng, passes=200, nodes=59, tokens=5000))
    return data_of(run, Texts([f" t{i}" for i in range(5000)]))


def test_a_page_of_two_hundred_passes_opens_within_two_seconds(show, large_run):
    """Of the processor, which other programs may hold for longer."""
    page = show(large_run)
    fresh = page.context.browser.new_page()  # in a process of its own, so that its tasks are the page's
    session = fresh.context.new_cdp_session(fresh)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    fresh.goto(page.url)
    Panel(fresh).node(59).wait_for()
    measured = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    fresh.close()
    assert 0 < measured["TaskDuration"] <= 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 900, 1600])
def test_a_window_of_any_width_shows_all_without_overlaps(show, large_run, width, scheme, tmp_path):
    page = show(large_run, width=width, scheme=scheme, fragment="#token=40")
    picture = page.screenshot(full_page=True, path=tmp_path / f"{width}-{scheme}.png")
    assert struct.unpack(">I", picture[16:20])[0] == width  # nothing sticks out
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for panel in (Panel(page), Panel(page, 1)):
        parts = [".head", ".film", ".answer", ".bars", ".story", ".stage", ".mask"]
        boxes = [panel.root.locator(part).bounding_box() for part in parts]
        for one, other in pairwise(boxes):
            below = other["y"] >= one["y"] + one["height"] - 1
            assert below or other["x"] >= one["x"] + one["width"] - 1
        nodes = panel.root.locator(".node").evaluate_all(
            "nodes => nodes.map(n => n.getBoundingClientRect()).map(b => [b.left, b.right, b.top, b.bottom])"
        )
        nodes = np.array(nodes)
        left, right, top, bottom = (nodes[:, i] for i in range(4))
        across = (left[:, None] < right) & (left < right[:, None])
        along = (top[:, None] < bottom - 0.5) & (top < bottom[:, None] - 0.5)
        assert (across & along).sum() == len(nodes)  # each overlaps itself alone


def test_colours_follow_the_scheme_and_the_button(show):
    page = show(two_policies(), scheme="dark")
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    for name in ("light", "dark", "auto"):
        page.locator("#theme").click()
        assert page.locator("#theme").inner_text() == f"Theme: {name}"
        assert (page.evaluate(colour) == dark) is (name != "light")
