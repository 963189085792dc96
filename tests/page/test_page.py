"""The page of `jaxkv serve` in a headless Chromium: it compresses, shows what is kept, and streams answers.

It runs in an environment of its own, `make test-page`.
"""

import os
import shutil

import httpx2
import lettered
import pytest
from playwright import sync_api
from playwright.sync_api import expect
from serve_runs import KEY, model_folder, started

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
ANSWER = "article .said"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("served"))
    # Later options replace earlier ones.
    options = ["--max-question-tokens", "16", "--max-new-tokens", "40", "--max-body-bytes", "2000"]
    with started(folder, "--also", "full", *options) as (process, address, _):
        yield process, address


@pytest.fixture(scope="module")
def browser():
    assert BROWSER, "there is no Chromium here: on Debian, apt-get install chromium"
    with sync_api.sync_playwright() as driver:
        # Root may not have Chromium's sandbox.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=BROWSER, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """The page before anything is typed; a script's error, or what its policy forbids, fails the test."""
    context = browser.new_context()
    page, faults = context.new_page(), []
    page.set_default_timeout(30_000)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda said: faults.append(said.text) if "Content Security Policy" in said.text else None,
    )
    page.on(
        "request",
        lambda asked: faults.append(asked.url) if not asked.url.startswith(server[1]) else None,
    )
    page.goto(f"{server[1]}/")
    yield page
    context.close()
    assert [each for each in faults if not each.startswith("data:")] == []


def unlock(page):
    """Gives the server's key and waits for the models."""
    page.get_by_label("Key of this server").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_label("Model and policy").locator("option")).to_have_text(
        ["tiny", "tiny:full"]
    )


def compress(page, text=lettered.DOC, *, budget=None):
    page.get_by_label("Text to compress").fill(text)
    if budget is not None:
        page.get_by_label("Budget", exact=True).fill(str(budget))
    page.get_by_role("button", name="Compress").click()
    expect(page.get_by_role("heading", name="What is kept")).to_be_focused()


def ask(page, question="who?"):
    page.get_by_label("Ask about the document").fill(question)
    page.get_by_label("Most tokens").fill("9")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Answered.")


def gone(page, server):
    """Leaves the page and waits until its documents are removed."""
    page.goto("about:blank")
    with api(server) as client:
        for _ in range(100):
            if not client.get("/v1/documents").json()["data"]:
                break
            page.wait_for_timeout(50)
        assert client.get("/v1/documents").json()["data"] == []


def api(server):
    return httpx2.Client(
        base_url=server[1], headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=60
    )


def test_the_key_is_asked_for(page):
    expect(page.get_by_role("alert")).to_have_text("This server wants an API key: give it above.")
    page.get_by_label("Key of this server").fill("open")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text(
        "The API key is wrong: give the key of this server."
    )
    unlock(page)
    expect(page.locator("#error")).to_be_hidden()


def test_what_is_kept_is_shown(page, server):
    unlock(page)
    compress(page, budget=9)
    expect(page.locator("#kept-about")).to_contain_text(
        "tiny keeps 9 of 45 entries per KV head and layer"
    )
    with api(server) as client:
        (made,) = client.get("/v1/documents").json()["data"]
        found = client.get(f"/v1/documents/{made['id']}/kept").json()
        one = client.get(f"/v1/documents/{made['id']}/kept?layer=1&head=0").json()
    text = page.locator("#text")
    assert text.text_content() == f"<s>[{lettered.DOC}"
    struck = "".join(text.locator("s").all_text_contents())
    assert struck == "".join(
        p for p, kept in zip(found["pieces"], found["kept"], strict=True) if not kept
    )
    script = "all => all.map(one => [one.title, one.style.getPropertyValue('--share')])"
    shares = text.locator("mark").evaluate_all(script)
    assert shares and all(
        title.startswith(f"{float(s) * found['pairs']:g} of ") for title, s in shares
    )
    before, after = (f"{made[name] / 1000:.1f} kB" for name in ("full_bytes", "kept_bytes"))
    assert page.locator("#sizes").text_content().startswith(f"before{before}after{after}, ")
    page.get_by_label("Layer").select_option("1")
    expect(page.get_by_label("KV head")).to_be_enabled()
    page.get_by_label("KV head").select_option("0")
    expect(page.locator("#notes")).to_have_text("Of 45 tokens, this head keeps 9 and drops 36.")
    kept = "".join(text.locator("mark").all_text_contents())
    assert kept == "".join(p for p, k in zip(one["pieces"], one["kept"], strict=True) if k)
    page.get_by_label("Layer").select_option("")
    expect(page.get_by_label("KV head")).to_be_disabled()
    expect(page.locator("#notes")).to_contain_text(f"by all {found['pairs']} heads")


