"""The page of `jaxkv serve` in a headless Chromium: it compresses, shows what is kept, and holds conversations.

It runs in an environment of its own, `make test-page`.
"""

import json
import os
import re
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
# The first question of a length waits until its program is compiled.
expect.set_options(timeout=30_000)
ANSWER = "#turns .said"
FIGURES = "#turns .about"
MODELS = ["tiny", "tiny:full", "tiny:keydiff-budget-2000"]
LONGEST = 1600


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = model_folder(tmp_path_factory.mktemp("served"))
    config = folder / "config.json"
    longer = json.loads(config.read_text()) | {"max_position_embeddings": 4096}
    config.write_text(json.dumps(longer))
    # Later options replace earlier ones.
    options = f"--max-prompt-tokens {LONGEST} --max-question-tokens 64 --max-new-tokens 900"
    policies = ["--also", "full", "--also", "keydiff --budget 2000"]
    sizes = ["--max-body-bytes", "4000", *options.split()]
    with started(folder, *policies, *sizes) as (process, address, _):
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
    if server[0].poll() is None:
        leave(page, server)
    context.close()
    assert [each for each in faults if not each.startswith("data:")] == []


def unlock(page):
    """Gives the server's key and waits for the models."""
    page.get_by_label("Key of this server").fill(KEY)
    page.get_by_role("button", name="Use this key").click()
    expect(page.get_by_label("Model and policy").locator("option")).to_have_text(MODELS)
    expect(page.locator("#question-count")).to_contain_text("tokens")


def choose(page, *, other="", budget=None, other_budget=None):
    page.get_by_label("Compare with").select_option(other)
    if budget is not None:
        page.get_by_label("Budget", exact=True).fill(str(budget))
    if other_budget is not None:
        page.get_by_label("Second budget").fill(str(other_budget))


def compress(page, text=lettered.DOC, **choice):
    page.get_by_label("Text to compress").fill(text)
    choose(page, **choice)
    page.get_by_role("button", name="Compress").click()
    expect(page.get_by_role("heading", name="What is kept")).to_be_focused()


def ask(page, question="who?", *, most=9):
    page.get_by_label("Most tokens").fill(str(most))
    page.get_by_label("Ask about the document").fill(question)
    page.get_by_label("Ask about the document").press("Enter")
    expect(page.get_by_role("status")).to_have_text("Answered.")


def documents(server):
    with api(server) as client:
        return client.get("/v1/documents").json()["data"]


def answers_of(server, *questions, most=9):
    """Each document's answers to these questions, a conversation, and the last one's prompt tokens, by model."""
    found = {}
    with api(server) as client:
        for made in client.get("/v1/documents").json()["data"]:
            chat, texts = [], []
            for question in questions:
                chat.append({"role": "user", "content": question})
                body = {
                    "document": made["id"],
                    "messages": chat,
                    "temperature": 0,
                    "max_tokens": most,
                }
                answer = client.post("/v1/chat/completions", json=body).json()
                texts.append(answer["choices"][0]["message"]["content"])
                chat.append({"role": "assistant", "content": texts[-1]})
            found[made["model"]] = texts, answer["usage"]["prompt_tokens"]
    return found


def wait_for_documents(page, server, expected):
    for _ in range(100):
        if documents(server) == expected:
            break
        page.wait_for_timeout(50)
    assert documents(server) == expected


def leave(page, server):
    """Leaves the page, which removes its documents."""
    page.goto("about:blank")
    wait_for_documents(page, server, [])


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


def test_a_sample_is_there_to_begin_with(page):
    unlock(page)
    sample = page.get_by_label("Text to compress").input_value()
    expect(page.locator("#document-count")).to_contain_text(f"{len(sample):,} tokens.")
    page.get_by_label("Model and policy").select_option(MODELS[2])
    # Its policy's budget would keep the whole sample.
    expect(page.get_by_label("Budget", exact=True)).to_have_value(str(round(len(sample) / 4)))
    page.get_by_label("Text to compress").fill("x")
    page.get_by_role("button", name="Use the sample").click()
    expect(page.get_by_label("Text to compress")).to_have_value(sample)
    page.get_by_role("button", name="Compress").click()
    expect(page.get_by_role("heading", name="What is kept")).to_be_focused()
    assert page.locator("#columns article").first.locator("s").count() > 0
    page.get_by_label("Most tokens").fill("3")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("status")).to_have_text("Answered.")
    expect(page.locator(".question")).to_contain_text("lighthouse")


def test_a_budget_that_evicts_nothing_is_pointed_out(page):
    unlock(page)
    page.get_by_label("Model and policy").select_option(MODELS[2])
    expect(page.locator("#about")).not_to_contain_text("nothing is evicted")
    page.get_by_label("Budget", exact=True).fill("2000")
    expect(page.locator("#about")).to_contain_text("nothing is evicted")
    page.get_by_label("Budget", exact=True).fill("20")
    page.get_by_label("Text to compress").fill("short")
    expect(page.locator("#about")).to_contain_text("nothing is evicted")


def test_tokens_are_counted_once_typing_pauses(page):
    unlock(page)
    asked = []
    page.on("request", lambda one: asked.append(one) if one.url.endswith("/tokenize") else None)
    document, count = page.get_by_label("Text to compress"), page.locator("#document-count")
    document.fill("")
    document.press_sequentially("twelve chars", delay=10)
    expect(count).to_have_text("12 tokens. At most 1,600.")
    assert len(asked) == 1
    document.fill("a" * (LONGEST + 1))
    expect(count).to_have_text("1,601 tokens, too long. At most 1,600.")
    compress(page)
    page.get_by_label("Ask about the document").fill("who was it?")
    expect(page.locator("#question-count")).to_have_text(
        "11 tokens. At most 64, with the conversation so far."
    )


def open_file(page, folder, content):
    file = folder / "it.md"
    file.write_bytes(content)
    page.get_by_label("Or a text file").set_input_files(file)


def test_a_text_file_is_opened(page, tmp_path):
    unlock(page)
    text = "Grüße aus der Datei"
    open_file(page, tmp_path, text.encode())
    expect(page.get_by_label("Text to compress")).to_have_value(text)
    expect(page.locator("#document-count")).to_contain_text("tokens.")
    moved = page.evaluate_handle(
        """() => {
          const moved = new DataTransfer();
          moved.items.add(new File(["dropped"], "it.txt"));
          return moved;
        }"""
    )
    page.get_by_label("Text to compress").dispatch_event("drop", {"dataTransfer": moved})
    expect(page.get_by_label("Text to compress")).to_have_value("dropped")
    expect(page.get_by_label("Or a text file")).to_have_value("")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xd8\xff\xe0", "it.md is not a text file: choose plain text in UTF-8."),
        (b"text\0", "it.md is not a text file: choose plain text in UTF-8."),
        (b" \n", "it.md is empty."),
        (b"a" * 1601, "it.md is too long: 1,601 tokens, at most 1,600."),
        (b"a" * 5000, "This is too long to send: the body is longer than 4000 bytes"),
        (b"a" * 20_100_000, "it.md is too large: 20.1 MB, at most 20.0 MB."),
    ],
    ids=["picture", "zeros", "empty", "long", "longer_than_a_body", "large"],
)
def test_another_file_is_not_opened(page, tmp_path, content, said):
    unlock(page)
    page.get_by_label("Text to compress").fill("before")
    open_file(page, tmp_path, content)
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.get_by_label("Text to compress")).to_have_value("before")
    expect(page.get_by_label("Or a text file")).to_have_value("")


def test_what_is_kept_is_shown(page, server):
    unlock(page)
    compress(page, budget=9)
    column = page.locator("#columns article")
    expect(column.locator(".kept-about")).to_contain_text(
        "Keeps 9 of 45 entries per KV head and layer"
    )
    with api(server) as client:
        (made,) = client.get("/v1/documents").json()["data"]
        found = client.get(f"/v1/documents/{made['id']}/kept").json()
        one = client.get(f"/v1/documents/{made['id']}/kept?layer=1&head=0").json()
    text, notes = column.locator(".text"), column.locator(".notes")
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
    assert column.locator(".sizes").text_content().startswith(f"before{before}after{after}, ")
    page.get_by_label("Layer").select_option("1")
    expect(page.get_by_label("KV head")).to_be_enabled()
    page.get_by_label("KV head").select_option("0")
    expect(notes).to_have_text("Of 45 tokens, this head keeps 9 and evicts 36.")
    kept = "".join(text.locator("mark").all_text_contents())
    assert kept == "".join(p for p, k in zip(one["pieces"], one["kept"], strict=True) if k)
    page.get_by_label("Layer").select_option("")
    expect(page.get_by_label("KV head")).to_be_disabled()
    expect(notes).to_contain_text(f"by all {found['pairs']} heads")