def test_answers_stream_beside_the_full_cache(page, server):
    unlock(page)
    compress(page)
    page.get_by_label("Also answer with the full cache").check()
    ask(page)
    expect(page.get_by_role("article").get_by_role("heading")).to_have_text(["tiny", "tiny:full"])
    with api(server) as client:
        expected = []
        for made in client.get("/v1/documents").json()["data"]:
            body = {
                "document": made["id"],
                "messages": [{"role": "user", "content": "who?"}],
                "temperature": 0,
            }
            found = client.post("/v1/chat/completions", json={**body, "max_tokens": 9}).json()
            expected.append((found["model"], found["choices"][0]["message"]["content"]))
    assert page.locator(ANSWER).all_text_contents() == [text for _, text in sorted(expected)]
    assert page.locator("article .dim").first.text_content().endswith("s")
    # Another document takes the place of both.
    compress(page, "another one")
    expect(page.locator(ANSWER)).to_have_count(0)
    with api(server) as client:
        assert [each["tokens"] for each in client.get("/v1/documents").json()["data"]] == [13]


def test_a_full_cache_that_comes_late_is_not_the_next_documents(page, server):
    unlock(page)
    compress(page)
    held = []

    def hold(route):
        held.append(route) if '"tiny:full"' in (
            route.request.post_data or ""
        ) and not held else route.continue_()

    page.route("**/v1/documents", hold)
    page.get_by_label("Also answer with the full cache").check()
    page.get_by_label("Ask about the document").fill("who?")
    page.get_by_label("Most tokens").fill("9")
    with page.expect_request(lambda asked: '"tiny:full"' in (asked.post_data or "")):
        page.keyboard.press("Enter")
    compress(page, "another one")
    held[0].continue_()
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    ask(page)
    with api(server) as client:
        assert [each["tokens"] for each in client.get("/v1/documents").json()["data"]] == [13, 13]
    gone(page, server)


def test_markup_in_a_document_is_text(page):
    unlock(page)
    text = "<img src=x onerror=alert(1)>"
    compress(page, text)
    assert page.locator("#text").text_content().endswith(text) and page.locator("img").count() == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a" * 70,
            "This document is not taken (72 tokens): too long: this engine accepts at most max_prompt_tokens=60.",
        ),
        (
            "a" * 3000,
            "The document is too long to send: the body is longer than 2000 bytes: send a shorter one.",
        ),
    ],
)
def test_refusals_are_told_in_words(page, text, said):
    unlock(page)
    page.get_by_label("Text to compress").fill(text)
    page.get_by_role("button", name="Compress").click()
    expect(page.get_by_role("alert")).to_have_text(said)
    # The next one that is taken clears it.
    compress(page)
    expect(page.locator("#error")).to_be_hidden()


def test_a_budget_above_the_policys_is_not_sent(page):
    unlock(page)
    page.get_by_label("Text to compress").fill(lettered.DOC)
    budget = page.get_by_label("Budget", exact=True)
    budget.fill("17")
    page.get_by_role("button", name="Compress").click()
    assert budget.evaluate("one => one.validity.rangeOverflow")
    expect(page.locator("#kept")).to_be_hidden()
    page.get_by_label("Model and policy").select_option("tiny:full")
    expect(budget).to_be_hidden()
    expect(page.get_by_label("Also answer with the full cache")).to_be_hidden()


def test_documents_go_when_the_page_does(page, server):
    unlock(page)
    compress(page)
    gone(page, server)


def test_it_is_usable_by_keyboard_and_screen_reader(page):
    unlock(page)
    compress(page)
    ask(page)
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('input, select, textarea')].filter(one => !one.labels.length).length"
    )
    assert unnamed == 0
    assert page.evaluate("document.documentElement.lang") == "en"
    page.get_by_label("Text to compress").focus()
    order = []
    for _ in range(9):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id"))
    assert order == [
        "model",
        "budget",
        "compress",
        "full",
        "layer",
        "text",
        "question",
        "most",
        "send",
    ]


def test_it_fits_narrow_windows_and_the_dark(page):
    unlock(page)
    compress(page)
    ask(page)
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]
    page.set_viewport_size({"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_server_that_is_gone_is_told(page, server):
    """The last test: it ends the server."""
    unlock(page)
    compress(page)
    server[0].kill()
    page.get_by_label("Ask about the document").fill("who?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    expect(page.locator("article .dim")).to_have_text("not answered")