def test_two_compressed_policies_answer_side_by_side(page, server):
    unlock(page)
    compress(page, budget=9, other=MODELS[2], other_budget=12)
    ask(page)
    titles = ["tiny KNorm(budget=16), here budget=9"]
    titles += [f"{MODELS[2]} KeyDiff(budget=2000), here budget=12"]
    expect(page.locator("#columns .title")).to_have_text(titles)
    expect(page.locator("#turns .title")).to_have_text(titles)
    expect(page.locator("#columns .kept-about")).to_contain_text(["Keeps 9 of", "Keeps 12 of"])
    expected = answers_of(server, "who?")
    texts = [expected[name][0][0] for name in ("tiny", MODELS[2])]
    assert page.locator(ANSWER).all_text_contents() == texts
    # Another document takes the place of both.
    compress(page, "another one")
    expect(page.locator(ANSWER)).to_have_count(0)
    assert [each["tokens"] for each in documents(server)] == [13]


def test_one_model_is_compared_with_itself(page):
    unlock(page)
    compress(page, budget=16, other="tiny", other_budget=5)
    expect(page.locator("#columns .title")).to_have_text(
        ["tiny KNorm(budget=16)", "tiny KNorm(budget=16), here budget=5"]
    )


def test_each_column_has_its_own_conversation(page, server):
    unlock(page)
    compress(page, other="tiny:full")
    ask(page, "who?")
    ask(page, "and then?")
    expect(page.locator(".question")).to_have_text(["who?", "and then?"])
    expected = answers_of(server, "who?", "and then?")
    shown = page.locator(ANSWER).all_text_contents()
    assert shown[::2] == expected["tiny"][0] and shown[1::2] == expected["tiny:full"][0]
    # The document is cached; the questions before this one are not.
    pattern = (
        r"\d+ tokens in [\d.]+ s, the first after [\d.]+ s.*; 45 of (\d+) prompt tokens cached"
    )
    prompts = [re.match(pattern, each)[1] for each in page.locator(FIGURES).all_text_contents()]
    assert [int(each) for each in prompts[2:]] == [
        expected["tiny"][1],
        expected["tiny:full"][1],
    ]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(ANSWER)).to_have_count(0)
    ask(page, "and then?")
    assert (
        page.locator(ANSWER).first.text_content() == answers_of(server, "and then?")["tiny"][0][0]
    )


def test_a_long_conversation_leaves_its_first_turns_out(page, server):
    unlock(page)
    compress(page)
    left = None
    while left is None:
        ask(page, f"question {page.locator(ANSWER).count()}")
        last = page.locator(FIGURES).last.text_content()
        left = re.search(r"(\d) earlier turns? left out, too long$", last)
    chat = []
    *earlier, last = zip(
        page.locator(".question").all_text_contents(),
        page.locator(ANSWER).all_text_contents(),
        strict=True,
    )
    # A turn without an answer is no part of the conversation.
    for question, answer in [each for each in earlier if each[1]][int(left[1]) :]:
        chat.append({"role": "user", "content": question})
        chat.append({"role": "assistant", "content": answer})
    (made,) = documents(server)
    chat.append({"role": "user", "content": last[0]})
    body = {"document": made["id"], "messages": chat, "temperature": 0, "max_tokens": 9}
    with api(server) as client:
        answer = client.post("/v1/chat/completions", json=body).json()
    assert last[1] == answer["choices"][0]["message"]["content"]
    assert (
        f"of {answer['usage']['prompt_tokens']} prompt" in page.locator(FIGURES).last.text_content()
    )


def test_an_answer_is_stopped(page):
    unlock(page)
    compress(page)

    def lengthen(route):
        route.continue_(post_data=route.request.post_data_json | {"ignore_eos": True})

    page.route("**/v1/chat/completions", lengthen)
    page.get_by_label("Most tokens").fill("900")
    page.get_by_label("Ask about the document").fill("who?")
    page.keyboard.press("Enter")
    expect(page.locator(ANSWER)).not_to_be_empty()
    page.get_by_label("Ask about the document").press("Escape")
    expect(page.locator(FIGURES)).to_have_text("stopped")
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    assert len(page.locator(ANSWER).text_content()) < 900
    page.get_by_role("button", name="New conversation").click()
    ask(page)


def test_a_compression_is_stopped(page, server):
    unlock(page)
    page.route("**/v1/documents", lambda route: None)
    page.get_by_label("Text to compress").fill(lettered.DOC)
    page.get_by_role("button", name="Compress").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Compress")).to_be_focused()
    expect(page.locator("#kept")).to_be_hidden()
    page.unroute("**/v1/documents")
    compress(page)


def test_a_new_document_ends_the_conversation_on_the_old_one(page, server):
    unlock(page)
    compress(page)
    page.route("**/v1/chat/completions", lambda route: None)
    page.get_by_label("Ask about the document").fill("who?")
    page.keyboard.press("Enter")
    compress(page, "another one")
    expect(page.get_by_role("button", name="Ask")).to_be_enabled()
    expect(page.locator("#turns li")).to_have_count(0)
    page.unroute("**/v1/chat/completions")
    ask(page)
    assert page.locator(ANSWER).all_text_contents() == answers_of(server, "who?")["tiny"][0]


def test_if_one_of_two_fails_what_was_there_stays(page, server):
    unlock(page)
    compress(page)
    ask(page)
    (before,) = documents(server)

    def fail(route):
        if "keydiff" not in route.request.post_data:
            return route.continue_()
        body = {"error": {"message": "out of memory", "param": None, "code": "out_of_memory"}}
        return route.fulfill(status=503, json=body)

    page.route("**/v1/documents", fail)
    page.get_by_label("Compare with").select_option(MODELS[2])
    page.get_by_role("button", name="Compress").click()
    expect(page.get_by_role("alert")).to_have_text("The server takes no requests: out of memory.")
    expect(page.locator("#columns article")).to_have_count(1)
    wait_for_documents(page, server, [before])
    ask(page, "and?")


def test_one_column_fails_alone(page, server):
    unlock(page)
    compress(page, other="tiny:full")
    with api(server) as client:
        for made in documents(server):
            if made["model"] == "tiny":
                client.delete(f"/v1/documents/{made['id']}")
    page.get_by_label("Most tokens").fill("9")
    page.get_by_label("Ask about the document").fill("who?")
    page.get_by_label("Ask about the document").press("Enter")
    said = "Not answered. The server no longer has this document: compress it again."
    expect(page.get_by_role("alert")).to_have_text(said)
    expect(page.locator(FIGURES).last).to_contain_text("prompt tokens cached")
    assert page.locator(ANSWER).last.text_content() == answers_of(server, "who?")["tiny:full"][0][0]


def test_a_question_that_is_too_long_is_kept(page):
    unlock(page)
    compress(page)
    page.get_by_label("Ask about the document").fill("w" * 70)
    page.get_by_label("Ask about the document").press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("tiny does not take this question (")
    expect(page.get_by_label("Ask about the document")).to_have_value("w" * 70)


MARKUP = "<img src=x onerror=alert(1)>"


def test_markup_in_a_document_is_text(page):
    unlock(page)
    compress(page, MARKUP)
    assert page.locator(".text").text_content().endswith(MARKUP)
    assert page.locator("img").count() == 0


def stream(*events):
    return "".join(f"data: {json.dumps(each)}\n\n" for each in events)


def piece(**delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}


def test_markup_in_an_answer_is_text_and_reasoning_is_apart(page):
    unlock(page)
    compress(page)
    usage = {"prompt_tokens": 50, "completion_tokens": 2}
    usage["prompt_tokens_details"] = {"cached_tokens": 45}
    events = piece(reasoning_content=f"hm {MARKUP}"), piece(content=MARKUP)
    body, sent = stream(*events, {"choices": [], "usage": usage}), []

    def fulfil(route):
        sent.append(route.request.post_data_json["messages"])
        route.fulfill(body=body, content_type="text/event-stream")

    page.route("**/v1/chat/completions", fulfil)
    ask(page, f"{MARKUP}?")
    assert page.locator(ANSWER).text_content() == MARKUP
    assert page.locator(".thought").text_content() == f"hm {MARKUP}"
    expect(page.locator(FIGURES)).to_contain_text("; 45 of 50 prompt tokens cached")
    assert page.locator("img").count() == 0
    # Reasoning is no part of the conversation.
    ask(page)
    assert [each["content"] for each in sent[-1]] == [f"{MARKUP}?", MARKUP, "who?"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ([], "The answer broke off: the server closed the connection."),
        ([{"error": {"message": "the engine failed"}}], "The answer broke off: the engine failed."),
    ],
)
def test_an_answer_that_breaks_off_is_reported(page, end, said):
    unlock(page)
    compress(page)
    body = stream(piece(content="so far"), *end)
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(body=body, content_type="text/event-stream"),
    )
    page.get_by_label("Ask about the document").fill("who?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text(f"Not answered. {said}")
    expect(page.locator(ANSWER)).to_have_text("so far")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a" * (LONGEST + 10),
            "tiny does not take this document (1612 tokens): too long: "
            f"this engine accepts at most max_prompt_tokens={LONGEST}.",
        ),
        (
            "a" * 5000,
            "This is too long to send: the body is longer than 4000 bytes: send a shorter one.",
        ),
    ],
)
def test_rejected_documents_are_reported_in_words(page, text, said):
    unlock(page)
    page.get_by_label("Text to compress").fill(text)
    choose(page)
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
    expect(page.locator("#about")).to_have_text("FullKV(). It keeps every token.")


def test_documents_go_when_the_page_does(page, server):
    unlock(page)
    compress(page, other="tiny:full")
    assert len(documents(server)) == 2
    leave(page, server)


def test_it_is_usable_by_keyboard_and_screen_reader(page):
    unlock(page)
    page.get_by_label("Compare with").select_option("tiny")
    page.get_by_label("Text to compress").fill(lettered.DOC)
    page.get_by_label("Text to compress").press("Control+Enter")
    expect(page.get_by_role("heading", name="What is kept")).to_be_focused()
    ask(page)
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('input, select, textarea')].filter(one => !one.labels.length).length"
    )
    assert unnamed == 0
    assert page.evaluate("document.documentElement.lang") == "en"
    expect(page.get_by_role("group", name="Kept tokens of tiny")).to_have_count(2)
    expect(page.get_by_role("list", name="Conversation").get_by_role("listitem")).to_have_count(1)
    page.get_by_label("Text to compress").focus()
    order = []
    for _ in range(14):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert order == [
        *("file", "sample", "model", "budget", "other-model", "other-budget", "compress"),
        *("layer", "text", "text", "most", "renew", "question", "send"),
    ]


def test_it_fits_narrow_windows_and_the_dark(page):
    unlock(page)
    compress(page, other="tiny:full")
    ask(page, "w" * 30)
    colours = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colours[0] != colours[1]
    left = "all => all.map(one => one.getBoundingClientRect().left)"
    answers = page.locator("#turns article")
    wide = answers.evaluate_all(left)
    assert wide[0] < wide[1]
    for width in (360, 320):
        page.set_viewport_size({"width": width, "height": 640})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        narrow = answers.evaluate_all(left)
        assert narrow[0] == narrow[1]


def test_a_server_that_is_gone_is_reported(page, server):
    """The last test: it ends the server."""
    unlock(page)
    compress(page)
    server[0].kill()
    page.get_by_label("Ask about the document").fill("who?")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Not answered. The server cannot be reached")
    expect(page.get_by_label("Ask about the document")).to_have_value("who?")
